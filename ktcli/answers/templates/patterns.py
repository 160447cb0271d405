"""Converts the patterns of response templates into automata that follow a text in linear time.

Patterns come with checkpoints and are hostile input, and no library matches in linear time what is not all there yet.
So Python's own parser of regular expressions reads them, and search.py follows a text through what is made of them.
What needs more than that, a look ahead or back to a group, is refused by name. `$` means the very end.

google-re2 1.1, tried with every pattern of the tests, knows ASCII's letters, digits and blanks only, and must search
what it holds anew when a piece comes (16,000 pieces of a value: 0.32 s against 0.17 s, and it grows with the square).
The expressions of llguidance say which token may follow, not where a match or its groups are.
"""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

# The parser that `re.compile` has used since 3.11; it has no public name, and no other library gives the tree.
from re import _constants, _parser  # type: ignore[attr-defined]  # isort: skip

PATTERN_CHARS = 2000
NODES = 300  # of a pattern's machine; every one may hold a thread, which each character moves
_UNLIKE_PYTHON = "\x1c\x1d\x1e\x1f"  # blanks for Python, not for the patterns' own dialect
_OF_WORDS = ("Nd", "Nl", "Pc")  # categories of letters in words, beside letters and their marks


class TextPlace(Enum):
    """The positions that an anchor of a pattern can require."""

    BEGIN = auto()
    END = auto()
    EDGE = auto()  # of a word
    NO_EDGE = auto()


_PLACES = {
    _constants.AT_BEGINNING: TextPlace.BEGIN,
    _constants.AT_BEGINNING_STRING: TextPlace.BEGIN,
    _constants.AT_END: TextPlace.END,
    _constants.AT_END_STRING: TextPlace.END,
    _constants.AT_BOUNDARY: TextPlace.EDGE,
    _constants.AT_NON_BOUNDARY: TextPlace.NO_EDGE,
}


class Match(NamedTuple):
    """A match; its positions are characters of the whole text.

    Attributes:
        places: where each named group begins and ends, one after the other; -1: it is no part of the match.
    """

    start: int
    end: int
    places: tuple[int, ...]


class _Node(NamedTuple):
    """A node of the machine: what it takes, or asks for, or notes, and where it leads, the preferred way first."""

    ways: tuple[int, ...]
    takes: _Letters | None = None
    place: TextPlace | None = None
    slot: int = -1


END = 0  # the node of a match
_Closure = tuple[tuple[int, tuple[int, ...]], ...]  # nodes, each with the slots noted on the way


