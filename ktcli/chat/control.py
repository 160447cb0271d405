"""Keeps words of a conversation from becoming control tokens: only a template's own text may give those.

`<|im_end|>` in a question or a file is text like any other, and must not end the turn. So before a conversation is
rendered, each such word in it gets a *mark* behind its first character, one that no text holds; the tokenizer encodes
the stretches with marks without control tokens and leaves the marks out (`Tokenizer.encode_marked`). Words that only
come to be where two texts meet are found by rendering once more with marks on all edges at which that could happen.
Where nothing pretends, nothing is marked, and the ids are those of the plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktcli.chat.codec import AddedToken
from ktcli.chat.tokenizer import Tokenizer

# Unicode says of these that no text is made of them.
_MARKS = [chr(code) for code in range(0xFDD6, 0xFDF0)]
# Added tokens that are not special, but mean something to the model: <tool_call>, </think>, [INST] …
_MARKER = re.compile(r"<[^\s<>]{1,80}>|\[/?[A-Z][A-Z_ ]{1,40}\]")
# Fields of an answer that say something about it: its thoughts are part of what the template is told.
_THOUGHT = re.compile(r"</?think(ing)?>|\[/?THINK\]")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Marked:
    """A rendered conversation.

    Attributes:
        marked: the text with marks.
        mark: the character that marks; empty: there are no marks.
    """

    marked: str
    mark: str = ""

    @property
    def text(self) -> str:
        """The text without marks."""
        return self.marked.replace(self.mark, "") if self.mark else self.marked

    def parts(self, cuts: Sequence[int]) -> list[Marked]:
        """The parts of the text between the characters `cuts` of it, ascending; the last one is its rest."""
        places: Sequence[int] = range(len(self.marked))
        if self.mark and self.mark in self.marked:
            places = [i for i, c in enumerate(self.marked) if c != self.mark]
        ends = [places[n] if n < len(places) else len(self.marked) for n in cuts]
        return [
            Marked(self.marked[first:last], self.mark)
            for first, last in zip(ends, [*ends[1:], len(self.marked)], strict=True)
        ]


class ControlTokens:
    """Knows the control tokens of a tokenizer and keeps texts that are not the template's from giving them.

    Args:
        tokenizer: the model's tokenizer.
        allowed: whether texts may give them all the same (`--allow-special`).
    """

    def __init__(self, tokenizer: Tokenizer, *, allowed: bool = False) -> None:
        self._tokenizer = tokenizer
        told = [t for t in tokenizer.added if t.special or _MARKER.fullmatch(t.text)]
        # A word of one character cannot be cut; no published tokenizer has one.
        told = [] if allowed else [token for token in told if len(token.text) > 1]
        self.ids = frozenset(token.id for token in told)
        self._everywhere = _Words(told)
        self._in_answers = _Words(t for t in told if t.special and not _THOUGHT.fullmatch(t.text))

    def render(
        self,
        render: Callable[[Sequence[Message], Mapping[str, Any]], str],
        messages: Sequence[Message],
        more: Mapping[str, Any],
    ) -> Marked:
        """Renders a conversation as text, with marks where its words pretend to be control tokens.

        Args:
            render: returns the text of messages and further variables.
        """
        mark = self._mark(messages, more)
        said, told = self._marked(messages, more, mark, edges=False)
        text = render(said, told)
        by_edges = self._marked(messages, more, mark, edges=True)
        if by_edges != (said, told):
            other = render(*by_edges)
            if self._everywhere.count(other) != self._everywhere.count(text):
                text = other  # somewhere two texts make a control token together
        # A template may write what is not ASCII as JSON does.
        escaped = f"\\u{ord(mark):04x}"
        return Marked(text.replace(escaped, mark) if escaped in text else text, mark)

    def encode(self, rendered: Marked) -> list[int]:
        """The ids of a rendered conversation."""
        if not rendered.mark or rendered.mark not in rendered.marked:
            return self._tokenizer.encode(rendered.marked)
        return self._tokenizer.encode_marked(rendered.marked, rendered.mark, self.ids)

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text outside any turn: none of them is a control token's."""
        mark = self._mark(text)
        return self.encode(Marked(self._everywhere.marked(text, mark), mark))

    def _mark(self, *values: Any) -> str:
        """A character that is in none of the texts."""
        texts = list(_texts(values))
        free = (mark for mark in _MARKS if not any(mark in text for text in texts))
        return next(free, _MARKS[0])

    def _marked(
        self, messages: Sequence[Message], more: Mapping[str, Any], mark: str, *, edges: bool
    ) -> tuple[list[Message], dict[str, Any]]:
        def put(words: _Words) -> Callable[[str], str]:
            return lambda text: words.marked(text, mark, edges=edges)

        said = [
            _each(message, put(self._in_answers if message.get("role") == "assistant" else self._everywhere))
            for message in messages
        ]  # fmt: skip
        return said, {key: _each(value, put(self._everywhere)) for key, value in more.items()}


class _Words:
    """Finds the texts of some added tokens."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        words = sorted({token.text for token in tokens}, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, words))
        # Looked for at every place: words may overlap.
        self._found = re.compile(f"(?=(?:{alternatives}))" if words else "(?!)")
        self._begins = frozenset(word[:n] for word in words for n in range(1, len(word)))
        self._ends = frozenset(word[-n:] for word in words for n in range(1, len(word)))
        self._longest = max(map(len, words), default=0)

    def count(self, text: str) -> int:
        """Counts the words in a text."""
        return sum(1 for _ in self._found.finditer(text))

    def marked(self, text: str, mark: str, *, edges: bool = False) -> str:
        """A text with a mark behind the first character of each word; with `edges` also at an end that could
        begin one, and at a beginning that could end one."""
        places = [found.start() + 1 for found in self._found.finditer(text)]
        if places:
            cuts = zip([0, *places], [*places, len(text)], strict=True)
            text = mark.join(text[first:last] for first, last in cuts)
        if edges:
            near = range(1, min(self._longest, len(text) + 1))
            if any(text[-n:] in self._begins for n in near):
                text += mark
            if any(text[:n] in self._ends for n in near):
                text = mark + text
        return text


def _each(value: Any, put: Callable[[str], str]) -> Any:
    """Returns nested plain values with `put` applied to every text in them, names of fields included."""
    if isinstance(value, str):
        return put(value)
    if isinstance(value, Mapping):
        return {put(str(key)): _each(part, put) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each(part, put) for part in value]
    return value


def _texts(value: Any) -> Iterable[str]:
    """Yields every text in nested plain values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from _texts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)
