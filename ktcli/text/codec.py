"""Wraps a tokenizer of the tokenizers library: text to tokens, ids to text, and the added tokens in its file.

`Codec` is the contract; `LibraryCodec` runs the library here, `confined.ConfinedCodec` in a helper process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ktcli.records import dataclass

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is recognised in a text before it is split into words.

    Attributes:
        special: whether it is left out of an answer's text.
    """

    id: int
    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of a text, and their places in it.

    Attributes:
        ids: the ids, [T].
        spans: the place of each token in the text, [T] pairs (first character, one after the last).
    """

    ids: list[int]
    spans: list[tuple[int, int]]


class Codec(Protocol):
    """The calls that a tokenizer makes to the library, wherever that runs.

    Every call may raise whatever the library does; its panics are no Exceptions.
    """

    @property
    def added(self) -> tuple[AddedToken, ...]:
        """The added tokens of the tokenizer, in the order of their ids."""

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text; added tokens in it are recognised."""

    def encode_spans(self, text: str) -> Encoded:
        """Returns the token ids of a text as by `encode`, with the place of each token in the text."""

    def encode_plain(self, texts: Sequence[str], unknown: Sequence[int]) -> list[list[int]]:
        """Returns the token ids of each text; the added tokens with the ids `unknown` are words like any other in
        them.
        """

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """Returns the text that token ids decode to; special tokens are written out if `special` is true, else left
        out.
        """

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, spelled as in the vocabulary; None if there is no such token."""

    def word_of(self, id: int) -> str | None:
        """Returns the token with this id, spelled in the letters of the vocabulary; None if there is no such id."""


class LibraryCodec:
    """A codec that runs the library in this process.

    Args:
        inner: a tokenizer; its truncation, padding and post-processing are switched off, as a conversation wants none.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Its threads would take cores from the engine's; set by hand it stays.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._inner = inner
        inner.no_truncation()
        inner.no_padding()
        inner.post_processor = None
        rows = sorted(inner.get_added_tokens_decoder().items())
        self.added = tuple(AddedToken(id, row.content, row.special) for id, row in rows)
        self._plain: dict[tuple[int, ...], tokenizers.Tokenizer] = {}

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text; added tokens in it are recognised."""
        return _ids(self._inner, text)

    def encode_spans(self, text: str) -> Encoded:
        """Returns the token ids of a text, with the place of each token in it."""
        found = self._inner.encode(text, add_special_tokens=False)
        return Encoded(list(found.ids), list(found.offsets))

    def encode_plain(self, texts: Sequence[str], unknown: Sequence[int]) -> list[list[int]]:
        """Returns the token ids of each text; the added tokens with the ids `unknown` are not recognised in them."""
        inner = self.prepare(unknown)
        return [_ids(inner, text) for text in texts]

    def prepare(self, unknown: Sequence[int]) -> tokenizers.Tokenizer:
        """Returns a copy of the tokenizer that does not recognise the added tokens with the ids `unknown`; made once
        for each set of them.
        """
        key = tuple(unknown)
        if key not in self._plain:
            self._plain[key] = _without(self._inner, frozenset(unknown))
        return self._plain[key]

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """Returns the text that token ids decode to; special tokens are written out if `special` is true, else left
        out.
        """
        return str(self._inner.decode(list(ids), skip_special_tokens=not special))

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, spelled as in the vocabulary; None if there is no such token."""
        return self._inner.token_to_id(token)

    def word_of(self, id: int) -> str | None:
        """Returns the token with this id, spelled in the letters of the vocabulary; None if there is no such id."""
        return self._inner.id_to_token(id)


def _ids(inner: tokenizers.Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text, without their places in it, which would take the library as long again."""
    return list(inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)


RESERVED = "\ufdd2\ufdd3\ufdd4\ufdd5"  # characters that texts for `encode_plain` must not hold, but in BORDER
# The name of an added token whose own text is to be a word like any other.
_NOWHERE = "\ufdd2kt-no-text-holds-this\ufdd3"
BORDER = "\ufdd4kt-border\ufdd5"  # an added token of `encode_plain`: what follows is not the beginning of a text


def _without(inner: tokenizers.Tokenizer, unknown: frozenset[int]) -> tokenizers.Tokenizer:
    """Returns a copy of a tokenizer that does not find the added tokens `unknown`, but BORDER; all other ids are the
    same."""
    import tokenizers

    document: dict[str, Any] = json.loads(inner.to_str())
    size = inner.get_vocab_size(with_added_tokens=False)
    rows = []
    for row in document["added_tokens"]:
        if row["id"] not in unknown:
            rows.append(row)
        elif row["id"] >= size:  # it holds a place: the ids of those after it are counted from it
            rows.append({**row, "content": f"{_NOWHERE}{row['id']}", "special": True})
    document["added_tokens"] = rows
    copy = tokenizers.Tokenizer.from_str(json.dumps(document))
    copy.add_special_tokens([tokenizers.AddedToken(BORDER, normalized=False, special=True)])
    return copy
