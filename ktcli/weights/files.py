"""The open files of a checkpoint, read in pieces by several threads at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ktcli.errors import BadCheckpoint
from ktcli.native import Pool
from ktcli.weights.storage import Matrix, Raw, Read, Span


class Files:
    """Files by the name that a `Read` gives them. Not mapped: a failing disk is an error and not a signal.

    Args:
        paths: by name.
        hint: what to do about a file that is not what it was.
    """

    def __init__(self, paths: Mapping[str, Path], hint: str) -> None:
        self._hint = hint
        self._descriptors: dict[str, int] = {}
        try:
            for name, path in paths.items():
                self._descriptors[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            raise BadCheckpoint(f"{name} cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, wanted: Read, into: Raw | None = None) -> Raw:
        """The bytes, in the given memory or new one.

        Raises:
            BadCheckpoint: the file ended early or the disk failed.
        """
        raw = np.empty(wanted.total_bytes, dtype=np.uint8) if into is None else into
        for i in range(wanted.count):
            part = raw[i * wanted.size_bytes : (i + 1) * wanted.size_bytes]
            self._fill(wanted.file, wanted.offset + i * wanted.stride, part)
        return raw

    def _fill(self, file: str, offset: int, raw: Raw) -> None:
        view, done = raw.data, 0
        while done < raw.size:
            try:
                got = os.preadv(self._descriptors[file], [view[done:]], offset + done)
            except OSError as error:
                raise BadCheckpoint(f"{file} cannot be read: {error.strerror}") from error
            if got == 0:
                raise BadCheckpoint(f"{file} became shorter while it was read", hint=self._hint)
            done += got

    def decode(self, pool: Pool, span: Span, raws: Sequence[Raw]) -> Matrix:
        """The rows of a span as f32, from the bytes that its storage wanted.

        Raises:
            BadCheckpoint: a value is NaN or Inf, or parts of the source contradict each other.
        """
        source = span.source
        try:
            return source.storage.decode(pool, span, raws)
        except BadCheckpoint as error:
            bad_value = str(error).startswith("value at")
            what = "holds NaN or Inf" if bad_value else f"is damaged: {error}"
            raise BadCheckpoint(f"{source.name} in {source.file} {what}", hint=self._hint) from None
