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

from ktcli.errors import BadCheckpoint
from ktcli.text import sentencepiece, tiktoken
from ktcli.text.around import NOTHING_AROUND, AroundText, read_around
from ktcli.text.codec import BORDER, RESERVED, Codec, LibraryCodec
from ktcli.text.components import Examined, examine
from ktcli.text.files import read_text, without_surrogates
from ktcli.text.words import inserted

MAX_BYTES = 60_000_000  # published ones reach 33 MB
MAX_COMMAS = 3_000_000  # published ones have 1.3 million; a merge of two bytes takes 500 in memory
MAX_LISTS = 1_500_000  # lists and objects; published ones have 530,000, most of them merges
MAX_TOKEN_CHARS = 64  # that a text of many tokens may have for each of them
WHOLE_BYTES = 1 << 18  # of a text that is cut into tokens without counting first whether it fits
SLICE_CHARS = 1 << 16  # of a long text, when only its length in tokens is asked for
LEAST_SLICE_CHARS = 1 << 12  # with which SLACK weighs little
SLACK = 16  # tokens by which cutting a text there may change their number
T = TypeVar("T")
_BYTES = {letter: byte for byte, letter in enumerate(tiktoken.letters())}
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_PROBE = "Hello, 世界 1+1=2\n"


class Tokenizer:
    """A model's tokenizer.

    Args:
        codec: the library, here or in a helper process.
        found: the findings about its components.
        where: the name of its file, for sentences of errors.
    Attributes:
        rewrites: whether its normalizer may make words of the vocabulary from other letters.
        added: tokens that are found in a text before it is cut into words.
        special_ids: the ids of the added tokens that are left out of an answer's text.
        byte_level: whether tokens are bytes, each of which has a letter.
        around: the ids that belong around a text of its own, for an embedding; `encode` puts none.
    """

    def __init__(
        self, codec: Codec, found: Examined, where: Path, around: AroundText = NOTHING_AROUND
    ) -> None:
        self._codec, self._where, self.around = codec, where, around
        self.rewrites = found.rewrites
        self.byte_level = list(found.decoder) == ["ByteLevel"]
        self._falls_back = "ByteFallback" in found.decoder
        self.added = codec.added
        self.special_ids = frozenset(token.id for token in self.added if token.special)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text. Added tokens in it are recognised; no start or end tokens are added."""
        return self._read(lambda: self._codec.encode(without_surrogates(text)))

    def encode_marked(self, text: str, mark: str, control: frozenset[int]) -> list[int]:
        """Returns the token ids of a text without its mark characters; a word with a mark in it does not become a
        control token.

        Args:
            mark: the mark character.
            control: the ids of the control tokens.
        """
        clean = without_surrogates(text)
        if self.rewrites:
            clean = self._unmasked(clean, mark, control)
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

    def _unmasked(self, text: str, mark: str, control: frozenset[int]) -> str:
        """Returns a text with a mark in each place that is a control token after normalization alone, such as ＜s＞."""
        words = {token.id: token.text for token in self.added}
        found = self._read(lambda: self._codec.encode_spans(text))
        pairs = zip(found.ids, found.spans, strict=True)
        masked = [
            first + 1
            for id, (first, last) in pairs
            if id in control and text[first:last].strip() != words.get(id)
        ]
        return inserted(text, mark, masked)

    def _stretch(
        self, text: str, mark: str, control: frozenset[int], ids: list[int], *, begins: bool
    ) -> list[int]:
        """Returns the ids of a text between control tokens: `ids` if it holds no mark."""
        if mark not in text:
            return ids
        text = text.translate(_RESERVED)
        border = "" if begins else BORDER
        whole = self._plain([border + text.replace(mark, "")], control)[0][not begins :]
        if control.isdisjoint(whole):
            return whole
        # The model itself spells a control token, as one of its words: so it is cut where the marks are.
        parts = self._plain([BORDER + part for part in text.split(mark) if part], control)
        return [id for part in parts for id in part[1:] if id not in control]

    def _plain(self, texts: list[str], control: frozenset[int]) -> list[list[int]]:
        return self._read(lambda: self._codec.encode_plain(texts, sorted(control)))

    def exceeds(self, text: str, most: int, encode: Callable[[str], list[int]]) -> bool:
        """Returns whether a text certainly has more than `most` tokens, encoding little more than that; False is no
        certainty.

        Args:
            encode: returns the ids of a slice of the text.
        """
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        if size <= min(4 * most, WHOLE_BYTES):
            return False
        if len(text) > MAX_TOKEN_CHARS * most:
            return True
        count, slice_chars = 0, min(max(4 * most, LEAST_SLICE_CHARS), SLICE_CHARS)
        for at in range(0, len(text), slice_chars):
            count += len(encode(text[at : at + slice_chars])) - SLACK
            if count > most:
                return True
        return False

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Returns the text that token ids decode to, with special tokens only if `special` is true; an incomplete
        character shows as U+FFFD.
        """
        return _guarded(
            f"{self._where} cannot decode the ids", lambda: self._codec.decode(ids, special=special)
        )

    def is_text(self, id: int) -> bool:
        """Returns whether `decode` writes anything for an id: there is such a token, and it is not special."""
        return self._word_of(id) is not None

    def is_byte(self, id: int) -> bool:
        """Returns whether an id represents one byte in a vocabulary of characters, as <0xE4> does."""
        token = self._codec.word_of(id) if self._falls_back else None
        return token is not None and _BYTE.fullmatch(token) is not None and self.is_text(id)

    def bytes_of(self, id: int) -> bytes:
        """Returns the bytes that an id adds to the decoded text, in a vocabulary of bytes (`byte_level`) or for an id
        that `is_byte`; empty for a special or unknown id.
        """
        token = self._word_of(id) or ""
        if self._falls_back:
            return bytes([int(token[1:-1], 16)])
        try:
            return bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # an added token, in letters of its own
            return token.encode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, spelled as in the vocabulary; None if there is no such token."""
        return self._codec.id_of(token)

    def _word_of(self, id: int) -> str | None:
        """Returns the token of an id that is text."""
        return None if id in self.special_ids else self._codec.word_of(id)

    def _read(self, call: Callable[[], T]) -> T:
        with _silent_stderr():
            return _guarded(f"{self._where} cannot encode the text", call)


_RESERVED = {ord(letter): "\ufffd" for letter in RESERVED}


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has files of a tokenizer."""
    whole, pieces = folder / "tokenizer.json", folder / sentencepiece.NAME
    return whole.exists() or tiktoken.find(folder) is not None or pieces.exists()


