"""Checks untrusted JSON schemas before they are compiled: their size, their depth, and their meaning."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from ktcli.answers.grammar.lookahead import without_lookaheads
from ktcli.answers.grammar.meaning import VALUES, followed, meant_schema
from ktcli.errors import UsageError

SCHEMA_BYTES = 256 << 10
SCHEMA_DEPTH = 64  # lists and objects in each other
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref"})
_OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_PAIRS = 10_000  # of branches that are compared
_KINDS = ("object", "array", "string", "number", "integer", "boolean", "null")


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
    _require_short(schema, field)
    schema = meant_schema(schema)
    _require_short(schema, field)
    found = _Branches(schema).apart(schema)
    return dict(without_lookaheads(found if _combines(found) else _closed(found)))


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


def _require_short(schema: Any, field: str) -> None:
    if len(json.dumps(schema)) > SCHEMA_BYTES:
        raise _too_large(field)


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
            left += [value for key, value in each.items() if key not in VALUES]
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
    found = {key: value if key in VALUES else _closed(value) for key, value in schema.items()}
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
            key: value if key in VALUES else self.apart(value) for key, value in schema.items()
        }
        branches = found.get("oneOf")
        if isinstance(branches, list) and "anyOf" not in found:
            if self._exclude(branches):
                parted: Sequence[Any] | None = branches
            else:
                parted = _parted(branches)
                if parted is None and self._left >= 0:  # it adds a property for each pair
                    parted = _by_members(branches)
            if parted is not None:
                found["anyOf"] = parted
                del found["oneOf"]
        return found

    def _exclude(self, branches: Sequence[Any]) -> bool:
        """Returns whether no value fits two of some schemas, as far as their types and fixed properties say."""
        self._left -= len(branches) * (len(branches) - 1) // 2
        if self._left < 0:
            return False
        known = [followed(each, self._root) for each in branches]
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


def _parted(branches: Sequence[Any]) -> list[Any] | None:
    """Returns branches without the types that several of them have, a value of which may fit more than one; None: not
    all of them name their types, or one has none left."""
    kinds = [_types(each) if isinstance(each, Mapping) else set[str]() for each in branches]
    if not all(kinds) or any("$ref" in each for each in branches):
        return None
    kinds = [each | {"integer"} if "number" in each else each for each in kinds]
    counts = Counter(kind for each in kinds for kind in each)
    own = [{kind for kind in each if counts[kind] == 1} for each in kinds]
    # A number may be an integer, which then fits another branch.
    own = [each if "integer" in each else each - {"number"} for each in own]
    if not all(own):
        return None
    return [
        {**each, "type": [kind for kind in _KINDS if kind in left]}
        for each, left in zip(branches, own, strict=True)
    ]


def _by_members(branches: Sequence[Any]) -> list[Any] | None:
    """Returns branches that require different members, each without a member that another one requires; None: they
    require none, or the same."""
    if not all(isinstance(each, Mapping) and "$ref" not in each for each in branches):
        return None
    required = [_required(each) for each in branches]
    found = []
    for at, branch in enumerate(branches):
        others = [names for other, names in enumerate(required) if other != at]
        apart = [next((one for one in names if one not in required[at]), None) for names in others]
        properties = branch.get("properties", {})
        if not all(apart) or not isinstance(properties, Mapping):
            return None
        found.append({**branch, "properties": {**properties, **dict.fromkeys(apart, False)}})
    return found


def _fixed_apart(
    one: Mapping[str, Any], other: Mapping[str, Any], name: str, root: Mapping[str, Any]
) -> bool:
    """Returns whether a property has values in one schema that it cannot have in another; both are of objects."""
    if _types(one) != {"object"} or _types(other) != {"object"}:
        return False
    mine, theirs = (_fixed(followed(_property(each, name), root)) for each in (one, other))
    return mine is not None and theirs is not None and mine.isdisjoint(theirs)


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
