"""The row of kernels of a GPU equals plain torch there, at small and at real shapes: `pytest -m gpu`.

Plain torch is exact here, so each tolerance is what rounding inputs and intermediate sums to bf16 may do.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import oracle  # noqa: E402
from torch import Tensor  # noqa: E402

from ktcli.native import Arena, Format, Pool, Weight, packed_bytes  # noqa: E402
from ktcli.ops.table.attention import GqaShape, MlaShape  # noqa: E402
from ktcli.ops.table.experts import GroupScore, Routing, Score  # noqa: E402
from ktcli.ops.table.rowwise import Rope  # noqa: E402
from ktcli.ops.torch import functions  # noqa: E402
from ktcli.ops.torch.functions import Rows  # noqa: E402
from ktcli.ops.torch.kernels import EXACT, kernels_for  # noqa: E402
from ktcli.ops.torch.packed import Packed, PackedStack, unpack, unpack_many  # noqa: E402
from ktcli.weights.formats import FORMATS  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"
    ),
]
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ANGLES = tuple(i / 31 for i in range(32))  # radians per position
BF16 = 2.0**-8  # greatest relative error of rounding to bf16


def packed(fmt: Format, count: int, n: int, k: int) -> Packed:
    """Random matrices; where columns are padded, with nothing, as in a pack."""
    if k % 64:
        draw = np.random.default_rng(1)
        rows = (draw.standard_normal((n, k)).astype(np.float32) for _ in range(count))
        small = torch.from_numpy(np.stack([oracle.pack(fmt, each) for each in rows]))
        return Packed(fmt, n, k, small.to(GPU))
    size = packed_bytes(fmt, n, k)
    arena = Arena(size * count)
    Pool(2).fill_random(Weight(fmt, n, k, count, arena.address, arena), 1)
    data = torch.from_numpy(np.array(arena.bytes[: size * count]).reshape(count, size))
    return Packed(fmt, n, k, data.to(GPU))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=GPU)


def near(out: Tensor, right: Tensor) -> None:
    """Rounding errors of bf16, of which the greatest of many is some times the usual one."""
    assert (out - right).abs().max() <= 0.05 * right.std() and torch.isfinite(out).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(50, 200), (512, 7168)])
@pytest.mark.parametrize("t", [1, 4, 40, 300])
def test_linear(name: str, n: int, k: int, t: int) -> None:
    w, x, bias = packed(FORMATS[name], 1, n, k), random(t, k), random(n)
    matrix = unpack(w, 0, torch.float32)
    out = kernels_for(GPU)["linear"](x, w, bias) - bias
    bound = x.double().abs() @ matrix.double().abs().mT
    error = (out.double() - x.double() @ matrix.double().mT).abs()
    assert (error <= 2.1 * BF16 * bound + 1e-4).all()


@pytest.mark.parametrize("name", ["bf16", "int8", "int8-row", "int4", "int4-g32"])
@pytest.mark.parametrize(("experts", "hidden", "width"), [(6, 72, 24), (128, 2048, 768)])
@pytest.mark.parametrize("t", [1, 4, 50])
def test_experts(name: str, experts: int, hidden: int, width: int, t: int) -> None:
    fmt, top_k, rounded = FORMATS[name], min(8, experts - 2), -(-width // 16) * 16
    gate_up, down = (
        packed(fmt, experts - 1, 2 * rounded, hidden),
        packed(fmt, experts - 1, hidden, width),
    )
    slots = torch.arange(-1, experts - 1, dtype=torch.int32, device=GPU)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(t)]).int().to(GPU)
    stack = PackedStack(slots, gate_up, down)
    of = random(t, hidden), ids, torch.rand(t, top_k, device=GPU), stack
    near(kernels_for(GPU).experts(*of), EXACT.experts(*of))


def places(batch: int) -> Rows:
    pages = torch.randperm(20)[: batch * 5].view(batch, 5).int().to(GPU)
    positions = torch.tensor([300, 0, 127, 64], device=GPU)[:batch]
    return Rows(positions, pages, 1)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("heads", "kv", "width", "wide"), [(3, 1, 80, 80), (32, 4, 128, 128), (64, 4, 192, 128)]
)
def test_gqa(heads: int, kv: int, width: int, wide: int, batch: int) -> None:
    shape, rows = GqaShape(heads, kv, width, width**-0.5, v=wide), places(batch)
    cache = tuple(random(20, 64, kv * each).bfloat16() for each in (width, wide))
    same = tuple(each.float() for each in cache)
    q, k, v = (random(batch, n) for n in (heads * width, kv * width, kv * wide))
    out = kernels_for(GPU)["gqa"](q, k, v, shape, rows=rows, cache=cache)
    near(out, EXACT["gqa"](q, k, v, shape, rows=rows, cache=same))
    for a, b in zip(cache, same, strict=True):
        assert torch.equal(a, b.bfloat16())


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("sizes", [(3, 8, 64, 8, 96), (128, 128, 64, 128, 512)])
def test_mla(sizes: tuple[int, int, int, int, int], batch: int) -> None:
    heads, nope, rope, v, lora = sizes
    shape, rows = MlaShape(*sizes, (nope + rope) ** -0.5), places(batch)
    ways = (lora, nope), (nope, lora), (v, lora)
    weights = tuple(packed(FORMATS["int8-row"], heads, n, k) for n, k in ways)
    cache = random(20, 64, lora + rope).bfloat16()
    same, q, latent = (
        cache.float(),
        random(batch, heads * (nope + rope)),
        random(batch, lora + rope),
    )
    out = kernels_for(GPU)["mla"](q, latent, *weights, shape, rows=rows, cache=(cache,))
    near(out, EXACT["mla"](q, latent, *weights, shape, rows=rows, cache=(same,)))
    assert torch.equal(cache, same.bfloat16())


@pytest.mark.parametrize(("t", "width"), [(1, 80), (3, 80), (1, 7168), (300, 2048)])
def test_rows_alone(t: int, width: int) -> None:
    row, x, gain = kernels_for(GPU), random(t, 2 * width)[:, 3 : 3 + width], random(width)
    torch.testing.assert_close(row["norm"](x, gain, 1e-6), functions.norm(x, gain, 1e-6))
    wide = random(t, 96)
    torch.testing.assert_close(row["swiglu"](wide, 40), functions.swiglu(wide, 40))
    rows = Rows(torch.arange(t, device=GPU) * 333, torch.zeros(t, 1, device=GPU).int(), 1)
    for first, interleaved in ((0, False), (16, True)):
        of = random(t, 240), Rope(64, ANGLES, 1.3, interleaved), 80, first
        # The angle of a far place is large: its sine differs by the rounding of that.
        made, right = (rope(*of, rows=rows) for rope in (row["rope"], functions.rope))
        torch.testing.assert_close(made, right, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "routing",
    [
        Routing(128, 8),
        Routing(5, 5),
        Routing(256, 8, Score.SIGMOID, 8, 4, GroupScore.TOP2, True, 2.5),
        Routing(160, 6, Score.SOFTMAX, 8, 3, GroupScore.MAX, False, 16.0),
    ],
    ids=str,
)
def test_route(routing: Routing) -> None:
    logits = random(5, routing.experts)
    logits[1] = 0  # all equal: the lower ids
    bias = random(routing.experts) if routing.score is Score.SIGMOID else None
    ids, gate = kernels_for(GPU)["route"](logits, routing, bias)
    right_ids, right_gate = functions.route(logits, routing, bias)
    assert torch.equal(ids, right_ids)
    torch.testing.assert_close(gate, right_gate)


@pytest.mark.parametrize("name", FORMATS)
def test_unpack_all(name: str) -> None:
    from ktcli.ops.triton.panels import unpack_all

    w, indices = packed(FORMATS[name], 3, 50, 200), torch.tensor([2, 0], device=GPU)
    right = unpack_many(w, indices, torch.bfloat16)
    assert torch.equal(unpack_all(w, indices), right)
