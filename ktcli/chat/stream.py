"""Turns ids as they come into text that can be shown: whole characters, and nothing past a stop string.

What a `Detokenizer` hands out is, in the end, what the tokenizer makes of all the ids at once, whatever they are.
`StopStrings` holds back what could become a stop string. `Thinking` tells the model's thoughts from its answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ktcli.chat.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
THINK, ANSWER = "<think>", "</think>"


class _Decoding(Protocol):
    """Turns ids into text, piece by piece."""

    def feed(self, id: int) -> str:
        """The text that `id` completes."""

    def finish(self) -> str:
        """The text that was held back and is whole."""


class Detokenizer:
    """Turns ids into whole characters.

    The pieces, with what `finish` gives, are `Tokenizer.decode` of all the ids, without a character at the end
    of which bytes are missing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        kind = _Bytes if tokenizer.byte_level else _Windows
        self._decoding: _Decoding = kind(tokenizer)

    def feed(self, id: int) -> str:
        """The text that `id` completes; empty while a character is unfinished."""
        return self._decoding.feed(id)

    def finish(self) -> str:
        """The text that was held back and is whole; the next id begins a new text."""
        return self._decoding.finish()


class _Bytes:
    """Decodes a vocabulary whose tokens are bytes: UTF-8, decoded as it comes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        return self._utf8.decode(self._tokenizer.bytes_of(id))

    def finish(self) -> str:
        self._utf8.reset()  # what it still holds is no whole character
        return ""


class _Windows:
    """Decodes any other vocabulary in windows, since some drop a space of whatever comes first.

    A window ends where the text before it is settled. Tokens for single bytes (<0xE4>) are settled by the first
    token that is none: if the run of them is not UTF-8 from end to end, no byte of it becomes a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those of the window: what is out already, then what is not
        self._shown = 0  # how many are out
        self._run: list[int] = []  # places of the single bytes at the end

    def feed(self, id: int) -> str:
        self._ids.append(id)
        if self._tokenizer.is_byte(id):
            self._run.append(len(self._ids) - 1)
        elif self._tokenizer.is_text(id):
            self._run = []
        text = "" if self._run else self._fresh()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text

    def finish(self) -> str:
        run = b"".join(self._tokenizer.bytes_of(self._ids[place]) for place in self._run)
        missing = len(_unfinished(run))
        for place in reversed(self._run[len(run) - missing :]):
            del self._ids[place]
        text = self._fresh()
        self._ids, self._shown, self._run = [], 0, []
        return text

    def _fresh(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._shown])
        return self._tokenizer.decode(self._ids)[len(before) :]


def _unfinished(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character and lack the rest of it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return bytes(decoder.getstate()[0])


class StopStrings:
    """Passes text on until a stop string appears, wherever tokens are cut.

    The first to be complete ends the text, even inside a longer one that began before it; of several that are
    complete with the same character the longest is cut off.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = ""  # the stop string that has appeared

    @property
    def stopped(self) -> bool:
        """Tells whether a stop string has appeared."""
        return bool(self.found)

    def feed(self, text: str) -> str:
        """The text that is certainly no part of a stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        places = [(self._held.find(stop), stop) for stop in self._stops]
        found = [(at + len(stop), at, stop) for at, stop in places if at >= 0]
        if found:
            _, start, self.found = min(found)
            passed, self._held = self._held[:start], ""
            return passed
        keep = max(overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def finish(self) -> str:
        """The text that was held back in vain."""
        rest, self._held = self._held, ""
        return rest


def overlap(text: str, stop: str) -> int:
    """The longest end of `text` with which `stop` begins."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0


@dataclass(slots=True)
class Thinking:
    """Splits text into pairs (is it a thought, piece); the tags themselves go with the thought.

    Attributes:
        inside: whether the next character is part of a thought.
        once: whether nothing is a thought any more behind the first one, or the first letter outside.
    """

    inside: bool = False
    once: bool = False
    _held: str = field(default="", repr=False)
    _over: bool = field(default=False, repr=False)

    def feed(self, text: str) -> Iterator[tuple[bool, str]]:
        """Yields the pieces of `text` in order; an end that may be half a tag waits."""
        rest = self._held + text
        if self.once and not self.inside and not THINK.startswith(rest[: len(THINK)]):
            self._over = True
        while not self._over:
            tag = ANSWER if self.inside else THINK
            at = rest.find(tag)
            if at < 0:
                break
            cut = at + len(tag) if self.inside else at
            if cut:
                yield self.inside, rest[:cut]
            rest = rest[cut:]
            if not self.inside:
                yield True, THINK
                rest = rest[len(THINK) :]
            self._over = self.once and self.inside
            self.inside = not self.inside
        keep = 0 if self._over else overlap(rest, tag)
        if len(rest) > keep:
            yield self.inside, rest[: len(rest) - keep]
        self._held = rest[len(rest) - keep :]

    def leave(self) -> Iterator[tuple[bool, str]]:
        """Ends a thought that was not closed; yields the text that was held back."""
        yield from self.finish()
        self._over, self.inside = self._over or self.once, False

    def finish(self) -> Iterator[tuple[bool, str]]:
        """Yields the text that was held back."""
        if self._held:
            yield self.inside, self._held
        self._held = ""
