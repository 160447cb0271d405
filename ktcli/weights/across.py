"""Storage types with codes by input: GPTQ and AWQ store a matrix as [inputs, outputs].

    X.qweight   I32: GPTQ [k / 8, n], eight inputs of 4 bits in a word from its low end on, or [k / 4, n] of 8 bits; AWQ
                [k, n / 8], eight outputs in a word, in the order 0 2 4 6 1 3 5 7
    X.scales    F16, BF16 or F32 [groups, n]
    X.qzeros    I32 [groups, n / 8], eight outputs in a word (n / 4, four), in order or as AWQ orders them. GPTQ stores
                one less than it means, unless its checkpoint_format is gptq_v2
    X.g_idx     I32 [k] (GPTQ): the group of each input, which need not be in order (desc_act)

value = (code - zero) * scale; the source is X.weight, [n, k]. Sources: AutoGPTQ 0.7 and GPTQModel (qlinear), AutoAWQ
0.2 (modules/linear/gemm.py). auto-round 0.16 writes both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import BadCheckpoint
from ktcli.native import Blocked, Numbers, Pool
from ktcli.records import dataclass
from ktcli.weights.storage import (
    PLAIN,
    ByteSpan,
    Part,
    Raw,
    Read,
    ScalesNotKept,
    StorageSource,
    rows_of,
)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output the nibble i of a word belongs to
IN_ORDER = tuple(range(8))

Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Across(ScalesNotKept):
    """The storage of a GPTQ or AWQ matrix, coded by input. Parts: qweight, scales, qzeros, and g_idx where there is
    one.

    Attributes:
        bits: bits of a code, 4 or 8.
        group: the number of inputs that share a scale; 0: all.
        zero_plus: the number added to stored zeros.
        outputs: whether a word holds eight outputs (AWQ), not eight inputs.

    Products of 4 and 11 bits are exact in f32, so a format finds the same scales by itself.
    """

    label: str
    lossless: str | None
    bits: int
    group: int
    zero_plus: int
    outputs: bool

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        """Returns the byte ranges to read for rows [span.start, span.stop) of a GPTQ or AWQ matrix, in this order: its
        codes, its scales, its zero points and, if it has one, the whole of its `g_idx` (the group of each column)."""
        codes, scales, zeros, *order = span.source.parts
        words = span.start // self._each, -(-span.stop // self._each)
        columns = words if self.outputs else (span.start, span.stop)
        found = [
            _columns(codes, *columns),
            _columns(scales, span.start, span.stop),
            _columns(zeros, *words),
        ]
        return [*found, *(rows_of(part, part.entry.size_bytes, 0, 1) for part in order)]

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of a GPTQ or AWQ matrix, [rows, columns], as packed integer codes
        (uint8) with f32 scales and zero points, [rows, groups of columns] (or [rows, columns] where `g_idx` mixes the
        groups), from `raws`, the bytes of the ranges that `reads` returns."""
        k, parts = span.source.columns, span.source.parts
        group = self.group or k
        groups = -(-k // group)
        above = span.start % self._each  # outputs of the first word that lie before the span
        wanted = slice(above, above + span.rows)
        zeros = _outputs(raws[2].view("<u4").reshape(groups, -1), self._order)[:, wanted]
        dtype = PLAIN[parts[1].entry.dtype].dtype
        scale = pool.decode(Numbers(dtype, raws[1], groups, span.rows).whole).T
        zero = zeros.T.astype(np.float32) + np.float32(self.zero_plus)
        wide = group
        if (
            len(raws) > 3
            and (chosen := _reordered(span.source, raws[3], group, groups)) is not None
        ):
            scale, zero, wide = scale[:, chosen], zero[:, chosen], 1
        if self.outputs:
            codes = _outputs(raws[0].view("<u4").reshape(k, -1), self._order)[:, wanted]
            stored = np.ascontiguousarray((codes[0::2] | codes[1::2] << 4).T)
        else:
            words = raws[0].view("<u4").reshape(k // self._each, span.rows)
            stored = np.ascontiguousarray(words.T).view(np.uint8)
        table = np.arange(1 << self.bits, dtype=np.float32)
        return Numbers(Blocked(self.bits, table, (1, wide), scale, zero), stored, span.rows, k)

    @property
    def _each(self) -> int:
        """The codes of a word."""
        return 32 // self.bits

    @property
    def _order(self) -> tuple[int, ...]:
        return AWQ_ORDER if self.outputs else IN_ORDER[: self._each]


def _columns(part: Part, start: int, stop: int) -> Read:
    """Columns [start, stop) of a two-dimensional part."""
    rows, columns = part.entry.shape
    width = part.entry.size_bytes // (rows * columns)
    offset = part.entry.offset + start * width
    return Read(part.file, offset, (stop - start) * width, rows, columns * width)


def _outputs(words: Words, order: Sequence[int]) -> NDArray[np.uint8]:
    """Codes [rows, outputs] of words [rows, words] that hold as many outputs each as `order` lists."""
    bits = 32 // len(order)
    codes = np.empty((*words.shape, len(order)), dtype=np.uint8)
    for place, output in enumerate(order):
        codes[:, :, output] = words >> np.uint32(bits * place) & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), -1)


def _reordered(
    source: StorageSource, raw: Raw, group: int, groups: int
) -> NDArray[np.int32] | None:
    """The group of each input [k]; None: the inputs are in the order of their groups.

    Raises:
        BadCheckpoint: an input names a group that does not exist.
    """
    chosen = raw.view("<i4")
    if np.array_equal(chosen, np.arange(len(chosen)) // group):
        return None
    if chosen.min() < 0 or chosen.max() >= groups:
        raise BadCheckpoint(f"{source.parts[3].name} names a group that is not one of {groups}")
    return chosen
