"""A set of schemas that one value has to fit, and the one schema that says so; whether there is such a value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

KINDS = ("object", "array", "string", "number", "integer", "boolean", "null")
JSON_KINDS = frozenset(KINDS) - {"integer"}  # each value has one of these
CHOICES = ("anyOf", "oneOf")
Join = Callable[[Sequence[Any]], Any]  # schemas that one value has to fit, in one


class Joined:
    """A set of schemas that one value has to fit.

    Args:
        parts: these, without references and `allOf`.
    Attributes:
        said: the one schema, with others of this class in the places of schemas.
        possible: whether there is such a value, as far as it is known.
    """

    __slots__ = ("parts", "possible", "said")

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self.parts = parts
        self.said: Any = {}
        self.possible = False


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types that a schema's `type` names, all if it has none; there "number" includes integers."""
    said = schema.get("type")
    if said is None:
        return JSON_KINDS
    return frozenset([said] if isinstance(said, str) else map(str, said))


def count_limits(
    parts: Sequence[Mapping[str, Any]], least: str, most: str
) -> tuple[int, int | None]:
    """Returns the highest lower limit (0: there is none) and the lowest upper limit (None: there is none) that some
    schemas set by the keywords `least` and `most`, such as "minItems" and "maxItems".
    """
    lowest = max((part.get(least, 0) for part in parts), default=0)
    return lowest, min((part[most] for part in parts if most in part), default=None)


def common_types(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Returns the JSON types that two sets of types have in common; "number" includes "integer"."""
    both = set(one & other)
    for mine, theirs in ((one, other), (other, one)):
        if "integer" in mine and "number" in theirs:
            both.add("integer")
    return frozenset(both - ({"integer"} if "number" in both else set()))


def shared_types(schemas: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Returns the JSON types that all of some schemas allow by their `type`."""
    return reduce(common_types, map(types_of, schemas), JSON_KINDS)


def is_possible(schema: Any) -> bool:
    """Returns whether any value may fit a schema, as far as this is known of the schemas in it."""
    if isinstance(schema, bool):
        return schema
    if isinstance(schema, Joined):
        return schema.possible
    for choice in CHOICES:
        if choice in schema and not any(map(is_possible, schema[choice])):
            return False
    if schema.get("enum") == []:
        return False
    return bool(possible_types(schema))


def possible_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types of the values that may fit a schema, as far as is known: types that its limits exclude
    are left out.
    """
    impossible = {"object": _no_object, "array": _no_array, "string": _no_string}
    return frozenset(
        kind for kind in types_of(schema) if kind not in impossible or not impossible[kind](schema)
    )


def _no_object(schema: Mapping[str, Any]) -> bool:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        others = schema.get("additionalProperties", True)
        if "patternProperties" in schema:
            others = True
        if not is_possible(properties.get(name, others)):
            return True
    return False


def _no_array(schema: Mapping[str, Any]) -> bool:
    least, first = schema.get("minItems", 0), schema.get("items", True)
    if least > schema.get("maxItems", least):
        return True
    if not isinstance(first, list):
        return least > 0 and not is_possible(first)
    if any(not is_possible(each) for each in first[:least]):
        return True
    return least > len(first) and not is_possible(schema.get("additionalItems", True))


def _no_string(schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("minLength", 0) > schema.get("maxLength", float("inf")))


def fits_scalars(value: Any, kinds: frozenset[str], said: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a JSON value has one of the types `kinds` and, if it is a text or a number, fits the limits and
    patterns of all schemas in `said`, as far as these are known.
    """
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean") in kinds
    if isinstance(value, (int, float)):
        is_whole = isinstance(value, int) or value.is_integer()
        if not ("number" in kinds or ("integer" in kinds and is_whole)):
            return False
        least, most = (_numbers(said, word) for word in ("minimum", "maximum"))
        return all(value >= each for each in least) and all(value <= each for each in most)
    if isinstance(value, str):
        least, most = (_numbers(said, word) for word in ("minLength", "maxLength"))
        fits = all(len(value) >= each for each in least) and all(
            len(value) <= each for each in most
        )
        return fits and "string" in kinds and all(_matches(each, value) for each in said)
    return ("array" if isinstance(value, list) else "object") in kinds


def _numbers(said: Sequence[Mapping[str, Any]], word: str) -> list[float]:
    return [each[word] for each in said if isinstance(each.get(word), (int, float))]


def _matches(said: Mapping[str, Any], text: str) -> bool:
    try:
        return "pattern" not in said or re.search(said["pattern"], text) is not None
    except (re.error, TypeError, RecursionError, OverflowError):
        return True


def listed_in(schema: Mapping[str, Any]) -> Any:
    """Returns the values that a schema lists: its `const` in a list, or its `enum`, which should be a list; None if it
    has neither.
    """
    return [schema["const"]] if "const" in schema else schema.get("enum")


def names_in(said: Any) -> list[str]:
    """Returns the strings in a list; none if `said` is not a list."""
    return [each for each in said if isinstance(each, str)] if isinstance(said, list) else []
