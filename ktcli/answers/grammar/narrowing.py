"""Narrows patterns to expressions that are compiled: without lookarounds, word boundaries and anchors inside.

Every text of the pattern that is made is one of the original one, which may have more. What must follow or must not is
taken out of what follows, letter by letter: each expression is the choice of its first letters, each with the
expression of what is behind it (Antimirov's partial derivatives). Where that has no end, the rest is left out.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ktcli.answers.grammar.expression import (
    ALL,
    BEGIN,
    END,
    INFINITE,
    MOST_BRANCHES,
    WORD,
    Assertion,
    Items,
    Ranges,
    Repeat,
    Unknown,
    common,
    complement,
    has_places,
    text_of,
    union,
    ways_of,
)

_MOST_CHARS = 4000  # of a pattern
_MOST_WAYS = 16  # of one place that are looked at one by one
_MOST_STEPS = 600  # states of readers, for one pattern
_MOST_TEXT = 12_000  # letters of what is made
_MOST_LOOKS = 300  # patterns of a schema that are compiled to see whether they are
_MOST_TRIES = 40  # that are narrowed
# What is not compiled in all places; with lengths, nothing surely is.
_DOUBTFUL = re.compile(r"\(\?|\\\\[bBAZzpPk]|\\\\u[dD]|.\^|\$.|\{\D|\[[^\]]*\[|Length")


class Narrowing:
    """Narrows the patterns of one document that are not compiled as they are, as long as that is not too much work."""

    def __init__(self) -> None:
        self._looks, self._tries = _MOST_LOOKS, _MOST_TRIES

    def is_compiled(self, schema: Mapping[str, Any]) -> bool:
        """Returns whether the grammar compiler takes the patterns and lengths of a string's schema as they are; always
        True once 300 doubtful schemas were tried.
        """
        text = json.dumps(schema)
        if not _DOUBTFUL.search(text):
            return True
        self._looks -= 1
        return self._looks < 0 or _is_compiled(text)

    def narrowed(self, pattern: str, least: int = 0, most: int | None = None) -> str:
        """Returns a regular expression that the grammar compiler takes and that matches only texts of `pattern` of
        `least` to `most` letters; empty if none is known, or after 40 calls.
        """
        self._tries -= 1
        return narrowed(pattern, least, most) if self._tries >= 0 else ""


@lru_cache(4096)
def _is_compiled(schema: str) -> bool:
    import llguidance

    grammar = f'{{"grammars": [{{"json_schema": {schema}}}]}}'
    why = llguidance.LLMatcher.validate_grammar(grammar, None)
    return not why or "Unsatisfiable" in why


@lru_cache(1024)
def narrowed(pattern: str, least: int = 0, most: int | None = None) -> str:
    """Returns a regular expression that the grammar compiler takes and that matches only texts of `pattern`, not
    necessarily all, of `least` to `most` letters (None: any number); empty if none is known.
    """
    if len(pattern) > _MOST_CHARS:
        return ""
    try:
        ways = [each for way in ways_of(pattern) for each in _Sequence(way).plain()]
        ways = [fit for way in ways if (fit := _fitted(way, least, most)) is not None]
        text = "|".join(map(text_of, ways))
    except (Unknown, re.error, RecursionError, OverflowError):
        return ""
    return f"^(?:{text})$" if ways and len(text) <= _MOST_TEXT else ""


_ANYTHING = Repeat(((ALL,),), 0, INFINITE)


class _Sequence:
    """One sequence of a pattern, without what it says about places.

    Args:
        inner: whether something may be before and behind it.
    """

    def __init__(self, items: Items, *, inner: bool = False) -> None:
        self._items, self._inner, self._steps = items, inner, _MOST_STEPS

    def plain(self) -> list[Items]:
        """Returns sequences of some of its texts."""
        items = list[Any]()
        for item in self._items:
            at_first = all(each == BEGIN or isinstance(each, Assertion) for each in items)
            if item != BEGIN or not items or not at_first:  # a second `^` says nothing more
                items.append(self._plain_item(item))
        if not self._inner:
            items = [*([] if BEGIN in items else [_ANYTHING]), *items]
            items += [] if END in items else [_ANYTHING]
        found = self._resolved(tuple(items), ahead=True)
        return [way for each in found for way in self._resolved(each, ahead=False)]

    def _resolved(self, items: Items, *, ahead: bool) -> list[Items]:
        """Returns sequences without what one says of places, as far as it looks in one direction: from the end on, so
        that there is none behind a place, or from the beginning."""
        places = range(len(items) - 1, -1, -1) if ahead else range(len(items))
        at = next((at for at in places if _asserts(items[at], ahead=ahead)), None)
        if at is None:
            return [items]
        ways = [*self._without(items, at, ahead=ahead)]
        if self._steps < 0 or len(ways) > MOST_BRANCHES:
            raise Unknown
        self._steps -= len(ways)
        return [each for way in ways for each in self._resolved(way, ahead=ahead)]

    def _plain_item(self, item: Any) -> Any:
        if isinstance(item, Repeat) and any(map(has_places, item.ways)):
            ways = [each for way in item.ways for each in _Sequence(way, inner=True).plain()]
            return Repeat(tuple(ways), item.least, item.most)
        return item

    def _without(self, items: Items, at: int, *, ahead: bool) -> Iterator[Items]:
        """Yields sequences that together are one without what it says at a place."""
        item, before, behind = items[at], items[:at], items[at + 1 :]
        if item in (BEGIN, END):
            if all(map(_may_be_empty, behind if ahead else before)) and not self._inner:
                yield before if ahead else behind
        elif item.ways is None:
            word, other = ((WORD,),), ((complement(WORD),),)
            for left, right in ((word, other), (other, word)):
                for rest in self._meeting(behind, right, holds=True, ends=right is other):
                    for first in self._meeting(
                        _reversed(before), left, holds=True, ends=left is other
                    ):
                        yield (*_reversed(first), *rest)
        elif ahead:
            if any(BEGIN in way for way in item.ways):
                if any(BEGIN in way[1:] for way in item.ways):
                    raise Unknown
                ways = tuple(way[1:] if way[:1] == (BEGIN,) else way for way in item.ways)
                if not item.holds:  # nor elsewhere
                    yield from self._without(
                        (*before, Assertion(ways, True, False), *behind), at, ahead=True
                    )
                elif len(ways) == 1 and all(map(_may_be_empty, before)) and not self._inner:
                    yield from self._without(
                        (BEGIN, Assertion(ways, True, True), *behind), 1, ahead=True
                    )
                return
            for rest in self._meeting(behind, item.ways, holds=item.holds, ends=not item.holds):
                yield (*before, *rest)
        else:
            ways = tuple(map(_reversed, item.ways))
            for first in self._meeting(
                _reversed(before), ways, holds=item.holds, ends=not item.holds
            ):
                yield (*_reversed(first), *behind)

    def _meeting(
        self, items: Items, ways: tuple[Items, ...], *, holds: bool, ends: bool
    ) -> Iterator[Items]:
        """Yields sequences of the texts of one that begin as one of some ways, or do not.

        Args:
            ends: whether the end of all is right, too.
        """
        found = self._met(items, ways, holds, ends and not self._inner)
        yield from found if len(found) <= _MOST_WAYS else [(Repeat(tuple(found), 1, 1),)]

    def _met(self, items: Items, ways: tuple[Items, ...], holds: bool, ends: bool) -> list[Items]:
        """Returns what `_meeting` yields, by the states in which a reader of both may be."""
        states: dict[tuple[Items, frozenset[Items]], int] = {(items, frozenset(ways)): 0}
        steps: list[dict[int, Ranges]] = []
        done: list[list[Items]] = []
        for rest, wanted in (order := list(states)):
            after, last = dict[int, Ranges](), list[Items]()
            steps.append(after)
            done.append(last)
            if any(self._is_met(way, holds) for way in wanted):
                last += [rest] if holds else []
                continue
            if all(map(_may_be_empty, rest)) and not self._inner:
                met = any(all(map(_may_be_empty, way)) for way in wanted)
                last += [()] if ((met or ends) if holds else (ends and not met)) else []
            firsts = [first for way in wanted for first in _firsts(way)]
            for letters, behind in _firsts(rest):
                left = letters
                for some, then in _partition(letters, firsts):
                    left = common(left, complement(some))
                    if (key := (behind, frozenset(then))) not in states:
                        self._steps -= 1
                        if self._steps < 0:
                            continue
                        states[key] = len(order)
                        order.append(key)
                    after[states[key]] = union([*after.get(states[key], ()), *some])
                if left and not holds:
                    last.append((left, *behind))
        return _solved(steps, done)

    def _is_met(self, way: Items, holds: bool) -> bool:
        """Returns whether nothing more is wanted; where the end is not known, what must not be may end there."""
        return all(map(_may_be_empty, way)) and (END not in way or (self._inner and not holds))


def _solved(steps: list[dict[int, Ranges]], done: list[list[Items]]) -> list[Items]:
    """Returns the sequences of all ways from the first state to an end (Arden's rule, from the last state on)."""
    ways: list[dict[int, list[Items]]] = [
        {to: [(letters,)] for to, letters in each.items()} for each in steps
    ]
    before = [set[int]() for _ in steps]
    for at, each in enumerate(steps):
        for to in each:
            before[to].add(at)
    room = _MOST_STEPS
    for at in range(len(steps) - 1, -1, -1):
        loop = ways[at].pop(at, [])
        again = (Repeat(tuple(loop), 0, INFINITE),) if loop else ()
        if again:
            done[at] = [(*again, *each) for each in done[at]]
            ways[at] = {to: [(*again, *each) for each in some] for to, some in ways[at].items()}
        if not at:
            break
        for place in before[at] - {at}:
            first = ways[place].pop(at, None)
            if first is None:
                continue
            lead = first[0] if len(first) == 1 else (Repeat(tuple(first), 1, 1),)
            room -= 1 + len(done[at]) + len(ways[at])
            if room < 0:
                continue
            if done[at]:
                last = done[at] if len(done[at]) < 3 else [(Repeat(tuple(done[at]), 1, 1),)]
                done[place] += [(*lead, *each) for each in last]
            for to, some in ways[at].items():
                ways[place].setdefault(to, []).extend((*lead, *each) for each in some)
                before[to].add(place)
    return done[0]


def _asserts(item: Any, *, ahead: bool) -> bool:
    """Returns whether an item says something of a place, and of what is behind or before it."""
    if isinstance(item, Assertion):
        return item.ahead is ahead if item.ways is not None else ahead
    return bool(item == (END if ahead else BEGIN))


def _partition(
    letters: Ranges, firsts: Sequence[tuple[Ranges, Items]]
) -> Iterator[tuple[Ranges, tuple[Items, ...]]]:
    """Yields parts of some letters, each with all that may follow such a letter."""
    parts: list[tuple[Ranges, tuple[Items, ...]]] = [(letters, ())]
    for some, rest in firsts:
        split = list[tuple[Ranges, tuple[Items, ...]]]()
        for part, behind in parts:
            if inside := common(part, some):
                split.append((inside, behind if rest in behind else (*behind, rest)))
            if outside := common(part, complement(some)):
                split.append((outside, behind))
        parts = split
    yield from (part for part in parts if part[1])


def _firsts(items: Items) -> Iterator[tuple[Ranges, Items]]:
    """Yields the letters with which a sequence may begin, and what is behind them then."""
    for at, item in enumerate(items):
        rest = items[at + 1 :]
        if isinstance(item, Repeat):
            more = Repeat(item.ways, max(item.least - 1, 0), item.most - (item.most < INFINITE))
            again = (more,) if more.most else ()
            for way in item.ways if item.most else ():
                for letters, behind in _firsts(way):
                    yield letters, (*behind, *again, *rest)
        elif isinstance(item, tuple):
            yield item, rest
        else:
            return
        if not _may_be_empty(item):
            return


def _may_be_empty(item: Any) -> bool:
    if isinstance(item, Repeat):
        return item.least == 0 or any(all(map(_may_be_empty, way)) for way in item.ways)
    return item in (BEGIN, END)


def _reversed(items: Items) -> Items:
    return tuple(
        Repeat(tuple(map(_reversed, item.ways)), item.least, item.most)
        if isinstance(item, Repeat)
        else item
        for item in reversed(items)
    )


# --- lengths ---------------------------------------------------------------------------------


def _fitted(items: Items, least: int, most: int | None) -> Items | None:
    """Returns a sequence with no other texts than those of so many letters; None: none is found."""
    if any(isinstance(item, Repeat) and item.least and not item.ways for item in items):
        return None
    short = least - _width(items, -1)
    for at, item in enumerate(items):
        if short <= 0:
            break
        if not isinstance(item, Repeat) or item.most != INFINITE:
            continue
        sizes = {_width(way, -1) for way in item.ways}
        if len(sizes) == 1 and (size := sizes.pop()):
            more = Repeat(item.ways, item.least - (-short // size), item.most)
            items, short = (*items[:at], more, *items[at + 1 :]), 0
    if short <= 0 and most is None:
        return items
    if short <= 0 and most is not None and _width(items, 0) <= most:
        if _width(items, INFINITE) <= most:
            return items
        cap = bisect_right(range(most + 1), most, key=lambda cap: _width(items, cap)) - 1
        return _capped(items, cap)
    for at, item in enumerate(items):  # each of some choices for itself
        if isinstance(item, Repeat) and len(item.ways) > 1 and (item.least, item.most) == (1, 1):
            some = [
                _fitted((*items[:at], *way, *items[at + 1 :]), least, most) for way in item.ways
            ]
            found = tuple(each for each in some if each is not None)
            return (Repeat(found, 1, 1),) if found else None
    return None


def _width(items: Items, cap: int) -> int:
    """Returns the letters of a sequence's longest texts, if endless repetitions end after so many; -1: of its shortest
    ones."""
    total = 0
    for item in items:
        if isinstance(item, Repeat):
            sizes = [_width(way, cap) for way in item.ways] or [0]
            if cap < 0:
                total += min(sizes) * item.least
            else:
                times = max(item.least, cap) if item.most == INFINITE else item.most
                total += max(sizes) * times
        else:
            total += 1
    return total


def _capped(items: Items, cap: int) -> Items:
    return tuple(
        Repeat(
            tuple(_capped(way, cap) for way in item.ways),
            item.least,
            item.most if item.most < INFINITE or cap == INFINITE else max(item.least, cap),
        )
        if isinstance(item, Repeat)
        else item
        for item in items
    )
