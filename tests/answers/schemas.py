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


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is one of a schema's, for schemas as SCHEMAS has them."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        listed = [schema["const"]] if "const" in schema else schema["enum"]
        return any(type(value) is type(each) and value == each for each in listed)
    kind = schema["type"]
    if kind == "object":
        known = schema.get("properties", {})
        closed = schema.get("additionalProperties") is False
        return (
            isinstance(value, dict)
            and set(schema.get("required", [])) <= set(value)
            and (not closed or set(value) <= set(known))
            and all(fits(value[name], known[name]) for name in value if name in known)
        )
    if kind == "array":
        least, most = schema.get("minItems", 0), schema.get("maxItems", 1 << 30)
        whole = isinstance(value, list) and least <= len(value) <= most
        return whole and all(fits(each, schema["items"]) for each in value)
    if kind == "string":
        whole = isinstance(value, str) and re.search(schema.get("pattern", ""), value) is not None
        return whole and schema.get("minLength", 0) <= len(value) <= schema.get(
            "maxLength", 1 << 30
        )
    if kind == "integer":
        whole = type(value) is int
        return whole and schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return {
        "number": isinstance(value, (int, float)) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }[kind]
