"""Random JSON schemas, and whether a value fits one: the judge of structured answers."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

NAMES = st.text("abk_é ", min_size=1, max_size=6)
_PATTERNS = (r"^[a-c]{2,5}$", r"^\d{3}-\d{2}$", r"^(x|yz)+$")


def _strings() -> st.SearchStrategy[dict[str, Any]]:
    plain: dict[str, Any] = {"type": "string"}
    bounded = st.tuples(st.integers(0, 4), st.integers(0, 6)).map(
        lambda n: {"type": "string", "minLength": n[0], "maxLength": sum(n)}
    )
    patterns = st.sampled_from(_PATTERNS).map(lambda p: {"type": "string", "pattern": p})
    return st.one_of(st.just(plain), bounded, patterns)


def _leaves() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-200, 200), st.integers(0, 300))
    integers = bounds.map(lambda n: {"type": "integer", "minimum": n[0], "maximum": sum(n)})
    values = st.one_of(NAMES, st.integers(-99, 99), st.booleans(), st.none())
    enums = st.lists(values, min_size=1, max_size=4).map(lambda v: {"enum": v})
    others = st.sampled_from([{"type": t} for t in ("boolean", "null", "integer", "number")])
    return st.one_of(_strings(), integers, enums, values.map(lambda v: {"const": v}), others)


def _object(inner: tuple[dict[str, Any], list[bool], bool]) -> dict[str, Any]:
    properties, needed, closed = inner
    required = [name for name, need in zip(properties, needed, strict=False) if need]
    found: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    return found | ({"additionalProperties": False} if closed else {})


def _around(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    flags = st.lists(st.booleans(), min_size=4, max_size=4)
    objects = st.tuples(st.dictionaries(NAMES, inner, max_size=4), flags, st.booleans())
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda n: {"type": "array", "items": n[0], "minItems": n[1], "maxItems": n[1] + n[2]}
    )
    either = st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    return st.one_of(objects.map(_object), arrays, either)


SCHEMAS = st.recursive(_leaves(), _around, max_leaves=8)


_SAID = st.sampled_from(["x", "xy", "a.b", "-"])


def _said(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """What a condition may say of an object, or of its value."""
    some = st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)
    required = some.map(lambda names: {"required": names})
    values = st.lists(_SAID, min_size=1, max_size=2, unique=True).map(lambda v: {"enum": v})
    inner = st.one_of(values, _SAID.map(lambda v: {"const": v}), st.just({"type": "string"}))
    members = st.dictionaries(st.sampled_from(names), inner, min_size=1, max_size=2)
    properties = members.map(lambda each: {"properties": each})
    both = st.tuples(required, properties).map(lambda two: {**two[0], **two[1]})
    plain = st.one_of(required, properties, both)
    return st.one_of(plain, st.lists(plain, min_size=1, max_size=2).map(lambda e: {"anyOf": e}))


def _negative(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of these names that must not be something, or only under a condition."""
    said, name = _said(names), st.sampled_from(names)
    needs = st.dictionaries(name, st.lists(name, max_size=2, unique=True), max_size=2)
    condition = st.fixed_dictionaries({"if": said}, optional={"then": said, "else": said})
    kinds = st.lists(_SAID, min_size=2, max_size=3, unique=True)
    by_kind = st.tuples(kinds, said).map(
        lambda two: [
            {"if": {"properties": {names[0]: {"const": k}}}, "then": two[1]} for k in two[0]
        ]
    )
    more = st.fixed_dictionaries(
        {},
        optional={
            "not": said,
            "dependentRequired": needs,
            "oneOf": st.lists(said, min_size=2, max_size=3),
            "allOf": st.one_of(st.lists(condition, max_size=2), by_kind),
        },
    )
    member = st.one_of(
        st.just({"type": "string", "maxLength": 3}),
        st.lists(_SAID, min_size=2, max_size=3, unique=True).map(lambda v: {"enum": v}),
        _SAID.map(lambda v: {"type": ["string", "null", "boolean"], "not": {"const": v}}),
    )
    properties = st.fixed_dictionaries(dict.fromkeys(names, member))
    return st.tuples(properties, more, condition, st.booleans()).map(
        lambda n: {
            "type": "object",
            "properties": n[0],
            "additionalProperties": False,
            **n[1],
            **(n[2] if n[3] else {}),
        }
    )


# Schemas with words that say what must not be; some have no value at all.
NEGATIVE = _negative(["a", "b", "c"])


