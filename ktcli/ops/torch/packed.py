"""Weights in device memory, packed as in kt.h or as plain rows, and their decoding in plain torch.

The bytes are those of a pack and of the CPU's memory: nothing is rearranged for the GPU. Decoding here is
exact and slow; the Triton kernels do the same inside their products and are held to it.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from ktcli.native import PANEL_ROWS, SILU, Codes, Format, Glu, Scale
from ktcli.ops.torch.lowrank import LowRankUpdate
from ktcli.records import dataclass

_LINES = {32: 1, 16: 2, 8: 4, 6: 4, 4: 4}  # bits -> columns of one code line (`g` of kt.h)
_ALIGNMENT = 64  # bytes; a panel is padded to a multiple
# Triton's kernels tell the two types of one byte by it.
SCALE_TYPES = {
    Scale.F32: torch.float32,
    Scale.BF16: torch.bfloat16,
    Scale.E8M0: torch.uint8,
    Scale.E4M3: torch.int8,
}
_BYTES = {Codes.INTEGER: torch.int8, Codes.E4M3: torch.float8_e4m3fn}
ROUTED_ROWS = 16  # the rows of a step that a router's kernel takes at most


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The sizes of one panel of 16 rows of a matrix with k columns.

    Attributes:
        line, step: columns of one code line, and of one step of 16 lines x g.
        columns: k rounded up to whole steps and groups.
        group, groups: columns per scale, scales per row.
        code_bytes, scale_bytes: bytes of codes, and of the scales behind them; the rest is padding.
    """

    line: int
    step: int
    columns: int
    group: int
    groups: int
    code_bytes: int
    scale_bytes: int
    panel_bytes: int


