"""A checkpoint whose numbers are changed as they are read: a `Reader` that wraps another one.

What changes them, an adapter that is merged, is not known here. Files stay as they are; every stage of a conversion
(samples, factors of columns, codes) reads the changed numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ktcli.errors import BadCheckpoint
from ktcli.native import Numbers, Pool
from ktcli.records import dataclass
from ktcli.weights.storage import (
    ByteSpan,
    Matrix,
    Raw,
    Read,
    Reader,
    ScalesNotKept,
    Storage,
    StorageSource,
)


class NumberChange(Protocol):
    """The interface of a change to the numbers of some of a checkpoint's tensors. Several threads may call it at
    once.
    """

    @property
    def digest(self) -> str:
        """The SHA-256 of all its inputs, hexadecimal."""

    @property
    def names(self) -> Collection[str]:
        """The names of the checkpoint's tensors that it changes."""

    def apply(self, name: str, start: int, values: Matrix) -> Matrix:
        """Returns the new values of rows [start, start + len(values)) of a tensor, f32; `values` may be changed."""


@dataclass(frozen=True, slots=True, eq=False)
class ChangedStorage(ScalesNotKept):
    """A storage whose numbers are changed after they are decoded.

    Attributes:
        source: the tensor as it is stored.
        change: what is done.
    """

    source: StorageSource
    change: NumberChange
    lossless: None = None

    @property
    def label(self) -> str:
        """The name of the storage that the tensor has in the files."""
        return self.source.storage.label

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        """Returns the reads of the same rows as they are stored."""
        return self.source.storage.reads(self._stored(span))

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns the changed rows as a matrix of f32."""
        stored = self._stored(span)
        values = pool.decode(self.source.storage.numbers(pool, stored, raws).whole)
        made = self.change.apply(self.source.name, span.start, values)
        return Numbers.of(np.ascontiguousarray(made, np.float32))

    def _stored(self, span: ByteSpan) -> ByteSpan:
        return replace(span, source=self.source)


class ChangedCheckpoint:
    """An open checkpoint with a change, a `Reader`. The caller closes it, and with it the checkpoint.

    Raises:
        BadCheckpoint: a tensor to be changed is not there.
    """

    def __init__(self, checkpoint: Reader, change: NumberChange) -> None:
        self._inner, self._change = checkpoint, change
        self._changed = {name: self._source(name) for name in change.names}

    @property
    def change(self) -> NumberChange:
        """The change to the numbers."""
        return self._change

    def _source(self, name: str) -> StorageSource:
        stored = self._inner.find(name)
        return replace(stored, storage=ChangedStorage(stored, self._change))

    @property
    def path(self) -> Path:
        """The path of the checkpoint."""
        return self._inner.path

    @property
    def config(self) -> Mapping[str, Any]:
        """The checkpoint's config."""
        return self._inner.config

    @property
    def description(self) -> str:
        """The name of the file that lists the tensors."""
        return self._inner.description

    @property
    def digest(self) -> str:
        """The checkpoint's digest: the manifest names the change beside it."""
        return self._inner.digest

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._inner.names

    def unused(self, taken: Collection[str]) -> list[str]:
        """Returns the names of the parts besides `taken`."""
        return self._inner.unused(taken)

    @property
    def small_files(self) -> tuple[str, ...]:
        """The names of the small files that a pack contains, too."""
        return self._inner.small_files

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> StorageSource:
        """Returns the tensor called `name`, changed if the change applies to it.

        Raises:
            BadCheckpoint: as of the checkpoint.
        """
        found = self._inner.find(name, shape)
        return self._changed.get(name, found)

    def small_file(self, name: str) -> bytes:
        """Returns the contents of a small file."""
        return self._inner.small_file(name)

    def read(self, wanted: Read, into: Raw | None = None) -> Raw:
        """Returns bytes of the checkpoint's files."""
        return self._inner.read(wanted, into)

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns the rows of a span as numbers, changed if the change applies to them."""
        return self._inner.numbers(pool, span, raws)

    def decode(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Matrix:
        """Returns the rows of a span decoded to f32, changed if the change applies to them."""
        return self._inner.decode(pool, span, raws)

    def refusal(self, source: StorageSource, error: BadCheckpoint) -> BadCheckpoint:
        """Returns `error` with the source's name and file added."""
        return self._inner.refusal(source, error)

    def close(self) -> None:
        """Closes the checkpoint."""
        self._inner.close()


def stored_as(source: StorageSource) -> Storage:
    """Returns the storage that a tensor has in the files, changed or not."""
    storage = source.storage
    return storage.source.storage if isinstance(storage, ChangedStorage) else storage


def change_of(checkpoint: Reader) -> str:
    """Returns the SHA-256 of the change to a checkpoint's numbers, hexadecimal; "": there is none."""
    return checkpoint.change.digest if isinstance(checkpoint, ChangedCheckpoint) else ""
