"""Searches for patterns in texts that arrive in pieces, in time linear in the text for any pattern.

A list of threads, in the order of their preference, follows a text through a pattern (Pike's machine): the match is
the one that backtracking would find in the whole text, and it counts once no further text can change it.
"""

from __future__ import annotations

from typing import NamedTuple

from ktcli.answers.templates.patterns import END, Match, Pattern, TextPlace, is_word

_AGAIN = 1 << 18  # characters that a finder may read again, a second's work


class FoundMatch(NamedTuple):
    """A match in a whole text: its end, and its named groups."""

    end: int
    groups: dict[str, str]


class _Thread(NamedTuple):
    """A way through the machine that has come as far as `node`."""

    node: int
    start: int
    places: tuple[int, ...]


class Search:
    """An incremental search for the first match of a pattern, in a text that comes in pieces.

    Args:
        at: the place in the whole text where it begins.
        before: the letter before that place; empty: there is none.
    Attributes:
        at: the place up to which it has read.
        match: the best match so far.
        done: whether no further text changes it.
    """

    def __init__(self, pattern: Pattern, at: int, before: str) -> None:
        self._pattern, self.at, self._before = pattern, at, before
        self.match: Match | None = None
        self.done = False
        self._threads: list[_Thread] = []
        if not pattern.asks:
            self._expand(frozenset())

    @property
    def hold(self) -> int:
        """The position, in the whole text, of the first character that can still become part of a match."""
        begun = self._threads[0].start if self._threads else self.at
        return begun if self.match is None else min(begun, self.match.start)

    def take(self, text: str, index: int) -> None:
        """Searches the next piece, `text` from `index` on, until the first match is certain or the piece ends; updates
        `match`, `done` and `at`.
        """
        asks = self._pattern.asks
        while index < len(text) and not self.done:
            if (fresh := self._skipped(text, index)) > index:
                self.at, self._before = self.at + fresh - index, text[fresh - 1]
                index, self._threads = fresh, []
                if not asks:
                    self._expand(frozenset())
                continue
            letter = text[index]
            if asks:
                self._expand(_places(self._before, letter))
                if self.done:
                    return
            self._consume(letter)
            self.at, self._before, index = self.at + 1, letter, index + 1
            if not asks:
                self._expand(frozenset())
            elif self.match is not None and not self._threads:
                self.done = True

    def finish(self) -> None:
        """Ends the text: `match` is then certain (None: there is none), and `done` is set."""
        if self._pattern.asks and not self.done:
            self._expand(_places(self._before, ""))
        self._threads, self.done = [], True

    def _skipped(self, text: str, index: int) -> int:
        """Returns the next place in a text where something can begin, if nothing has."""
        first = self._pattern.first
        idle = self.match is None and (not self._threads or self._threads[0].start == self.at)
        if first is None or not idle or (self._pattern.asks and not self._before):
            return index
        found = first.search(text, index)
        return len(text) if found is None else found.start()

    def _expand(self, places: frozenset[TextPlace]) -> None:
        """Follows all threads up to where they take a letter; those behind one that ends are not preferred to it."""
        pattern, waiting = self._pattern, self._threads
        if self.match is None:
            waiting = [*waiting, _Thread(pattern.begin, self.at, pattern.none)]
        found: list[_Thread] = []
        seen: set[int] = set()
        for thread in waiting:
            for node, slots in pattern.closure(thread.node, places):
                if node in seen:
                    continue
                seen.add(node)
                noted = _noted(thread.places, slots, self.at)
                if node == END:
                    self.match = Match(thread.start, self.at, noted)
                    break
                found.append(_Thread(node, thread.start, noted))
            if END in seen:
                break
        self._threads = found
        self.done = self.match is not None and not found

    def _consume(self, letter: str) -> None:
        takes = self._pattern.takes
        moved = [(takes(thread.node, letter), thread) for thread in self._threads]
        self._threads = [
            _Thread(node, thread.start, thread.places) for node, thread in moved if node >= 0
        ]


class Finder:
    """An incremental search for all matches in a text that comes in pieces.

    Raises:
        ValueError: too much of the text has to be read again; from every call.
    """

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self._text, self._at = "", 0  # what may be part of a match, and its place
        self._search = Search(pattern, 0, "")
        self._again = 0

    def feed(self, text: str) -> list[FoundMatch]:
        """Adds a piece of text; returns the matches that no further text can change any more."""
        self._text += text
        return self._found(ended=False)

    def finish(self) -> list[FoundMatch]:
        """Ends the text; returns the remaining matches."""
        return self._found(ended=True)

    def _found(self, *, ended: bool) -> list[FoundMatch]:
        found: list[FoundMatch] = []
        while True:
            self._search.take(self._text, self._search.at - self._at)
            if ended:
                self._search.finish()
            match = self._search.match
            if match is None or not self._search.done:
                return found
            found.append(FoundMatch(match.end, self._pattern.groups(match, self._between)))
            self._again += self._search.at - match.end
            if self._again > _AGAIN:
                raise ValueError("takes too long to find")
            if not self._go_on(match.end + (match.end == match.start)):
                return found

    def _between(self, start: int, end: int) -> str:
        return self._text[start - self._at : end - self._at]

    def _go_on(self, at: int) -> bool:
        """Looks for the next match from a place on; returns whether the text goes as far."""
        if at > self._at + len(self._text):
            return False
        before = self._text[at - self._at - 1 : at - self._at] if at > self._at else ""
        self._text, self._at = self._text[at - self._at :], at
        self._search = Search(self._pattern, at, before)
        return True


def _places(before: str, behind: str) -> frozenset[TextPlace]:
    """Returns what holds between two letters, of which one may be missing."""
    edge = (bool(before) and is_word(before)) != (bool(behind) and is_word(behind))
    found = [TextPlace.EDGE if edge else TextPlace.NO_EDGE]
    found += [] if before else [TextPlace.BEGIN]
    found += [] if behind else [TextPlace.END]
    return frozenset(found)


def _noted(places: tuple[int, ...], slots: tuple[int, ...], at: int) -> tuple[int, ...]:
    if not slots:
        return places
    noted = list(places)
    for slot in slots:
        noted[slot] = at
    return tuple(noted)
