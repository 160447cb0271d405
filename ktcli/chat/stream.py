"""From ids as they come to text that can be shown: whole characters, and nothing past a stop string.

`Detokenizer` decodes growing windows, since a token may be part of a character, and since some
tokenizers drop a leading space of whatever they decode first. `StopStrings` holds back what could
become a stop string. `Thinking` tells the model's thoughts from its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ktcli.chat.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most four bytes. A longer run without a whole one is rubbish, shown as such.
MAX_HELD = 8
THINK, ANSWER = "<think>", "</think>"


class Detokenizer:
    """Ids in, whole characters out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those of the window
        self._shown = 0  # of the window, how many are already out

    def feed(self, id: int) -> str:
        """The text that `id` completes; empty while a character is unfinished."""
        self._ids.append(id)
        text = self._fresh()
        held = len(self._ids) - self._shown
        if text.endswith(REPLACEMENT) and held < MAX_HELD:
            return ""
        if text:
            self._ids = self._ids[self._shown :]
            self._shown = len(self._ids)
        return text

    def finish(self) -> str:
        """What was held back and is whole."""
        text = self._fresh().rstrip(REPLACEMENT)
        self._ids, self._shown = [], 0
        return text

    def _fresh(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._shown])
        return self._tokenizer.decode(self._ids)[len(before) :]


class StopStrings:
    """Passes text on until a stop string appears, wherever tokens are cut."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that is certainly no part of a stop string."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            passed, self._held = self._held[: min(found)], ""
            return passed
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def finish(self) -> str:
        """What was held back in vain."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` with which `stop` begins."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(slots=True)
class Thinking:
    """Splits text into (thought?, piece); the tags themselves go with the thought.

    Attributes:
        inside: whether the next character is part of a thought.
    """

    inside: bool = False
    _held: str = field(default="", repr=False)

    def feed(self, text: str) -> Iterator[tuple[bool, str]]:
        """Pieces of `text` in order; what may be half a tag waits."""
        rest = self._held + text
        while True:
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
            self.inside = not self.inside
        keep = _overlap(rest, tag)
        if len(rest) > keep:
            yield self.inside, rest[: len(rest) - keep]
        self._held = rest[len(rest) - keep :]

    def finish(self) -> Iterator[tuple[bool, str]]:
        """What was held back."""
        if self._held:
            yield self.inside, self._held
        self._held = ""
