"""The laws of the Triton kernels, run in a process of its own by test_triton.py: python triton_laws.py [--gpu] NAME…

Each function here compares kernels with numpy's oracle or with the torch row: under the interpreter, or with
--gpu on a GPU, where every tensor below then lies. Without a name, all of them.
"""

import sys
from dataclasses import replace
from itertools import product

import kvoracle
import numpy as np
import oracle
import torch
from added_parts import added
from triton_interpreter import ON_GPU, backwards  # before triton

from ktcli.native import GELU_TANH, SILU, Format, Glu, Scale, packed_bytes
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.table.experts import GroupScore, Routing, Score
from ktcli.ops.table.rowwise import Reads, Rope
from ktcli.ops.torch import attention, functions
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.lowrank import LowRankUpdate
from ktcli.ops.torch.merged import Heads, Latent, Mlp, Parts
from ktcli.ops.torch.packed import (
    NO_EXTRAS,
    ROUTED_ROWS,
    Extras,
    Packed,
    PackedStack,
    PlainMatrix,
    rotate,
)
from ktcli.ops.torch.pages import ScaledPages
from ktcli.ops.triton import attention as triton_attention
from ktcli.ops.triton import merged as triton_merged
from ktcli.ops.triton import operations as triton_row
from ktcli.ops.triton import product as triton_product
from ktcli.ops.triton import router as triton_router
from ktcli.ops.triton import small as triton_small
from ktcli.ops.triton import summary as triton_summary
from ktcli.ops.triton import tiles as triton_tiles
from ktcli.ops.triton.panels import unpack_all
from ktcli.ops.triton.sums import sum_parts
from ktcli.weights.formats import FORMATS, LINEAR

EVERY = (
    *(fmt for fmt in FORMATS.values() if not fmt.rotation),  # the others: `rotated`
    Format("int4-row", 4, 0, Scale.F32, LINEAR),
    Format("int8-g64", 8, 64, Scale.BF16),
)
ROTATED = tuple(fmt for fmt in FORMATS.values() if fmt.rotation)
BF16 = 2.0**-8  # greatest relative error of rounding to bf16

SEED = 0

_random = np.random.default_rng(SEED)


def _seed(seed: int) -> None:
    """A law draws the same numbers whichever others run before it."""
    global _random
    _random = np.random.default_rng(seed)
    torch.manual_seed(seed)


def _stack(fmt: Format, count: int, n: int, k: int) -> tuple[Packed, torch.Tensor]:
    """Packed matrices and what they mean, [count, n, k] f32."""
    raw = (_random.standard_normal((count, n, k)) / k**0.5).astype(np.float32)
    data = [oracle.pack(fmt, each) for each in raw]
    means = np.stack([oracle.unpack(fmt, each, n, k) for each in data])
    device = torch.get_default_device()
    packed = torch.from_numpy(np.stack(data)).to(device)
    return Packed(fmt, n, k, packed), torch.from_numpy(means).to(device)


def _close(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float) -> None:
    """|out - x w^T| <= eps * sum |x w|, the worst any order of rounding to `eps` may do."""
    error = (out.double() - x.double() @ w.double().mT).abs()
    assert (error <= eps * (x.double().abs() @ w.double().abs().mT) + 1e-30).all()


def unpacking() -> None:
    """Every format, odd sizes: the oracle's values, rounded once."""
    n, k = 20, 200
    for fmt in (*EVERY, *ROTATED):
        w, means = _stack(fmt, 3, n, k)
        indices = torch.tensor([2, 0])
        assert torch.equal(unpack_all(w, indices, torch.float32), means[indices]), fmt.name
        assert torch.equal(unpack_all(w, indices), means[indices].bfloat16()), fmt.name


def few_rows() -> None:
    """One row: f32 sums, of numbers up to 264 / 8 times the codes (`zero_of`); splits of columns, too."""
    split = [(fmt, 16, 1100) for fmt in EVERY if fmt.name in ("int4-g32", "bf16")]
    for fmt, n, k in [*((fmt, 10, 136) for fmt in EVERY), (FORMATS["int4"], 34, 200), *split]:
        w, means = _stack(fmt, 1, n, k)
        x, bias = torch.randn(1, k + 3)[:, 1 : k + 1], torch.randn(n)
        _close(sum_parts(triton_product.vector_product(x, w, bias)) - bias, x, means[0], 1e-4)
    w, means = _stack(FORMATS["int4"], 3, 20, 40)
    x = torch.randn(2, 3, 40)
    out = triton_product.vector_products(x, w)
    for i in range(3):
        _close(out[:, i], x[:, i], means[i], 1e-4)
    w, means = _stack(FORMATS["int4"], 1, 32, 1024)  # whole tiles: the way without masks
    x = torch.randn(1, 1024)
    _close(sum_parts(triton_product.vector_product(x, w)), x, means[0], 1e-4)


def rows_alone() -> None:
    """A row's bits do not depend on its neighbours."""
    w, _ = _stack(FORMATS["int4"], 1, 32, 320)
    x = torch.randn(3, 320)
    alone = [sum_parts(triton_product.vector_product(x[i : i + 1], w)) for i in range(3)]
    assert torch.equal(torch.cat(alone), sum_parts(triton_product.vector_product(x, w)))


