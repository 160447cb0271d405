"""Text to ids and back, from a model's data files: `tokenizer.json`, tiktoken ranks, SentencePiece pieces.

No Python of a repository is run. The files come from strangers, so they are bounded, tried once, and
whatever the tokenizers library thinks of them becomes one sentence.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ktcli.chat import sentencepiece, tiktoken
from ktcli.chat.files import read_text
from ktcli.errors import BadCheckpoint

if TYPE_CHECKING:
    import tokenizers

MAX_BYTES = 60_000_000  # published ones reach 33 MB
MAX_COMMAS = 3_000_000  # published ones have 1.3 million; a merge of two bytes takes 500 in memory
# Times that a text may grow by replacements, one after the other; published tokenizers stay at 4.
MAX_GROWTH = 4096
T = TypeVar("T")
_BYTES = {letter: byte for byte, letter in enumerate(tiktoken.letters())}
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_PROBE = "Hello, 世界 1+1=2\n"


class Tokenizer:
    """A model's tokenizer.

    Args:
        inner: of the tokenizers library.
        where: its file, for sentences.
    """

    def __init__(self, inner: tokenizers.Tokenizer, where: Path) -> None:
        self._inner, self._where = inner, where
        # A file may ask to cut texts, fill them up or frame them; a conversation wants none of it.
        inner.no_truncation()
        inner.no_padding()
        inner.post_processor = None
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        steps = _decoder_steps(json.loads(inner.decoder.__getstate__())) if inner.decoder else []
        self.byte_level = steps == ["ByteLevel"]
        self._falls_back = "ByteFallback" in steps

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens in it are recognised, none are added."""
        clean = text.encode("utf-8", "replace").decode("utf-8")  # no lone surrogates
        with _silent_stderr():
            return _guarded(
                f"{self._where} cannot read the text",
                lambda: list(self._inner.encode(clean, add_special_tokens=False).ids),
            )

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; an incomplete character shows as U+FFFD."""
        return _guarded(
            f"{self._where} cannot write the ids",
            lambda: self._inner.decode(list(ids), skip_special_tokens=not special),
        )

    def is_text(self, id: int) -> bool:
        """Whether `decode` writes anything for an id: there is such a token, and it is not special."""
        return id not in self.special_ids and self._inner.id_to_token(id) is not None

    def is_byte(self, id: int) -> bool:
        """Whether an id stands for one byte in a vocabulary of characters, as <0xE4> does."""
        token = self._inner.id_to_token(id) if self._falls_back else None
        return token is not None and _BYTE.fullmatch(token) is not None and self.is_text(id)

    def bytes_of(self, id: int) -> bytes:
        """The bytes that an id adds to the text, where `byte_level` or `is_byte`; none if it is no text."""
        token = (self._inner.id_to_token(id) or "") if self.is_text(id) else ""
        if self._falls_back:
            return bytes([int(token[1:-1], 16)])
        try:
            return bytes(_BYTES[letter] for letter in token)
        except KeyError:  # an added token, in letters of its own
            return token.encode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """The id of one token, None if there is no such token."""
        return self._inner.token_to_id(token)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the model whose data files lie in `folder`.

    Raises:
        BadCheckpoint: there is none, or it is empty, too large or malformed.
    """
    whole, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    ranks, pieces = tiktoken.find(folder), folder / sentencepiece.NAME
    if not (whole.exists() or ranks or pieces.exists()):
        raise BadCheckpoint(
            f"{whole} is missing",
            hint=f"kt also reads {sentencepiece.NAME} and tiktoken.model; without one of them a model has no words",
        )
    if whole.is_file() or not (ranks or pieces.is_file()):
        where, made = whole, partial(_load, whole)
    elif ranks:
        where, made = ranks, partial(tiktoken.load, ranks, config)
    else:
        where, made = pieces, partial(sentencepiece.load, pieces, config)
    with _silent_stderr():
        return _guarded(f"{where} is not a tokenizer", lambda: _tried(made(), where))


def _load(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    text = read_text(path, MAX_BYTES)
    if text.count(",") > MAX_COMMAS:
        raise BadCheckpoint(f"{path} lists more tokens and merges than any tokenizer has")
    return tokenizers.Tokenizer.from_str(text)


def _tried(inner: tokenizers.Tokenizer, where: Path) -> Tokenizer:
    for step in (inner.normalizer, inner.decoder):
        if step is not None and _growth(json.loads(step.__getstate__())) > MAX_GROWTH:
            raise BadCheckpoint(
                f"{where} has rules that make texts more than {MAX_GROWTH} times longer"
            )
    tokenizer = Tokenizer(inner, where)
    ids = tokenizer.encode(_PROBE)
    if not ids:
        raise BadCheckpoint(f"{where} knows no tokens")
    tokenizer.decode(ids)
    return tokenizer


def _decoder_steps(step: dict[str, Any]) -> list[str]:
    """The kinds of a decoder's steps, in order; joining tokens is none."""
    if step.get("type") == "Sequence":
        return [kind for part in step["decoders"] for kind in _decoder_steps(part)]
    return [] if step["type"] == "Fuse" else [str(step["type"])]


def _growth(step: dict[str, Any]) -> int:
    """How many times longer a step of a normalizer or decoder may make a text, at most.

    Replacements in a row multiply: ten rules of a line each would fill any memory.
    """
    growth = 1
    for part in (*step.get("normalizers", ()), *step.get("decoders", ())):
        growth = min(growth * _growth(part), MAX_GROWTH + 1)
    content, pattern = step.get("content", ""), step.get("pattern")
    if step.get("type") == "Replace" and isinstance(pattern, dict):
        fixed = pattern.get("String", "")
        # A regular expression may match the empty text between any two characters.
        growth = -(-len(content) // len(fixed)) if fixed else 1 + len(content)
    if step.get("type") == "Prepend":
        growth = 1 + len(step.get("prepend", ""))
    return max(growth, 1)


def _guarded(sentence: str, call: Callable[[], T]) -> T:
    """`call()`; whatever the library raises becomes `BadCheckpoint`. Its panics are no Exceptions."""
    try:
        return call()
    except BadCheckpoint:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = " ".join(str(error).split())[:150]
        raise BadCheckpoint(
            f"{sentence}: {why}", hint="kt verify MODEL checks the files; kt pull gets them again"
        ) from error


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Keep the library's own backtrace of a panic off the terminal; it writes to the file descriptor."""
    try:
        kept = os.dup(2)
    except OSError:  # closed
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
