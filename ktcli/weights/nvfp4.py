"""The NVFP4 storage type: E2M1 codes with an E4M3 scale per 16 columns, and one f32 number per matrix.

    compressed-tensors  X.weight_packed U8 [n, k / 2], X.weight_scale F8_E4M3 [n, k / 16], and X.weight_global_scale
                        F32, by which scales are divided
    modelopt            X.weight U8 [n, k / 2], X.weight_scale F8_E4M3 [n, k / 16], and X.weight_scale_2 F32, by which
                        scales are multiplied

Two codes lie in a byte, that of the even column in its low half; the source is X.weight, [n, k]. Sources:
compressed-tensors 0.20 (compressors/nvfp4), modelopt 0.47 (quantization/qtensor/nvfp4_tensor.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktcli.native import Blocked, Numbers, Pool
from ktcli.records import dataclass
from ktcli.weights.coded import E2M1_VALUES
from ktcli.weights.oracle import E4M3_VALUES
from ktcli.weights.storage import ByteSpan, Raw, Read, ScalesNotKept, rows_of

GROUP = 16  # columns that share an E4M3 scale


@dataclass(frozen=True, slots=True)
class NvFp4(ScalesNotKept):
    """The storage of an NVFP4 matrix; parts: codes, scales and the number of the matrix. No format has such scales:
    the nearest of any format holds it.

    Attributes:
        divides: whether scales are divided by the number of the matrix, not multiplied.
    """

    divides: bool
    label: str = "nvfp4"
    lossless: None = None

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        """Returns the reads of a span: its codes, their scales, and the number of the matrix."""
        codes, scales, whole = span.source.parts
        k = span.source.columns
        return (
            rows_of(codes, k // 2, span.start, span.stop),
            rows_of(scales, k // GROUP, span.start, span.stop),
            rows_of(whole, whole.entry.size_bytes, 0, 1),
        )

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns the span as a matrix of 4-bit codes with one f32 scale for 16 columns."""
        with np.errstate(all="ignore"):  # what is NaN or Inf is refused below
            whole = raws[2].view("<f4")[0]
            stored = E4M3_VALUES[raws[1]].reshape(span.rows, -1)
            values = stored / whole if self.divides else stored * whole
        scale = pool.decode(Numbers.of(values).whole)
        table = np.array(E2M1_VALUES, np.float32)
        return Numbers(
            Blocked(4, table, (1, GROUP), scale), raws[0], span.rows, span.source.columns
        )
