"""Reads patterns as choices of sequences of letters, repetitions and places, and writes such sequences as patterns."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any

from ktcli.records import dataclass

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from re import _constants as op  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]

_TOP = 0x10FFFF
_MOST_PARTS = 400  # of a sequence
MOST_BRANCHES = 64  # of choices that are multiplied out
INFINITE = 1 << 20
# Properties of letters, as parts of a class: fewer letters than they have.
_PROPERTIES = {
    "L": "A-Za-z",
    "Ll": "a-z",
    "Lu": "A-Z",
    "N": "0-9",
    "Nd": "0-9",
    "Z": " ",
    "Zs": " ",
    "Alnum": "A-Za-z0-9",
    "Alpha": "A-Za-z",
    "Digit": "0-9",
    "Graph": "!-~",
    "Print": " -~",
}
Ranges = tuple[tuple[int, int], ...]


def complement(ranges: Ranges) -> Ranges:
    """Returns the code points outside the given ones, both as sorted (first, last) ranges."""
    found, at = [], 0
    for low, high in ranges:
        if low > at:
            found.append((at, low - 1))
        at = high + 1
    return (*found, *([(at, _TOP)] if at <= _TOP else []))


def union(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Returns the code points that are in any of some (first, last) ranges, which may overlap, as sorted, separate
    ranges.
    """
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Returns the code points that are in both of two sets, as sorted (first, last) ranges."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return tuple(sorted(pair for pair in pairs if pair[0] <= pair[1]))


_SURROGATES = (0xD800, 0xDFFF)
ALL = complement((_SURROGATES,))
_LINE = common(ALL, complement(union([(10, 10), (13, 13), (0x2028, 0x2029)])))
WORD = union([(48, 57), (65, 90), (95, 95), (97, 122)])
_SPACE = union([(9, 13), (32, 32)])
# The classes of letters; of what is in none of these classes, only what no reader counts to them.
_CLASSES = {
    op.CATEGORY_DIGIT: ((48, 57),),
    op.CATEGORY_NOT_DIGIT: common(((0, 127),), complement(((48, 57),))),
    op.CATEGORY_WORD: WORD,
    op.CATEGORY_NOT_WORD: common(((0, 127),), complement(WORD)),
    op.CATEGORY_SPACE: _SPACE,
    op.CATEGORY_NOT_SPACE: common(
        ALL,
        complement(
            union(
                [
                    *_SPACE,
                    (28, 31),
                    (0x85, 0xA0),
                    (0x1680, 0x1680),
                    (0x2000, 0x200A),
                    (0x2028, 0x202F),
                    (0x205F, 0x205F),
                    (0x3000, 0x3000),
                    (0xFEFF, 0xFEFF),
                ]
            )
        ),
    ),
}


class Unknown(Exception):
    """A pattern has something that is not narrowed."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A choice of sequences, again and again."""

    ways: tuple[tuple[Any, ...], ...]
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Assertion:
    """What must be at a place, or must not, before it or behind it; `ways` None: a word begins or ends there."""

    ways: tuple[tuple[Any, ...], ...] | None
    ahead: bool = True
    holds: bool = True


# An item of a sequence: the ranges of a letter, `Repeat`, `Assertion`, or an end of the text.
BEGIN, END = "begin", "end"
Items = tuple[Any, ...]


