"""Rewrites JSON schemas into the words that are compiled, where they mean the same: what says nothing is left out, and
what can be said in other words is. Whatever is left of unknown words is refused by the compiler, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ktcli.answers.calls.values import referred
from ktcli.answers.grammar.joined import listed_in
from ktcli.records import dataclass

# Keys whose values are no schemas.
VALUES = frozenset({"const", "enum", "default", "examples", "example", "x-guidance"})
# Keys whose values map names to schemas, and so are no schemas themselves.
NAMING = frozenset(
    "properties patternProperties $defs definitions dependentSchemas dependentRequired dependencies".split()
)
_COUNTS = frozenset(
    "minItems maxItems minLength maxLength minProperties maxProperties minContains maxContains".split()
)
# The formats that texts are held to. Every other one is an annotation, as JSON Schema has it.
_FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
)
_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})  # each name of a property is a text
_REFS = 16  # references that are followed, one to the next
# Words beside which a property may be evaluated elsewhere.
_ELSEWHERE = frozenset(
    "$ref $dynamicRef $recursiveRef allOf anyOf oneOf not if dependentSchemas patternProperties".split()
)
_NAMED_BYTES = 64 << 10  # of the properties that take the place of a limit of names
_ALL_NAMED_BYTES = 256 << 10  # of those of a whole schema
_DRAFT = re.compile(r"json-schema.org/draft([-/])(04|06|07|2019-09|2020-12)/schema")
UP_TO_7 = ("-04/schema", "-06/schema", "-07/schema")
_NOTES = frozenset({"$comment", "description", "title", "type"})  # beside what limits a name


def meant_schema(schema: Mapping[str, Any]) -> Any:
    """Returns an equivalent JSON schema in the spelling that the grammar compiler takes: 2.0 becomes 2, and names
    limited to a list become properties. Keywords without effect are dropped, such as null values, unchecked formats,
    and `then` without `if`.
    """
    found = _meant(schema, _Document(schema))
    draft = _draft(found.pop("$schema", None))
    return {**found, "$schema": draft} if draft else found


def _draft(said: Any) -> str:
    """Returns the address of JSON Schema's draft that a schema names in any spelling; empty: the latest one."""
    found = _DRAFT.search(said) if isinstance(said, str) else None
    if not found:
        return ""
    return (
        f"http{'s' if found[1] == '/' else ''}://json-schema.org/draft{found[1]}{found[2]}/schema"
    )


@dataclass(slots=True)
class _Document:
    """The schema that is rewritten, and the bytes of properties that it may still get."""

    root: Mapping[str, Any]
    left_bytes: int = _ALL_NAMED_BYTES


def _meant(schema: Any, whole: _Document) -> Any:
    if isinstance(schema, list):
        return [_meant(each, whole) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in VALUES:  # in which null is a value like others, unless a list is due
            if value is not None or key != "enum":
                found[key] = value
        elif value is None or (key == "propertyNames" and value in _ANY_NAME):
            continue
        elif key in NAMING and isinstance(value, Mapping):
            found[key] = {name: _meant(each, whole) for name, each in value.items()}
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            found[key] = int(value)
        elif key != "format" or not isinstance(value, str) or value in _FORMATS:
            found[key] = _meant(value, whole)
    _leave_out_empty(found)
    if isinstance(found.get("$ref"), str) and "type" in found:
        _leave_to_reference(found, whole.root)
    _close_evaluated(found)
    _name_properties(found, whole)
    return found


def rewritten(
    schema: Any, change: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]]
) -> Any:
    """Returns a copy of a JSON schema in which each schema, inner ones first, is replaced by what `change` returns.

    Args:
        change: is given a copy of a schema in which the inner ones are replaced, and the original; returns the
            replacement.
    """
    if isinstance(schema, list):
        return [rewritten(each, change) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {
        key: value
        if key in VALUES
        else {name: rewritten(each, change) for name, each in value.items()}
        if key in NAMING and isinstance(value, Mapping)
        else rewritten(value, change)
        for key, value in schema.items()
    }
    return change(found, schema)


def _leave_out_empty(schema: dict[str, Any]) -> None:
    """Removes words that allow everything where they stand."""
    if schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
        schema.pop("uniqueItems", None)
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        if schema.get(key) == {}:
            del schema[key]
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif "then" not in schema and "else" not in schema:
        del schema["if"]


def _leave_to_reference(schema: dict[str, Any], root: Mapping[str, Any]) -> None:
    """Removes a type beside a reference to a schema of this type, or in a draft that ignores it: not even words beside
    a reference to what contains it are compiled."""
    ignored = _draft(root.get("$schema")).endswith(UP_TO_7)
    if ignored or followed({"$ref": schema["$ref"]}, root).get("type") == schema["type"]:
        del schema["type"]


def _close_evaluated(schema: dict[str, Any]) -> None:
    """Says `additionalProperties` for `unevaluatedProperties` where nothing else can evaluate a property."""
    if "unevaluatedProperties" in schema and _ELSEWHERE.isdisjoint(schema):
        others = schema.pop("unevaluatedProperties")
        schema.setdefault("additionalProperties", others)


def _name_properties(schema: dict[str, Any], whole: _Document) -> None:
    """Says properties, or properties of a pattern, for the names that `propertyNames` allows."""
    names = schema.get("propertyNames")
    allowed, properties = followed(names, whole.root), schema.get("properties", {})
    is_known = isinstance(names, Mapping) and (
        "$ref" not in names or names.keys() <= _NOTES | {"$ref"}
    )
    is_text = allowed.get("type", "string") == "string"
    if not (is_known and is_text and isinstance(properties, Mapping)):
        return
    if "patternProperties" in schema or "unevaluatedProperties" in schema:
        return
    others = schema.get("additionalProperties", {})
    others = {} if others is True else others
    limits = allowed.keys() - _NOTES
    if limits == {"pattern"} and not properties and isinstance(allowed["pattern"], str):
        schema["patternProperties"] = {} if others is False else {allowed["pattern"]: others}
    elif limits == {"enum"} or limits == {"const"}:
        names = listed_in(allowed)
        if not isinstance(names, list):
            return
        size = len(names) * len(json.dumps(others))
        if size > min(_NAMED_BYTES, whole.left_bytes):
            return
        whole.left_bytes -= size
        known = {name: properties.get(name, others) for name in names if isinstance(name, str)}
        schema["properties"] = {name: each for name, each in known.items() if each is not False}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def followed(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema that a `$ref` to a place in the document `root` leads to; the schema itself if it has no
    reference, and {} if that leads to no object.
    """
    for _ in range(_REFS):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str):
            break
        schema = referred(ref, root)
    return schema if isinstance(schema, Mapping) else {}
