"""The storage of tensors whose numbers are changed as they are read, see `CheckpointFiles.changed`.

What changes them, an adapter that is merged, is not known here. Files stay as they are; every stage of a conversion
(samples, factors of columns, codes) reads the changed numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ktcli.native import Numbers, Pool
from ktcli.records import dataclass
from ktcli.weights.storage import (
    ByteSpan,
    NumberChange,
    Raw,
    Read,
    ScalesNotKept,
    Storage,
    StorageSource,
)


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
        """The name, for messages, of the number type in which the files store the tensor, before it is changed."""
        return self.source.storage.label

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        """Returns the byte ranges to read for rows [span.start, span.stop) of the tensor as the files store it."""
        return self.source.storage.reads(self._stored(span))

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of the tensor, decoded to f32 and changed, from `raws`, the bytes of the
        ranges that `reads` returns."""
        stored = self._stored(span)
        values = pool.decode(self.source.storage.numbers(pool, stored, raws).whole)
        made = self.change.apply(self.source.name, span.start, values)
        return Numbers.of(np.ascontiguousarray(made, np.float32))

    def _stored(self, span: ByteSpan) -> ByteSpan:
        return replace(span, source=self.source)


def stored_as(source: StorageSource) -> Storage:
    """Returns the storage (number type and layout) that a tensor has in the checkpoint files, also where its numbers
    are changed as they are read."""
    storage = source.storage
    return storage.source.storage if isinstance(storage, ChangedStorage) else storage
