"""Checks the files of a model against its manifest: their sizes, and their SHA-256."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ktcli.manifest import FileRecord

_BLOCK = 1 << 22


def digest(path: Path, advance: Callable[[int], None] = lambda n: None) -> str:
    """Returns the SHA-256 of a file, hexadecimal; `advance` is called with the number of bytes of each read."""
    state = hashlib.sha256()
    _feed(path, advance, state)
    return state.hexdigest()


def digests(path: Path, advance: Callable[[int], None] = lambda n: None) -> tuple[str, str]:
    """Returns two hashes of a file, hexadecimal: its SHA-256, and its SHA-1 as a git blob; `advance` is called with the
    number of bytes of each read.
    """
    state = hashlib.sha256()
    blob = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    _feed(path, advance, state, blob)
    return state.hexdigest(), blob.hexdigest()


def _feed(path: Path, advance: Callable[[int], None], *states: hashlib._Hash) -> None:
    """Updates hashes with the bytes of a file."""
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            for state in states:
                state.update(block)
            advance(len(block))


def check(
    folder: Path, files: tuple[FileRecord, ...], advance: Callable[[int], None]
) -> Iterator[tuple[FileRecord, str]]:
    """Compares the files in a folder with their records; yields each record with "" if size and SHA-256 match, else
    with a phrase that tells the problem.
    """
    for file in files:
        path = folder / file.name
        try:
            status = path.stat()
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                advance(file.size_bytes)
                yield file, "is not a plain file"
            elif size != file.size_bytes:
                advance(file.size_bytes)
                yield file, f"has {size} bytes, not {file.size_bytes}"
            else:
                yield (
                    file,
                    "" if digest(path, advance) == file.sha256 else "has a checksum mismatch",
                )
        except FileNotFoundError:
            advance(file.size_bytes)
            yield file, "is missing"
        except OSError as error:
            advance(file.size_bytes)
            yield file, f"cannot be read: {error.strerror or error}"
