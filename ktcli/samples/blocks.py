"""Reads the text of a data file in blocks, whatever its size: UTF-8, one bounded piece in memory at a time."""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ktcli.errors import NotFound, gib
from ktcli.samples.sample import BadData

# Of one row; the longest that a context of a million tokens holds has 4 million.
MAX_ROW_CHARS = 8 << 20
_BLOCK_BYTES = 1 << 16
T = TypeVar("T")


def too_long(name: str, line: int) -> BadData:
    """Returns the error to raise for a row, beginning in line `line`, that has more than MAX_ROW_CHARS (8 Mi)
    characters.
    """
    return BadData(
        f"{name}, line {line}: a row is larger than {gib(MAX_ROW_CHARS)}, the most that kt reads",
        hint="split it into several rows; no model reads that much at once",
    )


def open_plain(path: Path) -> int:
    """Returns a file descriptor, open for reading, of a plain file that is not empty.

    Raises:
        NotFound: there is no such file.
        BadData: it is no plain file (but a pipe or device, say), is empty, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"the data file {path} does not exist") from None
    except ValueError:  # a zero byte in the name
        raise BadData(f"{str(path)!r} is not a file name") from None
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}") from error
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size:
        return descriptor
    os.close(descriptor)
    if stat.S_ISREG(found.st_mode):
        raise BadData(f"{path} is empty")
    kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a plain file"
    raise BadData(f"{path} is {kind}", hint="name a data file, for example: --data mine.jsonl")


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, as hexadecimal digits.

    Raises:
        NotFound, BadData: as `open_plain`.
    """
    with os.fdopen(open_plain(path), "rb") as file:
        return _told(path, lambda: hashlib.file_digest(file, "sha256").hexdigest())


def blocks(path: Path, told: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yields the text of a UTF-8 file in pieces, without a byte order mark at its beginning.

    Args:
        told: called with the number of bytes read so far.
    Raises:
        NotFound, BadData: as `open_plain`, or the file is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # some programs write a mark in front
    line, done = 1, 0
    with os.fdopen(open_plain(path), "rb") as file:
        while True:
            data = _told(path, lambda: file.read(_BLOCK_BYTES))
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line += bytes(error.object[: error.start]).count(b"\n")
                raise BadData(
                    f"{path.name}, line {line}: it is not UTF-8 text",
                    hint=f"convert it, for example: iconv -f latin1 -t utf-8 {path.name}",
                ) from None
            done += len(data)
            line += text.count("\n")
            if told:
                told(done)
            if text:
                yield text
            if not data:
                return


def lines(path: Path, told: Callable[[int], None] | None = None) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, their ends included.

    Raises:
        NotFound, BadData: as `blocks`, or a line is longer than a row may be.
    """
    rest, line = "", 1
    for block in blocks(path, told):
        *whole, rest = (rest + block).split("\n")
        for each in whole:
            yield f"{each}\n"
        line += len(whole)
        if len(rest) > MAX_ROW_CHARS:
            raise too_long(path.name, line)
    if rest:
        yield rest


def _told(path: Path, call: Callable[[], T]) -> T:
    try:
        return call()
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}") from error
