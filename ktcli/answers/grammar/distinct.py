"""Keeps apart the items of arrays that a schema wants to be unique (`uniqueItems`), which no grammar can say.

What an answer has is read beside the grammar. While an item has the beginning of an earlier one, ids that would make it
the same are taken out of the mask: before the end of its last text or number, which can go on another way. Arrays are
known by the property that they are in, so others of that name have unique items, too.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.answers.calls.values import referred
from ktcli.answers.grammar.joined import listed_in
from ktcli.answers.grammar.meaning import followed, rewritten
from ktcli.answers.grammar.tokentable import BLANKS, NUMBER, TokenPart, TokenTable
from ktcli.answers.grammar.vocabulary import SPECIAL
from ktcli.errors import UsageError
from ktcli.records import dataclass

_MOST_VISITS = 100_000  # of parts of a schema: some 0.7 s
_ANY = "*"
_SAME = ("items", "prefixItems", "allOf", "anyOf", "oneOf", "contains", "additionalItems")
_OTHERS = ("additionalProperties", "unevaluatedProperties")

# For each property whose arrays have unique items, the JSON texts that these may be; None: too many to list. `*` stands
# for all properties, the empty text for none.
Held = Mapping[str, tuple[bytes, ...] | None]


def held_arrays(schema: Mapping[str, Any], field: str = "the schema") -> Held:
    """Returns the arrays of a JSON schema that must have unique items: by the name of the property that holds the array
    ("*": any property, "": none), the JSON texts that its items may be; None if these are not listed.

    Args:
        field: the schema's name in error messages.
    Raises:
        UsageError: the schema has more than 100,000 parts to look at, counted for each property that leads to them.
    """
    found: dict[str, tuple[bytes, ...] | None] = {}
    seen: set[tuple[int, str]] = set()
    lists = _ListedItems(schema)
    left: list[tuple[Any, str]] = [(schema, "")]
    visits = 0
    while left:
        part, name = left.pop()
        visits += 1
        if visits > _MOST_VISITS:
            raise UsageError(f"{field} has uniqueItems and is too complex for that")
        if isinstance(part, list):
            left += [(each, name) for each in part if isinstance(each, Mapping)]
        if not isinstance(part, Mapping) or (id(part), name) in seen:
            continue
        seen.add((id(part), name))
        if part.get("uniqueItems") is True:
            listed = lists.of(part)
            found[name] = listed if found.get(name, listed) == listed else None
        left += [(part[key], name) for key in _SAME if key in part]
        left += [(part[key], _ANY) for key in _OTHERS if key in part]
        left += [(each, key) for key, each in _members(part, "properties")]
        left += [(each, _ANY) for _, each in _members(part, "patternProperties")]
        if isinstance(ref := part.get("$ref"), str):
            left.append((referred(ref, schema), name))
    return found


def without_unique(schema: Mapping[str, Any]) -> Any:
    """Returns a JSON schema without `uniqueItems`; an array that had it, and whose items come from a list, gets a
    `maxItems` of at most the length of that list.
    """
    lists = _ListedItems(schema)

    def change(found: dict[str, Any], array: Mapping[str, Any]) -> dict[str, Any]:
        if found.get("uniqueItems") is True:
            del found["uniqueItems"]
            listed, most = lists.of(array), array.get("maxItems")
            if listed is not None and not (isinstance(most, int) and most <= len(listed)):
                found["maxItems"] = len(listed)
        return found

    return rewritten(schema, change)


class _ListedItems:
    """The items of arrays that their schemas list; each list is read once, however many arrays refer to it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, tuple[Mapping[str, Any], tuple[bytes, ...] | None]] = {}

    def of(self, array: Mapping[str, Any]) -> tuple[bytes, ...] | None:
        """Returns the JSON texts of all items that an array may have; None: they are not listed."""
        items = followed(array.get("items"), self._root)
        if id(items) not in self._known:
            self._known[id(items)] = items, _listed(items)  # kept, so that its id stays its own
        return self._known[id(items)][1]


