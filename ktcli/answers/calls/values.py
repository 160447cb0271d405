"""Converts the values of a call to the types in the tool's schema: models that write pairs write only text."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that a model may call.

    Attributes:
        parameters: the schema of each, by its name.
    """

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> Tools:
        """Returns the tools of a request (names and parameter schemas), read from their definitions in OpenAI's
        format.
        """
        found: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping):
                schema = function.get("parameters")
                found[str(function.get("name"))] = schema if isinstance(schema, Mapping) else {}
        return cls(found)

    def is_text(self, tool: str, key: str) -> bool:
        """Returns whether the argument `key` of a tool is passed on as a string: its schema allows no other type, or
        names none.
        """
        return self._types(tool, key) <= {"string"}

    def value(self, tool: str, key: str, text: str) -> Any:
        """Returns the value of a tool's argument that was given as text: decoded as JSON, if the argument's schema
        allows the type of the result or names none, or as a Python literal of a type it names; else the text itself.
        """
        types = self._types(tool, key)
        if "string" in types and len(types) == 1:
            return text
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = _loosely(text.strip(), types)
        if found is None and "null" not in types and types:
            return text
        return text if types and not _is_one_of(found, types) else found

    def typed(self, tool: str, key: str, text: str) -> Any:
        """Returns the value of a tool's argument that was given as text, decoded to a type that the argument's schema
        allows; the text itself if the schema names no type, or none fits.
        """
        return self.value(tool, key, text) if self._types(tool, key) else text

    def _types(self, tool: str, key: str) -> set[str]:
        """Returns the types that a value may have; empty: nothing is said."""
        properties = self.parameters.get(tool, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return _types_of(schema, self.parameters.get(tool, {}), 0)


class PairValue:
    """A value between marks, as JSON: a text goes out as it comes, anything else when it is whole.

    Args:
        said: what stands in the mark before it, such as its type.
        streams: whether it is a text.
    """

    def __init__(self, tools: Tools, tool: str, key: str, said: str, *, streams: bool) -> None:
        self._tools, self._tool, self._key, self._said = tools, tool, key, said
        self._streams, self._begun = streams, False
        self._held = ""

    def feed(self, text: str) -> str:
        """Adds a piece of an argument's text; returns the next piece of the value's JSON encoding. It is empty unless
        the value is a string that is passed on piece by piece; else `finish` returns all of the encoding.
        """
        self._held += text
        if not self._streams or not self._held:
            return ""
        lead = "" if self._begun else '"'
        whole = self._held if self._begun else self._held.removeprefix("\n")
        self._begun = True
        keep = 1 if whole.endswith("\n") else 0  # the last newline belongs to the mark
        said, self._held = whole[: len(whole) - keep], whole[len(whole) - keep :]
        return lead + json.dumps(said)[1:-1]

    def finish(self) -> str:
        """Ends the argument's text; returns the rest of its JSON encoding."""
        if self._streams:
            return '"' if self._begun else '""'
        text = self._held.removeprefix("\n").removesuffix("\n")
        if 'string="false"' in self._said:
            try:
                return json.dumps(json.loads(text))
            except (ValueError, RecursionError):
                return json.dumps(text)
        return json.dumps(self._tools.value(self._tool, self._key, text))


_DEPTH = 8  # of schemas in schemas that are looked at


def _types_of(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """Returns the types that a schema allows; empty: nothing is said."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return set()
    if isinstance(schema.get("$ref"), str):
        return _types_of(referred(schema["$ref"], root), root, depth + 1)
    said = schema.get("type")
    found = {said} if isinstance(said, str) else set()
    if isinstance(said, list):
        found = {each for each in said if isinstance(each, str)}
    if not found and isinstance(schema.get("enum"), list):
        found = {type_of(each) for each in schema["enum"]}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            branches = [_types_of(each, root, depth + 1) for each in schema[name]]
            found = found.union(*branches) if all(branches) else set()
    return found


def referred(ref: str, root: Mapping[str, Any]) -> Any:
    """Returns the part of the JSON schema document `root` that a `$ref` such as "#/$defs/x" points to; None if there
    is none.
    """
    at: Any = root if ref.startswith("#") else None
    for part in ref[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        at = at.get(name) if isinstance(at, Mapping) else None
    return at


_TYPES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
}  # fmt: skip


def type_of(value: Any) -> str:
    """Returns the JSON Schema name of a decoded JSON value's type, such as "integer" or "object"."""
    return _TYPES.get(type(value), "object")


def _is_one_of(value: Any, types: set[str]) -> bool:
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _loosely(text: str, types: set[str]) -> Any:
    """Returns what Python's words mean where JSON's were due; the text itself if nothing."""
    words = {"True": True, "False": False, "None": None}
    if text in words and ("boolean" in types or "null" in types):
        return words[text]
    if _BRACKETS.get(text[:1]) not in types or len(text) > _LITERAL_CHARS:
        return text
    try:
        with warnings.catch_warnings():  # about escapes that Python does not know
            warnings.simplefilter("ignore")
            found = ast.literal_eval(text)
        json.dumps(found, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return list(found) if isinstance(found, tuple) else found


_LITERAL_CHARS = 1 << 16  # of a list or an object that is parsed as Python
_BRACKETS = {"[": "array", "(": "array", "{": "object"}
