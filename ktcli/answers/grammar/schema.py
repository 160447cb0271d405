"""Checks untrusted JSON schemas before they are compiled: their size, their depth, and their meaning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from ktcli.answers.calls.values import referred
from ktcli.errors import UsageError

SCHEMA_BYTES = 256 << 10
SCHEMA_DEPTH = 64  # lists and objects in each other
# Keys whose values are no schemas.
_VALUES = frozenset({"const", "enum", "default", "examples", "example", "x-guidance"})
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref"})
_OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
# Keys whose values map names to schemas, and so are no schemas themselves.
_NAMING = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_COUNTS = frozenset(
    "minItems maxItems minLength maxLength minProperties maxProperties minContains maxContains".split()
)
# The formats that texts are held to. Every other one is an annotation, as JSON Schema has it.
_FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
)
_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})  # each name of a property is a text
_PAIRS = 10_000  # of branches that are compared
_REFS = 16  # references that are followed, one to the next


def checked_schema(schema: Any, field: str) -> dict[str, Any]:
    """Returns a schema as it is compiled: within limits, with `anyOf` for each `oneOf` whose branches exclude each
    other, and without properties that it does not name where it says nothing of them: some models would not come to an
    end.

    Args:
        field: what errors call it.
    Raises:
        UsageError: it is no schema, or beyond a limit.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise UsageError(f"{field} is not a JSON schema: it must be an object")
    _require_small(schema, field)
    size = len(json.dumps(schema))
    if size > SCHEMA_BYTES:
        raise _too_large(field)
    schema = _meant(schema)
    found = _Branches(schema).apart(schema)
    return dict(found if _combines(found) else _closed(found))


def _meant(schema: Any) -> Any:
    """Returns a schema in the spelling that is compiled, without what says nothing: null for a word that is not there,
    2.0 for 2, formats that nobody checks, names of properties that may be any text."""
    if isinstance(schema, list):
        return [_meant(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _VALUES:  # in which null is a value like others, unless a list is due
            if value is not None or key != "enum":
                found[key] = value
        elif value is None or (key == "propertyNames" and value in _ANY_NAME):
            continue
        elif key in _NAMING and isinstance(value, Mapping):
            found[key] = {name: _meant(each) for name, each in value.items()}
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            found[key] = int(value)
        elif key != "format" or not isinstance(value, str) or value in _FORMATS:
            found[key] = _meant(value)
    return found


def _require_small(schema: Any, field: str) -> None:
    """Refuses what is nested too deep, or surely too large, without recursion and without reading all of it."""
    level, size = [schema], 0
    for _ in range(SCHEMA_DEPTH):
        inner: list[Any] = []
        for each in level:
            size += 4 * len(each)
            if size > SCHEMA_BYTES:
                raise _too_large(field)
            if isinstance(each, Mapping):
                size += sum(map(len, each))
                each = each.values()
            size += sum(len(one) for one in each if isinstance(one, str))
            inner += [one for one in each if isinstance(one, (Mapping, list))]
        if not inner:
            return
        level = inner
    raise UsageError(f"{field} is nested deeper than {SCHEMA_DEPTH} levels")


def _too_large(field: str) -> UsageError:
    return UsageError(f"{field} has more than {SCHEMA_BYTES:,} bytes")


def _schemas_in(schema: Any) -> list[Mapping[str, Any]]:
    """Returns all objects in a schema but those of values."""
    found: list[Mapping[str, Any]] = []
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            found.append(each)
            left += [value for key, value in each.items() if key not in _VALUES]
        elif isinstance(each, list):
            left += each
    return found


def _combines(schema: Any) -> bool:
    """Returns whether one object may have to fit several schemas, so that none of them names all of its properties."""
    for each in _schemas_in(schema):
        others = _COMBINING & each.keys()
        if "allOf" in others or "if" in others or (others and "properties" in each):
            return True
        if "$ref" in others and len(others) > 1:
            return True
    return False


def _closed(schema: Any) -> Any:
    """Returns a schema whose objects have no properties but those that are named, where it does not say so."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: value if key in _VALUES else _closed(value) for key, value in schema.items()}
    properties = found.get("properties")
    if (
        isinstance(properties, Mapping)
        and properties
        and _OTHERS.isdisjoint(found)
        and set(_required(found)) <= set(properties)
    ):
        found["additionalProperties"] = False
    return found


class _Branches:
    """Looks for each `oneOf` of a schema whose branches exclude each other, as long as that is not too much work."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _PAIRS

    def apart(self, schema: Any) -> Any:
        """Returns a schema with `anyOf` in place of each `oneOf` of which no value can fit two branches."""
        if isinstance(schema, list):
            return [self.apart(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        found = {
            key: value if key in _VALUES else self.apart(value) for key, value in schema.items()
        }
        branches = found.get("oneOf")
        if isinstance(branches, list) and "anyOf" not in found and self._exclude(branches):
            found["anyOf"] = found.pop("oneOf")
        return found

    def _exclude(self, branches: Sequence[Any]) -> bool:
        """Returns whether no value fits two of some schemas, as far as their types and fixed properties say."""
        self._left -= len(branches) * (len(branches) - 1) // 2
        if self._left < 0:
            return False
        known = [_followed(each, self._root) for each in branches]
        return all(_differ(one, other, self._root) for one, other in combinations(known, 2))


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    if (mine := _fixed(one)) is not None and (theirs := _fixed(other)) is not None:
        return mine.isdisjoint(theirs)
    if (kinds := _types(one)) and (others := _types(other)):
        if {"integer", "number"} <= kinds | others and not kinds & others:
            kinds = kinds | {"number"} if "integer" in kinds else kinds
            others = others | {"number"} if "integer" in others else others
        if not kinds & others:
            return True
        if kinds != {"object"} or others != {"object"}:
            return False
    both = set(_required(one)) & set(_required(other))
    return any(_fixed_apart(one, other, name, root) for name in both)


def _fixed_apart(
    one: Mapping[str, Any], other: Mapping[str, Any], name: str, root: Mapping[str, Any]
) -> bool:
    """Returns whether a property has values in one schema that it cannot have in another; both are of objects."""
    if _types(one) != {"object"} or _types(other) != {"object"}:
        return False
    mine, theirs = (_fixed(_followed(_property(each, name), root)) for each in (one, other))
    return mine is not None and theirs is not None and mine.isdisjoint(theirs)


def _followed(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema that a reference inside the document means; the schema itself if it is none."""
    for _ in range(_REFS):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str):
            break
        schema = referred(ref, root)
    return schema if isinstance(schema, Mapping) else {}


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _required(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required")
    return (
        [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    )


def _types(schema: Mapping[str, Any]) -> set[str]:
    said = schema.get("type")
    return (
        {said}
        if isinstance(said, str)
        else set(map(str, said))
        if isinstance(said, list)
        else set()
    )


def _fixed(schema: Mapping[str, Any]) -> set[str] | None:
    """Returns the texts of the values that a schema lists; None: it lists none. Numbers are not told apart by their
    texts."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(
        isinstance(value, (float, Mapping, list)) for value in values
    ):
        return None
    return {json.dumps(value) for value in values}
