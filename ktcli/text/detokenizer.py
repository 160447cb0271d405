"""Turns ids into text as they arrive: only whole characters.

What a `Detokenizer` hands out is, in the end, what the tokenizer makes of all the ids at once, whatever they are.
"""

from __future__ import annotations

import codecs

from ktcli.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns ids into text, in whole characters.

    The pieces, with what `finish` gives, are `Tokenizer.decode` of all the ids, without a character at the end
    of which bytes are missing.

    Attributes:
        feed: returns the text that an id completes; empty while a character is unfinished.
        finish: returns the remaining complete characters; the next id begins a new text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        inner = _Bytes(tokenizer) if tokenizer.byte_level else _Windows(tokenizer)
        self.feed, self.finish = inner.feed, inner.finish


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
    """Returns the bytes at the end of `data` that begin a character and lack the rest of it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return bytes(decoder.getstate()[0])
