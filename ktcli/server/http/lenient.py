"""Reads JSON values as clients write them: null for a missing field, whole numbers as floats.

A serializer writes `"stream": null` for an option that nobody set, and 4096.0 where its language has one number type.
A body that fits its structure as it is never comes here.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, cast

import msgspec
from msgspec import inspect

# Beyond it not every whole number is a float, so that what was meant is not known.
_EXACT = 2.0**53


def tidied(value: Any, kind: type[Any]) -> Any:
    """Returns a JSON value without null in fields of a structure that cannot be null, and with integers where its
    fields are integers (2.0 is 2); everything else is unchanged.

    Args:
        kind: the structure that the value is to become.
    """
    return _tidied(value, _fields_of(cast(Hashable, kind)))


@cache
def _fields_of(kind: Hashable) -> inspect.Type:
    return inspect.type_info(kind)


def _tidied(value: Any, kind: inspect.Type) -> Any:
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, dict):
        return _object(value, members)
    if isinstance(value, list):
        return _list(value, members)
    if isinstance(value, float) and _is(inspect.IntType, members):
        exact = value.is_integer() and abs(value) <= _EXACT
        return int(value) if exact and not _is(inspect.FloatType, members) else value
    return value


def _object(value: dict[str, Any], members: tuple[inspect.Type, ...]) -> dict[str, Any]:
    for member in members:
        if isinstance(member, inspect.StructType):
            kinds = {each.encode_name: each.type for each in member.fields}
        elif isinstance(member, inspect.DictType):
            kinds = dict.fromkeys(value, member.value_type)
        else:
            continue
        found = {}
        for name, each in value.items():
            kind = kinds.get(name)
            if kind is None:
                found[name] = each
            elif each is not None or _may_be_null(kind):
                found[name] = _tidied(each, kind)
        return found
    return value


def _list(value: list[Any], members: tuple[inspect.Type, ...]) -> list[Any]:
    for member in members:
        if isinstance(member, inspect.ListType):
            if isinstance(member.item_type, inspect.AnyType):
                return value
            return [_tidied(each, member.item_type) for each in value]
    return value


def _may_be_null(kind: inspect.Type) -> bool:
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return _is(inspect.NoneType, members) or _is(inspect.AnyType, members)


def _is(what: type[inspect.Type], members: tuple[inspect.Type, ...]) -> bool:
    return any(isinstance(each, what) for each in members)


def converted(value: Any, kind: type[Any]) -> Any:
    """Returns a decoded JSON value as a structure.

    Raises:
        msgspec.ValidationError: a field has the wrong type.
    """
    return msgspec.convert(tidied(value, kind), kind)
