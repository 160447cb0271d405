"""Finds the texts of control tokens in other texts, and marks the places where they could form.

Some tokenizers have thousands of such words and some texts have millions of letters, so a text is searched for the
first letters of words, and what follows is looked up in a sorted list.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

MAX_HEADS = 64  # beginnings of words that are looked for at once
MAX_HEAD_CHARS = 6


class ControlWords:
    """Finds the texts of some added tokens, each of two characters or more."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._all = sorted(set(texts))
        self._backwards = sorted(word[::-1] for word in self._all)
        # Where a word begins with another, that one is found; so none of these begins with another.
        self._shortest: list[str] = []
        for word in self._all:
            if not self._shortest or not word.startswith(self._shortest[-1]):
                self._shortest.append(word)
        self._longest = max(map(len, self._all), default=0)
        self._joined = "\0".join(self._all)
        self._heads = _heads(self._shortest)
        self._ascii_heads = _heads([word for word in self._shortest if word.isascii()])
        self._last = frozenset(word[-1] for word in self._all)
        self._first = frozenset(word[0] for word in self._all if not word[0].isspace())

    def places(self, text: str) -> Iterator[int]:
        """Yields the positions, in characters, where one of the control tokens' texts begins in `text`; these may
        overlap.
        """
        heads = self._ascii_heads if text.isascii() else self._heads
        for head in heads.finditer(text):
            at = head.start()
            below = bisect_right(self._shortest, text[at : at + self._longest])
            if below and text.startswith(self._shortest[below - 1], at):
                yield at

    def found(self, text: str) -> list[str]:
        """Returns the control tokens' texts that occur in `text`, in order; of those that begin at the same place the
        shortest.
        """
        places = self.places(text)
        ends = ((at, bisect_right(self._shortest, text[at : at + self._longest])) for at in places)
        return [self._shortest[below - 1] for _, below in ends]

    def marked(self, text: str, mark: str) -> str:
        """Returns the text with a mark behind the first character of each control token's text in it."""
        return inserted(text, mark, [at + 1 for at in self.places(text)])

    def guarded(self, text: str, mark: str, kept: Sequence[int] = ()) -> str:
        """Returns the text with a mark wherever a control token's text could begin or go on in it, whatever texts stand
        before and behind: after each character with which one begins, and at the beginning, spaces aside, if the text
        could go on with one.

        Args:
            kept: positions of characters that get no mark; control tokens may begin there.
        """
        inside = len(text) - len(text.lstrip())
        joins = self._could_go_on(text[inside : inside + self._longest].rstrip())
        if kept:
            whole = frozenset(kept)
            letters = (
                letter + mark if letter in self._first and at not in whole else letter
                for at, letter in enumerate(text)
            )
            made = "".join(letters)
        else:
            made = text
            for letter in self._first:
                made = made.replace(letter, letter + mark)
        return made[:inside] + mark + made[inside:] if joins else made

    def _could_go_on(self, beginning: str) -> bool:
        """Returns whether a text with this beginning could be the middle of a word, or begins with the end of one."""
        if not beginning:
            return False
        if len(beginning) < self._longest and beginning in self._joined:
            return True
        return any(
            self._ends_a_word(beginning[: at + 1])
            for at, letter in enumerate(beginning)
            if letter in self._last
        )

    def _ends_a_word(self, text: str) -> bool:
        backwards = text[::-1]
        at = bisect_left(self._backwards, backwards)
        return at < len(self._backwards) and self._backwards[at].startswith(backwards)


def inserted(text: str, mark: str, places: Sequence[int]) -> str:
    """Returns the text with a mark inserted at each of some positions, in characters, ascending."""
    pieces = zip([0, *places], [*places, len(text)], strict=True)
    return mark.join(text[first:last] for first, last in pieces)


def _heads(words: Sequence[str]) -> re.Pattern[str]:
    """Returns a quick expression that finds at least the places where a word begins."""
    heads: set[str] = set()
    for size in range(MAX_HEAD_CHARS, 0, -1):
        heads = {word[:size] for word in words}
        if len(heads) <= MAX_HEADS:
            break
    ways = [
        re.escape(first) + (f"(?={_any_of(rests)})" if "" not in rests else "")
        for first, rests in _by_first(heads)
    ]
    return re.compile("|".join(ways) if ways else "(?!)")


def _any_of(texts: set[str]) -> str:
    """Returns an expression for any of some texts that looks at each letter once."""
    ways = [
        re.escape(first) + (_any_of(rests) if "" not in rests else "")
        for first, rests in _by_first(texts)
    ]
    return f"(?:{'|'.join(ways)})"


def _by_first(texts: set[str]) -> list[tuple[str, set[str]]]:
    """First letters, each with what follows it."""
    rests: dict[str, set[str]] = {}
    for text in sorted(texts):
        rests.setdefault(text[0], set()).add(text[1:])
    return list(rests.items())
