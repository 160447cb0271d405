"""The exact, slow encoder and decoder of every number format, in numpy.

It follows the specification in kt.h (layout) and native/src/kernels/formats.h (encoding) line by line,
one f32 rounding per operation written there; the tests hold every kernel to its bytes. Use it to check,
to explain, and to evaluate a format before it has a kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.native import PANEL_ROWS, Codes, Format, Scale
from ktcli.records import dataclass

F32 = NDArray[np.float32]
ROTATION_UNIT = 64  # columns of the smallest rotated block
TINY = np.float32(2.0**-60)  # a group below this encodes as zero
FACTORS = tuple(np.float32(j) / np.float32(32) for j in range(26, 49))  # of the scale search
LINE = 64  # bytes; a panel is padded to a multiple
E4M3_MOST = 448
# Element type of a stored scale, and the bits of an f32 that are left out below it.
_SCALES = {
    Scale.F32: ("<f4", 0),
    Scale.BF16: ("<u2", 16),
    Scale.E8M0: ("u1", 23),
    Scale.E4M3: ("u1", 20),
}


def e4m3_value(code: int) -> float:
    """Returns the value of an E4M3 byte, computed from sign, exponent and fraction."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -size if code & 128 else size


# The sizes of e4m3 scales, byte 0 to 127, of a row whose exponent is 0.
SCALE_SIZES = np.ldexp(1 + np.arange(128) % 8 / 8, np.arange(128) // 8)
SCALE_TOP = 15  # the exponent of the greatest
E4M3_VALUES: F32 = np.array([e4m3_value(code) for code in range(256)], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class PanelLayout:
    """The sizes of one panel of a matrix with k columns.

    Attributes:
        line, step: columns of one code line, and of one step of 16 lines x g.
        columns: k rounded up to whole steps and groups.
        group, groups: columns per scale, scales per row.
    """

    line: int
    step: int
    columns: int
    group: int
    groups: int
    panel_bytes: int


def layout(fmt: Format, k: int) -> PanelLayout:
    """Returns the layout of a panel with `k` columns."""
    line = {32: 1, 16: 2}.get(fmt.bits, 4)
    step = 16 * line
    columns = -(-k // max(step, fmt.group)) * max(step, fmt.group)
    group = fmt.group or columns
    groups = columns // group
    scales = groups * PANEL_ROWS * _scale_type(fmt).itemsize if fmt.scale is not Scale.NONE else 0
    size = PANEL_ROWS * columns * fmt.bits // 8 + _head_bytes(fmt) + scales
    return PanelLayout(line, step, columns, group, groups, -(-size // LINE) * LINE)


def pack(
    fmt: Format, matrix: F32, scales: F32 | None = None, importance: F32 | None = None
) -> NDArray[np.uint8]:
    """Returns the packed bytes of `matrix` [n, k] f32.

    Args:
        scales: given scales [n, groups] f32, for formats with f32 scales.
        importance: the weight of each column's errors, [k] f32.
    """
    n, k = matrix.shape
    lay = layout(fmt, k)
    panels = -(-n // PANEL_ROWS)
    padded = np.zeros((panels * PANEL_ROWS, lay.columns), dtype=np.float32)
    padded[:n, :k] = matrix
    counts = None if importance is None else np.zeros(lay.columns, dtype=np.float32)
    if counts is not None:
        counts[:k] = importance
    feedback = None
    if fmt.rotation:
        block = rotation_block(fmt, k)
        padded = rotate(padded, block)
        if counts is not None:
            feedback = feedback_of(counts[:k]) if feeds_back(fmt) else None
            counts = _block_means(counts, block, k)
    given = np.zeros((len(padded), lay.groups), dtype=np.float32)
    if scales is not None:
        given[:n, : scales.shape[1]] = scales
    codes, scales = encode(fmt, padded, given, counts)
    if feedback is not None and scales is not None:
        codes = encode_with_feedback(fmt, padded, scales, feedback)
    out = np.zeros((panels, lay.panel_bytes), dtype=np.uint8)
    lines = _to_lines(fmt, lay, codes)
    out[:, : lines.shape[1]] = lines
    if scales is not None:  # [panels, groups, 16]
        common = row_exponents(fmt, padded)
        stored = _store_scale(fmt, scales, common[:, None])
        stored = stored.reshape(panels, PANEL_ROWS, lay.groups).transpose(0, 2, 1)
        tail = np.ascontiguousarray(stored).reshape(panels, -1).view(np.uint8)
        if _head_bytes(fmt):
            tail = np.hstack([common.astype(np.uint8).reshape(panels, PANEL_ROWS), tail])
        out[:, lines.shape[1] : lines.shape[1] + tail.shape[1]] = tail
    return out.reshape(-1)


def unpack(fmt: Format, data: NDArray[np.uint8], n: int, k: int) -> F32:
    """Returns the matrix [n, k] f32 decoded from packed bytes."""
    lay = layout(fmt, k)
    panels = -(-n // PANEL_ROWS)
    rows = data.reshape(panels, lay.panel_bytes)
    code_bytes = PANEL_ROWS * lay.columns * fmt.bits // 8
    codes = _from_lines(fmt, lay, rows[:, :code_bytes])
    scales = None
    if fmt.scale is not Scale.NONE:
        kind = _scale_type(fmt)
        size = lay.groups * PANEL_ROWS * kind.itemsize
        first = code_bytes + _head_bytes(fmt)
        tail = np.ascontiguousarray(rows[:, first : first + size]).view(kind)
        stored = tail.reshape(panels, lay.groups, PANEL_ROWS).transpose(0, 2, 1)
        common = rows[:, code_bytes:first].reshape(-1, 1)
        scales = _load_scale(fmt, np.ascontiguousarray(stored).reshape(-1, lay.groups), common)
    values = decode(fmt, codes, scales)
    if fmt.rotation:
        values = rotate(values, rotation_block(fmt, k))
    return values[:n, :k]


def rotation_block(fmt: Format, k: int) -> int:
    """Returns the number of columns of each rotated block of a matrix with `k` columns."""
    block = fmt.rotation
    while -(-k // ROTATION_UNIT) * ROTATION_UNIT % block:
        block //= 2
    return block


def rotate(x: F32, block: int) -> F32:
    """Returns rows [n, columns] times the Hadamard matrix of their blocks, in the specified order of operations."""
    out = x.reshape(-1, block)
    h = 1
    while h < block:
        a, b = np.moveaxis(out.reshape(-1, block // (2 * h), 2, h), 2, 0)
        out = np.stack((a + b, a - b), axis=2).reshape(-1, block)
        h *= 2
    return (out * np.float32(1 / np.sqrt(block))).reshape(x.shape)


def feeds_back(fmt: Format) -> bool:
    """Returns whether columns of a format make up for each other's errors where their importance is known."""
    return fmt.bits < 8 and fmt.rotation == ROTATION_UNIT and 0 < fmt.group <= ROTATION_UNIT


def feedback_of(counts: F32) -> F32:
    """Returns L [blocks, 64, 64] of the columns' importance [k], step by step as specified; 0 on the diagonal."""
    found = []
    for first in range(0, len(counts), ROTATION_UNIT):
        own = counts[first : first + ROTATION_UNIT].astype(np.float64)
        v = np.full(ROTATION_UNIT, own.min())
        v[: len(own)] = own
        total = 0.0
        for value in v:
            total += float(value)
        w = v + total / ROTATION_UNIT**2
        h = 1
        while h < ROTATION_UNIT:
            a, b = np.moveaxis(w.reshape(-1, 2, h), 1, 0)
            w = np.stack((a + b, a - b), axis=1).reshape(-1)
            h *= 2
        side = np.arange(ROTATION_UNIT)
        a = (w / ROTATION_UNIT)[side[:, None] ^ side]
        lower = np.zeros_like(a)
        for i in reversed(range(ROTATION_UNIT)):
            lower[i, :i] = a[i, :i] / a[i, i]
            a[:i, :i] = a[:i, :i] - a[i, :i, None] * lower[i, :i]
        found.append(lower)
    return np.stack(found).astype(np.float32)


def encode_with_feedback(fmt: Format, matrix: F32, scales: F32, feedback: F32) -> NDArray[np.uint8]:
    """Returns the indices [n, columns] of rotated rows, each column of which makes up for the errors before it.

    Args:
        scales: of the rows' groups, [n, groups].
        feedback: `feedback_of` the columns' importance.
    """
    book = codebook(fmt)
    middles = (book[:-1] + book[1:]) / np.float32(2)
    indices = np.zeros(matrix.shape, np.uint8)
    for block, lower in enumerate(feedback):
        x = matrix[:, block * ROTATION_UNIT :][:, :ROTATION_UNIT]
        left = x.copy()
        for i in range(ROTATION_UNIT):
            s = scales[:, (block * ROTATION_UNIT + i) // fmt.group]
            inv = np.where(
                s == 0, np.float32(0), np.float32(1) / np.where(s == 0, np.float32(1), s)
            )
            found = np.searchsorted(middles, left[:, i] * inv, side="left")
            e = book[found] * s - x[:, i]
            left[:, i + 1 :] -= lower[i + 1 :, i] * e[:, None]
            indices[:, block * ROTATION_UNIT + i] = found
    return indices


def _block_means(counts: F32, block: int, k: int) -> F32:
    """The mean importance of each block's columns within `k`, in all its columns."""
    means = np.zeros_like(counts)
    for first in range(0, k, block):
        total = np.float32(0)
        for value in counts[first : min(first + block, k)]:
            total += value
        means[first : first + block] = total / np.float32(min(first + block, k) - first)
    return means


def encode(
    fmt: Format, matrix: F32, given: F32 | None = None, importance: F32 | None = None
) -> tuple[NDArray[np.generic], F32 | None]:
    """Returns the codes [n, k] and scales [n, groups] of a matrix of whole groups; scales are None where there are
    none.

    Codes are f32 values, bf16 bits, signed integers, E4M3 bytes, or indices into the `codebook`. Given scales
    [n, groups] are used where their magnitude is within 2^-60..2^60. The errors of a column count by its
    importance [k].
    """
    if fmt.bits == 32:
        return matrix.copy(), None
    if fmt.bits == 16:
        return round_to_bf16(matrix), None
    n, k = matrix.shape
    groups = matrix.reshape(-1, fmt.group or k)
    codes: NDArray[np.integer[Any]]
    wanted = np.zeros(len(groups), np.float32) if given is None else given.reshape(-1)
    if fmt.bits < 8:
        counts = (
            None if importance is None else np.tile(importance.reshape(-1, groups.shape[1]), (n, 1))
        )
        common = np.repeat(row_exponents(fmt, matrix), len(groups) // n)
        codes, scales = _encode_codebook(fmt, groups, wanted, counts, common)
    else:
        codes, scales = _encode_8_bits(fmt, groups, wanted)
    return codes.reshape(n, k), scales.reshape(n, -1)


def decode(fmt: Format, codes: NDArray[np.generic], scales: F32 | None) -> F32:
    """Returns the f32 matrix that codes and scales represent."""
    if fmt.bits == 32:
        return codes.astype(np.float32)
    if fmt.bits == 16:
        return (codes.astype(np.uint32) << 16).view(np.float32)
    assert scales is not None
    values: F32 = codes.astype(np.float32)
    if fmt.bits < 8:
        values = codebook(fmt)[codes]
    elif fmt.codes is Codes.E4M3:
        values = E4M3_VALUES[codes]
    return values * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def round_to_bf16(x: F32) -> NDArray[np.uint16]:
    """Returns the bf16 bits of finite values, rounded to nearest even; values that overflow become infinite."""
    bits = x.view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def codebook(fmt: Format) -> F32:
    """Returns the values of the indices of a format of 4 or 6 bits, ascending."""
    values = fmt.codebook if fmt.bits == 4 else range(-32, 32)
    return np.array(values, dtype=np.float32)


def row_exponents(fmt: Format, matrix: F32) -> NDArray[np.int64]:
    """Returns what the e4m3 scales of each row have in common, R of kt.h, [n]; 0 in a format with other scales."""
    if fmt.scale is not Scale.E4M3:
        return np.zeros(len(matrix), np.int64)
    book = codebook(fmt)
    top = np.abs(matrix).max(axis=1) / (min(-book[0], book[-1]) * np.float32(23 / 32))
    fields: NDArray[np.int32] = (top * np.float32(16 / 15)).view(np.int32) >> 23
    exponents: NDArray[np.int64] = np.clip(fields.astype(np.int64) - SCALE_TOP, 1, 254 - SCALE_TOP)
    return exponents


def _head_bytes(fmt: Format) -> int:
    """The bytes between the codes of a panel and its first scale."""
    return PANEL_ROWS if fmt.scale is Scale.E4M3 else 0


def _nearest_scale(s: F32, common: NDArray[np.int64]) -> F32:
    """Rounds to the sizes of e4m3 scales, ties to the even byte; 0 stays 0."""
    middles = (SCALE_SIZES[:-1] + SCALE_SIZES[1:]) / 2
    size = np.ldexp(np.abs(s).astype(np.float64), 127 - common)
    lower = np.searchsorted(middles, size, side="left")
    tie = np.searchsorted(middles, size, side="right") != lower
    nearest = SCALE_SIZES[lower + (tie & (lower % 2 == 1))]
    return np.where(s == 0, 0, np.copysign(np.ldexp(nearest, common - 127), s)).astype(np.float32)


def _round_scale(fmt: Format, s: F32, common: NDArray[np.int64]) -> F32:
    if fmt.scale is Scale.E4M3:
        return _nearest_scale(s, common)
    if fmt.scale is not Scale.BF16:
        return s
    return (round_to_bf16(np.ascontiguousarray(s)).astype(np.uint32) << 16).view(np.float32)


def _encode_8_bits(fmt: Format, x: F32, given: F32) -> tuple[NDArray[np.integer[Any]], F32]:
    """Encodes groups x [G, g] as codes [G, g] and scales [G]."""
    amax = np.max(np.abs(x), axis=1)
    most = np.float32(E4M3_MOST if fmt.codes is Codes.E4M3 else 127)
    s = _round_scale(fmt, amax / most, np.zeros(len(x), np.int64))
    if fmt.scale is Scale.E8M0:  # the least power of two >= s
        mantissa, exponent = np.frexp(s)
        s = np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)
    s = np.where(amax < TINY, np.float32(0), s)
    s = np.where(_usable(given), given, s)
    inv = np.float32(1) / np.where(s == 0, np.float32(1), s)
    v = np.where(s[:, None] == 0, x * np.float32(0), x * inv[:, None])
    if fmt.codes is Codes.E4M3:
        return nearest_e4m3(v), s
    return np.clip(np.rint(v), -127, 127).astype(np.int8), s


def _usable(given: F32) -> NDArray[np.bool_]:
    """A mask of the given scales that are used."""
    return (np.abs(given) >= TINY) & (np.abs(given) <= 1 / TINY)


def nearest_e4m3(v: F32) -> NDArray[np.uint8]:
    """Returns the E4M3 codes nearest to finite values, ties to the even code; values beyond the range are clamped."""
    sizes = E4M3_VALUES[:127].astype(np.float64)
    middles = (sizes[:-1] + sizes[1:]) / 2
    size = np.abs(v).astype(np.float64)
    lower = np.searchsorted(middles, size, side="left")
    tie = np.searchsorted(middles, size, side="right") != lower
    codes: NDArray[np.intp] = lower + (tie & (lower % 2 == 1)) + 128 * np.signbit(v)
    return codes.astype(np.uint8)


def _encode_codebook(
    fmt: Format, x: F32, given: F32, importance: F32 | None, common: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], F32]:
    """Encodes groups x [G, g] as indices [G, g] and scales [G]; given scales [G], importance [G, g], and the
    `row_exponents` [G] of their rows."""
    book = codebook(fmt)
    middles = (book[:-1] + book[1:]) / np.float32(2)
    is_linear = bool(np.all(np.diff(book) == 1))
    hi, lo = x.max(axis=1), x.min(axis=1)
    m = np.where(hi >= -lo, hi, lo)

    def nearest(v: F32) -> NDArray[np.intp]:
        return np.searchsorted(middles, v, side="left")

    def errors(s: F32) -> F32:
        return x - book[nearest(x * (np.float32(1) / s)[:, None])] * s[:, None]

    def searched_errors(s: F32) -> F32:
        if not is_linear:
            return errors(s)
        v: F32 = np.clip(np.rint(x * (np.float32(1) / s)[:, None]), book[0], book[-1])
        return x - v * s[:, None]

    with np.errstate(all="ignore"):  # candidates that divide by zero are skipped below
        chosen = np.zeros_like(m)
        if fmt.scale is not Scale.E8M0:
            for value in [*book[:8], *book[-8:]][
                ::-1
            ]:  # so that the first exact candidate stands last
                s = _round_scale(fmt, m / value, common)
                exact = (value != 0) & (s != 0) & np.all(errors(s) == 0, axis=1)
                chosen = np.where(exact, s, chosen)
        best = np.where(chosen != 0, np.float32(-1), np.float32(np.inf))
        for s in _searched(fmt, book, m, common):
            error = np.where(s == 0, np.float32(np.nan), _total(searched_errors(s), importance))
            better = error < best
            best, chosen = np.where(better, error, best), np.where(better, s, chosen)
        chosen = np.where(np.abs(m) < TINY, np.float32(0), chosen).astype(np.float32)
        chosen = np.where(_usable(given), given, chosen)
        inv = np.float32(1) / chosen
        indices = nearest(np.where(chosen[:, None] == 0, np.float32(0), x * inv[:, None]))
    return indices.astype(np.uint8), chosen


def _searched(fmt: Format, book: F32, m: F32, common: NDArray[np.int64]) -> list[F32]:
    """The candidate scales of the search, in order; 0 where one must be skipped."""
    if fmt.scale is Scale.E4M3:
        found = []
        for end in (book[0], book[-1]):
            size = np.abs(_nearest_scale(m / (end * FACTORS[-1]), common)).astype(np.float64)
            first = np.searchsorted(SCALE_SIZES, np.ldexp(size, 127 - common))
            for i in range(8):
                size = np.ldexp(SCALE_SIZES[np.minimum(first + i, 127)], common - 127)
                found.append(np.where(m == 0, 0, np.copysign(size, m / end)).astype(np.float32))
        return found
    if fmt.scale is not Scale.E8M0:
        pairs = ((end, factor) for factor in FACTORS for end in (book[0], book[-1]))
        return [
            _round_scale(fmt, m / (end * f), common) if end else np.zeros_like(m)
            for end, f in pairs
        ]
    top = max(abs(float(book[0])), abs(float(book[-1])))
    span = int(np.floor(np.log2(top))) if top >= 1 else 0
    p = np.frexp(m)[1] - 1
    exponents = [p - i for i in range(span + 1)]
    return [
        np.where((e >= -126) & (e <= 127), np.ldexp(np.float32(1), e), 0).astype(np.float32)
        for e in exponents
    ]


def _total(e: F32, importance: F32 | None) -> F32:
    """The sum of squares of [G, g], times their importance, in the specified order: 16 partial sums, then a tree."""
    squares = e * e if importance is None else e * e * importance
    squares = squares.reshape(e.shape[0], -1, 16)
    q = np.zeros((e.shape[0], 16), dtype=np.float32)
    for i in range(squares.shape[1]):
        q = q + squares[:, i]
    for half in (8, 4, 2, 1):
        q = q[:, :half] + q[:, half : 2 * half]
    return q[:, 0]


def _scale_type(fmt: Format) -> np.dtype[np.generic]:
    return np.dtype(_SCALES[fmt.scale][0])


def _store_scale(fmt: Format, s: F32, common: NDArray[np.int64]) -> NDArray[np.generic]:
    kind, shift = _SCALES[fmt.scale]
    bits = np.ascontiguousarray(s).view(np.uint32)
    if fmt.scale is Scale.E4M3:
        size = np.where(s == 0, 0, (bits & 0x7FFFFFFF).astype(np.int64) - (common << 23)) >> shift
        return ((bits >> 24 & 128) | size).astype(kind)
    return s if shift == 0 else (bits >> shift).astype(kind)


def _load_scale(fmt: Format, stored: NDArray[np.generic], common: NDArray[np.uint8]) -> F32:
    _, shift = _SCALES[fmt.scale]
    if fmt.scale is Scale.E4M3:
        byte = stored.astype(np.uint32)
        size = ((byte & 127) << shift) + (common.astype(np.uint32) << 23)
        values: F32 = (size | (byte & 128) << 24).view(np.float32)
        return values
    if shift == 0:
        return stored.astype(np.float32)
    return (stored.astype(np.uint32) << shift).view(np.float32)


def _to_lines(fmt: Format, lay: PanelLayout, codes: NDArray[np.generic]) -> NDArray[np.uint8]:
    """The bytes of the panels [n/16, …] of codes [n, k]."""
    panels = codes.shape[0] // PANEL_ROWS
    if fmt.bits < 8:  # [panel, row, step, half, line, 4] -> [panel, step, line, row, 4] per half
        halves = codes.reshape(panels, PANEL_ROWS, -1, 2, 8, 4).transpose(3, 0, 2, 4, 1, 5)
        low, high = halves.astype(np.uint8)
        planes = [(low & 15 | (high & 15) << 4)]
        if fmt.bits == 6:
            two = [half[:, :, odd::2] >> 4 for half in (low, high) for odd in (0, 1)]
            planes.append(two[0] | two[1] << 2 | two[2] << 4 | two[3] << 6)
        return np.ascontiguousarray(np.concatenate(planes, axis=2)).reshape(panels, -1)
    tiled = codes.reshape(panels, PANEL_ROWS, -1, lay.step // lay.line, lay.line).transpose(
        0, 2, 3, 1, 4
    )
    return np.ascontiguousarray(tiled).reshape(panels, -1).view(np.uint8)


def _from_lines(fmt: Format, lay: PanelLayout, data: NDArray[np.uint8]) -> NDArray[np.generic]:
    """Inverts `_to_lines`."""
    panels = data.shape[0]
    data = np.ascontiguousarray(data)
    if fmt.bits < 8:
        lines = data.reshape(panels, -1, 2 * fmt.bits, PANEL_ROWS, 4)
        both, two = lines[:, :, :8], lines[:, :, 8:]
        halves = np.stack([both & 15, both >> 4])  # [half, panel, step, line, row, 4]
        for half in range(2 if fmt.bits == 6 else 0):
            for odd in (0, 1):
                halves[half, :, :, odd::2] |= (two >> (4 * half + 2 * odd) & 3) << 4
        return halves.transpose(1, 4, 2, 0, 3, 5).reshape(panels * PANEL_ROWS, lay.columns)
    kind = {32: "<f4", 16: "<u2", 8: "u1" if fmt.codes is Codes.E4M3 else "i1"}[fmt.bits]
    tiled = data.view(kind).reshape(panels, -1, lay.step // lay.line, PANEL_ROWS, lay.line)
    return tiled.transpose(0, 3, 1, 2, 4).reshape(panels * PANEL_ROWS, lay.columns)
