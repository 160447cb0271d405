"""Decoding in torch gives the oracle's values to the bit: formats x awkward shapes."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch

from ktcli.native import Format, Pool, Scale, Weight, packed_bytes
from ktcli.ops.torch.packed import Packed, layout, rows_of, unpack, unpack_many, unpack_whole
from ktcli.weights.formats import FORMATS, LINEAR

# Beyond the table: what a new row may need.
OTHERS = (
    Format("int4-row", bits=4, group=0, scale=Scale.F32, codebook=LINEAR),
    Format("int8-g64", bits=8, group=64, scale=Scale.BF16),
    Format("mxint8", bits=8, group=32, scale=Scale.E8M0),
)
ALL = (*FORMATS.values(), *OTHERS)
SHAPES = ((1, 1), (16, 64), (17, 65), (5, 128), (33, 300))


def random_packed(fmt: Format, n: int, k: int, count: int = 1) -> Packed:
    """Packed matrices of normal values."""
    draw = np.random.default_rng(n * 1000 + k)
    matrices = draw.standard_normal((count, n, k)).astype(np.float32)
    data = np.stack([oracle.pack(fmt, matrix) for matrix in matrices])
    return Packed(fmt, n, k, torch.from_numpy(data))


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_values_are_the_oracles_and_the_librarys(fmt: Format) -> None:
    pool = Pool(1)
    for n, k in SHAPES:
        w = random_packed(fmt, n, k, count=3)
        assert w.data.shape[1] == packed_bytes(fmt, n, k)
        data = w.data.numpy()
        weight = Weight(fmt, n, k, 3, data.ctypes.data, data)
        for index in range(3):
            found = unpack(w, index, torch.float32).numpy()
            assert found.tobytes() == oracle.unpack(fmt, data[index], n, k).tobytes(), (n, k)
            assert found.tobytes() == pool.unpack(weight, index).tobytes(), (n, k)


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_panels_are_as_large_as_the_oracles(fmt: Format) -> None:
    for _, k in SHAPES:
        lay, expected = layout(fmt, k), oracle.layout(fmt, k)
        names = ("line", "step", "columns", "group", "groups", "panel_bytes")
        assert [getattr(lay, name) for name in names] == [getattr(expected, n) for n in names]


def test_several_matrices_are_those_one_by_one_and_rounded_once() -> None:
    w = random_packed(FORMATS["int4"], 17, 65, count=4)
    one_by_one = torch.stack([unpack(w, i, torch.float32) for i in range(4)])
    assert torch.equal(unpack_whole(w, torch.float32), one_by_one)
    picked = unpack_many(w, torch.tensor([3, 0, 3], dtype=torch.int32), torch.bfloat16)
    assert torch.equal(picked, one_by_one[[3, 0, 3]].bfloat16())


def test_rows_are_cut_where_panels_begin() -> None:
    w = random_packed(FORMATS["int8"], 50, 65, count=2)
    whole = unpack_whole(w, torch.float32)
    for first, last in ((0, 50), (0, 16), (16, 48), (32, 50)):
        assert torch.equal(
            unpack_whole(rows_of(w, first, last), torch.float32), whole[:, first:last]
        )
