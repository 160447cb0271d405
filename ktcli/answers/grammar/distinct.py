"""Keeps apart the items of arrays that a schema wants to be unique (`uniqueItems`), which no grammar can say.

What an answer has is read beside the grammar. While an item has the beginning of an earlier one, ids that would make it
the same are taken out of the mask: before the end of its last text or number, which can go on another way. Arrays are
known by the property that they are in, so others of that name have unique items, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.answers.calls.values import referred
from ktcli.answers.grammar.meaning import VALUES, followed
from ktcli.answers.grammar.vocabulary import SPECIAL

_BLANKS = b" \t\r\n"
_NUMBER = b"+-.0123456789Ee"
_ANY = "*"
_SAME = ("items", "prefixItems", "allOf", "anyOf", "oneOf", "contains", "additionalItems")
_OTHERS = ("additionalProperties", "unevaluatedProperties")

# For each property whose arrays have unique items, the JSON texts that these may be; None: too many to list. `*` stands
# for all properties, the empty text for none.
Held = Mapping[str, tuple[bytes, ...] | None]


def held_arrays(schema: Mapping[str, Any]) -> Held:
    """Returns the arrays of a schema that have unique items."""
    found: dict[str, tuple[bytes, ...] | None] = {}
    seen: set[tuple[int, str]] = set()
    left: list[tuple[Any, str]] = [(schema, "")]
    while left:
        part, name = left.pop()
        if isinstance(part, list):
            left += [(each, name) for each in part]
        if not isinstance(part, Mapping) or (id(part), name) in seen:
            continue
        seen.add((id(part), name))
        if part.get("uniqueItems") is True:
            listed = _listed(followed(part.get("items"), schema))
            found[name] = listed if found.get(name, listed) == listed else None
        left += [(part.get(key), name) for key in _SAME]
        left += [(part.get(key), _ANY) for key in _OTHERS]
        left += [(each, key) for key, each in _members(part, "properties")]
        left += [(each, _ANY) for _, each in _members(part, "patternProperties")]
        if isinstance(ref := part.get("$ref"), str):
            left.append((referred(ref, schema), name))
    return found


def without_unique(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns a schema without `uniqueItems`; an array whose items are listed has at most as many."""
    if isinstance(schema, list):
        return [without_unique(each, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {
        key: each if key in VALUES else without_unique(each, root)
        for key, each in schema.items()
        if key != "uniqueItems" or each is not True
    }
    if len(found) < len(schema):
        listed, most = _listed(followed(schema.get("items"), root)), schema.get("maxItems")
        if listed is not None and not (isinstance(most, int) and most <= len(listed)):
            found["maxItems"] = len(listed)
    return found


def _members(schema: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    members = schema.get(key)
    return [*members.items()] if isinstance(members, Mapping) else []


def _listed(items: Mapping[str, Any]) -> tuple[bytes, ...] | None:
    values = [items["const"]] if "const" in items else items.get("enum")
    if values is None and items.get("type") == "boolean":
        values = [False, True]
    if not isinstance(values, list):
        return None
    return tuple(dict.fromkeys(_spelled(each) for each in values))


def _spelled(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _canonical(text: bytes) -> str:
    """Returns what two equal values have in common, whatever the order of their members and the form of numbers."""

    def number(text: str) -> int | float:
        found = float(text)
        return int(found) if found.is_integer() else found

    return json.dumps(json.loads(text, parse_float=number), sort_keys=True)


class TokenTable:
    """The bytes of a model's tokens, and which of them can end a text or a number."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self._squeezed: dict[int, bytes] = {}

    def squeezed(self, id: int) -> bytes:
        """Returns the bytes of a token that begins between two texts, without the blanks that are in none."""
        if (found := self._squeezed.get(id)) is None:
            parts = self.tokens[id].split(b'"')
            parts[::2] = [part.translate(None, _BLANKS) for part in parts[::2]]
            found = self._squeezed[id] = b'"'.join(parts)
        return found

    @cached_property
    def quotes(self) -> list[int]:
        """Those with a quotation mark."""
        return [id for id, token in enumerate(self.tokens) if b'"' in token]

    @cached_property
    def ends(self) -> list[int]:
        """Those with what may follow a number."""
        return [
            id for id, token in enumerate(self.tokens) if any(e in token for e in b",]} \n\t\r")
        ]


@dataclass(slots=True)
class _Item:
    """An item that is there: its text without blanks, and the end of its last text or number in that."""

    text: bytes
    point: int
    is_number: bool


@dataclass(slots=True)
class _OpenValue:
    """An array or an object that is open.

    Attributes:
        name: the property that it is in.
        held: whether its items are unique.
        listed: all that they can be; None: they are not listed.
        start: where the next item begins in the text; None: it has not begun.
        is_key: whether the next text is the name of a member.
    """

    is_array: bool
    name: str
    held: bool = False
    listed: tuple[bytes, ...] | None = None
    start: int | None = None
    items: list[_Item] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    is_key: bool = True
    key: str = ""


class DistinctItems:
    """Follows the JSON of one answer.

    Args:
        thought: the marks of a thought that may come before the JSON; None: there is none.
        inside: whether the answer begins in one.
    Attributes:
        repeated: whether an array has an item twice, spelled in two ways.
    """

    def __init__(
        self,
        held: Held,
        table: TokenTable,
        thought: tuple[str, str] | None = None,
        *,
        inside: bool = False,
    ) -> None:
        self._held, self._table = held, table
        begin, end = thought or ("", "")
        self._begin_mark, self._end_mark = begin.encode(), end.encode()
        self._inside, self._before = inside, b""  # in a thought, which is what comes before
        self._text = bytearray()  # without the blanks between values
        self._stack: list[_OpenValue] = []
        self._in_string = self._escaped = False
        self._string = 0  # where the last text begins
        self._scalar: int | None = None  # where the number or word that is not at its end begins
        self._free, self._is_number = 0, False  # the end of the last text or number
        self.repeated = False

    def take(self, id: int) -> None:
        """Reads the next id."""
        data = self._table.tokens[id].removeprefix(SPECIAL)
        if self._begin_mark and not self._text and data.strip() == self._begin_mark:
            self._inside = True
        if self._inside:
            self._before += data
            _, mark, data = self._before.partition(self._end_mark)
            if not mark:
                return
            self._inside, self._begin_mark = False, b""
        for byte in data:
            self._read(byte)

    def limit(self, mask: NDArray[np.uint32]) -> None:
        """Takes the ids out of a mask with which an item would be there twice."""
        for frame in self._stack:
            if not frame.held or not frame.items:
                continue
            begun = b"" if frame.start is None else bytes(self._text[frame.start :])
            barred = self._unlisted if frame.listed is None else self._not_left
            for id in barred(frame, begun, mask):
                mask[id >> 5] &= ~np.uint32(1 << (id & 31))

    def _not_left(self, frame: _OpenValue, begun: bytes, mask: NDArray[np.uint32]) -> list[int]:
        """Returns the ids that lead to none of the listed items that are left."""
        left = [each for each in frame.listed or () if _canonical(each) not in frame.seen]
        found = []
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        for id in np.flatnonzero(bits).tolist():
            text = self._goes_on(id, frame)
            if not text or (not begun and text.startswith(b"]")):
                continue
            text = begun + text
            if not any(each.startswith(text) or text.startswith(each) for each in left):
                found.append(id)
        return found

    def _unlisted(self, frame: _OpenValue, begun: bytes, mask: NDArray[np.uint32]) -> list[int]:
        """Returns the ids with which the next item becomes one that is there."""
        found = []
        for item in frame.items:
            if len(begun) > item.point or not item.text.startswith(begun):
                continue
            rest = item.text[len(begun) : item.point]
            for id in self._table.ends if item.is_number else self._table.quotes:
                text = self._goes_on(id, frame)
                if not text.startswith(rest) or not text:
                    continue
                if not item.is_number or (len(text) > len(rest) and text[len(rest)] not in _NUMBER):
                    found.append(id)
        return found

    def _goes_on(self, id: int, frame: _OpenValue) -> bytes:
        """Returns what an id adds to the item of an array, as far as blanks and the comma before it are none of it."""
        if self._in_string or self._scalar is not None:
            return self._table.tokens[id]
        text = self._table.squeezed(id)
        return text.lstrip(b",") if frame.start is None else text

    def _read(self, byte: int) -> None:
        if self._in_string:
            self._in_text(byte)
        elif byte in _BLANKS:
            self._end_scalar()
        elif byte == ord('"'):
            self._begin()
            self._in_string, self._string = True, len(self._text)
            self._text.append(byte)
        elif byte in b"{[":
            self._begin()
            self._text.append(byte)
            self._stack.append(self._opened(byte == ord("[")))
        elif byte in b"}],:":
            self._end_scalar()
            self._text.append(byte)
            self._between(byte)
        else:
            self._begin()
            self._scalar = len(self._text) if self._scalar is None else self._scalar
            self._text.append(byte)

    def _in_text(self, byte: int) -> None:
        self._text.append(byte)
        if self._escaped:
            self._escaped = False
        elif byte == ord("\\"):
            self._escaped = True
        elif byte == ord('"'):
            self._in_string = False
            top = self._stack[-1] if self._stack else None
            if top is not None and not top.is_array and top.is_key:
                top.key = json.loads(self._text[self._string :])
            else:
                self._free, self._is_number = len(self._text), False
                self._end()

    def _between(self, byte: int) -> None:
        top = self._stack[-1] if self._stack else None
        if top is None:
            return
        if byte in b"}]":
            self._stack.pop()
            self._end()
        else:
            top.is_key = byte == ord(",")

    def _opened(self, is_array: bool) -> _OpenValue:
        above = self._stack[-1] if self._stack else None
        name = "" if above is None else above.name if above.is_array else above.key
        named = name if name in self._held else _ANY
        held = is_array and named in self._held
        return _OpenValue(is_array, name, held, self._held[named] if held else None)

    def _begin(self) -> None:
        top = self._stack[-1] if self._stack else None
        if top is not None and top.is_array and top.start is None:
            top.start = len(self._text)

    def _end_scalar(self) -> None:
        if self._scalar is None:
            return
        if self._text[self._scalar] in _NUMBER:
            self._free, self._is_number = len(self._text), True
        self._scalar = None
        self._end()

    def _end(self) -> None:
        """Notes the end of a value, which may be an item."""
        top = self._stack[-1] if self._stack else None
        if top is None or not top.is_array or top.start is None:
            return
        text, point = bytes(self._text[top.start :]), self._free - top.start
        top.start = None
        if not top.held:
            return
        is_free = point > 0
        top.items.append(_Item(text, point if is_free else len(text), is_free and self._is_number))
        value = _canonical(text)
        self.repeated |= value in top.seen
        top.seen.add(value)