def tiles() -> None:
    """Several rows: what cuBLAS gets from unpacked weights, in f32 sums."""
    sizes = ((50, 200, 3), (80, 330, 18))
    for i, fmt in enumerate(EVERY):
        n, k, t = sizes[i % 2]
        w, means = _stack(fmt, 1, n, k)
        x, bias = torch.randn(t, k), torch.randn(n)
        rounded, matrix = (x, means[0]) if fmt.bits == 32 else (x.bfloat16(), means[0].bfloat16())
        if not fmt.group and fmt.bits != 32:
            matrix = means[0]  # scaled after the sum
        out = sum_parts(triton_tiles.tile_product(x, w, bias)) - bias
        _close(out, rounded.float(), matrix.float(), 1e-4)


def tiles_of_few() -> None:
    """Rows that are read as they are, columns of wider ones: the bits of rows that torch rounds and brings in order,
    ties and what bf16 does not hold among them."""
    few = triton_tiles.DIRECT_ROWS
    for i, fmt in enumerate(EVERY):
        n, k, t = ((50, 200, 3), (40, 331, 16), (34, 256, 2))[i % 3]
        w, _ = _stack(fmt, 1, n, k)
        x = torch.randn(t, k + 9)[:, 5 : k + 5]
        x[:, ::5] = 1 + torch.randint(0, 9, (t, 1)) * 2.0**-8  # halfway between two numbers
        x[0, :3] = torch.tensor([1e-40, -0.0, 3e30])
        made = []
        for triton_tiles.DIRECT_ROWS in (few, 0):
            made.append(sum_parts(triton_tiles.tile_product(x, w)))
        assert torch.equal(*made), fmt.name


def linear() -> None:
    """Any number of rows comes to the right kernel; a matrix is un-packed whole or in blocks."""
    w, means = _stack(FORMATS["int4"], 1, 40, 128)
    whole = triton_row.UNPACKED_ELEMENTS
    for t, elements in ((1, whole), (2, whole), (65, whole), (65, 16 * 128)):
        triton_row.UNPACKED_ELEMENTS = elements
        x = torch.randn(t, 128)
        _close(triton_row.linear(x, w, None), x, means[0], 2.1 * BF16)


def experts() -> None:
    """Both ways equal the torch row; what is not here is skipped, whatever its gate."""
    biased = Extras(Glu(1.702, 0.9, 1.0, 1.1), torch.randn(6, 64), torch.randn(6, 72))
    for first, second, extras in (("int4", "int4", biased), ("int8-row", "bf16", NO_EXTRAS)):
        gate_up, _ = _stack(FORMATS[first], 4, 64, 72)
        down, _ = _stack(FORMATS[second], 4, 72, 24)
        ids = torch.stack([torch.randperm(6)[:2] for _ in range(19)]).int()
        gate = torch.rand(19, 2)
        ids[3, 1] = -1
        slots = torch.tensor([3, -1, 0, 1, 2, -1], dtype=torch.int32)
        x = torch.randn(19, 72)
        stack = PackedStack(slots, gate_up, down, extras)
        right = functions.experts(x, ids, gate, stack, exact=True)
        gate[3, 1] = float("nan")
        few = triton_row.experts(x[3:5], ids[3:5], gate[3:5], stack)
        torch.testing.assert_close(few, right[3:5], atol=2e-4, rtol=1e-4)
        triton_tiles.CHUNK_TOKENS = 16
        many = triton_row.experts(x, ids, gate, stack)
        torch.testing.assert_close(many, right, atol=2e-2, rtol=2e-2)


def beside() -> None:
    """An MLP beside the experts of a row: wider or narrower than they are, in another format, rotated or not, with its
    own activation; a row of several stays alone."""
    given = (
        ("int4", 80, "int8-row", Glu(1.702, 0.9, 1.0)),
        ("int8-row", 48, "int4-g32", SILU),
        ("int8", 48, "int8", SILU),
        ("int4-row-had", 48, "int8", SILU),
        ("int4", 48, "int4-row-had", SILU),
        ("int4-row-had", 80, "bf16", SILU),
    )
    for fmt, width, other, glu in given:
        (gate_up, _), (down, _) = _stack(FORMATS[fmt], 2, 96, 72), _stack(FORMATS[fmt], 2, 72, 40)
        wide, narrow = (
            _stack(FORMATS[other], 1, 2 * width, 72)[0],
            _stack(FORMATS[other], 1, 72, width)[0],
        )
        ids, slots = torch.tensor([[2, 1, 0]]).int(), torch.tensor([1, -1, 0]).int()
        x, gate, bias = torch.randn(2, 72), torch.rand(1, 3), torch.randn(72)
        of = x[:1], ids, gate, PackedStack(slots, gate_up, down)
        made = triton_row.few_experts(*of, Mlp(wide, narrow, glu, bias))
        alone = triton_row.few_experts(*of)
        assert made is not None and made[1] is not None and alone is not None and alone[1] is None
        assert torch.equal(added(made[0]), added(alone[0]))
        inner = functions.swiglu(functions.linear(x[:1], wide, exact=True), width, glu)
        right = functions.linear(inner, narrow, bias, exact=True)
        torch.testing.assert_close(added(made[1]), right, atol=2e-4, rtol=1e-4)
        both = x, ids.expand(2, -1).contiguous(), gate.expand(2, -1).contiguous(), *of[3:]
        several = triton_row.few_experts(*both, Mlp(wide, narrow, glu, bias))
        assert several is not None and several[1] is None


