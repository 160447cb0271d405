"""Storage types with codes and scales, row by row: FP8, packed integers, MXFP4, NVFP4.

The codes of a row lie together; 4-bit ones two in a byte, the first in its low nibble (so that eight fill an
int32 from its low end on). A scale belongs to a block of rows and columns of a matrix, and scales lie in the
order of their blocks.

    FP8            X, and X_scale_inv or X_scale: F32, BF16, F16 or E8M0. Scales of 128 x 128 blocks, of rows
                   ("channels") or of the whole matrix. They multiply, although one is called inverse
    MXFP8          X, and X_scale or X_scale_inv: E8M0 [..., n, k / 32]
    FP8, V4        X.weight, and X.scale: E8M0 or F32, of 128 x 128 blocks
    int8           X.weight I8, and X.weight_scale of each row
    packed int     X.weight_packed I32 [n, k * bits / 32] of codes + 2^(bits - 1), X.weight_scale of each row, or of
                   each row and group of columns; X.weight_zero_point I32 [n * bits / 32, groups] if asymmetric
    MXFP4          X_blocks U8 [..., n, k / 32, 16] of E2M1 codes, and X_scales U8 [..., n, k / 32] of exponents + 127;
                   the source is called X_blocks and has the shape [..., n, k]
    FP4, V4        X.weight I8 [n, k / 2] of E2M1 codes, and X.scale E8M0 [n, k / 32]: the numbers of MXFP4; the
                   source has the shape [n, k]
    MXFP4, others  X.weight_packed (compressed-tensors) or X.weight (modelopt, Quark) U8 [n, k / 2] of E2M1 codes, and
                   X.weight_scale E8M0 [n, k / 32]
    NVFP4          X.weight_packed (compressed-tensors) or X.weight (modelopt) U8 [n, k / 2] of E2M1 codes,
                   X.weight_scale F8_E4M3 [n, k / 16], and one F32 number: X.weight_global_scale, by which scales are
                   divided, or X.weight_scale_2, by which they are multiplied; the source is X.weight, [n, k]

E8M0 is a power of two: the byte b means 2^(b - 127), 255 is NaN.

Sources: compressed-tensors 0.20 (compressors/quantized_compressors and nvfp4), transformers 5.23 (integrations/mxfp4.py
and finegrained_fp8.py), modelopt 0.47 (quantization/qtensor/nvfp4_tensor.py), DeepSeek-V4's inference/convert.py and
model.py, the OCP microscaling formats 1.0, the published checkpoints of DeepSeek-V3, Kimi-K2-Thinking and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ktcli.native import Blocked, Codes, Format, Numbers, Pool, Scale
from ktcli.records import dataclass
from ktcli.weights.storage import (
    PLAIN,
    ByteSpan,
    Matrix,
    Raw,
    Read,
    ScalesNotKept,
    StorageSource,
    rows_of,
)

FP8_BLOCK = 128  # rows and columns that share one scale
NVFP4_COLUMNS = 16  # that share an E4M3 scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*E2M1, *(-value for value in E2M1))
E8M0 = ("F8_E8M0", "U8")  # types of powers of two, a byte each
E8M0_NAN = 255
SCALES = {*PLAIN, *E8M0}  # how scales may be stored


@dataclass(frozen=True, slots=True)
class Coded:
    """A storage of codes and scales; parts: codes, scales, and zero points where there are any.

    Attributes:
        bits: bits of a code, 4 or 8.
        table: the value of each code.
        block: the numbers of rows and of columns that share a scale; 0: all of a matrix.
        kind: the kind of the codes; None: no format has the same.
    """

    label: str
    lossless: str | None
    bits: int
    table: tuple[float, ...]
    block: tuple[int, int]
    kind: Codes | None = None

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        """Returns the byte ranges to read for rows [span.start, span.stop) of a quantized tensor, in this order: its
        codes, the scales of their blocks and, if there are any, the zero points."""
        codes, scales, *zeros = span.source.parts
        first, last = self._blocks(span)
        row_bytes = codes.entry.size_bytes // span.source.rows
        scale_bytes = scales.entry.size_bytes // self._all_blocks(span.source)
        found = [
            rows_of(codes, row_bytes, span.start, span.stop),
            rows_of(scales, scale_bytes, first, last),
        ]
        for part in zeros:  # of eight rows in an int32
            words = part.entry.size_bytes // part.entry.shape[0]
            found.append(rows_of(part, words, span.start * self.bits // 32, self._zero_stop(span)))
        return found

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of a quantized tensor, [rows, columns], as codes with the f32 scales
        and, if there are any, zero points of its blocks, from `raws`, the bytes of the ranges that `reads` returns."""
        high, wide = self._block(span.source)
        scale = self._scales(pool, span, raws[1])
        how = Blocked(
            self.bits,
            np.array(self.table, np.float32),
            (high, wide),
            scale,
            self._zeros(span, raws[2], scale.shape[1]) if len(raws) > 2 else None,
            self._row(span) % high,
        )
        return Numbers(how, raws[0], span.rows, span.source.columns)

    def kept(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw], fmt: Format) -> Matrix | None:
        """Returns the stored scales of the rows of a span, one for each group of columns of `fmt`, f32 [rows, groups];
        None: the format `fmt` cannot hold the codes exactly with them."""
        high, wide = self._block(span.source)
        k = span.source.columns
        covered = wide >= k or (fmt.group and wide % fmt.group == 0)
        same = fmt.scale is Scale.F32 and fmt.bits == self.bits and fmt.codes is self.kind
        linear = fmt.bits == 8 or fmt.codebook == self.table
        if not (same and linear and covered) or fmt.rotation or len(span.source.parts) > 2:
            return None
        inside = self._row(span) % high
        rows = np.arange(inside, inside + span.rows) // high
        groups = -(-k // fmt.group) if fmt.group else 1
        columns = np.arange(groups) * fmt.group // wide
        return np.ascontiguousarray(self._scales(pool, span, raws[1])[rows][:, columns])

    def _scales(self, pool: Pool, span: ByteSpan, raw: Raw) -> Matrix:
        """The scales of the span's blocks, [rows of blocks, columns of blocks] f32."""
        dtype = span.source.parts[1].entry.dtype
        first, last = self._blocks(span)
        columns = -(-span.source.columns // self._block(span.source)[1])
        if dtype in PLAIN:
            return pool.decode(Numbers(PLAIN[dtype].dtype, raw, last - first, columns).whole)
        bits = raw.astype(np.uint32) << 23
        bits[raw == E8M0_NAN] |= 1 << 22  # NaN; 0 is 2^-127, which an f32 holds as a subnormal
        values = np.where(raw == 0, np.float32(2.0**-127), bits.view(np.float32))
        return pool.decode(Numbers.of(values.reshape(last - first, columns)).whole)

    def _zeros(self, span: ByteSpan, raw: Raw, groups: int) -> Matrix:
        """The zero point of each group, [rows, groups] f32, from codes of which 32 / bits rows lie in one int32."""
        per_word = 32 // self.bits
        words = raw.view("<u4").reshape(-1, groups)
        shifts = np.arange(per_word, dtype=np.uint32) * self.bits
        codes = words[:, None] >> shifts[None, :, None] & ((1 << self.bits) - 1)
        above = span.start % per_word
        rows = codes.reshape(-1, groups)[above : above + span.rows]
        zeros: Matrix = np.array(self.table, np.float32)[rows]
        return zeros

    def _zero_stop(self, span: ByteSpan) -> int:
        return -(-span.stop * self.bits // 32)

    def _row(self, span: ByteSpan) -> int:
        """The span's first row within its matrix."""
        return span.start % span.source.shape[-2]

    def _block(self, source: StorageSource) -> tuple[int, int]:
        return self.block[0] or source.shape[-2], self.block[1] or source.columns

    def _blocks(self, span: ByteSpan) -> tuple[int, int]:
        """The first row of blocks that the span has, and the row after the last."""
        height, row = span.source.shape[-2], self._row(span)
        high = self._block(span.source)[0]
        above = span.start // height * -(-height // high)
        return above + row // high, above + -(-(row + span.rows) // high)

    def _all_blocks(self, source: StorageSource) -> int:
        """The number of rows of blocks of the whole source."""
        return prod(source.shape[:-2]) * -(-source.shape[-2] // self._block(source)[0])


def _e4m3(code: int) -> float:
    """Returns the value of an E4M3 byte, computed from sign, exponent and fraction."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -size if code & 128 else size


def _integers(bits: int) -> tuple[float, ...]:
    return tuple(float(code - (1 << bits - 1)) for code in range(1 << bits))


E4M3_VALUES = np.array([_e4m3(code) for code in range(256)], np.float32)
_E4M3 = tuple(map(float, E4M3_VALUES))
_SIGNED = tuple(float(code - 256 * (code > 127)) for code in range(256))


def fp8(block: tuple[int, int]) -> Coded:
    """Returns the storage of FP8 (E4M3) codes with one scale for each block of `block` (rows, columns); 0 stands for
    all rows or columns of a matrix."""
    named = {
        (FP8_BLOCK, FP8_BLOCK): "blocks of 128 x 128",
        (1, 0): "rows",
        (0, 0): "whole matrices",
    }
    label = f"FP8 (E4M3) with scales of {named.get(block, block)}"
    return Coded(label, "fp8", 8, _E4M3, block, Codes.E4M3)


def integers(bits: int, group: int, scale: str, *, symmetric: bool = True) -> Coded:
    """Returns the storage of matrices of integer codes of `bits` (4 or 8) bits, with one scale for each `group` columns
    of a row (0: for the whole row) and, unless `symmetric`, zero points. `scale` is the type of the scales: "BF16",
    "F32" …"""
    of = f"groups of {group}" if group else "rows"
    label = f"int{bits} with {scale.lower()} scales of {of}"
    lossless = lossless_int4(group, scale) if bits == 4 and symmetric else None
    return Coded(label, lossless, bits, _integers(bits), (1, group), Codes.INTEGER)


INT8_ROWS = Coded("int8 with scales of rows", None, 8, _SIGNED, (1, 0), Codes.INTEGER)
MXFP4 = Coded("mxfp4", "mxfp4", 4, E2M1_VALUES, (1, 32))
MXFP8 = Coded("mxfp8", "mxfp8", 8, _E4M3, (1, 32), Codes.E4M3)


def lossless_int4(group: int, scale: str) -> str | None:
    """Returns the name of kt's smallest 4-bit format that exactly holds symmetric 4-bit codes with one scale of the
    type `scale` ("BF16", "F32" …) for every `group` columns; None: there is none."""
    exact = [] if scale == "BF16" else ["-f32"]
    if group % 128 == 0:
        return "".join(["int4-g128", *exact])
    if group == 64 and not exact:
        return "int4"
    return "".join(["int4-g32", *exact]) if group % 32 == 0 else None


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
        """Returns the byte ranges to read for rows [span.start, span.stop) of an NVFP4 matrix, in this order: its
        codes, their scales, and the one factor of the whole matrix."""
        codes, scales, whole = span.source.parts
        k = span.source.columns
        return (
            rows_of(codes, k // 2, span.start, span.stop),
            rows_of(scales, k // NVFP4_COLUMNS, span.start, span.stop),
            rows_of(whole, whole.entry.size_bytes, 0, 1),
        )

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of an NVFP4 matrix, [rows, columns], as 4-bit codes with one f32 scale
        for every 16 columns, from `raws`, the bytes of the ranges that `reads` returns."""
        with np.errstate(all="ignore"):  # what is NaN or Inf is refused below
            whole = raws[2].view("<f4")[0]
            stored = E4M3_VALUES[raws[1]].reshape(span.rows, -1)
            values = stored / whole if self.divides else stored * whole
        scale = pool.decode(Numbers.of(values).whole)
        table = np.array(E2M1_VALUES, np.float32)
        return Numbers(
            Blocked(4, table, (1, NVFP4_COLUMNS), scale), raws[0], span.rows, span.source.columns
        )