def _members(schema: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    members = schema.get(key)
    return [*members.items()] if isinstance(members, Mapping) else []


def _listed(items: Mapping[str, Any]) -> tuple[bytes, ...] | None:
    values = listed_in(items)
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


@lru_cache(8)
def _by_value(listed: tuple[bytes, ...]) -> Mapping[bytes, str]:
    """Returns what `_canonical` says of each text, the texts in their order."""
    return {text: _canonical(text) for text in sorted(listed)}


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
        values: all that they can be, see `_by_value`; None: they are not listed.
        left: those of them that are not there yet, in order.
        start: where the next item begins in the text; None: it has not begun.
        is_key: whether the next text is the name of a member.
    """

    is_array: bool
    name: str
    held: bool = False
    values: Mapping[bytes, str] | None = None
    left: list[bytes] = field(default_factory=list)
    start: int | None = None
    items: list[_Item] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    is_key: bool = True
    key: str = ""


class DistinctItems:
    """Enforces `uniqueItems` along the JSON of one answer.

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
        """Reads the next id of the answer, to note the items of its arrays; sets `repeated` if an array has an item
        twice.
        """
        data = self._table.tokens[id].removeprefix(SPECIAL)
        if self._begin_mark and not self._text and data.strip() == self._begin_mark:
            self._inside = True
        if self._inside:
            self._before += data
            _, mark, data = self._before.partition(self._end_mark)
            if not mark:
                self._before = self._before[-len(self._end_mark) :]
                return
            self._inside, self._begin_mark = False, b""
        for byte in data:
            self._read(byte)

    def limit(self, mask: NDArray[np.uint32]) -> None:
        """Clears in a bit mask of ids (uint32, one bit per id) those with which an array would have an item twice."""
        for frame in self._stack:
            if not frame.held or not frame.items:
                continue
            begun = b"" if frame.start is None else bytes(self._text[frame.start :])
            if frame.values is None:
                barred = self._unlisted(frame, begun)
            else:
                barred = self._not_left(frame, begun, mask)
            if barred:
                bits = np.zeros(mask.size * 32, dtype=np.uint8)
                bits[barred] = 1
                mask &= ~np.packbits(bits, bitorder="little").view(np.uint32)

    def _not_left(self, frame: _OpenValue, begun: bytes, mask: NDArray[np.uint32]) -> list[int]:
        """Returns the ids that lead to none of the listed items that are left."""
        found, part = [], self._part(frame)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        for id in np.flatnonzero(bits).tolist():
            text = self._table.text(id, part)
            if not text or (not begun and text.startswith(b"]")):
                continue
            if not _leads_to(begun + text, len(begun), frame.left):
                found.append(id)
        return found

    def _unlisted(self, frame: _OpenValue, begun: bytes) -> list[int]:
        """Returns the ids with which the next item becomes one that is there."""
        found, part = list[int](), self._part(frame)
        for item in frame.items:
            if len(begun) <= item.point and item.text.startswith(begun):
                index = self._table.index(part, ends_number=item.is_number)
                rest = item.text[len(begun) : item.point]
                found += index.ending(rest) if item.is_number else index.beginning(rest)
        return found

    def _part(self, frame: _OpenValue) -> TokenPart:
        """Returns which part of a token belongs to the item of an array."""
        if self._in_string or self._scalar is not None:
            return TokenPart.ALL
        return TokenPart.NEXT if frame.start is None else TokenPart.VALUES

    def _read(self, byte: int) -> None:
        if self._in_string:
            self._in_text(byte)
        elif byte in BLANKS:
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
        listed = self._held[named] if held else None
        values = None if listed is None else _by_value(listed)
        return _OpenValue(is_array, name, held, values, list(values or ()))

    def _begin(self) -> None:
        top = self._stack[-1] if self._stack else None
        if top is not None and top.is_array and top.start is None:
            top.start = len(self._text)

    def _end_scalar(self) -> None:
        if self._scalar is None:
            return
        if self._text[self._scalar] in NUMBER:
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
        if top.values is not None:
            top.left = [each for each in top.left if top.values[each] != value]


def _leads_to(text: bytes, begun: int, left: list[bytes]) -> bool:
    """Returns whether a text is the beginning of a text of a sorted list, or goes on behind one.

    Args:
        begun: the bytes of the text that are there already.
    """
    at = bisect_left(left, text)
    if at < len(left) and left[at].startswith(text):
        return True
    for end in range(max(begun, 1), len(text)):
        at = bisect_left(left, text[:end])
        goes_on = text[end - 1] in NUMBER and text[end] in NUMBER  # 1 is not the end of 12
        if not goes_on and at < len(left) and left[at] == text[:end]:
            return True
    return False