def examine_tokenizer(folder: Path) -> None:
    """Raises an error if a tokenizer has components that no published one has; it does not test whether it works.

    Raises:
        BadCheckpoint: the tokenizer has such a component, or is too large.
    """
    whole, pieces = folder / "tokenizer.json", folder / sentencepiece.NAME
    with contextlib.suppress(ValueError, RecursionError):  # no JSON: a chat says so
        if whole.is_file():
            document = json.loads(_whole(whole))
            if isinstance(document, dict):
                examine(document, str(whole))
        elif tiktoken.find(folder) is None and pieces.is_file():
            config = folder / "tokenizer_config.json"
            examine(json.loads(sentencepiece.document_of(pieces, config)), str(pieces))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of the model whose data files are in `folder`.

    Raises:
        BadCheckpoint: the tokenizer is missing, empty, too large or malformed, or has an unknown component.
    """
    whole, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    ranks, pieces = tiktoken.find(folder), folder / sentencepiece.NAME
    if not has_tokenizer(folder):
        raise BadCheckpoint(
            f"{whole} is missing",
            hint=f"kt also reads {sentencepiece.NAME} and tiktoken.model; a model needs one of them",
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
        raise BadCheckpoint(f"{path} lists more tokens and merges than any tokenizer")
    if text.count("[") + text.count("{") > MAX_LISTS:
        raise BadCheckpoint(f"{path} has more lists and objects than any tokenizer")
    return text


def _read_document(text: str, where: Path) -> Tokenizer:
    """Makes the tokenizer of a `tokenizer.json`: here if all of its parts are known, else confined; tried once."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:100]
        raise BadCheckpoint(f"{where} is not a tokenizer: invalid JSON: {why}") from error
    if not isinstance(document, dict):
        raise BadCheckpoint(f"{where} is not a tokenizer: it is not a JSON object")
    found, around = examine(document, str(where)), read_around(document)
    del document
    with _silent_stderr():
        codec = _guarded(f"{where} is not a tokenizer", lambda: _made(text, found))
    tokenizer = Tokenizer(codec, found, where, around)
    ids = tokenizer.encode(_PROBE)
    if not ids:
        raise BadCheckpoint(f"{where} has no tokens")
    tokenizer.decode(ids)
    return tokenizer


def _made(text: str, found: Examined) -> Codec:
    from ktcli.text.confined import ConfinedCodec, RunsCodec

    if not found.known:
        return ConfinedCodec(text)
    import tokenizers

    here = LibraryCodec(tokenizers.Tokenizer.from_str(text))
    return RunsCodec(here, text, found.slow_runs) if found.slow_runs else here


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
