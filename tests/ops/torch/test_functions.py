"""Each operation in plain torch against the slow and obvious thing; and what every row of kernels must keep:
no look at places that were not written, no order of pages, no choice of path that shows in the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from device import CPU
from numpy.typing import NDArray

from ktcli.native import GELU_TANH, SILU, Format, Glu
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.table.experts import GroupScore, Routing, Score
from ktcli.ops.table.rowwise import Rope
from ktcli.ops.torch import attention
from ktcli.ops.torch import functions as f
from ktcli.ops.torch.chosen import highest
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import EXACT, TORCH, kernels_for
from ktcli.ops.torch.packed import (
    NO_EXTRAS,
    Extras,
    Packed,
    PackedStack,
    PlainMatrix,
    unpack,
    unpack_many,
)
from ktcli.weights.formats import FORMATS

F32 = NDArray[np.float32]
BF16_EPS = 2.0**-8  # rounding of one bf16 value, relative


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return torch.from_numpy(values.astype(np.float32))


def packed(fmt: Format, count: int, n: int, k: int, seed: int = 0) -> Packed:
    matrices = draw(count, n, k, seed=seed, scale=k**-0.5).numpy()
    data = np.stack([oracle.pack(fmt, matrix) for matrix in matrices])
    return Packed(fmt, n, k, torch.from_numpy(data))


def matrices(w: Packed) -> F32:
    """[count, n, k], as the oracle decodes them."""
    return np.stack([oracle.unpack(w.format, each, w.n, w.k) for each in w.data.numpy()])


def near(found: torch.Tensor, expected: NDArray[np.floating], tolerance: float = 2e-6) -> None:
    """Within `tolerance` of the values' size."""
    size = np.abs(expected).max()
    assert np.abs(found.double().numpy() - expected).max() <= tolerance * size


# -- rows by themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize("head_width", [24, 8])
def test_norm(head_width: int) -> None:
    x, gain = draw(3, 40)[:, 5:29], draw(head_width, seed=1)  # columns of wider rows
    expected = np.empty((3, 24))
    for t in range(3):
        for first in range(0, 24, head_width):
            run = x[t, first : first + head_width].double().numpy()
            root = np.sqrt((run**2).mean() + 1e-5)
            expected[t, first : first + head_width] = run / root * gain.double().numpy()
    near(f.norm(x, gain, 1e-5), expected)


GLU = Glu(1.702, 0.8, 1.0, 1.1)


def activation(gate: NDArray[np.float64], up: NDArray[np.float64], glu: Glu) -> NDArray[np.float64]:
    limit = glu.limit or np.inf
    gate, up = np.minimum(gate, glu.gate_limit or limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-glu.alpha * (gate + glu.cubic * gate**3))) * (up + glu.shift)


