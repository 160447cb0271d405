"""Turns text to ids and back, from a model's data files: `tokenizer.json`, tiktoken ranks, SentencePiece pieces.

No Python of a repository is run. The files come from strangers: they are bounded, their components are looked at
(`components`) before the library sees them, what nobody has looked at runs in a helper process with limits
(`confined`), and whatever the library thinks of them becomes one sentence.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ktcli.chat import sentencepiece, tiktoken
from ktcli.chat.codec import BORDER, Codec, LibraryCodec
from ktcli.chat.components import examine
from ktcli.chat.files import read_text
from ktcli.errors import BadCheckpoint

MAX_BYTES = 60_000_000  # published ones reach 33 MB
MAX_COMMAS = 3_000_000  # published ones have 1.3 million; a merge of two bytes takes 500 in memory
MAX_ADDED = 50_000  # added tokens; published ones have up to 6,500
SLICE_CHARS = 1 << 16  # of a long text, when only its length in tokens is asked for
SLACK = 16  # tokens by which cutting a text there may change their number
T = TypeVar("T")
_BYTES = {letter: byte for byte, letter in enumerate(tiktoken.letters())}
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_PROBE = "Hello, 世界 1+1=2\n"


class Tokenizer:
    """A model's tokenizer.

    Args:
        codec: the library, here or in a helper process.
        decoder: the kinds of its decoder's steps, in order; joining tokens is not one of them.
        where: the name of its file, for sentences of errors.
    Attributes:
        added: tokens that are found in a text before it is cut into words.
        special_ids: the ids of the added tokens that are left out of an answer's text.
        byte_level: whether tokens are bytes, each of which has a letter.
    """

    def __init__(self, codec: Codec, decoder: Sequence[str], where: Path) -> None:
        self._codec, self._where = codec, where
        self.byte_level = list(decoder) == ["ByteLevel"]
        self._falls_back = "ByteFallback" in decoder
        self.added = codec.added
        self.special_ids = frozenset(token.id for token in self.added if token.special)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; added tokens in it are recognised, and none are put around it."""
        return self._read(lambda: self._codec.encode(_clean(text)))

    def encode_marked(self, text: str, mark: str, control: frozenset[int]) -> list[int]:
        """The ids of a text without its marks; a word with a mark in it becomes no control token.

        The text between two control tokens is encoded apart from all else, so only those stretches differ from
        `encode` that hold a mark.

        Args:
            mark: the character that marks.
            control: ids of the added tokens that a marked stretch may not have.
        """
        clean = _clean(text)
        if mark not in clean:
            return self.encode(clean)
        found = self._read(lambda: self._codec.encode_spans(clean))
        ids: list[int] = []
        stretch: list[int] = []
        at = 0
        for id, (first, last) in zip(found.ids, found.spans, strict=True):
            if id in control and mark not in clean[first:last]:
                ids += self._stretch(clean[at:first], mark, control, stretch, begins=at == 0)
                ids.append(id)
                stretch, at = [], last
            else:
                stretch.append(id)
        return ids + self._stretch(clean[at:], mark, control, stretch, begins=at == 0)

    def _stretch(
        self, text: str, mark: str, control: frozenset[int], ids: list[int], *, begins: bool
    ) -> list[int]:
        """The ids of a text between control tokens: `ids` if it holds no mark."""
        if mark not in text:
            return ids
        border = "" if begins else BORDER
        whole = self._plain([border + text.replace(mark, "")], control)[0][not begins :]
        if control.isdisjoint(whole):
            return whole
        # The model itself spells a control token, as one of its words: so it is cut where the marks are.
        parts = self._plain([BORDER + part for part in text.split(mark) if part], control)
        return [id for part in parts for id in part[1:]]

    def _plain(self, texts: list[str], control: frozenset[int]) -> list[list[int]]:
        return self._read(lambda: self._codec.encode_plain(texts, sorted(control)))

    def exceeds(self, text: str, most: int) -> bool:
        """Returns whether a text surely has more than `most` tokens, without encoding much more than those."""
        if len(text) <= 8 * most:
            return False
        count = 0
        for at in range(0, len(text), SLICE_CHARS):
            count += len(self.encode(text[at : at + SLICE_CHARS])) - SLACK
            if count > most:
                return True
        return False

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; an incomplete character shows as U+FFFD."""
        return _guarded(
            f"{self._where} cannot write the ids", lambda: self._codec.decode(ids, special=special)
        )

    def is_text(self, id: int) -> bool:
        """Returns whether `decode` writes anything for an id: there is such a token, and it is not special."""
        return id not in self.special_ids and self._codec.word_of(id) is not None

    def is_byte(self, id: int) -> bool:
        """Returns whether an id stands for one byte in a vocabulary of characters, as <0xE4> does."""
        token = self._codec.word_of(id) if self._falls_back else None
        return token is not None and _BYTE.fullmatch(token) is not None and self.is_text(id)

    def bytes_of(self, id: int) -> bytes:
        """The bytes that an id adds to the text, where `byte_level` or `is_byte`; none if it is no text."""
        token = (self._codec.word_of(id) or "") if self.is_text(id) else ""
        if self._falls_back:
            return bytes([int(token[1:-1], 16)])
        try:
            return bytes(_BYTES[letter] for letter in token)
        except KeyError:  # an added token, in letters of its own
            return token.encode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """The id of one token, None if there is no such token."""
        return self._codec.id_of(token)

    def _read(self, call: Callable[[], T]) -> T:
        with _silent_stderr():
            return _guarded(f"{self._where} cannot read the text", call)


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")  # no lone surrogates


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has files of a tokenizer."""
    whole, pieces = folder / "tokenizer.json", folder / sentencepiece.NAME
    return whole.exists() or tiktoken.find(folder) is not None or pieces.exists()