class Pattern:
    """A pattern, read and made a machine.

    Raises:
        ValueError: it is wrong, or beyond what is supported; the message completes a sentence about it.
    """

    def __init__(self, source: str) -> None:
        tree = _read(source)
        groups = tree.state.groupdict
        self.names: tuple[str, ...] = tuple(groups)
        self._slots = {group: 2 * at for at, group in enumerate(groups.values())}
        self._nodes = [_Node(())]
        self._work = 0
        self._begin = self._sequence(tree, END)
        self.none = (-1,) * (2 * len(groups))
        self.asks = any(node.place is not None for node in self._nodes)
        self.example = _example(tree)
        self._closures: dict[tuple[int, frozenset[TextPlace]], _Closure] = {}
        if any(node == END for node, _ in self.closure(self._begin, frozenset())):
            raise ValueError("matches the empty string everywhere")
        self.first = self._first()

    @classmethod
    def of(cls, texts: Sequence[str]) -> Pattern:
        """Returns the pattern that matches any of some literal texts, the longest one that fits."""
        longest = sorted(dict.fromkeys(texts), key=len, reverse=True)
        return cls("|".join(map(re.escape, longest)))

    def groups(self, match: Match, text: Callable[[int, int], str]) -> dict[str, str]:
        """Returns the text of each named group that is part of a match, by its name; `text` returns the characters
        between two positions.
        """
        pairs = zip(self.names, match.places[::2], match.places[1::2], strict=True)
        return {name: text(start, end) for name, start, end in pairs if min(start, end) >= 0}

    # --- the machine, built from its end ------------------------------------------------------

    def _node(self, node: _Node) -> int:
        self._nodes.append(node)
        self._spend()
        return len(self._nodes) - 1

    def _spend(self) -> None:
        self._work += 1
        if self._work > NODES:
            raise ValueError(f"has more than {NODES} parts, counting what it repeats")

    def _sequence(self, parts: Any, then: int) -> int:
        for op, value in reversed(list(parts)):
            then = self._part(op, value, then)
        return then

    def _part(self, op: Any, value: Any, then: int) -> int:
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            least, most, inner = value
            return self._repeat((least, most), inner, then, lazy=op is _constants.MIN_REPEAT)
        if op is _constants.BRANCH:
            return self._node(_Node(tuple(self._sequence(way, then) for way in value[1])))
        if op is _constants.SUBPATTERN:
            group, more, less, inner = value
            if less or more & ~re.DOTALL:
                raise ValueError("has flags, which are not supported")
            return self._group(group, inner, then)
        if op is _constants.AT and value in _PLACES:
            return self._node(_Node((then,), place=_PLACES[value]))
        letters = _letters(op, value)
        return self._node(_Node((then,), takes=letters))

    def _group(self, group: int | None, parts: Any, then: int) -> int:
        slot = self._slots.get(group or 0)
        if slot is None:
            return self._sequence(parts, then)
        inner = self._sequence(parts, self._node(_Node((then,), slot=slot + 1)))
        return self._node(_Node((inner,), slot=slot))

    def _repeat(self, times: tuple[int, Any], parts: Any, then: int, *, lazy: bool) -> int:
        least, most = times

        def ways(more: int) -> tuple[int, ...]:
            return (then, more) if lazy else (more, then)

        tail = then
        if most is _constants.MAXREPEAT:
            tail = self._node(_Node(()))
            self._nodes[tail] = _Node(ways(self._sequence(parts, tail)))
        else:
            for _ in range(int(most) - least):
                tail = self._node(_Node(ways(self._sequence(parts, tail))))
        for _ in range(least):
            self._spend()
            tail = self._sequence(parts, tail)
        return tail

    # --- what a thread at a node may do next --------------------------------------------------

    def closure(self, node: int, places: frozenset[TextPlace]) -> _Closure:
        """Returns, the preferred first, (node, slots) for each node of the automaton that takes a letter or ends the
        match and is reached from `node` without a letter; `slots` numbers the group boundaries passed on the way.

        Args:
            places: the anchors that hold at this position of the text.
        """
        known = self._closures.get((node, places))
        if known is None:
            found: dict[int, tuple[int, ...]] = {}
            seen: set[int] = set()
            stack: list[tuple[int, tuple[int, ...]]] = [(node, ())]
            while stack:
                at, slots = stack.pop()
                if at in seen:
                    continue
                seen.add(at)
                here = self._nodes[at]
                if at == END or here.takes is not None:
                    found[at] = slots
                elif here.place is None or here.place in places:
                    noted = slots if here.slot < 0 else (*slots, here.slot)
                    stack += [(way, noted) for way in reversed(here.ways)]
            known = self._closures[node, places] = tuple(found.items())
        return known

    @property
    def begin(self) -> int:
        """The number of the automaton's node where a match begins."""
        return self._begin

    def takes(self, node: int, letter: str) -> int:
        """Returns the number of the automaton's node to which a letter leads from `node`; -1 if it does not take it."""
        here = self._nodes[node]
        return here.ways[0] if here.takes is not None and here.takes[letter] else -1

    def _first(self) -> re.Pattern[str] | None:
        """Finds the next letter with which a match may begin; None: every letter may be one."""
        reached = [node for node, _ in self.closure(self._begin, frozenset(TextPlace))]
        edges = {node.place for node in self._nodes} & {TextPlace.EDGE, TextPlace.NO_EDGE}
        if edges or not all(node == END or self._listed(node) for node in reached):
            return None
        listed = "".join(self._listed(node) for node in reached)
        return re.compile(f"[{listed}]") if listed else None

    def _listed(self, node: int) -> str:
        letters = self._nodes[node].takes
        return "" if letters is None else letters.listed


