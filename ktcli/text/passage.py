"""Reads a text for measuring models, as text and as a model's ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ktcli import smallfiles
from ktcli.errors import NotFound, UsageError
from ktcli.records import dataclass
from ktcli.resources import data_path
from ktcli.text.control import ControlTokens
from ktcli.text.settings import named_id
from ktcli.text.tokenizer import SLACK, Tokenizer, load_tokenizer

MAX_BYTES = 4 << 20  # about a million tokens; cutting more into tokens takes gigabytes
START_CHARS = 1 << 20  # of a text that are encoded first
BUILT_IN = "built-in (Python's standard library)"


@dataclass(frozen=True, slots=True)
class Passage:
    """A text and its origin.

    Attributes:
        name: a path, or BUILT_IN.
        cut: whether the file has more bytes than are read.
    """

    name: str
    text: str
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """A text, encoded by one model's tokenizer.

    Attributes:
        ids: the ids of the text.
        begin: the id that texts begin with; None: the model's files name none.
        bytes_per_token: the mean bytes of text per token.
    """

    ids: tuple[int, ...]
    begin: int | None
    bytes_per_token: float

    @classmethod
    def of(cls, ids: Sequence[int], tokenizer: Tokenizer, folder: Path) -> Reading:
        """Returns the given ids of a text, together with the id with which the model in `folder` begins texts (None:
        its files name none) and the mean bytes of text per token.
        """
        size = len(tokenizer.decode(ids, special=True).encode())
        begin = named_id(folder, tokenizer, "bos_token")
        return cls(tuple(ids), begin, size / max(1, len(ids)))


def read_passage(path: Path | None) -> Passage:
    """Returns the text of a file, with its name, or the built-in text if `path` is None; of a larger file only the
    first 4 MiB.

    Raises:
        NotFound: the file cannot be read.
        UsageError: the file is not UTF-8.
    """
    where = data_path("profiles", "text", "python.txt") if path is None else path
    try:
        data = smallfiles.read_start(where, MAX_BYTES + 1)
    except OSError as error:
        raise NotFound(
            f"cannot read the text {str(where)[:300]}: {error.strerror}",
            hint="give a plain text file, or leave it out",
        ) from error
    cut = len(data) > MAX_BYTES
    text = _decoded(data[:MAX_BYTES], str(where)[:300], whole=not cut)
    return Passage(BUILT_IN if path is None else str(path), text, cut)


def read_with(folder: Path, passage: Passage, most: int, *, allow_special: bool = False) -> Reading:
    """Returns the first `most` token ids of a text by the tokenizer of the model in `folder`, with the mean bytes of
    text per token.

    Args:
        allow_special: whether the text may contain control tokens.

    Raises:
        BadCheckpoint: the tokenizer is missing, damaged or hostile.
    """
    tokenizer = load_tokenizer(folder)
    control = ControlTokens(tokenizer, allowed=allow_special)
    return Reading.of(_first_ids(control, passage.text, most), tokenizer, folder)


def _first_ids(control: ControlTokens, text: str, most: int) -> list[int]:
    """Returns the first `most` ids of a text; of a long one no more is encoded than surely has them."""
    start = text[: max(START_CHARS, 16 * most)]
    ids = control.encode_text(start)
    if len(start) < len(text) and len(ids) < most + SLACK:
        ids = control.encode_text(text)
    return ids[:most]


def _decoded(data: bytes, where: str, *, whole: bool) -> str:
    """Decodes UTF-8; in a cut file the last character may be cut too."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if not whole and error.start > len(data) - 4:
            return data[: error.start].decode("utf-8")
        raise UsageError(
            f"{where} is not UTF-8 text (byte {error.start})", hint="give a plain text file"
        ) from error
