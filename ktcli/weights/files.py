"""The open files of a checkpoint, read in pieces by several threads at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from ktcli.errors import BadCheckpoint
from ktcli.native import BadNumber, Numbers, Pool
from ktcli.weights.changed import ChangedStorage
from ktcli.weights.storage import ByteSpan, Matrix, NumberChange, Raw, Read, StorageSource


class OpenFiles:
    """Open files by the names in `Read` objects: the part of a `Reader` that does the reading. Not mapped: a failing
    disk is an error and not a signal. Close it, or use it in a `with` statement.

    Args:
        paths: the path of each file by that name.
        hint: what the user can do about a file that is no longer what it was.
    """

    def __init__(self, paths: Mapping[str, Path], hint: str) -> None:
        self._hint = hint
        self._descriptors: dict[str, int] = {}
        try:
            for name, path in paths.items():
                self.open(name, path)
        except BadCheckpoint:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, name: str, path: Path) -> None:
        """Opens the file at `path`, so that it can be read under the name `name`.

        Raises:
            BadCheckpoint: the file cannot be read.
        """
        try:
            self._descriptors[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BadCheckpoint(f"{name} cannot be read: {error.strerror}") from error

    def forget(self, name: str) -> None:
        """Closes the file called `name`, if it is open; no thread may be reading it."""
        if (descriptor := self._descriptors.pop(name, None)) is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Closes all open files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, wanted: Read, into: Raw | None = None) -> Raw:
        """Returns the bytes of the ranges `wanted` of a file, uint8, one range after the other: in the memory `into`,
        or in new memory. Several threads may call it at once.

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

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of a tensor in their stored number type, from `raws`, the bytes of the
        ranges that its storage reads for the span.

        Raises:
            BadCheckpoint: a scale is NaN or Inf, or parts of the source contradict each other.
        """
        try:
            return span.source.storage.numbers(pool, span, raws)
        except BadCheckpoint as error:
            raise self.refusal(span.source, error) from None

    def decode(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Matrix:
        """Returns rows [span.start, span.stop) of a tensor decoded to f32, [rows, columns], from `raws`, the bytes of
        the ranges that its storage reads for the span.

        Raises:
            BadCheckpoint: a value is NaN or Inf, or parts of the source contradict each other.
        """
        numbers = self.numbers(pool, span, raws)
        try:
            return pool.decode(numbers.whole)
        except BadNumber as error:
            raise self.refusal(span.source, error) from None

    def refusal(self, source: StorageSource, error: BadCheckpoint) -> BadCheckpoint:
        """Returns a new error like `error`, about bad numbers of a tensor, whose message names the tensor and its
        file."""
        what = "contains NaN or Inf" if isinstance(error, BadNumber) else f"is damaged: {error}"
        return BadCheckpoint(f"{source.name} in {source.file} {what}", hint=self._hint)


class CheckpointFiles(OpenFiles):
    """The open files of a checkpoint, whose numbers may be changed as they are read: the common part of `Reader`s."""

    change: NumberChange | None = None

    def __init__(self, paths: Mapping[str, Path], hint: str) -> None:
        super().__init__(paths, hint)
        self._changed: Mapping[str, StorageSource] = {}

    def changed(self, change: NumberChange) -> Self:
        """Returns a copy of this open checkpoint in which `change` (such as a merged adapter) modifies the numbers of
        tensors as they are read. Both share the open files: closing either closes both.

        Raises:
            BadCheckpoint: a tensor to be changed is missing.
        """
        made = copy(self)
        made.change = change
        sources = {name: self.find(name) for name in change.names}
        made._changed = {
            name: replace(source, storage=ChangedStorage(source, change))
            for name, source in sources.items()
        }
        return made

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> StorageSource:
        """Returns the checkpoint tensor called `name`: its shape, and where and how its numbers are stored. In a copy
        that `changed` made, they are read with the change.

        Raises:
            BadCheckpoint: the tensor is missing, stored in a way that cannot be read, or not of the shape `shape`.
        """
        try:
            found = self._stored(name, shape)
        except BadCheckpoint as error:
            error.hint = error.hint or self._hint
            raise
        return self._changed.get(name, found)

    def _stored(self, name: str, shape: tuple[int, ...] | None) -> StorageSource:
        """Returns the tensor called `name` as it is stored; `find` gives errors their hint."""
        raise NotImplementedError
