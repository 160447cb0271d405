"""The fp8 cache in torch: its bytes are those of the oracle."""

from __future__ import annotations

import kvoracle
import numpy as np
import oracle
import pytest
import torch

from ktcli.ops.operation import Cached
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.torch import attention
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.packed import Packed
from ktcli.ops.torch.pages import ScaledPages, append, decode, encode, held_at, held_by, own_parts
from ktcli.weights.formats import FORMATS


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
        right, right_scale = kvoracle.encode(x)
        numbers = kvoracle.decode(right, right_scale)
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
    right = [kvoracle.decode(*kvoracle.encode(new[:, cut].numpy())) for cut in cuts]
    found = held_by(pages, rows.pages[0], rows.positions)
    assert found.dtype == torch.bfloat16 and found.shape == (128, 8)
    assert (found[62:65].float().numpy() == np.concatenate(right, 1)).all()
    assert not found[:62].any() and not found[65:].any()
    assert (held_at(pages, rows.pages)[0] == found.float()).all()
    assert not flat[64 * 8 : 2 * 64 * 8].any()  # page 1 is nobody's


STEP = Rows(torch.tensor([130, 0]), torch.tensor([[4, 0, 2], [3, 1, 5]], dtype=torch.int32), 1)


def _held(pages: ScaledPages, sequence: int, *widths: int) -> np.ndarray:
    """What the heads of a sequence mean by the oracle, f64, up to its position."""
    table, end = STEP.pages[sequence].long(), int(STEP.positions[sequence]) + 1
    codes, scales = (x[table].flatten(0, 1)[:end].numpy() for x in (pages.codes, pages.scales))
    heads = np.split(codes, np.cumsum(widths)[:-1], 1)
    meant = [kvoracle.decode(each, scales[:, i]) for i, each in enumerate(heads)]
    return np.concatenate(meant, 1).astype(np.float64)


def _pages(width: int, heads: int) -> ScaledPages:
    """Any codes but NaN, with scales of their own."""
    codes = torch.randint(0, 256, (6, 64, width), dtype=torch.uint8) & 0xF7
    return ScaledPages(codes, torch.randint(118, 123, (6, 64, heads), dtype=torch.uint8))


def _mixed(q: np.ndarray, keys: np.ndarray, values: np.ndarray, window: int = 0) -> np.ndarray:
    """Attention of a query that is scaled, and sum |weight value|, [2, V] f64."""
    scores = keys @ q
    if window:
        scores[:-window] = -np.inf
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return np.stack([weights @ values, weights @ np.abs(values)])


@pytest.mark.parametrize("window", [0, 70])
def test_heads_are_attended_to_as_f64_says(window: int) -> None:
    shape = GqaShape(4, 2, 24, 0.2, window, v=16)
    cache = _pages(2 * 24, 2), _pages(2 * 16, 2)
    q, k, v = (torch.randn(2, n) for n in (4 * 24, 2 * 24, 2 * 16))
    out = attention.gqa(q, k, v, shape, rows=STEP, cache=cache, exact=True)
    for i in range(2):
        keys, values = _held(cache[0], i, 24, 24), _held(cache[1], i, 16, 16)
        for head, query in enumerate(q[i].double().view(4, 24).numpy() * shape.scale):
            kv = head // 2
            own = keys[:, 24 * kv : 24 * (kv + 1)], values[:, 16 * kv : 16 * (kv + 1)]
            right, size = _mixed(query, *own, window)
            assert (np.abs(out[i].view(4, 16)[head].numpy() - right) <= 1e-5 * size).all()


@pytest.mark.parametrize("turned", [8, 0])
def test_latents_are_attended_to_as_f64_says(turned: int) -> None:
    shape, draw = MlaShape(2, 8, turned, 8, 32, 0.2), np.random.default_rng(1)
    means = [draw.standard_normal((2, n, k)).astype(np.float32) for n, k in ((32, 8), (8, 32))]
    uk_in, uv = (
        Packed(
            FORMATS["f32"],
            *w.shape[1:],
            torch.from_numpy(np.stack([oracle.pack(FORMATS["f32"], x) for x in w])),
        )
        for w in means
    )
    pages = _pages(32 + turned, shape.cached_heads)
    q, new = torch.randn(2, 2 * (8 + turned)), torch.randn(2, 32 + turned)
    out = attention.mla(q, new, uk_in, uk_in, uv, shape, rows=STEP, cache=(pages,), exact=True)
    for i in range(2):
        keys = _held(pages, i, *(n for n in (32, turned) if n))
        for head, query in enumerate(q[i].double().view(2, -1).numpy() * shape.scale):
            through, back = (w[head].astype(np.float64) for w in means)
            asked = np.concatenate([through @ query[:8], query[8:]])
            mixed, size = _mixed(asked, keys, keys[:, :32])
            error = np.abs(out[i].view(2, 8)[head].numpy() - back @ mixed)
            assert (error <= 1e-5 * (np.abs(back) @ size)).all()