def examine_tokenizer(folder: Path) -> None:
    """Refuses a `tokenizer.json` with components that no published one has; it does not test whether it works.

    Raises:
        BadCheckpoint: it has one, or it is too large.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    with contextlib.suppress(ValueError, RecursionError):  # no JSON: a chat says so
        document = json.loads(_whole(path))
        if isinstance(document, dict):
            examine(document, str(path))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the model whose data files lie in `folder`.

    Raises:
        BadCheckpoint: there is none, or it is empty, too large, malformed, or of parts that no published one has.
    """
    whole, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    ranks, pieces = tiktoken.find(folder), folder / sentencepiece.NAME
    if not has_tokenizer(folder):
        raise BadCheckpoint(
            f"{whole} is missing",
            hint=f"kt also reads {sentencepiece.NAME} and tiktoken.model; without one of them a model has no words",
        )
    if whole.is_file() or not (ranks or pieces.is_file()):
        where, made = whole, partial(_whole, whole)
    elif ranks:
        where, made = ranks, partial(tiktoken.document, ranks, config)
    else:
        where, made = pieces, partial(sentencepiece.document_of, pieces, config)
    return _read_document(made(), where)


def _whole(path: Path) -> str:
    text = read_text(path, MAX_BYTES)
    if text.count(",") > MAX_COMMAS:
        raise BadCheckpoint(f"{path} lists more tokens and merges than any tokenizer has")
    return text


def _read_document(text: str, where: Path) -> Tokenizer:
    """Makes the tokenizer of a `tokenizer.json`: here if all of its parts are known, else confined; tried once."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:100]
        raise BadCheckpoint(f"{where} is not a tokenizer: it is not JSON: {why}") from error
    if not isinstance(document, dict):
        raise BadCheckpoint(f"{where} is not a tokenizer: it holds no object")
    added = document.get("added_tokens")
    if isinstance(added, list) and len(added) > MAX_ADDED:
        raise BadCheckpoint(f"{where} adds {len(added):,} tokens, more than {MAX_ADDED:,}")
    found = examine(document, str(where))
    del document
    with _silent_stderr():
        codec = _guarded(f"{where} is not a tokenizer", lambda: _made(text, found.known))
    tokenizer = Tokenizer(codec, found.decoder, where)
    ids = tokenizer.encode(_PROBE)
    if not ids:
        raise BadCheckpoint(f"{where} knows no tokens")
    tokenizer.decode(ids)
    return tokenizer


def _made(text: str, known: bool) -> Codec:
    if not known:
        from ktcli.chat.confined import ConfinedCodec

        return ConfinedCodec(text)
    import tokenizers

    return LibraryCodec(tokenizers.Tokenizer.from_str(text))


def _guarded(sentence: str, call: Callable[[], T]) -> T:
    """Returns `call()`; whatever the library raises becomes `BadCheckpoint`. Its panics are no Exceptions."""
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
    """Keeps the library's own backtrace of a panic off the terminal; it writes to the file descriptor."""
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