@cache
def layout(fmt: Format, k: int) -> PackedLayout:
    """Returns the sizes of one panel, 16 packed rows of a matrix with `k` columns in format `fmt`: padded columns,
    columns per scale, and bytes of codes, of scales and in all.
    """
    line = _LINES[fmt.bits]
    step = 16 * line
    columns = -(-k // max(step, fmt.group)) * max(step, fmt.group)
    group = fmt.group or columns
    codes = PANEL_ROWS * columns * fmt.bits // 8
    heads = PANEL_ROWS if fmt.scale is Scale.E4M3 else 0
    scales = heads + columns // group * PANEL_ROWS * fmt.scale.bits // 8
    panel = -(-(codes + scales) // _ALIGNMENT) * _ALIGNMENT
    return PackedLayout(line, step, columns, group, columns // group, codes, scales, panel)


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed matrices of one shape in device memory.

    Attributes:
        n, k: outputs and inputs of each matrix.
        data: uint8 [count, packed bytes of one matrix]; contiguous but in what `rows_of` gives.
        update: what an adapter adds to products with it; None: there is no room for any. `linear` leaves it to its
            caller.
    """

    format: Format
    n: int
    k: int
    data: Tensor
    update: LowRankUpdate | None = None

    @property
    def count(self) -> int:
        """The number of packed matrices in `data`."""
        return int(self.data.shape[0])


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A matrix as plain rows: data [n, k] bf16 or f32, contiguous.

    Attributes:
        tickets: int32 [ROUTED_ROWS], the counters of a router's kernel, 0 between two; None: it is no router's.
        update: as of `Packed`.
    """

    data: Tensor
    tickets: Tensor | None = None
    update: LowRankUpdate | None = None

    @property
    def n(self) -> int:
        """The number of outputs of the matrix, its rows."""
        return int(self.data.shape[0])

    @property
    def k(self) -> int:
        """The number of inputs of the matrix, its columns."""
        return int(self.data.shape[1])


Matrix = Packed | PlainMatrix


@dataclass(frozen=True, slots=True)
class Extras:
    """The biases of the experts of a layer, and their activation.

    Attributes:
        glu: the activation.
        gate_up_bias: f32 [E, rows of gate_up] of all experts, or None.
        down_bias: f32 [E, H] of all experts, or None.
    """

    glu: Glu = SILU
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def bias_bytes(self) -> int:
        """The size in bytes of the experts' biases; 0 without any."""
        biases = (self.gate_up_bias, self.down_bias)
        return sum(bias.nbytes for bias in biases if bias is not None)

    def columns(self, first: int, last: int) -> Extras:
        """Returns the experts' biases and activation for columns [first, last) of the experts' width; `first` is a
        multiple of 16. The bias of down is included only if `first` is 0, so that it is added once.
        """
        if self.gate_up_bias is None:
            return self
        rows = self.gate_up_bias[:, self.glu.rows(first) : self.glu.rows(last)]
        return Extras(self.glu, rows, self.down_bias if first == 0 else None)


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class PackedStack:
    """The experts of one layer that are on the device.

    Attributes:
        slots: int32 [E], on the device: which matrix of the stacks an expert is; negative: it is elsewhere.
        gate_up, down: `count` matrices each, in the order of slots; count 0: no expert is here.
        extras: biases and activation; those of an expert are found by its id.
    """

    slots: Tensor
    gate_up: Packed
    down: Packed
    extras: Extras = NO_EXTRAS


def rows_of(w: Packed, first: int, last: int) -> Packed:
    """Returns rows [first, last) of each packed matrix of w, as a view; `first` is a multiple of 16."""
    size = layout(w.format, w.k).panel_bytes
    panels = slice(first // PANEL_ROWS * size, -(-last // PANEL_ROWS) * size)
    return Packed(w.format, last - first, w.k, w.data[:, panels])


def unpack(w: Packed, index: int, dtype: torch.dtype) -> Tensor:
    """Returns matrix `index` of w unpacked, [n, k] of `dtype`: exact in f32, else rounded once."""
    return _decode(w, w.data[index : index + 1], dtype)[0]


def unpack_many(w: Packed, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the matrices of w with the given `indices` (int [m], on the device) unpacked, [m, n, k] of `dtype`,
    without waiting for the device.
    """
    return _decode(w, w.data.index_select(0, indices), dtype)


def unpack_whole(w: Packed, dtype: torch.dtype) -> Tensor:
    """Returns all matrices of w unpacked, [count, n, k] of `dtype`."""
    return _decode(w, w.data, dtype)


def _decode(w: Packed, data: Tensor, dtype: torch.dtype) -> Tensor:
    """Decodes the bytes [m, packed bytes] of matrices -> [m, n, k]."""
    lay = layout(w.format, w.k)
    panels = torch.unflatten(data, -1, (-1, lay.panel_bytes))
    values = _values(w.format, lay, panels[..., : lay.code_bytes])
    if w.format.scale is not Scale.NONE:
        tail = panels[..., lay.code_bytes : lay.code_bytes + lay.scale_bytes]
        scales = _scales(w.format, lay, tail)
        # One f32 product per value, as the oracle says.
        values = torch.unflatten(values, -1, (lay.groups, lay.group)) * scales.unsqueeze(-1)
    rows = values.reshape(data.shape[0], panels.shape[1] * PANEL_ROWS, lay.columns)
    block = w.format.of_columns(w.k).rotation
    if block:
        rows = rotate(rows, block)
    return rows[:, : w.n, : w.k].to(dtype)


def rotate(rows: Tensor, block: int) -> Tensor:
    """Returns rows [..., columns] f32 with each block of `block` columns multiplied by the normalised Hadamard matrix,
    which is its own inverse; see kt.h.
    """
    out: Tensor = rows.reshape(-1, block)
    h = 1
    while h < block:
        a, b = out.reshape(-1, block // (2 * h), 2, h).unbind(2)
        out, h = torch.stack((a + b, a - b), dim=2).reshape(-1, block), 2 * h
    return (out * (1 / math.sqrt(block))).view(rows.shape)


def _values(fmt: Format, lay: PackedLayout, codes: Tensor) -> Tensor:
    """Decodes code bytes [m, panels, code bytes] to what the codes mean, f32 [m, panels, 16, columns]."""
    m, panels = codes.shape[:2]
    steps, lines = lay.columns // lay.step, lay.step // lay.line
    if fmt.bits < 8:
        planes = codes.reshape(m, panels, steps, 2 * fmt.bits, PANEL_ROWS, lay.line)
        both = planes[:, :, :, : lines // 2]
        # A byte holds column 4i + j of the step in its low, 32 + 4i + j in its high nibble.
        halves = torch.stack((both & 15, both >> 4), dim=3)  # [m, panel, step, half, line, row, 4]
        if fmt.bits == 6:
            two = planes[:, :, :, lines // 2 :]
            pairs = torch.stack([two >> 2 * i & 3 for i in range(4)], dim=4)
            upper = torch.unflatten(pairs, 4, (2, 2)).permute(0, 1, 2, 4, 3, 5, 6, 7).flatten(4, 5)
            tiled = (halves | upper << 4).float() - 32
        else:
            tiled = _codebook(fmt.codebook, codes.device)[halves.int()]
        return tiled.permute(0, 1, 5, 2, 3, 4, 6).reshape(m, panels, PANEL_ROWS, lay.columns)
    kind = {32: torch.float32, 16: torch.bfloat16, 8: _BYTES[fmt.codes]}[fmt.bits]
    tiled = codes.view(kind).reshape(m, panels, steps, lines, PANEL_ROWS, lay.line).float()
    return tiled.permute(0, 1, 4, 2, 3, 5).reshape(m, panels, PANEL_ROWS, lay.columns)


def _scales(fmt: Format, lay: PackedLayout, tail: Tensor) -> Tensor:
    """Decodes scale bytes [m, panels, scale bytes] to f32 [m, panels, 16, groups]."""
    common = tail[..., :PANEL_ROWS]
    if fmt.scale is Scale.E4M3:
        tail = tail[..., PANEL_ROWS:].contiguous()
    rows = torch.unflatten(tail.view(SCALE_TYPES[fmt.scale]), -1, (lay.groups, PANEL_ROWS))
    stored = rows.transpose(-1, -2)
    if fmt.scale is Scale.E8M0:
        return (stored.int() << 23).view(torch.float32)
    if fmt.scale is Scale.E4M3:
        size = ((stored.int() & 127) << 20) + (common.int() << 23).unsqueeze(-1)
        bits: Tensor = size | stored.int() & -(1 << 31)
        return bits.view(torch.float32)
    return stored.float()


@cache
def _codebook(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns a codebook, f32 [16], made at the first use on a device: before anything is captured there."""
    return torch.tensor(values, dtype=torch.float32, device=device)