def rows_rotated() -> None:
    """Rows that are columns of wider ones, rotated for a weight, have the bits of torch's, alone as
    among others; of blocks of all sizes, padded with zeros."""
    for fmt, k in product(ROTATED, (1, 72, 200, 256, 1000)):
        w = Packed(fmt, 16, k, torch.zeros(1, packed_bytes(fmt, 16, k), dtype=torch.uint8))
        x = torch.randn(3, 2, k + 9)[..., 5 : k + 5]
        made, plain = triton_small.unrotated(x, w)
        block, columns = triton_small.rotation_of(w)
        right = rotate(torch.nn.functional.pad(x, (0, columns - k)), block)
        assert torch.equal(made, right) and (plain.format.rotation, plain.k) == (0, columns)
        assert torch.equal(made[1:, 1], triton_small.unrotated(x[1:, 1], w)[0])
    w, _ = _stack(FORMATS["int4"], 1, 16, 72)
    assert triton_small.unrotated(x, w) == (x, w)


def rotated() -> None:
    """Rotated formats mean what the oracle says here too, of one row, few and many: with blocks of all sizes, padded
    columns, bias, biases of experts and activation."""
    slots = torch.tensor([1, -1, 0], dtype=torch.int32)
    extras = Extras(Glu(1.702, 0.9, 1.0, 1.1), torch.randn(3, 64), torch.randn(3, 72))
    for fmt in ROTATED:
        (gate_up, _), (down, _) = _stack(fmt, 2, 64, 72), _stack(fmt, 2, 72, 24)
        plain, _ = _stack(FORMATS["bf16"], 2, 72, 24)
        for k in (72, 256):
            w, means = _stack(fmt, 3, 40, k)
            x = torch.randn(2, 3, k)
            out = triton_product.vector_products(x, w)
            for i in range(3):
                _close(out[:, i], x[:, i], means[i], 1e-4)
            w = Packed(fmt, 40, k, w.data[:1])
            for t in (1, 3, 18, triton_tiles.TILE_ROWS + 1):
                x, bias = torch.randn(t, k + 3)[:, 1 : k + 1], torch.randn(40)
                eps = 1e-4 if t == 1 else 2.1 * BF16
                _close(triton_row.linear(x, w, bias) - bias, x, means[0], eps)
        for t in (1, 3, triton_tiles.TILE_ROWS + 1):
            ids = torch.stack([torch.randperm(3)[:2] for _ in range(t)]).int()
            ids[-1, 0] = -1
            for second in (down, plain):
                stack = PackedStack(slots, gate_up, second, extras)
                given = torch.randn(t, 72), ids, torch.rand(t, 2), stack
                right = functions.experts(*given, exact=True)
                close = 2e-4 if t <= triton_row.FEW_ROWS else 2e-2
                made = triton_row.experts(*given)
                torch.testing.assert_close(made, right, atol=close, rtol=close)


def groups() -> None:
    """Tiles name every place of a matrix once, in order, and nothing else."""
    for count, tile_rows in ((5, 2), (1, 16), (40, 4)):
        ids = torch.randint(-1, 12, (9, 3)).int()
        slots = (torch.arange(12) % (count + 1) - 1).int()
        made = triton_tiles.group_slots(ids, slots, count, tile_rows)
        matrix = torch.where(ids >= 0, slots[ids.clamp(min=0).long()], -1).flatten()
        seen = []
        for m, first, last in made.tiles.tolist():
            if m < count:
                seen += [(m, place) for place in range(first, min(first + tile_rows, last))]
        assert sorted(place for _, place in seen) == list(range(int((matrix >= 0).sum())))
        assert all(int(matrix[int(made.order[place])]) == m for m, place in seen)


