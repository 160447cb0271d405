"""The values of fields: converts the text of a field according to its kind and to the shape that its template
defines.

The kinds and their settings are those of transformers (`utils/chat_parsing`), whose results are equalled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ktcli.answers.templates.patterns import Pattern
from ktcli.answers.templates.search import Finder
from ktcli.records import dataclass

KINDS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines")
STREAMED = frozenset(KINDS[:4])  # whose text is the value
_NESTING = 8  # of kinds of values in values
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_KEPT = re.compile("\x01([0-9]+)\x02")  # a text that was taken out


@dataclass(frozen=True, slots=True)
class FieldContent:
    """The content type of a field's text, and how it is parsed.

    Attributes:
        kind: one of `KINDS`.
        strip: whether blanks around a text go.
        texts: pairs of marks around texts in JSON, beside quotation marks.
        bare_keys: whether keys in JSON may have no quotation marks.
        any_text: whether what is no JSON is a text.
        tag: a pair of xml-inline, with groups `key` and `value`.
        value: how the value of a pair is read; None: it is a text as it stands.
        merge: whether the values of a key that comes again are a list; else the last one counts.
        line, equals: what stands between lines, and between key and value, of kv-lines.
    """

    kind: str = "text"
    strip: bool = True
    texts: tuple[tuple[str, str], ...] = ()
    bare_keys: bool = False
    any_text: bool = False
    tag: Pattern | None = None
    value: FieldContent | None = None
    merge: bool = False
    line: str = "\n"
    equals: str = ":"

    @property
    def is_plain_json(self) -> bool:
        """Whether the field's text is standard JSON: without other marks of strings, bare keys, or plain text in its
        place.
        """
        return self.kind == "json" and not (self.texts or self.bare_keys or self.any_text)


def read_content(kind: Any, args: Any, depth: int = 0) -> FieldContent:
    """Returns the parsed content type of a field: its kind, and the settings of that kind.

    Raises:
        ValueError: the kind is unknown, or a setting is invalid.
    """
    if kind not in KINDS:
        raise ValueError(f"has an unknown kind: {str(kind)[:40]!r}")
    if not isinstance(args, Mapping) or depth > _NESTING:
        raise ValueError("has content_args that are not an object, or are nested too deeply")
    tag = args.get("tag_pattern")
    if kind == "xml-inline" and not isinstance(tag, str):
        raise ValueError("needs a tag_pattern")
    pattern = Pattern(tag) if kind == "xml-inline" and isinstance(tag, str) else None
    if pattern is not None and "key" not in pattern.names:
        raise ValueError("has a tag_pattern without the group 'key'")
    value = args.get("value_parser")
    if value is not None and not isinstance(value, Mapping):
        raise ValueError("has a value_parser that is not an object")
    inner = value and read_content(value.get("name", "text"), value.get("args", {}), depth + 1)
    return FieldContent(
        kind,
        bool(args.get("strip", True)),
        tuple(_pair(each) for each in _list(args.get("string_delims", []))),
        bool(args.get("unquoted_keys", False)),
        bool(args.get("allow_non_json", False)),
        pattern,
        inner or None,
        bool(args.get("merge_duplicates", False)),
        _separator(args.get("line_sep", "\n")),
        _separator(args.get("kv_sep", ":")),
    )


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > _NESTING:
        raise ValueError("has string_delims that are not a short list")
    return value


def _pair(value: Any) -> tuple[str, str]:
    match value:
        case [str(opened), str(closed)] if opened and closed:
            return opened, closed
    raise ValueError("has string_delims that are not pairs of strings")


def _separator(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("has a separator that is not a string")
    return value


# --- values -----------------------------------------------------------------------------------------


def value_of(text: str, content: FieldContent) -> Any:
    """Returns the value of a field's text by its content type: a str, int, float or bool, a decoded JSON value, or a
    dict of the text's key-value pairs.

    Raises:
        ValueError: the text has no such value.
    """
    match content.kind:
        case "text":
            return _text(text, content)
        case "int":
            return int(_text(text, content))
        case "float":
            return float(_text(text, content))
        case "bool":
            return _text(text, content).lower() in ("true", "1")
        case "json":
            return _json(text, content)
        case "xml-inline":
            return _pairs(text, content)
        case _:
            return _lines(text, content)


def _text(text: str, content: FieldContent) -> str:
    return text.strip() if content.strip else text


def _json(text: str, content: FieldContent) -> Any:
    found = text
    if content.texts and ("\x01" in text or "\x02" in text):
        raise ValueError("the text contains the control characters that mark strings")
    taken: list[str] = []
    for opened, closed in content.texts:
        found = _without_texts(found, opened, closed, taken)
    if content.bare_keys:
        found = re.sub(r"(?<=[{,])(\w+):", r'"\1":', found)
    if taken:
        found = _KEPT.sub(lambda match: json.dumps(taken[int(match[1])]), found)
    try:
        return json.loads(found)
    except RecursionError:
        raise ValueError("the text is nested too deeply") from None
    except json.JSONDecodeError:
        if content.any_text:
            return _text(text, content)
        raise


def _without_texts(text: str, opened: str, closed: str, taken: list[str]) -> str:
    """Returns a text in which numbers stand for the texts between two marks; adds these to `taken`."""
    parts, at = [], 0
    while (start := text.find(opened, at)) >= 0:
        end = text.find(closed, start + len(opened))
        if end < 0:
            break
        parts += [text[at:start], f"\x01{len(taken)}\x02"]
        taken.append(text[start + len(opened) : end])
        at = end + len(closed)
    return "".join([*parts, text[at:]])


def _inner(text: str, content: FieldContent) -> Any:
    return text if content.value is None else value_of(text, content.value)


class PairReader:
    """An incremental parser of key-value pairs of the kind xml-inline.

    Raises:
        ValueError: a pair means nothing, or takes too long to find; from every call.
    """

    def __init__(self, content: FieldContent) -> None:
        assert content.tag is not None
        self._content, self._finder = content, Finder(content.tag)

    def feed(self, text: str) -> list[tuple[str, Any]]:
        """Adds a piece of text; returns the (key, value) pairs that it completes."""
        return [self._pair(found.groups) for found in self._finder.feed(text)]

    def finish(self) -> list[tuple[str, Any]]:
        """Ends the text; returns the remaining (key, value) pairs."""
        return [self._pair(found.groups) for found in self._finder.finish()]

    def _pair(self, groups: Mapping[str, str]) -> tuple[str, Any]:
        if "key" not in groups:
            raise ValueError("a tag has no key")
        return groups["key"], _inner(groups.get("value", ""), self._content)


def _pairs(text: str, content: FieldContent) -> dict[str, Any]:
    reader, found = PairReader(content), dict[str, Any]()
    for key, value in (*reader.feed(text), *reader.finish()):
        if key in found and content.merge:
            known = found[key]
            found[key] = [*(known if isinstance(known, list) else [known]), value]
        else:
            found[key] = value
    return found


def _lines(text: str, content: FieldContent) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in text.split(content.line):
        line = _text(each, content)
        if line and content.equals in line:
            key, value = line.split(content.equals, 1)
            found[_text(key, content)] = _inner(_text(value, content), content)
    return found


# --- shapes -----------------------------------------------------------------------------------------


def check_shape(shape: Any) -> None:
    """Raises ValueError if a string in a field's `transform` has a placeholder, `{name}`, beside other text."""
    if isinstance(shape, (dict, list)):
        for part in shape.values() if isinstance(shape, dict) else shape:
            check_shape(part)
    elif isinstance(shape, str) and bool(_PLACEHOLDER.search(shape)) > bool(
        _PLACEHOLDER.fullmatch(shape)
    ):
        raise ValueError("has a transform that mixes a placeholder with other text")


def shaped(shape: Any, names: Mapping[str, Any]) -> Any:
    """Returns a copy of a field's `transform` in which each string that is a placeholder, `{name}`, is replaced by its
    value; `{a.b}` is the value of b in that of a.

    Raises:
        ValueError: a placeholder has no value in `names`.
    """
    if isinstance(shape, dict):
        return {key: shaped(part, names) for key, part in shape.items()}
    if isinstance(shape, list):
        return [shaped(part, names) for part in shape]
    match = _PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    if match is None:
        return shape
    value: Any = names
    for key in match[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"{match[0][:60]} is not defined")
        value = value[key]
    return value
