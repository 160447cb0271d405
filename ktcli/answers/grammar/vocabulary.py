"""A model's tokens as bytes, in the form that llguidance expects."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ktcli.errors import KtError, UsageError
from ktcli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

SPECIAL = b"\xff"  # what llguidance tells special tokens by
_LONGEST = 64  # bytes of a token that is looked for in a text
_CUT = 4096  # texts whose ids are remembered
_BEFORE = "a"  # a text before a token, since decoders drop the blank of whatever comes first


class _Tokens:
    """What llguidance asks a tokenizer for: the bytes of each token, and how a text that must follow is cut.

    A text is cut as the model's own tokenizer does it. Where that adds a blank or finds special tokens in it, and so
    does not give the very bytes, the longest token that fits is taken each time.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int]) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = special[0], None
        self._tokenizer = tokenizer
        self._ids = {text: id for id, text in reversed(list(enumerate(tokens))) if text}
        self._longest = min(_LONGEST, max(map(len, self._ids), default=0))
        self._cut: dict[bytes, list[int]] = {}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        if (found := self._cut.get(data)) is None:
            if len(self._cut) >= _CUT:
                self._cut.clear()
            found = self._cut[data] = self._own(data) or self._greedily(data)
        return list(found)

    def _own(self, data: bytes) -> list[int]:
        """As the tokenizer cuts it; empty: these would be other bytes."""
        try:
            ids = self._tokenizer.encode(data.decode())
        except (UnicodeDecodeError, KtError):
            return []
        known = all(id < len(self.tokens) for id in ids)
        return ids if known and b"".join(self.tokens[id] for id in ids) == data else []

    def _greedily(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((n for n in sizes if data[at : at + n] in self._ids), 0)
            if not size:
                break  # no token has this byte
            ids.append(self._ids[data[at : at + size]])
            at += size
        return ids


def read_vocabulary(
    tokenizer: Tokenizer, stop_ids: Collection[int], size: int
) -> llguidance.LLTokenizer:
    """Returns llguidance's tokenizer for a model's vocabulary, with masks of `size` ids.

    Raises:
        UsageError: no token of the vocabulary ends an answer.
    """
    import llguidance

    tokens, ends = token_bytes(tokenizer, stop_ids, size), _ends(stop_ids, size)
    others = [id for id, token in enumerate(tokens) if token[:1] == SPECIAL and id not in ends]
    made = _Tokens(tokenizer, tokens, [*ends, *others])
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(made), n_vocab=size, eos_token=ends)


def token_bytes(tokenizer: Tokenizer, stop_ids: Collection[int], size: int) -> list[bytes]:
    """Returns the bytes of each id from 0 to `size` - 1; those of special tokens and of the ends of answers
    begin with 0xFF, a byte that no text has.

    Raises:
        UsageError: no token of the vocabulary ends an answer.
    """
    ends = _ends(stop_ids, size)
    words = {token.id: token.text for token in tokenizer.added if token.id in tokenizer.special_ids}
    special = {id: SPECIAL + text.encode("utf-8", "replace") for id, text in words.items()}
    for id in ends:  # some are no special tokens, but never part of an answer
        special.setdefault(id, SPECIAL + f"<end {id}>".encode())
    decoded = {} if tokenizer.byte_level else _decoded(tokenizer, size)
    bytes_of = tokenizer.bytes_of if tokenizer.byte_level else lambda id: decoded.get(id, b"")
    return [special[id] if id in special else bytes_of(id) for id in range(size)]


def _ends(stop_ids: Collection[int], size: int) -> list[int]:
    ends = sorted(id for id in stop_ids if 0 <= id < size)
    if not ends:
        raise UsageError(
            "this model has no end-of-answer token, so its answers cannot be constrained"
        )
    return ends


def _decoded(tokenizer: Tokenizer, size: int) -> dict[int, bytes]:
    """Returns the bytes that each id adds to a text, by what the decoder writes."""
    first = tokenizer.encode(_BEFORE)
    before = tokenizer.decode(first)
    found = {}
    for id in range(size):
        if tokenizer.is_byte(id):
            found[id] = tokenizer.bytes_of(id)
        elif tokenizer.is_text(id):
            text = tokenizer.decode([*first, id])
            found[id] = text[len(before) :].encode("utf-8", "replace")
    return found