def _collections() -> st.SearchStrategy[dict[str, Any]]:
    """Arrays that contain something, choices of arrays, and objects of so many members."""
    item = st.sampled_from(
        [{"type": "integer"}, {"const": "x"}, {"type": "string", "maxLength": 2}, {"type": "null"}]
    )
    some = st.lists(item, min_size=1, max_size=3).map(lambda each: {"anyOf": each})
    plain = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={"items": some, "minItems": st.integers(0, 2), "maxItems": st.integers(1, 4)},
    )
    counts = {"minContains": st.integers(0, 3), "maxContains": st.integers(0, 3)}
    holding = st.fixed_dictionaries(
        {"type": st.just("array"), "contains": item, "items": some}, optional=counts
    )
    either = st.lists(plain, min_size=2, max_size=3).map(lambda each: {"oneOf": each})
    names = st.lists(st.sampled_from("abcd"), min_size=1, unique=True)
    sizes = {"minProperties": st.integers(0, 3), "maxProperties": st.integers(0, 3)}
    counted = st.tuples(names, st.fixed_dictionaries({}, optional=sizes)).map(
        lambda n: {
            "type": "object",
            "properties": {name: {"type": "null"} for name in n[0]},
            "additionalProperties": False,
            **n[1],
        }
    )
    both = st.lists(holding, min_size=2, max_size=2).map(lambda each: {"allOf": each})
    return st.one_of(holding, either, counted, both)


# Schemas of arrays and objects with words of what they contain; some have no value at all.
COLLECTIONS = _collections()


def fits(value: Any, schema: Any) -> bool:
    """Whether a value is one of a schema's, for schemas as SCHEMAS, NEGATIVE and COLLECTIONS have them."""
    if isinstance(schema, bool):
        return schema
    return all(_WORDS[word](value, said, schema) for word, said in schema.items() if word in _WORDS)


def _listed(value: Any, listed: list[Any], _: Any) -> bool:
    return any(type(value) is type(each) and value == each for each in listed)


def _typed(value: Any, kinds: Any, _: Any) -> bool:
    is_one = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "integer": type(value) is int,
        "number": isinstance(value, (int, float)) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }
    return any(is_one[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _bounds(kinds: Any, keep: Any) -> Any:
    return lambda value, said, schema: not isinstance(value, kinds) or keep(value, said)


def _conditional(value: Any, condition: Any, schema: Any) -> bool:
    return fits(value, schema.get("then" if fits(value, condition) else "else", True))


def _contains(value: Any, said: Any, schema: Any) -> bool:
    if not isinstance(value, list):
        return True
    count = sum(fits(each, said) for each in value)
    return bool(schema.get("minContains", 1) <= count <= schema.get("maxContains", count))


def _only_known(value: Any, others: Any, schema: Any) -> bool:
    known = schema.get("properties", {})
    return others is not False or not isinstance(value, dict) or set(value) <= set(known)


_WORDS: dict[str, Any] = {
    "anyOf": lambda value, some, _: any(fits(value, each) for each in some),
    "allOf": lambda value, some, _: all(fits(value, each) for each in some),
    "oneOf": lambda value, some, _: sum(fits(value, each) for each in some) == 1,
    "not": lambda value, other, _: not fits(value, other),
    "if": _conditional,
    "const": lambda value, one, schema: _listed(value, [one], schema),
    "enum": _listed,
    "type": _typed,
    "required": _bounds(dict, lambda value, names: set(names) <= set(value)),
    "dependentRequired": _bounds(
        dict,
        lambda value, needs: all(set(needs[each]) <= set(value) for each in needs if each in value),
    ),
    "properties": _bounds(
        dict,
        lambda value, known: all(fits(value[each], known[each]) for each in value if each in known),
    ),
    "additionalProperties": _only_known,
    "items": _bounds(list, lambda value, one: all(fits(each, one) for each in value)),
    "contains": _contains,
    "minProperties": _bounds(dict, lambda value, least: len(value) >= least),
    "maxProperties": _bounds(dict, lambda value, most: len(value) <= most),
    "minItems": _bounds(list, lambda value, least: len(value) >= least),
    "maxItems": _bounds(list, lambda value, most: len(value) <= most),
    "pattern": _bounds(str, lambda value, pattern: re.search(pattern, value) is not None),
    "minLength": _bounds(str, lambda value, least: len(value) >= least),
    "maxLength": _bounds(str, lambda value, most: len(value) <= most),
    "minimum": _bounds(int, lambda value, least: value >= least),
    "maximum": _bounds(int, lambda value, most: value <= most),
}
