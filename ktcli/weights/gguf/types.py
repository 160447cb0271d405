"""Decodes the number types of GGUF files: the usual ones are decoded by the library (blocks.c), the rest by the
`gguf` package, which knows them all and uses one core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ktcli.native import BadNumber, DType, Format, Numbers, Pool, Scale
from ktcli.weights.formats import LINEAR
from ktcli.weights.storage import PLAIN, ByteSpan, Matrix, PlainStorage, Raw, Read, Storage, rows_of


@dataclass(frozen=True, slots=True)
class HalfScales(PlainStorage):
    """A storage of blocks that begin with an f16 scale and hold codes -8..7: 4 bits and f32 scales hold them
    exactly."""

    def kept(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw], fmt: Format) -> Matrix | None:
        elements, size = self.dtype.block
        if (fmt.bits, fmt.group, fmt.scale, fmt.codebook) != (4, elements, Scale.F32, LINEAR):
            return None
        halves = np.ascontiguousarray(raws[0].reshape(-1, size)[:, :2]).view("<f2")
        return halves.astype(np.float32).reshape(span.rows, -1)


@dataclass(frozen=True, slots=True)
class Packaged:
    """A storage of blocks of a type that the `gguf` package decodes; one part."""

    dtype: str
    lossless: None = None

    @property
    def label(self) -> str:
        return self.dtype

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        part = span.source.parts[0]
        row_bytes = part.entry.size_bytes // max(span.source.rows, 1)
        return (rows_of(part, row_bytes, span.start, span.stop),)

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = raws[0].reshape(span.rows, -1)
        with np.errstate(all="ignore"):  # the result is checked below
            out: Matrix = dequantize(rows, GGMLQuantizationType[self.dtype])
        if not np.isfinite(out).all():
            raise BadNumber("a value is NaN or Inf")
        return Numbers.of(np.ascontiguousarray(out))

    def kept(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw], fmt: Format) -> Matrix | None:
        return None


_OTHERS = (
    "Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0",
)  # fmt: skip
# The storages by the types' names in ggml.
STORAGES: dict[str, Storage] = {
    **PLAIN,
    "Q4_0": HalfScales(DType.Q4_0, "int4-g32-f32"),
    **{name: PlainStorage(DType[name], None) for name in ("Q4_1", "Q5_0", "Q5_1", "Q8_0")},
    **{name: PlainStorage(DType[name], None) for name in ("Q4_K", "Q5_K", "Q6_K")},
    "MXFP4": PlainStorage(DType.GGUF_MXFP4, "mxfp4"),
    **{name: Packaged(name) for name in _OTHERS},
}
