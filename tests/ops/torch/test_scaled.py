"""The fp8 cache in torch: its bytes are those of the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ktcli.ops import kvformat
from ktcli.ops.operation import Cached
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.pages import append, held_at, held_by, own_parts
from ktcli.ops.torch.scaled import ScaledPages, decode, encode


def _heads(spread: int) -> np.ndarray:
    draw = np.random.default_rng(spread)
    x = draw.standard_normal((600, 24)) * np.exp2(draw.integers(-spread, spread - 19, (600, 1)))
    x[0], x[1], x[2, 3], x[3, 5], x[4, 6] = 0, -0.0, np.nan, np.inf, -np.inf
    return x.astype(np.float32)


@pytest.mark.parametrize("spread", [20, 60, 145])
def test_codes_and_scales_are_those_of_the_oracle(spread: int) -> None:
    x = _heads(spread)
    codes, scale = encode(torch.from_numpy(x))
    with np.errstate(invalid="ignore", over="ignore"):  # of NaN and infinity
        right, right_scale = kvformat.encode(x)
        numbers = kvformat.decode(right, right_scale)
    assert (codes.numpy() == right).all() and (scale.numpy() == right_scale).all()
    back = decode(codes, scale).numpy()
    np.testing.assert_array_equal(back, numbers)


@pytest.mark.parametrize("widths", [(), (6, 2)])
def test_rows_are_read_as_they_were_written(widths: tuple[int, ...]) -> None:
    flat = torch.zeros(3 * 64 * (8 + 2), dtype=torch.uint8)
    (pages,) = own_parts(flat, Cached(0, (8,), 0, (2,)))
    assert isinstance(pages, ScaledPages)
    pages = pages.of_heads(*widths)
    rows = Rows(torch.tensor([62, 63, 64]), torch.tensor([[2, 0]], dtype=torch.int32), 3)
    new = torch.randn(3, 8) * torch.tensor([1.0, 1e3, 1e-3])[:, None]
    append(pages, new, rows)
    cuts = [slice(0, 6), slice(6, 8)] if widths else [slice(0, 4), slice(4, 8)]
    right = [kvformat.decode(*kvformat.encode(new[:, cut].numpy())) for cut in cuts]
    found = held_by(pages, rows.pages[0], rows.positions)
    assert found.dtype == torch.bfloat16 and found.shape == (128, 8)
    assert (found[62:65].float().numpy() == np.concatenate(right, 1)).all()
    assert not found[:62].any() and not found[65:].any()
    assert (held_at(pages, rows.pages)[0] == found.float()).all()
    assert not flat[64 * 8 : 2 * 64 * 8].any()  # page 1 is nobody's
