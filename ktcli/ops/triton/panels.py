"""Reads panels of packed weights in Triton kernels: locates words, decodes and unpacks them.

The layout is that of kt.h ("number formats and packed weights"), read as 32-bit words: a panel is
`lines` x 16 rows of words, one line of 64 bytes after the other, then the scales. A word holds 32 / bits
codes of one row. So a tile [lines, 16 rows] of words is one stretch of memory, and four neighbouring words
make the widest load of a thread, 16 bytes, whatever the format.

Codes become floats without the conversion instructions, which run at a quarter of the rate or less: the bits
of a code are put into the mantissa of a power of two, small ones, so that little precision is lost where the
power of two is subtracted from sums instead of from every code. Per weight: a logical operation, and a shift
for five of eight nibbles.

A kernel gets the format as the constants that `panel_arguments` makes:
    BITS, GROUP        of kt_format; BITS of a format of 6 is 4, of the lower ones of its codes
    SCALE_BYTES        4 f32, 2 bf16, 1 e8m0 (bytes) or e4m3 (signed ones), 0 none
    COLUMNS            k', the padded columns
    PANEL_BYTES        from one panel to the next
    BOOK_LOW/HIGH      the codebook, value + 128 in 8 bytes each; both 0: codes are integers, of 4 bits -8..7;
                       of 8 bits, both -1: codes are E4M3; of 4 bits, both -1: they have two more
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.native import Codes
from ktcli.ops.torch.packed import SCALE_TYPES, Packed, layout, unpack_many

_UNPACK_LINES = 32


def panel_arguments(w: Packed) -> dict[str, int]:
    """Returns the compile-time constants by name (BITS, GROUP, COLUMNS …) that tell kernels the format and layout of a
    packed weight; its format must not be rotated.
    """
    assert not w.format.rotation, "no kernel here undoes a rotation"
    lay = layout(w.format, w.k)
    is_six = w.format.bits == 6
    marked = is_six or w.format.codes is Codes.E4M3
    low, high = (-1, -1) if marked else _codebook_words(w.format.codebook)
    return {
        "BITS": 4 if is_six else w.format.bits,
        "GROUP": w.format.group,
        "SCALE_BYTES": w.format.scale.bits // 8,
        "COLUMNS": lay.columns,
        "PANEL_BYTES": lay.panel_bytes,
        "BOOK_LOW": low,
        "BOOK_HIGH": high,
    }


def lines_of(arguments: dict[str, int]) -> int:
    """Returns the number of lines of a panel of a packed weight. A line is 64 bytes, a 32-bit word of codes for each of
    16 rows; in formats of 6 bits only lines with the lower 4 bits count.

    Args:
        arguments: the constants that `panel_arguments` returned for the weight.
    """
    return arguments["COLUMNS"] * arguments["BITS"] // 32


def words_and_scales(w: Packed) -> tuple[Tensor, Tensor]:
    """Returns two views of the bytes of a packed weight: as int32 words, and as numbers of the type of its scales
    (int32 words again where it has none).
    """
    assert w.data.is_contiguous()
    words = w.data.view(torch.int32)
    scale = SCALE_TYPES.get(w.format.scale)
    return words, words if scale is None else w.data.view(scale)


def _codebook_words(codebook: tuple[int, ...]) -> tuple[int, int]:
    """Returns 16 values as two signed 64-bit integers, value + 128 per byte; (0, 0) for the linear codebook."""
    if not codebook or codebook == tuple(range(-8, 8)):
        return 0, 0
    raw = bytes(value + 128 for value in codebook)
    low, high = (int.from_bytes(part, "little", signed=True) for part in (raw[:8], raw[8:]))
    return low, high


@triton.jit
def raw_code(
    words, zero, n: tl.constexpr, BITS: tl.constexpr, BOOK_LOW: tl.constexpr, BOOK_HIGH: tl.constexpr
):  # fmt: skip
    """Returns the decoded code n of each packed word, 0 <= n < 32 / BITS, as f32: the weight / its scale + zero_of(n);
    of E4M3 a 256th of it.

    zero: 0, better one the compiler cannot know. A logical instruction has room for one constant; the other
    then stays in a register, while a known one is moved there again for most weights (sm_90, ptxas 12.9:
    0.8 of 4.4 instructions per weight).
    """
    if BITS == 32:
        value = words.to(tl.float32, bitcast=True)
    elif BITS == 16:
        if n == 0:
            value = (words << 16).to(tl.float32, bitcast=True)
        else:
            value = (words & -65536).to(tl.float32, bitcast=True)
    elif BITS == 8 and BOOK_LOW == -1:
        # Sign, 4 bits of exponent, 3 of mantissa: an f16 with an exponent larger by 8, subnormals included.
        if n == 0:
            moved = words << 7
        else:
            moved = words >> (8 * n - 7)
        half = ((moved & 0x3F80) | ((moved << 1) & 0x8000)).to(tl.int16)
        half = half.to(tl.float16, bitcast=True)
        value = half.to(tl.float32)
    elif BITS == 8:  # code + 128 to mantissa bits 15..22 of 256.0
        if n < 2:
            moved = words << (15 - 8 * n)
        else:
            moved = words >> (8 * n - 15)
        value = ((moved & (zero + 0x7F8000)) ^ 0x43C00000).to(tl.float32, bitcast=True)
    elif BOOK_LOW == 0:
        if n == 0:
            moved = words << 19
        elif n <= 2:
            moved = words << 11
        elif n <= 4:
            moved = words << 3
        elif n <= 6:
            moved = words >> 5
        else:
            moved = words >> 9
        if n % 2 == 1 and n < 7:  # to mantissa bits 15..18 of 256.0
            value = ((moved & (zero + 0x078000)) ^ 0x43800000).to(tl.float32, bitcast=True)
        else:  # to mantissa bits 19..22 of 16.0
            value = ((moved & (zero + 0x780000)) ^ 0x41800000).to(tl.float32, bitcast=True)
    elif BOOK_LOW == -1:  # see words_of
        upper = (words >> (32 + 8 * (n // 2) + 4 * (n % 2))) & 3
        value = (((words >> (4 * n)) & 15) + upper * 16 - 32).to(tl.float32)
    else:
        index = (words >> (4 * n)) & 15
        eight = tl.where(index < 8, BOOK_LOW, BOOK_HIGH).to(tl.int64)
        byte = (eight >> ((index & 7) * 8).to(tl.int64)) & 255
        value = byte.to(tl.float32) - 128.0
    return value


@triton.jit
def zero_of(
    n: tl.constexpr, BITS: tl.constexpr, BOOK_LOW: tl.constexpr, BOOK_HIGH: tl.constexpr
):  # fmt: skip
    """Returns the constant, as f32, by which `raw_code` of code n is larger than the weight / its scale."""
    zero = 0.0
    if BITS == 8 and BOOK_LOW == 0:
        zero = 384.0
    elif BITS == 4 and BOOK_LOW == 0:
        if n % 2 == 1 and n < 7:
            zero = 264.0
        else:
            zero = 24.0
    return zero


@triton.jit
def code_of(
    words, n: tl.constexpr, BITS: tl.constexpr, BOOK_LOW: tl.constexpr, BOOK_HIGH: tl.constexpr
):  # fmt: skip
    """Returns the decoded code n of each packed word, 0 <= n < 32 / BITS, as f32: exactly the weight / its scale."""
    raw = raw_code(words, 0, n, BITS, BOOK_LOW, BOOK_HIGH)
    if BITS <= 8 and BOOK_LOW == 0:
        raw = raw - zero_of(n, BITS, BOOK_LOW, BOOK_HIGH)
    if BITS == 8 and BOOK_LOW == -1:
        raw = raw * 256.0
    return raw


@triton.jit
def words_of(
    panel, lines, rows, inside, EVEN: tl.constexpr, BITS: tl.constexpr, BOOK_LOW: tl.constexpr
):  # fmt: skip
    """Returns the packed words [lines, rows] of a panel; if EVEN, those that are not inside are anything, else 0.

    panel: its first byte, as a pointer to words. Codes of 6 bits come as 64: the word of their lower 4 bits, and above
    it that of their upper 2, moved so that both halves of a line of upper bits lie alike.
    """
    SIX: tl.constexpr = BITS == 4 and BOOK_LOW == -1
    at = lines * 16 + rows
    if SIX:  # 8 lines of a step, then 4 of their upper bits
        at += lines // 8 * 64
    if EVEN:  # no zeros: they cost a move per register
        lower = tl.load(panel + at, mask=inside)
    else:
        lower = tl.load(panel + at, mask=inside, other=0)
    if SIX:
        at = (lines // 8 * 12 + 8 + lines % 8 // 2) * 16 + rows
        upper = tl.load(panel + at, mask=inside, other=0) >> (lines % 2 * 2)
        lower = (lower.to(tl.int64) & 0xFFFFFFFF) | (upper.to(tl.int64) << 32)
    return lower


@triton.jit
def first_scale(
    SCALE_BYTES: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, BOOK_LOW: tl.constexpr
):  # fmt: skip
    """Returns the index of a panel's first scale, counted in scales from the panel's first byte: behind the codes."""
    CODE_BITS: tl.constexpr = 6 if BITS == 4 and BOOK_LOW == -1 else BITS
    return 2 * COLUMNS * CODE_BITS // SCALE_BYTES


@triton.jit
def column_of(lines, n: tl.constexpr, BITS: tl.constexpr):
    """Returns the column of the matrix that code n of a packed word belongs to, for the words of each of `lines`."""
    if BITS == 4:
        return lines // 8 * 64 + lines % 8 * 4 + n // 2 + n % 2 * 32
    return lines * (32 // BITS) + n


@triton.jit
def stored_scales(first, at, rows, inside):
    """Returns the scales of a panel at `at` [lines] + rows as they are stored (0 where not `inside`), `first` being
    where the panel's scales begin; those of the type e4m3 as the bits of their f32 values.
    """
    here = at + rows
    if first.dtype.element_ty == tl.int8:
        byte = tl.load(first + 16 + here, mask=inside, other=0).to(tl.int32)
        common = tl.load(first + rows + at * 0, mask=inside, other=0).to(tl.int32)
        return ((byte & 127) << 20) + ((common & 255) << 23) + (byte & -0x80000000)
    return tl.load(first + tl.max_contiguous(here, [1, 4]), mask=inside, other=0)


@triton.jit
def scales_of(
    scales, lines, rows, inside, HALF: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    BOOK_LOW: tl.constexpr,
):  # fmt: skip
    """Returns the scales of the packed words [lines, rows] of a panel, as stored (see `scale_value`); the shape is that
    of lines + rows.

    scales: the panel's first byte, as a pointer to scales. HALF: the scales of a word's even codes (0) or of its
    odd ones (1), which differ only in groups of 32 columns at 4 bits. Four rows are one load: 8 bytes of
    bf16 beside 16 bytes of codes.
    """
    if GROUP == 0:
        group = lines * 0
    else:
        group = column_of(lines, HALF, BITS) // GROUP
    first = scales + first_scale(SCALE_BYTES, COLUMNS, BITS, BOOK_LOW)
    return stored_scales(first, group * 16, rows, inside)


@triton.jit
def scale_value(raw, SCALE_BYTES: tl.constexpr):
    """Returns the scales `raw`, as `stored_scales` returned them, converted to f32."""
    if raw.dtype == tl.int32:  # of e4m3
        return raw.to(tl.float32, bitcast=True)
    if SCALE_BYTES == 1:
        return (raw.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@triton.jit
def _codes_in_order(
    words, BITS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, L: tl.constexpr
):  # fmt: skip
    """Returns words [L, 16] as the codes of their rows, [16, L * 32 / BITS] f32, columns ascending."""
    if BITS == 32:
        codes = tl.permute(code_of(words, 0, BITS, LOW, HIGH), (1, 0))
    elif BITS == 16:
        both = tl.join(code_of(words, 0, BITS, LOW, HIGH), code_of(words, 1, BITS, LOW, HIGH))
        codes = tl.reshape(tl.permute(both, (1, 0, 2)), (16, L * 2))
    elif BITS == 8:
        even = tl.join(code_of(words, 0, BITS, LOW, HIGH), code_of(words, 2, BITS, LOW, HIGH))
        odd = tl.join(code_of(words, 1, BITS, LOW, HIGH), code_of(words, 3, BITS, LOW, HIGH))
        four = tl.join(even, odd)  # [L, 16, 2, 2], code 2a + b at [.., a, b]
        codes = tl.reshape(tl.permute(four, (1, 0, 2, 3)), (16, L * 4))
    else:
        e = tl.join(code_of(words, 0, BITS, LOW, HIGH), code_of(words, 4, BITS, LOW, HIGH))
        f = tl.join(code_of(words, 2, BITS, LOW, HIGH), code_of(words, 6, BITS, LOW, HIGH))
        g = tl.join(code_of(words, 1, BITS, LOW, HIGH), code_of(words, 5, BITS, LOW, HIGH))
        h = tl.join(code_of(words, 3, BITS, LOW, HIGH), code_of(words, 7, BITS, LOW, HIGH))
        eight = tl.join(tl.join(e, f), tl.join(g, h))  # code 4a + 2b + c at [L, 16, a, b, c]
        steps = tl.reshape(eight, (L // 8, 8, 16, 4, 2))  # c: the half of the 64 columns
        codes = tl.reshape(tl.permute(steps, (2, 0, 4, 1, 3)), (16, L * 8))
    return codes


@triton.jit
def _unpack_kernel(
    words, scales, indices, out, n_rows, n_columns,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    PANEL_BYTES: tl.constexpr, BOOK_LOW: tl.constexpr, BOOK_HIGH: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Unpacks matrix indices[m] into out[m, row, column]; one program: 16 rows, L lines."""
    LAST: tl.constexpr = COLUMNS * BITS // 32
    WIDTH: tl.constexpr = L * 32 // BITS
    chunk, p, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    panel = tl.load(indices + m).to(tl.int64) * tl.num_programs(1) + p
    lines = chunk * L + tl.arange(0, L)[:, None]
    rows = tl.arange(0, 16)[None, :]
    tile = words_of(
        words + panel * (PANEL_BYTES // 4), lines, rows, lines < LAST, False, BITS, BOOK_LOW
    )
    values = _codes_in_order(tile, BITS, BOOK_LOW, BOOK_HIGH, L)  # [16, WIDTH]
    columns = chunk * WIDTH + tl.arange(0, WIDTH)[None, :]
    down = tl.arange(0, 16)[:, None]
    if SCALE_BYTES != 0:
        if GROUP == 0:
            group = columns * 0
        else:
            group = columns // GROUP
        first = scales + panel * (PANEL_BYTES // SCALE_BYTES)
        first += first_scale(SCALE_BYTES, COLUMNS, BITS, BOOK_LOW)
        raw = stored_scales(first, group * 16, down, columns < COLUMNS)
        values = values * scale_value(raw, SCALE_BYTES)
    row = p * 16 + down
    to = out + (m.to(tl.int64) * n_rows + row) * n_columns + columns
    tl.store(to, values.to(out.dtype.element_ty), mask=(row < n_rows) & (columns < n_columns))


def unpack_all(w: Packed, indices: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns the matrices of w with the given `indices` (int [m], on the device) unpacked, [m, n, k]; each value
    rounded once to `dtype`.
    """
    if w.format.rotation:
        return unpack_many(w, indices, dtype)
    out = torch.empty(indices.shape[0], w.n, w.k, dtype=dtype, device=w.data.device)
    if not out.numel():
        return out
    arguments: dict[str, Any] = panel_arguments(w)
    lines = lines_of(arguments)
    grid = (triton.cdiv(lines, _UNPACK_LINES), triton.cdiv(w.n, 16), indices.shape[0])
    words, scales = words_and_scales(w)
    _unpack_kernel[grid](words, scales, indices, out, w.n, w.k, **arguments, L=_UNPACK_LINES)
    return out
