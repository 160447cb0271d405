"""The bytes of a model's tokens, sorted, so that those that begin with some text are found without a look at all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cached_property

BLANKS = b" \t\r\n"
NUMBER = b"+-.0123456789Ee"  # the bytes of numbers
_ENDS = b",]} \n\t\r"  # what may follow a number


class TokenPart(Enum):
    """The part of a token's bytes that belongs to a value.

    Attributes:
        ALL: the whole token: it begins in a text, a number or a word.
        VALUES: without the blanks between values.
        NEXT: without these and the comma before the value.
    """

    ALL = 0
    VALUES = 1
    NEXT = 2


class TokenIndex:
    """Some tokens, sorted by their texts.

    Args:
        tokens: texts and ids.
    """

    def __init__(self, tokens: Iterable[tuple[bytes, int]]) -> None:
        pairs = sorted(pair for pair in tokens if pair[0])
        self._texts, self._ids = [text for text, _ in pairs], [id for _, id in pairs]

    def beginning(self, start: bytes) -> list[int]:
        """Returns the ids of the indexed tokens whose bytes begin with `start`."""
        first, end = self._range(start)
        return self._ids[first:end]

    def ending(self, number: bytes) -> list[int]:
        """Returns the ids of the indexed tokens that complete a number: their bytes begin with `number`, the rest of
        it, and go on with a byte that no number has.
        """
        if not number:
            return self._others
        first, end = self._range(number)
        size = len(number)
        return [
            self._ids[at]
            for at in range(first, end)
            if len(text := self._texts[at]) > size and text[size] not in NUMBER
        ]

    @cached_property
    def _others(self) -> list[int]:
        pairs = zip(self._texts, self._ids, strict=True)
        return [id for text, id in pairs if text[0] not in NUMBER]

    def _range(self, start: bytes) -> tuple[int, int]:
        short = start.rstrip(b"\xff")
        after = short[:-1] + bytes((short[-1] + 1,)) if short else b""
        texts = self._texts
        return bisect_left(texts, start), bisect_left(texts, after) if short else len(texts)


class TokenTable:
    """The bytes of a model's tokens, and which of them can end a text or a number."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self._squeezed: dict[int, bytes] = {}
        self._indexes: dict[tuple[TokenPart, bool], TokenIndex] = {}

    def text(self, id: int, part: TokenPart) -> bytes:
        """Returns the bytes of a token that belong to a JSON value: as `part` says all, those without blanks outside
        strings, or those without such blanks and a leading comma.
        """
        if part is TokenPart.ALL:
            return self.tokens[id]
        text = self._without_blanks(id)
        return text.lstrip(b",") if part is TokenPart.NEXT else text

    def index(self, part: TokenPart, *, ends_number: bool) -> TokenIndex:
        """Returns an index, by the bytes that `part` selects, of the tokens that contain a byte that can follow a
        number (`ends_number`), or else of those that contain a quotation mark.
        """
        found = self._indexes.get((part, ends_number))
        if found is None:
            marks = _ENDS if ends_number else b'"'
            tokens = (
                (self.text(id, part), id)
                for id, token in enumerate(self.tokens)
                if token.translate(None, marks) != token
            )
            found = self._indexes[part, ends_number] = TokenIndex(tokens)
        return found

    def _without_blanks(self, id: int) -> bytes:
        """Returns the bytes of a token that begins between two texts, without the blanks that are in none."""
        if (found := self._squeezed.get(id)) is None:
            parts = self.tokens[id].split(b'"')
            parts[::2] = [part.translate(None, BLANKS) for part in parts[::2]]
            found = self._squeezed[id] = b'"'.join(parts)
        return found