def _cached(rows: Rows, *shape: int) -> torch.Tensor:
    """Pages with NaN wherever a sequence has not been."""
    cache = torch.full((20, 64, *shape), float("nan"), dtype=torch.bfloat16)
    for table, position in zip(rows.pages, rows.positions.tolist(), strict=True):
        for at in range(position):
            cache[table[at // 64], at % 64] = torch.randn(shape).bfloat16()
    return cache


def _rows(width: int) -> Rows:
    pages = torch.randperm(20)[: 3 * width].view(3, width).int()
    return Rows(torch.tensor([300, 0, 127]), pages, 1)


def gqa() -> None:
    for heads, kv, width, window, wide, chunked in (
        (4, 2, 64, 0, 0, False),
        (3, 1, 80, 70, 0, False),
        (1, 1, 256, 0, 0, False),
        (2, 1, 16, 3, 0, False),
        (4, 2, 24, 70, 18, False),
        (2, 2, 8, 0, 40, False),
        (4, 2, 16, 56, 0, True),
    ):
        shape = GqaShape(heads, kv, width, width**-0.5, window, v=wide, chunked=chunked)
        sinks = torch.randn(heads) if window else None
        rows = _rows(5)
        cache = _cached(rows, kv * width), _cached(rows, kv * shape.value_dim)
        same = cache[0].clone(), cache[1].clone()
        q, k = (torch.randn(3, n * width) for n in (heads, kv))
        v = torch.randn(3, kv * shape.value_dim)
        out = triton_row.gqa(q, k, v, shape, sinks, rows=rows, cache=cache)
        right = attention.gqa(q, k, v, shape, sinks, rows=rows, cache=same)
        torch.testing.assert_close(out, right, atol=8e-3, rtol=8e-3)
        for a, b in zip(cache, same, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))
        # A wider table, of pages that are nobody's, changes no bit.
        wide = Rows(rows.positions, torch.nn.functional.pad(rows.pages, (0, 4)), 1)
        assert torch.equal(out, triton_attention.gqa_one(q, cache, wide, shape, sinks))


def _adapted(*weights: Packed) -> tuple[Packed, ...]:
    """Matrices of heads with updates: some of both factors are the same for all heads."""
    shared = ((True, False), (False, True), (False, False))
    made = []
    for w, (one_a, one_b) in zip(weights, shared, strict=True):
        a = torch.randn(1 if one_a else w.count, 3, w.k)
        b = torch.randn(1 if one_b else w.count, w.n, 3)
        made.append(replace(w, update=LowRankUpdate(0.1 * a, 0.2 * b)))
    return tuple(made)


def mla() -> None:
    for heads, nope, rope, v, lora in ((2, 16, 16, 16, 32), (1, 8, 64, 8, 96), (2, 24, 0, 16, 40)):
        shape = MlaShape(heads, nope, rope, v, lora, (nope + rope) ** -0.5)
        weights = tuple(
            _stack(FORMATS["int8-row"], heads, n, k)[0]
            for n, k in ((lora, nope), (nope, lora), (v, lora))
        )
        rows = _rows(5)
        cache = _cached(rows, lora + rope)
        same = cache.clone()
        q, latent = torch.randn(3, heads * (nope + rope)), torch.randn(3, lora + rope)
        plain = None
        for of in (weights, _adapted(*weights)):
            out = triton_row.mla(q, latent, *of, shape, rows=rows, cache=(cache,))
            right = attention.mla(q, latent, *of, shape, rows=rows, cache=(same,))
            torch.testing.assert_close(out, right, atol=2e-2, rtol=2e-2)
            assert plain is None or (right - plain).abs().max() > 0.1
            plain = right
        assert torch.equal(cache.view(torch.int16), same.view(torch.int16))


def _scaled(rows: Rows, width: int, heads: int) -> ScaledPages:
    """Pages of an fp8 cache with something up to each position, and NaN behind it."""
    codes = torch.full((20, 64, width), 0x7F, dtype=torch.uint8)
    scales = torch.full((20, 64, heads), 255, dtype=torch.uint8)
    for position, table in zip(rows.positions.tolist(), rows.pages, strict=True):
        for at in range(position):
            place = table[at // 64], at % 64
            codes[place] = torch.randint(0, 256, (width,)).where(torch.rand(width) < 0.9, 5) & 0xF7
            scales[place] = torch.randint(118, 122, (heads,))
    return ScaledPages(codes, scales)


def _twin(pages: ScaledPages) -> ScaledPages:
    return ScaledPages(pages.codes.clone(), pages.scales.clone())


def _is_same(a: ScaledPages, b: ScaledPages) -> bool:
    return torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)


def _meant(pages: ScaledPages, rows: Rows, sequence: int, *widths: int) -> torch.Tensor:
    """What a sequence's heads, which have so many columns each, hold up to its position by the oracle, f64."""
    table, end = rows.pages[sequence].long(), int(rows.positions[sequence]) + 1
    codes = pages.codes[table].flatten(0, 1)[:end].cpu().numpy()
    scales = pages.scales[table].flatten(0, 1)[:end].cpu().numpy()
    heads = np.split(codes, np.cumsum(widths)[:-1], 1)
    meant = [kvoracle.decode(each, scales[:, i]) for i, each in enumerate(heads)]
    return torch.from_numpy(np.concatenate(meant, 1)).to(pages.codes.device).double()


def _attends(
    out: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int = 0
) -> None:
    """One query, [D] of bf16 numbers and scaled: out is what f64 says, but for weights that are rounded to bf16, and
    a hundredth of that for sums in f32."""
    scores = keys @ q.double()
    if window:
        scores[:-window] = float("-inf")
    weights = scores.softmax(0)
    error = (out.double() - weights @ values).abs()
    bound = BF16 / (1 + BF16) * (weights @ values.abs()) * 1.01
    assert (error <= bound).all(), f"{(error / bound).max().item():.3f} times the bound"


def fp8() -> None:
    """An fp8 cache: heads are written as torch writes them, bit by bit, and attended to as what they mean."""
    for width, wide, window in ((64, 0, 0), (80, 48, 70), (8, 40, 0)):
        shape, rows = GqaShape(4, 2, width, width**-0.5, window, v=wide), _rows(5)
        cache = _scaled(rows, 2 * width, 2), _scaled(rows, 2 * shape.value_dim, 2)
        same = _twin(cache[0]), _twin(cache[1])
        q, k = (
            torch.randn(3, 4 * width).bfloat16().float(),
            torch.randn(3, 2 * width) * torch.tensor([[1e-30], [0], [99.0]]),
        )
        v = torch.randn(3, 2 * shape.value_dim)
        k[2, 0], v[0, 0] = 1e-39, 1e-6
        out = triton_row.gqa(q, k, v, shape, rows=rows, cache=cache)
        attention.gqa(q, k, v, shape, rows=rows, cache=same)
        assert all(map(_is_same, cache, same))
        for i, head in product(range(3), range(4)):
            keys, values = (
                _meant(pages, rows, i, n, n).chunk(2, 1)[head // 2]
                for pages, n in zip(cache, (width, shape.value_dim), strict=True)
            )
            asked = q[i].double().view(4, width)[head] * shape.scale
            _attends(out[i].view(4, -1)[head], asked, keys, values, window)
        of = Heads(*map(Parts.of, (q, k, v)), None, None, 0.0, None, 0)
        merged = triton_merged.gqa(of, shape, None, rows=rows, cache=same)
        assert torch.equal(merged, out) and all(map(_is_same, cache, same))
    for nope, turned, v_width, lora in ((16, 16, 16, 32), (24, 8, 8, 96), (24, 0, 16, 40)):
        latent_shape = MlaShape(2, nope, turned, v_width, lora, (nope + turned) ** -0.5)
        sizes = (lora, nope), (nope, lora), (v_width, lora)
        weights = tuple(_stack(FORMATS["int8-row"], 2, n, k)[0] for n, k in sizes)
        rows = _rows(5)
        pages = _scaled(rows, lora + turned, latent_shape.cached_heads)
        twin, again, last = _twin(pages), _twin(pages), _twin(pages)
        q, new = torch.randn(3, 2 * (nope + turned)), torch.randn(3, lora + turned) * 7
        normed = functions.norm(new, torch.ones(lora), 1e-6, columns=lora)
        out = triton_row.mla(q, normed, *weights, latent_shape, rows=rows, cache=(pages,))
        right = attention.mla(q, normed, *weights, latent_shape, rows=rows, cache=(twin,))
        torch.testing.assert_close(out, right, atol=2e-2, rtol=2e-2)
        assert _is_same(pages, twin)
        of = Latent(Parts.of(q), Parts.of(new), torch.ones(lora), 1e-6, None)
        merged = triton_attention.attend_latent(
            of, weights[0], weights[2], latent_shape, rows=rows, cache=(again,)
        )
        torch.testing.assert_close(merged, out, atol=2e-2, rtol=2e-2)
        asked, q = (x.bfloat16().float() for x in (torch.randn(3, 2, lora), q))
        mixed = triton_attention.mla_one(asked, q, of, last, rows, latent_shape)
        for i, head in product(range(3), range(2)):
            keys = _meant(last, rows, i, *(n for n in (lora, turned) if n))
            whole = torch.cat((asked[i, head], q[i].view(2, -1)[head, nope:])).double()
            found = mixed[i].view(2, lora)[head]
            _attends(found, whole * latent_shape.scale, keys, keys[:, :lora])


class Written:
    """Counts the codes that kernels wrote otherwise than the oracle encodes what torch computed in f32.

    Norm and rotation may differ in their last bits, and so may a code, but only where a number is halfway between two.
    """

    def __init__(self) -> None:
        self.codes = self.others = 0

    def see(
        self, pages: ScaledPages, rows: Rows, heads: tuple[torch.Tensor, ...], *, exact: bool
    ) -> None:
        """Looks at the last place of each sequence; `heads` [T, columns] each stand there. exact: no code differs."""
        place = rows.pages.gather(1, rows.positions[:, None] // 64)[:, 0].long()
        at = place, rows.positions % 64
        found = pages.codes[at].cpu().numpy()
        scales = pages.scales[at].cpu().numpy()
        ends = np.cumsum([head.shape[1] for head in heads])
        assert ends[-1] == found.shape[1] and len(heads) == scales.shape[1]
        for i, codes in enumerate(np.split(found, ends[:-1], 1)):
            x = heads[i].cpu().numpy()
            right, scale = kvoracle.encode(x)
            assert (scales[:, i] == scale).all(), (scales[:, i], scale)
            differ = codes != right
            assert not (exact and differ.any()), (codes[differ], right[differ])
            there, wanted = (np.abs(kvoracle.decode(c, scale) - x) for c in (codes, right))
            slack = 2.0**-20 * np.abs(x).max(1, keepdims=True)
            assert (np.abs(there - wanted) <= slack)[differ].all()
            self.codes, self.others = self.codes + codes.size, self.others + int(differ.sum())


def _exactly(width: int, power: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of three whose norm is exact, in any order: of eight numbers one is 5 and seven are 1, times a power of
    two, which makes their mean square 4 times one of four; and a gain. Normed they are often halves between codes."""
    signs = torch.randint(0, 2, (3, width)) * 2.0 - 1
    sizes = torch.tensor([5.0] + [1.0] * 7).repeat(width // 8)[torch.randperm(width)]
    return signs * sizes * 2.0**power, torch.randint(1, 64, (width,)) / 32.0


def fp8_written() -> None:
    """An fp8 cache holds what the oracle encodes, byte for byte, of heads and latents that kernels norm and rotate."""
    written, parts = Written(), Parts.of
    rows = Rows(torch.tensor([70, 0, 127]), torch.randperm(20)[:6].view(3, 2).int(), 1)
    still = Rope(8, (0.0,) * 4, 2.0)  # turns by no angle, and doubles
    for width, wide, dim, first, interleaved in ((64, 0, 64, 0, False), (80, 48, 32, 16, True)):
        shape = GqaShape(2, 2, width, width**-0.5, v=wide)
        cache = _scaled(rows, 2 * width, 2), _scaled(rows, 2 * shape.value_dim, 2)
        q, k, v = (_parts(3, n) for n in (2 * width, 2 * width, 2 * shape.value_dim))
        gain = torch.rand(width)
        of = Heads(q, k, v, gain, gain, 0.5, _rope(dim, interleaved), first)
        triton_merged.gqa(of, shape, None, rows=rows, cache=cache)
        written.see(cache[0], rows, _ready(k, gain, of, rows).chunk(2, 1), exact=False)
        written.see(cache[1], rows, added(v).chunk(2, 1), exact=False)
        if not ON_GPU:  # where quotients and roots are not exact
            (a, gain), (b, _) = _exactly(width, 12), _exactly(width, 20)
            of = Heads(q, parts(torch.cat((a, b), 1)), v, gain, gain, 1e-6, still, 8)
            triton_merged.gqa(of, shape, None, rows=rows, cache=cache)
            ready = a / 2.0**13 * gain, b / 2.0**21 * gain
            for each in ready:
                each[:, 8:16] *= 2.0
            written.see(cache[0], rows, ready, exact=True)
    for turned, lora, interleaved in ((16, 32, True), (8, 96, False), (0, 40, False)):
        shape, cut = MlaShape(1, 8, turned, 8, lora, 0.2), [n for n in (lora, turned) if n]
        pages = _scaled(rows, lora + turned, shape.cached_heads)
        absorbed, q = torch.randn(3, 1, lora), torch.randn(3, 8 + turned)
        new, gain = _parts(3, lora + turned), torch.rand(lora)
        of = Latent(parts(q), new, gain, 0.5, _rope(turned, interleaved))
        triton_attention.mla_one(absorbed, q, of, pages, rows, shape)
        made = functions.norm(added(new), gain, 0.5, columns=lora)
        if of.rope is not None:
            made = functions.rope(made, of.rope, lora + turned, lora, rows=rows)
        written.see(pages, rows, made.split(cut, 1), exact=False)
        if not ON_GPU:
            x, gain = _exactly(lora, 12)
            tail = torch.randint(-448, 449, (3, turned)) / 2.0
            of = Latent(
                parts(q), parts(torch.cat((x, tail), 1)), gain, 1e-6, still if turned else None
            )
            triton_attention.mla_one(absorbed, q, of, pages, rows, shape)
            tail[:, :8] *= 2.0
            made = torch.cat((x / 2.0**13 * gain, tail), 1)
            written.see(pages, rows, made.split(cut, 1), exact=True)
    assert written.codes > 2000 and written.others <= written.codes // 1000


def _parts(rows: int, width: int) -> Parts:
    """The sum of some columns of three parts and a bias."""
    return Parts(torch.randn(rows, 3, width + 9), None, torch.randn(width + 9)).columns(
        5, width + 5
    )


def _routed(rows: int, width: int) -> Parts:
    """The sum of chosen experts, one of them not here and one that is nobody's, and of what the CPU computed."""
    ids = torch.tensor([[0, 2, 1], [1, -1, 0], [2, 1, 3]], dtype=torch.int32)[:rows]
    gates = torch.rand(rows, 3).where(ids >= 0, torch.nan)
    slots = torch.tensor([1, -1, 0, 2], dtype=torch.int32)
    values = torch.randn(rows, 3, width)
    values[0, 2] = torch.nan
    return Parts(values, (ids, slots, gates), torch.randn(rows, width + 1)[:, 1:])


def sums() -> None:
    """Sums taken alone, and in front of a norm or an activation."""
    gain = torch.rand(256)
    some, routed, one = _parts(3, 256), _routed(3, 256), Parts.of(torch.randn(3, 300)[:, 7:263])
    for parts in (some, routed, one):
        torch.testing.assert_close(sum_parts(parts), added(parts))
        made = triton_small.swiglu_of(parts, 115)
        torch.testing.assert_close(made, functions.swiglu(added(parts), 115))
    assert sum_parts(one).data_ptr() == one.values.data_ptr()
    rows = torch.randn(3, 300)[:, :256]
    for a, terms in (
        (rows, (one,)),
        (rows, (routed, some)),
        (None, (some,)),
        (None, (one, routed)),
    ):
        total, normed = triton_merged.add_norm(a, terms, gain, 1e-6)
        right = sum((added(each) for each in terms), torch.zeros_like(rows))
        right = right if a is None else a + right
        torch.testing.assert_close(total, right)
        torch.testing.assert_close(normed, functions.norm(right, gain, 1e-6))


def _ready(x: Parts, gain: torch.Tensor | None, of: Heads, rows: Rows) -> torch.Tensor:
    """Queries or keys, normed and rotated one after the other."""
    width = of.k.shape[1] // 2
    made = added(x) if gain is None else functions.norm(added(x), gain, of.eps, width)
    return made if of.rope is None else functions.rope(made, of.rope, width, of.first, rows=rows)


def _rope(dim: int, interleaved: bool) -> Rope | None:
    angles = tuple(torch.rand(dim // 2).tolist())
    return Rope(dim, angles, 1.3, interleaved, shift=5) if dim else None


def heads() -> None:
    """Attention with what stands before it, beside the same operations alone."""
    for width, wide, gains, dim, first, interleaved in (
        (64, 0, True, 64, 0, False),
        (80, 48, False, 32, 16, True),
        (24, 40, True, 16, 8, False),
        (32, 0, True, 0, 0, False),
    ):
        shape = GqaShape(4, 2, width, width**-0.5, 70, v=wide)
        rows = _rows(5)
        cache = _cached(rows, 2 * width), _cached(rows, 2 * shape.value_dim)
        same = cache[0].clone(), cache[1].clone()
        qkv, ends = _parts(3, 6 * width + 2 * shape.value_dim), (4 * width, 6 * width)
        q, k = qkv.columns(0, ends[0]), qkv.columns(*ends)
        v = qkv.columns(ends[1], qkv.shape[1])
        q_gain, k_gain = (torch.rand(width) if gains else None for _ in range(2))
        of = Heads(q, k, v, q_gain, k_gain, 1e-6, _rope(dim, interleaved), first)
        sinks = torch.randn(4)
        out = triton_merged.gqa(of, shape, sinks, rows=rows, cache=cache)

        ready = (_ready(x, gain, of, rows) for x, gain in ((q, q_gain), (k, k_gain)))
        right = attention.gqa(*ready, added(v), shape, sinks, rows=rows, cache=same)
        torch.testing.assert_close(out, right, atol=8e-3, rtol=8e-3)
        for made, alone in zip(cache, same, strict=True):  # one rounding apart
            torch.testing.assert_close(made, alone, equal_nan=True)


def latent() -> None:
    """Latent attention with what stands before it, beside the same operations alone."""
    for nope, turned, v, lora, interleaved in (
        (16, 16, 16, 32, True),
        (24, 8, 8, 96, False),
        (24, 0, 16, 40, False),
    ):
        shape = MlaShape(2, nope, turned, v, lora, (nope + turned) ** -0.5)
        sizes = (lora, nope), (nope, lora), (v, lora)
        weights = _adapted(*(_stack(FORMATS["int8-row"], 2, n, k)[0] for n, k in sizes))
        uk_in, uk_out, uv = weights
        rows = _rows(5)
        cache = _cached(rows, lora + turned)
        same = cache.clone()
        q, new, gain = _parts(3, 2 * (nope + turned)), _parts(3, lora + turned), torch.rand(lora)
        of = Latent(q, new, gain, 1e-6, _rope(turned, interleaved))
        out = triton_attention.attend_latent(of, uk_in, uv, shape, rows=rows, cache=(cache,))

        ready, normed = added(q), functions.norm(added(new), gain, 1e-6, columns=lora)
        if of.rope is not None:
            ready = functions.rope(ready, of.rope, nope + turned, nope, rows=rows)
            normed = functions.rope(normed, of.rope, lora + turned, lora, rows=rows)
        right = attention.mla(ready, normed, uk_in, uk_out, uv, shape, rows=rows, cache=(same,))
        torch.testing.assert_close(out, right, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(cache, same, equal_nan=True)


def small() -> None:
    wide = torch.randn(3, 400)
    x = wide[:, 40:280]
    gain = torch.rand(80)
    torch.testing.assert_close(triton_small.norm(x, gain, 1e-6), functions.norm(x, gain, 1e-6))
    gain = torch.rand(240)
    torch.testing.assert_close(triton_small.norm(x, gain, 1e-6), functions.norm(x, gain, 1e-6))
    made, right = wide.clone()[:, 40:280], wide.clone()[:, 40:280]
    for way, of in ((triton_small.norm, made), (functions.norm, right)):
        assert way(of, torch.full((80,), 0.7), 1e-6, columns=80).data_ptr() == of.data_ptr()
    torch.testing.assert_close(made, right)
    torch.testing.assert_close(made[:, 80:], x[:, 80:])
    rows = Rows(torch.tensor([0, 17, 100_001]), torch.zeros(3, 1).int(), 1)
    angles = tuple(torch.rand(32).tolist())
    for first, interleaved in product((0, 16), (False, True)):
        of = x, Rope(64, angles, 1.3, interleaved, shift=5), 80, first
        made, right = (rope(*of, rows=rows) for rope in (triton_small.rope, functions.rope))
        torch.testing.assert_close(made, right)
    made, right = (
        norm(x, gain, 1e-6, head_width=60, own_gains=True)
        for norm in (triton_small.norm, functions.norm)
    )
    torch.testing.assert_close(made, right)
    alone = Glu(ungated=True)
    torch.testing.assert_close(triton_small.swiglu(x, 240, alone), functions.swiglu(x, 240, alone))
    for glu in (SILU, GELU_TANH, Glu(1.702, 0.9, 1.0), Glu(1.0, 0.9, 0.0, 0.7)):
        torch.testing.assert_close(
            triton_small.swiglu(wide[:, :96], 40, glu), functions.swiglu(wide[:, :96], 40, glu)
        )


ROUTINGS = (
    Routing(60, 4),
    Routing(256, 8, Score.SIGMOID, 8, 4, GroupScore.TOP2, True, 2.5),
    Routing(160, 6, Score.SOFTMAX, 8, 3, GroupScore.MAX, False, 16.0),
    Routing(6, 2, Score.SIGMOID, 6, 3, GroupScore.TOP2),
    Routing(256, 6, Score.SQRT_SOFTPLUS, scale=1.5),
    Routing(5, 5),
    Routing(512, 10),
    Routing(16, 2, Score.SPARSEMIXER, normalize=False, band=0.02),
    Routing(10, 3, Score.SPARSEMIXER, normalize=False, band=0.7),
)


def route() -> None:
    """The same ids as the torch row, with ties, and the same weights; valid ids of NaN."""
    for routing in ROUTINGS:
        logits = torch.randn(5, routing.experts)
        logits[1] = 0
        logits[2] = logits[2].round()
        biases = (None, torch.randn(routing.experts)) if routing.score is Score.SIGMOID else (None,)
        for bias in biases:
            factors = None if bias is None else torch.rand(routing.experts)
            ids, gate = triton_small.route(logits, routing, bias, factors)
            right_ids, right_gate = functions.route(logits, routing, bias, factors)
            assert torch.equal(ids, right_ids), routing
            torch.testing.assert_close(gate, right_gate)
    with np.errstate(invalid="ignore"):
        ids, _ = triton_small.route(torch.full((1, 60), float("nan")), ROUTINGS[0], None)
    assert ids.tolist() == [[0, 1, 2, 3]]


def send() -> None:
    """A router's choice, a layer's input and both again in main memory: in rows with gaps, which stay as they were;
    rows that are not live choose nothing."""
    for routing, hidden in zip(ROUTINGS[:3], (1030, 5, 2048), strict=True):
        logits, x = torch.randn(3, routing.experts), torch.randn(3, hidden + 70)[:, :hidden]
        ids, gates = triton_small.route(logits, routing)
        to = torch.full((3, hidden + 10), 7.0), torch.full_like(ids, 7), torch.full_like(gates, 7.0)
        live = torch.tensor([True, False, True])
        made = triton_small.route_all(logits, routing, live=live, x=x, to=to)
        assert torch.equal(made[0], ids.masked_fill(~live[:, None], -1))
        assert torch.equal(made[1], gates)
        assert torch.equal(to[0][:, :hidden], x) and (to[0][:, hidden:] == 7).all()
        assert torch.equal(to[1], made[0]) and torch.equal(to[2], gates)


def router() -> None:
    """A router's product with its choice is the product and then the choice: the same ids and weights, where a sum has
    the same bits in any order, and where the logits of random numbers lie apart; with rows and experts of any number,
    both biases, rows that are not live, and rows that are sent. Whichever program comes last chooses, and counters are
    0 again."""
    tickets = torch.zeros(ROUTED_ROWS, dtype=torch.int32)
    for number, (routing, rows, hidden, dtype) in enumerate(
        (
            (ROUTINGS[0], 3, 1030, torch.float32),
            (ROUTINGS[1], 1, 500, torch.float32),
            (ROUTINGS[2], 1, 40, torch.bfloat16),
            (ROUTINGS[3], 5, 1100, torch.bfloat16),
            (Routing(32, 6, Score.SQRT_SOFTPLUS, scale=1.5), 1, 1024, torch.float32),
            (ROUTINGS[5], 7, 64, torch.float32),
            (ROUTINGS[6], 1, 2100, torch.float32),  # splits of two tiles
            (Routing(8, 2, Score.SIGMOID, normalize=False), 16, 1536, torch.float32),
            (Routing(16, 2, Score.SPARSEMIXER, normalize=False, band=0.5), 2, 1100, torch.float32),
        )
    ):
        e = routing.experts
        x = torch.randint(-3, 4, (rows, hidden + 6)).float()[:, :hidden]
        w = (torch.randint(-2, 3, (e, hidden)) / 64).to(dtype)
        shift = torch.randint(-3, 4, (e,)).float() if number % 2 else None
        plain = routing.score in (Score.SOFTMAX, Score.SPARSEMIXER)
        bias = None if plain else torch.randn(e)
        live = torch.arange(rows) % 3 != 1 if number % 3 else None
        _routes(x, PlainMatrix(w, tickets), shift, routing, bias, live)
        if number in (3, 5):
            with backwards():
                _routes(x, PlainMatrix(w, tickets), shift, routing, bias, live)
        if e > 60:  # the interpreter takes its time
            continue
        levels = torch.linspace(-4, 4, e)[torch.randperm(e)]
        way = torch.randn(hidden)
        x, w = (1 + torch.rand(rows, 1)) * way, levels[:, None] * way / (way @ way)
        _routes(x, PlainMatrix(w, tickets), None, routing, None, live)
    x = torch.zeros(ROUTED_ROWS + 1, 64)
    for w in (PlainMatrix(torch.zeros(8, 64)), PlainMatrix(torch.zeros(8, 64), tickets)):
        assert triton_router.choose(x, w, None, Routing(8, 2)) is None
    wide = PlainMatrix(torch.zeros(256, 7168), tickets)  # is read by two rows, not by three
    assert triton_router.choose(torch.zeros(3, 7168), wide, None, Routing(256, 8)) is None


def _routes(
    x: torch.Tensor,
    w: PlainMatrix,
    shift: torch.Tensor | None,
    routing: Routing,
    bias: torch.Tensor | None,
    live: torch.Tensor | None,
) -> None:
    logits = functions.linear(x, w, shift, Reads.F32)
    ids, gates = functions.route(logits, routing, bias)
    ids = ids if live is None else ids.masked_fill(~live[:, None], -1)
    rows, sent = x.shape[0], torch.randn(x.shape[0], 1100)[:, :1030]
    to = torch.full((rows, 1040), 7.0), torch.full_like(ids, 7), torch.full_like(gates, 7.0)
    there = None if shift is None else to
    of = x, w, shift, routing, bias
    several = [  # on a GPU each finds the counters as the one before is just leaving them
        triton_router.choose(*of, live=live, sent=sent, to=there)
        for _ in range(200 if ON_GPU else 1)
    ]
    for made in several:
        assert made is not None and torch.equal(made[0], ids), routing
        torch.testing.assert_close(made[1], gates)
        assert torch.equal(made[1], several[0][1])
    assert w.tickets is not None and not w.tickets.any()
    if there is not None:
        assert torch.equal(to[0][:, :1030], sent) and (to[0][:, 1030:] == 7).all()
        assert torch.equal(to[1], ids) and torch.equal(to[2], several[0][1])


def summary() -> None:
    """The best, peaks and sums of the torch row: ties, infinite logits and NaN, ends that fill no block."""
    for vocab in (99, 64 * 64 * 2 + 3):
        logits = torch.randn(6, vocab)
        logits[1] = logits[1].round()
        logits[2, 70], logits[2, 71] = float("inf"), float("inf")
        logits[3, :64] = float("-inf")
        logits[4, 80] = float("nan")
        logits[5] = 0.0
        temperature = torch.tensor([0.7, 1.3, 1.0, 0.0, 1.0, 0.5])
        made = triton_summary.summarize(logits, temperature)
        for out, right in zip(made, functions.summarize(logits, temperature), strict=True):
            torch.testing.assert_close(out, right, equal_nan=True)


LAWS = (
    unpacking, few_rows, rows_alone, tiles, tiles_of_few, linear, experts, beside, rows_rotated, rotated, groups,
    gqa, mla, fp8, fp8_written, sums, heads, latent, small, route, send, router,
    summary,
)  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_device("cuda" if ON_GPU else "cpu")
    named = [name for name in sys.argv[1:] if name != "--gpu"]
    for law in LAWS:
        if law.__name__ in named or not named:
            _seed(SEED)
            law()
            print("held:", law.__name__, flush=True)