def ways_of(pattern: str) -> list[Items]:
    """Returns the alternatives of a regular expression, each a sequence of letter ranges, `Repeat`, `Assertion`, BEGIN
    and END. Choices with anchors in them are expanded into alternatives of the whole expression.

    Raises:
        Unknown: the expression has something that is not supported.
        re.error, RecursionError, OverflowError: it is not a regular expression, or is nested too deeply.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _ways(parser.parse(_spelled(pattern)))


def _spelled(pattern: str) -> str:
    """Returns a pattern with properties of letters and names of groups as Python spells them."""
    found, inside, at = "", False, 0
    while at < len(pattern):
        one = pattern[at]
        if match := re.compile(r"\\p\{(\w+)\}|\\p(\w)").match(pattern, at):
            letters = _PROPERTIES.get(match[1] or match[2])
            if letters is None:
                raise Unknown
            after = pattern[match.end() : match.end() + 1]
            found += letters if inside else f"[{letters}]"
            at = match.end()
            if inside and after == "-":  # which stands for itself here
                found, at = found + r"\-", at + 1
            continue
        if one == "\\":
            escaped = pattern[at : at + 2]
            if escaped in (r"\P", r"\k"):
                raise Unknown
            found += {r"\z": r"\Z", r"\/": "/"}.get(escaped, escaped)
            at += 2
            continue
        inside = one == "[" or (inside and one != "]")
        is_named = pattern.startswith("(?<", at) and pattern[at + 3 : at + 4] not in ("=", "!")
        if is_named and not inside:
            found, at = f"{found}(?P<", at + 3
            continue
        found, at = found + one, at + 1
    return found


def _ways(tree: Any) -> list[Items]:
    """Returns the sequences of which an expression is a choice; choices with anchors in them are multiplied out."""
    parts: list[list[Items]] = []
    for code, said in tree:
        parts.append(_choices(code, said))
    if len(parts) > _MOST_PARTS:
        raise Unknown
    found: list[Items] = [()]
    for part in parts:
        if len(found) * len(part) > MOST_BRANCHES:
            part = [(Repeat(tuple(part), 1, 1),)]
        found = [(*one, *other) for one, other in product(found, part)]
    return found


def _choices(code: Any, said: Any) -> list[Items]:
    if code in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
        return [(_letters(code, said),)]
    if code is op.SUBPATTERN:
        _, added, removed, inner = said
        if added or removed:
            raise Unknown
        return _kept(_ways(inner))
    if code is op.BRANCH:
        return _kept([way for each in said[1] for way in _ways(each)])
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        least, most, inner = said
        most = INFINITE if most is op.MAXREPEAT else int(most)
        return [(Repeat(tuple(_ways(inner)), int(least), most),)]
    if code in (op.ASSERT, op.ASSERT_NOT):
        side, inner = said
        return [(Assertion(tuple(_ways(inner)), side > 0, code is op.ASSERT),)]
    if code is op.AT and said in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
        return [(BEGIN,)]
    if code is op.AT and said in (op.AT_END, op.AT_END_STRING):
        return [(END,)]
    if code is op.AT and said is op.AT_BOUNDARY:
        return [(Assertion(None),)]
    raise Unknown


def _kept(ways: list[Items]) -> list[Items]:
    """Returns a choice as one item, unless there are anchors or lookarounds in it."""
    if len(ways) > 1 and not any(map(has_places, ways)):
        return [(Repeat(tuple(ways), 1, 1),)]
    return ways


def has_places(items: Items) -> bool:
    """Returns whether a sequence of a regular expression's items has an anchor, lookaround or word boundary in it."""
    return any(
        item in (BEGIN, END)
        or isinstance(item, Assertion)
        or (isinstance(item, Repeat) and any(map(has_places, item.ways)))
        for item in items
    )


def _letters(code: Any, said: Any) -> Ranges:
    if code is op.ANY:
        return _LINE
    if code is op.LITERAL:
        return common(ALL, ((said, said),))
    if code is op.NOT_LITERAL:
        return common(ALL, complement(((said, said),)))
    negated = said[0][0] is op.NEGATE
    found: list[tuple[int, int]] = []
    for each, value in said[negated:]:
        if each is op.LITERAL:
            found.append((value, value))
        elif each is op.RANGE:
            found.append(value)
        elif negated:  # all that some reader counts to the class
            found += complement(_CLASSES[_OPPOSITE[value]])
        else:
            found += _CLASSES[value]
    ranges = union(found)
    return common(ALL, complement(ranges) if negated else ranges)


_OPPOSITE = {
    op.CATEGORY_DIGIT: op.CATEGORY_NOT_DIGIT,
    op.CATEGORY_WORD: op.CATEGORY_NOT_WORD,
    op.CATEGORY_SPACE: op.CATEGORY_NOT_SPACE,
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
}


def text_of(items: Items) -> str:
    """Returns the regular expression, as text, that a sequence of parsed items (see `ways_of`) stands for."""
    return "".join(map(_item_text, items))


def _item_text(item: Any) -> str:
    if isinstance(item, tuple):
        return _class_text(item)
    if not isinstance(item, Repeat):
        raise Unknown  # a place in what was put together
    inner = "|".join(map(text_of, item.ways))
    if not item.ways:
        return "" if item.least == 0 else "[^\\x{0}-\\x{10FFFF}]"
    single = len(item.ways) == 1 and len(item.ways[0]) == 1 and isinstance(item.ways[0][0], tuple)
    body = inner if single else f"(?:{inner})"
    if (item.least, item.most) == (1, 1):
        return body
    if item.most == INFINITE:
        return body + {0: "*", 1: "+"}.get(item.least, f"{{{item.least},}}")
    return f"{body}{{{item.least},{item.most}}}"


def _class_text(ranges: Ranges) -> str:
    if not ranges:
        raise Unknown
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _point(ranges[0][0])
    return "[" + "".join(_point(a) + (f"-{_point(b)}" if b > a else "") for a, b in ranges) + "]"


def _point(code: int) -> str:
    one = chr(code)
    return one if one.isascii() and one.isalnum() else f"\\x{{{code:X}}}"