@pytest.mark.parametrize("glu", [SILU, GLU, GELU_TANH], ids=["silu", "clamped", "gelu"])
@pytest.mark.parametrize("width", [16, 40, 45])
def test_swiglu(width: int, glu: Glu) -> None:
    padded = -(-width // 16) * 16
    x = draw(3, 2 * padded)
    expected = np.empty((3, width))
    for i in range(width):
        gate, up = x.double().numpy()[:, [i // 16 * 32 + i % 16, i // 16 * 32 + 16 + i % 16]].T
        expected[:, i] = activation(gate, up, glu)
    near(f.swiglu(x, width, glu), expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_each_pair_by_its_angle(interleaved: bool) -> None:
    dim, head_width, first, scale = 6, 10, 3, 1.25
    inv_freq = (1.0, 0.3, 0.01)
    x, positions = draw(4, 30)[:, :20], torch.tensor([0, 1, 77, 5000])
    expected = x.double().numpy().copy()
    for t, position in enumerate(positions.tolist()):
        for head in range(0, 20, head_width):
            for i in range(dim // 2):
                pair = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
                at = [head + first + each for each in pair]
                angle = float(np.float32(position) * np.float32(inv_freq[i]))
                a, b = expected[t, at]
                turned = complex(a, b) * np.exp(1j * angle) * scale
                expected[t, at] = turned.real, turned.imag
    rows = Rows(positions, torch.zeros(4, 100, dtype=torch.int32), 1)
    rope = Rope(dim, inv_freq, scale, interleaved)
    near(f.rope(x, rope, head_width, first, rows=rows), expected)
    before = replace(rows, positions=positions - 7)
    near(f.rope(x, replace(rope, shift=7), head_width, first, rows=before), expected)


# -- products ------------------------------------------------------------------------------------------


PLAIN = {"plain bf16": torch.bfloat16, "plain f32": torch.float32}


@pytest.mark.parametrize("name", [*FORMATS, *PLAIN])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("elements", [1 << 24, 1], ids=["whole", "panel by panel"])
def test_linear(name: str, exact: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f, "_UNPACKED_ELEMENTS", elements)
    x, bias = draw(5, 65), draw(33, seed=1)
    if name in PLAIN:
        w = PlainMatrix(draw(33, 65, seed=2).to(PLAIN[name]))
        matrix = w.data.double().numpy()
    else:
        w = packed(FORMATS[name], 1, 33, 65)
        matrix = matrices(w)[0].astype(np.float64)
    expected = x.double().numpy() @ matrix.T + bias.numpy()
    # Both factors rounded to bf16, or the sum in f32.
    bound = np.abs(x.double().numpy()) @ np.abs(matrix.T) + np.abs(bias.numpy())
    error = np.abs(f.linear(x, w, bias, exact=exact).double().numpy() - expected)
    assert (error <= (65 * 2.0**-23 if exact else 2 * BF16_EPS) * bound).all()
    assert torch.equal(f.linear(x, w, None, exact=exact) + bias, f.linear(x, w, bias, exact=exact))


def test_unpack_many_gives_the_matrices_of_the_indices() -> None:
    w, which = packed(FORMATS["int4"], 3, 17, 65), torch.tensor([2, 0])
    for dtype in (torch.float32, torch.bfloat16):
        expected = torch.stack([unpack(w, i, dtype) for i in which.tolist()])
        assert torch.equal(unpack_many(w, which, dtype), expected)


# -- routing -------------------------------------------------------------------------------------------


def near_share(logits: F32, chosen: list[int], band: float) -> np.float32:
    """The softmax of the last chosen expert among those near it that were not chosen before."""
    *before, last = chosen
    top = logits[last]
    others = np.delete(logits, before)
    with np.errstate(invalid="ignore"):
        near = others[~((top - others) / np.maximum(np.abs(others), top) > np.float32(band))]
    return 1 / np.exp(near - top).sum()


def route_slowly(logits: F32, r: Routing, bias: F32 | None) -> tuple[list[int], list[float]]:
    """One token, by the rule of kt_program_route."""
    if r.score is Score.SOFTMAX:
        score = np.exp(logits - logits.max(), dtype=np.float32)
        score = score / score.sum()
    elif r.score is Score.SPARSEMIXER:
        score = logits
    elif r.score is Score.SIGMOID:
        score = (1 / (1 + np.exp(-logits))).astype(np.float32)
    else:
        score = np.sqrt(np.log1p(np.exp(logits))).astype(np.float32)
    rank = score if bias is None else score + bias
    size = r.experts // r.n_group
    best_first = [sorted(rank[g * size : (g + 1) * size])[::-1] for g in range(r.n_group)]
    keep = 2 if r.group_score is GroupScore.TOP2 else 1
    value = [sum(each[:keep]) for each in best_first]
    groups = sorted(range(r.n_group), key=lambda g: (-value[g], g))[: r.topk_group]
    taking_part = [e for e in range(r.experts) if e // size in groups]
    ids = sorted(taking_part, key=lambda e: (-rank[e], e))[: r.top_k]
    gate = np.array([score[e] for e in ids])
    if r.score is Score.SPARSEMIXER:
        gate = np.array([near_share(logits, ids[: k + 1], r.band) for k in range(r.top_k)])
    if r.normalize:
        gate = gate / (gate.sum() + np.float32(1e-20))
    return ids, (gate * np.float32(r.scale)).tolist()


ROUTINGS = (
    Routing(10, 3),
    Routing(10, 10, normalize=False, scale=16.0),
    Routing(16, 4, Score.SIGMOID, 4, 2, GroupScore.TOP2, True, 2.5),
    Routing(16, 3, Score.SOFTMAX, 8, 3, GroupScore.MAX, False, 16.0),
    Routing(16, 4, Score.SQRT_SOFTPLUS, scale=1.5),
    Routing(6, 2, Score.SIGMOID, 6, 3, GroupScore.TOP2),  # groups of one
    Routing(16, 2, Score.SPARSEMIXER, normalize=False, band=0.02),
    Routing(10, 3, Score.SPARSEMIXER, normalize=False, band=0.7),
)


@pytest.mark.parametrize("r", ROUTINGS, ids=lambda r: f"{r.score.name}-{r.n_group}-{r.top_k}")
@pytest.mark.parametrize("ties", [False, True])
def test_route(r: Routing, ties: bool) -> None:
    logits = draw(40, r.experts)
    # Of few values, so that experts and groups tie; a negative bias puts open experts below closed ones' zero.
    logits, bias = (logits.round(), torch.full((r.experts,), -2.0)) if ties else (logits, None)
    bias = None if r.score is Score.SPARSEMIXER else bias
    ids, gate = f.route(logits, r, bias)
    assert ids.dtype == torch.int32 and gate.dtype == torch.float32
    for t in range(40):
        expected = route_slowly(logits[t].numpy(), r, None if bias is None else bias.numpy())
        assert ids[t].tolist() == expected[0]
        np.testing.assert_allclose(gate[t].numpy(), expected[1], rtol=1e-6)


# -- experts -------------------------------------------------------------------------------------------

E, H, WIDTH, K = 6, 80, 40, 3


def stacks(fmt: str, count: int) -> tuple[Packed, Packed]:
    return packed(FORMATS[fmt], count, 96, H), packed(FORMATS[fmt], count, H, WIDTH, seed=1)


EXTRAS = Extras(GLU, draw(E, 96, seed=2), draw(E, H, seed=3))


def experts_slowly(x, ids, gate, stack: PackedStack) -> NDArray[np.float64]:
    slots, extras = stack.slots, stack.extras
    out, wide, narrow = np.zeros((x.shape[0], H)), matrices(stack.gate_up), matrices(stack.down)
    biases = [
        np.zeros((E, n)) if bias is None else bias.double().numpy()
        for bias, n in ((extras.gate_up_bias, 96), (extras.down_bias, H))
    ]
    for t in range(x.shape[0]):
        for e, weight in sorted(zip(ids[t].tolist(), gate[t].tolist(), strict=True)):
            if e < 0 or slots[e] < 0:
                continue
            both = wide[slots[e]].astype(np.float64) @ x[t].double().numpy() + biases[0][e]
            both = both.reshape(-1, 2, 16)
            inner = activation(both[:, 0], both[:, 1], extras.glu).reshape(-1)[:WIDTH]
            out[t] += weight * (narrow[slots[e]].astype(np.float64) @ inner + biases[1][e])
    return out


def chosen(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and gate of n tokens; some slots are empty."""
    rng = np.random.default_rng(n)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(n)]).astype(np.int32)
    ids[rng.random((n, K)) < 0.2] = -1
    return draw(n, H), torch.from_numpy(ids), draw(n, K, seed=1).abs()


@pytest.mark.parametrize("n", [1, 4, 40])
@pytest.mark.parametrize("fmt", ["int4", "int8", "bf16"])
@pytest.mark.parametrize("extras", [NO_EXTRAS, EXTRAS], ids=["plain", "biases"])
def test_experts(n: int, fmt: str, extras: Extras) -> None:
    x, ids, gate = chosen(n)
    slots = torch.tensor([2, -1, 0, 1, -1, 3], dtype=torch.int32)
    given = x, ids, gate, PackedStack(slots, *stacks(fmt, 4), extras)
    expected = experts_slowly(*given)
    near(f.experts(*given, exact=True), expected, 1e-5)
    near(f.experts(*given), expected, 0.02)


def test_experts_here_and_elsewhere_make_the_whole() -> None:
    x, ids, gate = chosen(30)
    wide, narrow = stacks("int4", E)
    stack = PackedStack(torch.arange(E, dtype=torch.int32), wide, narrow)
    whole = f.experts(x, ids, gate, stack, exact=True)
    total = torch.zeros_like(whole)
    for here in ([0, 3, 4], [1, 2, 5]):
        slots = torch.full((E,), -1, dtype=torch.int32)
        slots[here] = torch.arange(len(here), dtype=torch.int32)
        parts = (Packed(w.format, w.n, w.k, w.data[here]) for w in (wide, narrow))
        total += f.experts(x, ids, gate, PackedStack(slots, *parts), exact=True)
    near(total, whole.double().numpy(), 1e-5)


def test_experts_that_are_not_there_give_zeros() -> None:
    x, ids, gate = chosen(3)
    nowhere = torch.full((E,), -1, dtype=torch.int32)
    for count in (0, 2):
        some = (Packed(w.format, w.n, w.k, w.data[:count]) for w in stacks("int4", 2))
        out = f.experts(x, ids, gate, PackedStack(nowhere, *some))
        assert torch.equal(out, torch.zeros(3, H))


def test_both_ways_of_experts_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (*chosen(7), PackedStack(torch.arange(E, dtype=torch.int32), *stacks("int4", E)))
    gathered = f.experts(*given, exact=True)
    monkeypatch.setattr(f, "GATHERED_ROWS", 0)
    near(f.experts(*given, exact=True), gathered.double().numpy(), 1e-5)


# -- attention -----------------------------------------------------------------------------------------

GQA = GqaShape(heads=6, kv_heads=2, head_dim=10, scale=0.3)
SINKS = draw(6, seed=9)
MLA = MlaShape(heads=3, nope=12, rope=6, v=14, lora=20, scale=0.25)
N = 150  # positions; three pages


def attend_slowly(
    q, k, v, scale: float, window: int = 0, sinks: torch.Tensor | None = None, chunked: bool = False
) -> NDArray[np.float64]:
    """Position by position: q [N, heads, D], k [N, heads, D], v [N, heads, W] -> [N, heads * W]."""
    q, k, v = (each.double().numpy() for each in (q, k, v))
    out = np.empty((q.shape[0], q.shape[1], v.shape[2]))
    sink = np.full((q.shape[1], 1), -np.inf) if sinks is None else sinks.double().numpy()[:, None]
    for t in range(q.shape[0]):
        first = max(0, t + 1 - window) if window else 0
        seen = slice(t // window * window if chunked else first, t + 1)
        scores = np.einsum("hd,lhd->hl", q[t], k[seen]) * scale
        weights = np.exp(np.concatenate((scores, sink), 1))
        weights /= weights.sum(1, keepdims=True)
        out[t] = np.einsum("hl,lhw->hw", weights[:, :-1], v[seen])
    return out.reshape(q.shape[0], -1)


def in_pieces(sizes: list[int], step, width: int) -> torch.Tensor:
    """All N positions through `step(slice, rows)`: the first pieces of these sizes, the rest like the last;
    pages in no order, and of a single row a page more than it needs."""
    order, out, at = [5, 0, 3, 1], torch.empty(N, width), 0
    while at < N:
        size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], N - at)
        pages = -(-(at + size) // 64) + (size == 1)
        table = torch.tensor([order[:pages]], dtype=torch.int32)
        out[at : at + size] = step(
            slice(at, at + size), Rows(torch.arange(at, at + size), table, size)
        )
        at += size
    return out


SIZES = ([N], [7, 70, 40], [60, 1])


@pytest.mark.parametrize("sizes", SIZES, ids=["whole", "chunks", "one by one"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize(
    ("block", "window", "chunked", "sinks", "wide"),
    [
        (1024, 0, False, None, 10),
        (9, 0, False, None, 7),
        (1024, 20, False, SINKS, 10),
        (9, 0, False, SINKS, 13),
        (9, 130, False, None, 10),
        (9, 70, True, None, 10),
        (1024, 64, True, SINKS, 10),
    ],
)
def test_gqa(
    sizes, exact: bool, block: int, window: int, chunked: bool, sinks, wide: int, monkeypatch
) -> None:
    monkeypatch.setattr(attention, "_BLOCK_QUERIES", block)
    s = replace(GQA, window=window, v=wide, chunked=chunked)
    widths = 6 * 10, 2 * 10, 2 * wide
    q, k, v = (draw(N, width, seed=i) for i, width in enumerate(widths))
    dtype = torch.float32 if exact else torch.bfloat16
    cache = tuple(torch.full((7, 64, 2 * n), float("nan"), dtype=dtype) for n in (10, wide))
    found = in_pieces(
        list(sizes),
        lambda at, rows: attention.gqa(
            q[at], k[at], v[at], s, sinks, rows=rows, cache=cache, exact=exact
        ),
        6 * wide,
    )
    k, v = (each.view(N, 2, 1, -1).expand(N, 2, 3, -1).flatten(1, 2) for each in (k, v))
    expected = attend_slowly(q.view(N, 6, 10), k, v, s.scale, window, sinks, chunked)
    near(found, expected, 1e-5 if exact else 0.02)


@pytest.mark.parametrize("sizes", SIZES, ids=["whole", "chunks", "one by one"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("elements", [1 << 26, 1])
@pytest.mark.parametrize("mixed", [False, True], ids=["expanded", "mixed forms"])
def test_mla(
    sizes: list[int], exact: bool, elements: int, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_EXPANDED_ELEMENTS", elements)
    s = MLA
    uk_out = packed(FORMATS["bf16"], s.heads, s.nope, s.lora)
    turned = np.ascontiguousarray(matrices(uk_out).transpose(0, 2, 1))
    data = torch.from_numpy(np.stack([oracle.pack(FORMATS["bf16"], each) for each in turned]))
    uk_in = Packed(FORMATS["bf16"], s.lora, s.nope, data)
    uv = packed(FORMATS["bf16"], s.heads, s.v, s.lora, seed=1)
    q, latent = draw(N, s.heads * 18), draw(N, s.lora + s.rope, seed=1)
    cache = torch.full((7, 64, 26), float("nan"), dtype=torch.float32 if exact else torch.bfloat16)
    found = in_pieces(
        list(sizes),
        lambda at, rows: attention.mla(
            q[at],
            latent[at],
            uk_in,
            uk_out,
            uv,
            s,
            rows=replace(rows, absorbed=((0, 3), (5, rows.run)))
            if mixed and rows.run > 5
            else rows,
            cache=(cache,),
            exact=exact,
        ),
        s.heads * s.v,
    )
    c, r = latent[:, : s.lora], latent[:, None, s.lora :].expand(N, s.heads, s.rope)
    keys = torch.einsum("lc,hnc->lhn", c, torch.from_numpy(matrices(uk_out)))
    values = torch.einsum("lc,hvc->lhv", c, torch.from_numpy(matrices(uv)))
    expected = attend_slowly(q.view(N, s.heads, 18), torch.cat((keys, r), -1), values, s.scale)
    near(found, expected, 1e-5 if exact else 0.02)


def test_no_prompt_attends_by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compile a plan for every new length."""
    asked = []

    def watched(*args: torch.Tensor, **named: object) -> torch.Tensor:
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return of_torch(*args, **named)

    of_torch = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    q, k = draw(2, 5, 8), draw(2, 9, 8, seed=1)
    seen = torch.ones(5, 9, dtype=torch.bool)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    found = attention.attend(q, k, k, seen, 0.5)
    torch.testing.assert_close(found, (q @ k.mT * 0.5).softmax(-1) @ k)
    assert asked == [False] and torch.backends.cuda.cudnn_sdp_enabled() == before
    # Nobody else asks torch for it.
    sources = Path(attention.__file__).parents[2].rglob("*.py")
    calls = [path.name for path in sources if "scaled_dot_product_attention(" in path.read_text()]
    assert calls == ["attention.py"]


def test_sequences_of_a_step_do_not_see_each_other() -> None:
    """Two sequences, two rows each, as each alone."""
    q, k, v = (draw(4, heads * 10, seed=i) for i, heads in enumerate((6, 2, 2)))
    both = tuple(torch.zeros(4, 64, 20) for _ in range(2))
    tables, positions = torch.tensor([[2], [0]], dtype=torch.int32), torch.tensor([0, 1, 0, 1])
    where = Rows(positions, tables, 2)
    together = attention.gqa(q, k, v, GQA, rows=where, cache=both, exact=True)
    for i in range(2):
        of, alone = slice(2 * i, 2 * i + 2), tuple(torch.zeros(4, 64, 20) for _ in range(2))
        rows = Rows(positions[of], tables[i : i + 1], 2)
        expected = attention.gqa(q[of], k[of], v[of], GQA, rows=rows, cache=alone, exact=True)
        assert torch.equal(together[of], expected)


def test_the_exact_row_is_asked_for() -> None:
    assert kernels_for(CPU) is TORCH
    assert kernels_for(CPU, exact=True) is EXACT


def test_the_highest_are_those_of_a_stable_sort() -> None:
    scores = torch.randn(50, 3, 400).mul(4).round().div(4)
    scores[0] = torch.tensor([0.0, -0.0] * 200)
    scores[1, :, 5:] = -torch.inf
    scores[2, :, ::3] = torch.inf
    for k in (1, 64, 400):
        wanted = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        assert torch.equal(highest(scores, k), wanted)
    assert highest(scores, 500).shape[-1] == 400


@pytest.mark.parametrize(("run", "end"), [(5, 5), (7, 70), (1, 64), (130, 200)])
def test_a_run_whose_end_is_known_attends_without_a_mask(run: int, end: int) -> None:
    """In whole pages, of which the last is not full; heads share keys, and values are narrower."""
    length = -(-end // 64) * 64
    q, k, v = (torch.randn(2, 3, n, d) for n, d in ((run, 24), (length, 24), (length, 16)))
    positions = torch.arange(end - run, end)
    k, v = (each[:, :1].expand(-1, 3, -1, -1) for each in (k, v))
    known = attention._attend(q, k, v, positions, 0.2, end=end)
    torch.testing.assert_close(known, attention._attend(q, k, v, positions, 0.2))