# --- reading ----------------------------------------------------------------------------------------


def _read(source: str) -> Any:
    if len(source) > PATTERN_CHARS:
        raise ValueError(f"has more than {PATTERN_CHARS:,} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tree = _parser.parse(source, re.DOTALL)
    except (re.error, OverflowError, Warning) as error:
        raise ValueError(f"is not a valid pattern: {str(error)[:100]}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if tree.state.flags & ~(re.DOTALL | re.UNICODE):
        raise ValueError("has flags, which are not supported")
    return tree


class _Letters(dict[str, bool]):
    """Tells whether a letter is one of a set, and remembers it for the usual ones.

    Attributes:
        listed: the set as a regular expression has it between brackets; empty: it is a large one.
    """

    def __init__(self, holds: Callable[[str], bool], listed: str = "") -> None:
        super().__init__()
        self._holds, self.listed = holds, listed

    def __missing__(self, letter: str) -> bool:
        held = self._holds(letter)
        if letter < "\u3000":
            self[letter] = held
        return held


def _letters(op: Any, value: Any) -> _Letters:
    """Returns the letters that a part of a pattern takes.

    Raises:
        ValueError: it is no such part.
    """
    if op is _constants.LITERAL:
        return _Letters(lambda letter: ord(letter) == value, re.escape(chr(value)))
    if op is _constants.NOT_LITERAL:
        return _Letters(lambda letter: ord(letter) != value)
    if op is _constants.ANY:
        return _Letters(lambda letter: True)
    if op is not _constants.IN:
        raise ValueError(f"has a part that is not supported: {str(op).lower().replace('_', ' ')}")
    negated = value[0][0] is _constants.NEGATE
    tests = [_member(*each) for each in value[negated:]]
    blank = [(_constants.CATEGORY, _constants.CATEGORY_SPACE)]
    listed = r"\s" if not negated and value == blank else ""
    return _Letters(lambda letter: any(test(letter) for test in tests) != negated, listed)


def _member(op: Any, value: Any) -> Callable[[str], bool]:
    if op is _constants.LITERAL:
        return lambda letter: ord(letter) == value
    if op is _constants.RANGE:
        return lambda letter: bool(value[0] <= ord(letter) <= value[1])
    name = str(value).removeprefix("CATEGORY_")
    test = _CATEGORIES.get(name.removeprefix("NOT_"))
    if test is None:
        raise ValueError(f"has a set that is not supported: {name.lower()}")
    return (lambda letter: not test(letter)) if name.startswith("NOT_") else test


def _is_blank(letter: str) -> bool:
    return letter.isspace() and letter not in _UNLIKE_PYTHON


def is_word(letter: str) -> bool:
    """Returns whether a character belongs to words: a letter, mark, digit or connector."""
    category = unicodedata.category(letter)
    return category[0] in "LM" or category in _OF_WORDS


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "SPACE": _is_blank,
    "DIGIT": str.isdecimal,
    "WORD": is_word,
}


def _example(parts: Any) -> str | None:
    """Returns the shortest text that a pattern of letters takes; None: it has a part of which no example is simple."""
    found = []
    for op, value in parts:
        if op is _constants.LITERAL:
            piece: str | None = chr(value)
        elif op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            inner = _example(value[2]) if value[0] else ""
            piece = None if inner is None or value[0] > NODES else inner * value[0]
        elif op is _constants.SUBPATTERN:
            piece = _example(value[3])
        else:
            piece = _example(value[1][0]) if op is _constants.BRANCH else None
        if piece is None:
            return None
        found.append(piece)
    return "".join(found)
