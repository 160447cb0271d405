"""The law of the batch, operation by operation: what a run gets has the same bits alone and in any batch, whole, in
pieces and drafted, for any number of threads; on every row of kernels, in every number format, exact or not.

Products of bf16 on the row amx are the exception, with a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle import unpack

from ktcli.native import (
    Arena,
    Batch,
    Format,
    Pool,
    Program,
    Run,
    View,
    Weight,
    isa_rows,
    packed_bytes,
)
from ktcli.ops.table.rowwise import Reads
from ktcli.weights.formats import FORMATS

PAGE = 64
LINES, CONTEXT, MOST = 3, 256, 160  # sequences, their positions, rows of a step
SLOTS, WIDTH, VOCAB = 2 * LINES, 320, 50
ROWS = [row.name for row in isa_rows() if row.usable]
F32Array = NDArray[np.float32]


@cache
def inputs() -> F32Array:
    """Of each position of each sequence, of different sizes."""
    draw = np.random.default_rng(5)
    size = draw.uniform(0.1, 5, (LINES, CONTEXT, 1))
    return (draw.standard_normal((LINES, CONTEXT, WIDTH)) * size).astype(np.float32)


@cache
def vector(n: int, seed: int = 0) -> F32Array:
    return np.random.default_rng([n, seed]).uniform(0.1, 1, n).astype(np.float32)


@dataclass
class Bench:
    """A program that is being recorded, with pages and states.

    Attributes:
        results: what is compared, of each token.
        outputs: the same, of each output.
    """

    isa: str
    threads: int
    exact: bool
    fmt: Format = FORMATS["bf16"]
    results: list[View] = field(default_factory=list)
    outputs: list[View] = field(default_factory=list)
    page_bytes: int = 0
    state_bytes: int = 0

    def __post_init__(self) -> None:
        self.pool = Pool(self.threads, isa=self.isa)
        self.program = Program(self.pool, max_tokens=MOST, max_outputs=MOST, exact=self.exact)
        self.x = self.program.buffer(WIDTH)
        self._at = 0

    def part(self, width: int) -> View:
        """The next columns of the input."""
        self._at += width
        return View(self.x.buffer, self._at - width, width)

    def made(self, width: int) -> View:
        self.results.append(self.program.buffer(width))
        return self.results[-1]

    def pages(self, floats: int) -> int:
        """Where a layer's part of a page begins that holds so many numbers."""
        self.page_bytes += -(-4 * floats // 64) * 64
        return self.page_bytes - -(-4 * floats // 64) * 64

    def states(self, floats: int) -> int:
        self.state_bytes += -(-4 * floats // 64) * 64
        return self.state_bytes - -(-4 * floats // 64) * 64

    def weight(self, n: int, k: int, count: int = 1, fmt: Format | None = None) -> Weight:
        fmt = fmt or self.fmt
        arena = Arena(packed_bytes(fmt, n, k) * count)
        weight = Weight(fmt, n, k, count, arena.address, arena)
        self.pool.fill_random(weight, n + 3 * k)
        return weight

    def finish(self) -> Bench:
        self.program.finish()
        cache = Arena(LINES * (CONTEXT // PAGE) * max(self.page_bytes, 64))
        states = Arena(SLOTS * self.state_bytes) if self.state_bytes else None
        self.program.attach(cache, max(self.page_bytes, 64), states, self.state_bytes)
        return self

    def run(self, parts: list[tuple[int, Run]]) -> list[list[bytes]]:
        """The bits of each token of each run."""
        n, at = sum(run.ids.size for _, run in parts), 0
        rows = self.program.rows(self.x, n)
        for line, run in parts:
            rows[at : at + run.ids.size] = inputs()[line, run.start : run.start + run.ids.size]
            at += run.ids.size
        self.program.run(Batch(tuple(run for _, run in parts)))
        views = [self.program.rows(view, n) for view in (*self.results, *self.outputs)]
        found, at = [], 0
        for _, run in parts:
            ends = range(at, at + run.ids.size)
            found.append([b"".join(view[row].tobytes() for view in views) for row in ends])
            at += run.ids.size
        return found


# --- operations -------------------------------------------------------------------------------------


def embed(b: Bench) -> None:
    table = np.random.default_rng(1).integers(0, 1 << 14, (VOCAB, 32)).astype(np.uint16)
    b.program.append("embed", (b.made(32),), table=table, vocab=VOCAB)


def rope(b: Bench) -> None:
    b.results.append(view := b.part(64))
    shape = {"dim": 16, "inv_freq": vector(8), "scale": 1.0, "head_width": 32, "first": 8}
    b.program.append("rope", (view,), **shape)


def gqa(b: Bench, v: int = 16, **more: object) -> None:
    q, k, values = b.part(64), b.part(32), b.part(2 * v)
    offset = b.pages(PAGE * (32 + 2 * v))
    shape = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "scale": 0.25,
        "layer_offset": offset,
        "v": v,
    }
    b.program.append("gqa", (b.made(4 * v), q, k, values), **shape, **more)


def gqa_windows(b: Bench) -> None:
    gqa(b, 24, window=70, sinks=vector(4))


def gqa_chunks(b: Bench) -> None:
    gqa(b, window=70, chunked=1)


def gqa_blocks(b: Bench) -> None:
    shape = {"heads": 2, "dim": 16, "top_k": 2, "block": PAGE, "local": 1, "scale": 1.0}
    views = b.part(32), b.part(16), None
    gqa(b, choice=b.program.append("choose", views, **shape, layer_offset=b.pages(PAGE * 16)))


def mla(b: Bench, **more: object) -> None:
    q, latent = b.part(2 * 48), b.part(64 + 16)
    matrices = {
        "uk_in": (b.weight(64, 32, 2),),
        "uk_out": (b.weight(32, 64, 2),),
        "uv": (b.weight(24, 64, 2),),
    }
    shape = {"heads": 2, "nope": 32, "rope": 16, "v": 24, "lora": 64, "scale": 0.1}
    offset = b.pages(PAGE * 80)
    b.program.append(
        "mla", (b.made(48), q, latent), **shape, **matrices, layer_offset=offset, **more
    )


def mla_chosen(b: Bench) -> None:
    shape = {"heads": 2, "dim": 16, "top_k": 20, "block": 1, "scale": 0.3}
    views = b.part(32), b.part(16), b.part(2)
    mla(b, choice=b.program.append("choose", views, **shape, layer_offset=b.pages(PAGE * 16)))


def mqa(b: Bench, **more: object) -> None:
    q, kv = b.part(64), b.part(16)
    shape = {"heads": 4, "dim": 16, "scale": 0.25, "window": 9, "sinks": vector(4)}
    state = b.states(9 * 16)
    pooled = more.pop("pooled", None)
    b.program.append("mqa", (b.made(64), q, kv, pooled), **shape, state_offset=state, **more)


def mqa_pooled(b: Bench) -> None:
    """Windows of 4 positions, of which the best 5 are chosen."""
    pooled = b.made(16)
    views = pooled, b.part(16), b.part(16)
    state = b.states(3 * 16)
    b.program.append("pooling", views, every=4, bias=vector(4 * 16), state_offset=state)
    shape = {"heads": 2, "dim": 16, "top_k": 5, "block": 1, "scale": 0.2, "every": 4}
    views = b.part(32), pooled, b.part(2)
    choice = b.program.append("choose", views, **shape, layer_offset=b.pages(16 * 16))
    offset = b.pages(16 * 16)
    mqa(b, pooled=pooled, every=4, choice=choice, context=CONTEXT, layer_offset=offset)


def pooling_overlap(b: Bench) -> None:
    views = b.made(16), b.part(32), b.part(32)
    shape = {"every": 8, "overlap": 1, "bias": vector(8 * 32)}
    b.program.append("pooling", views, **shape, state_offset=b.states(6 * 16))


def conv(b: Bench, linear: int = 0) -> None:
    shape = {"width": 4, "weight": vector(4 * 48), "state_offset": b.states(3 * 48)}
    b.program.append("conv", (b.made(48), b.part(48)), **shape, linear=linear)


def conv_linear(b: Bench) -> None:
    conv(b, 1)


def temper(b: Bench) -> None:
    b.program.append("temper", (b.made(48), b.part(48)), beta=0.3, every=16, shift=1)


def delta(b: Bench, decays: int = 1) -> None:
    q, k, v = b.part(32), b.part(32), b.part(4 * 24)
    decay, beta = b.part(4 * decays), b.part(4)
    shape = {"heads": 4, "key_heads": 2, "dk": 16, "dv": 24, "log_rate": vector(4)}
    state = b.states(4 * 16 * 32)
    views = b.made(96), q, k, v, decay, beta
    b.program.append("delta", views, **shape, bias=vector(4 * decays), state_offset=state)


def delta_by_key(b: Bench) -> None:
    delta(b, 16)


def scan(b: Bench) -> None:
    views = b.made(96), b.part(4 * 24), b.part(32), b.part(32), b.part(4)
    shape = {"heads": 4, "groups": 2, "state_dim": 16, "head_dim": 24, "dt_min": 0.1, "dt_max": 2.0}
    learned = {name: vector(4) for name in ("log_rate", "bias", "skip")}
    b.program.append("scan", views, **shape, **learned, state_offset=b.states(4 * 16 * 32))


def lightning(b: Bench) -> None:
    views = b.made(48), b.part(48), b.part(48), b.part(48)
    shape = {"heads": 3, "head_dim": 16, "rates": vector(3) ** 2}
    b.program.append("lightning", views, **shape, state_offset=b.states(3 * 16 * 16))


def experts(b: Bench) -> None:
    """With deferral, and without normalisation."""
    width, n = 64, 6
    rule = {"experts": n, "top_k": 4, "score": 1, "scale": 1.0}
    routing = b.program.append("route", (b.part(n),), **rule)
    first = b.program.append("split", routing=routing, defers=1)
    gate_up, down = b.weight(2 * width, 128, n), b.weight(128, width, n)
    x, now, later = b.part(128), b.made(128), b.program.buffer(128)
    for which, out in ((first, now), (first + 1, later)):
        b.program.append("experts", (out, x), routing=which, gate_up=(gate_up,), down=(down,))
    b.program.append("carry", (now, later))


def linear(b: Bench) -> None:
    weight, x = b.weight(37, 192), b.part(192)
    for reads in Reads:
        b.program.append("linear", (b.made(37), x), weight=(weight,), reads=reads)


def summary(b: Bench) -> None:
    rows = b.program.buffer(200, outputs=True)
    found = [b.program.buffer(width, outputs=True) for width in (1, 4, 4)]
    b.program.append("select", (rows, b.part(200)))
    b.program.append("summary", (*found, rows))
    b.outputs += [rows, *found]


WALKING = (
    embed, rope, gqa, gqa_windows, gqa_chunks, gqa_blocks, mla, mla_chosen, mqa, mqa_pooled, pooling_overlap, conv,
    conv_linear, delta, delta_by_key, scan, lightning, temper, summary,
)  # fmt: skip
PRODUCTS = (linear, experts)
Record = Callable[[Bench], None]


# --- the law ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Tokens that go together, or are drafted together."""

    tokens: int
    drafted: bool = False


Line = tuple[Chunk, ...]
CHUNKS = st.builds(Chunk, st.sampled_from([1, 1, 2, 5, 17, 63, 64, 65, 130])) | st.builds(
    Chunk, st.integers(1, 5), st.just(True)
)


def fitting(chunks: list[Chunk]) -> Line:
    """The first ones, as long as there is room; nothing is drafted at the beginning."""
    found, size = [Chunk(chunks[0].tokens)], chunks[0].tokens
    for chunk in chunks[1:]:
        size += chunk.tokens
        if size > CONTEXT:
            break
        found.append(chunk)
    return tuple(found)


LINES_OF_CHUNKS = st.lists(
    st.lists(CHUNKS, min_size=1, max_size=5).map(fitting), min_size=2, max_size=LINES
)


class Memory:
    """Pages and states of a sequence of its own."""

    def __init__(self, bench: Bench, line: int, *, mixed: bool) -> None:
        each = CONTEXT // PAGE
        pages = [i * LINES + line if mixed else line * each + i for i in range(each)]
        self.table, self.line = np.array(pages, np.int32), line
        self.keeps, self.turn = bench.state_bytes > 0, 0

    def run(
        self, start: int, n: int, chunk: tuple[int, int] | None, expanded: tuple[int, int] = (0, 0)
    ) -> Run:
        before = 2 * self.line + self.turn if self.keeps and start else -1
        self.turn = 1 - self.turn
        after = 2 * self.line + self.turn if self.keeps else -1
        ids = (np.arange(start, start + n) * 7 % VOCAB).astype(np.int32)
        return Run(
            ids, start, self.table, 0, 0.7, self.line % 2, before, after, chunk, None, expanded
        )


def alone(bench: Bench, which: int, line: Line) -> list[bytes]:
    """Each chunk in a step of its own, drafted tokens one by one."""
    memory, found, at = Memory(bench, which, mixed=False), [], 0
    for chunk in line:
        for n in [1] * chunk.tokens if chunk.drafted else [chunk.tokens]:
            expanded = (0, 0) if chunk.drafted else (at + 5, at + n)
            found += bench.run([(which, memory.run(at, n, None, expanded))])[0]
            at += n
    return found


def pieces(bench: Bench, which: int, line: Line, draw: Random) -> Iterator[Run]:
    memory, at = Memory(bench, which, mixed=True), 0
    for chunk in line:
        end, whole = at + chunk.tokens, (at, chunk.tokens)
        while at < end:
            n = end - at if draw.random() < 0.5 else draw.randint(1, end - at)
            if chunk.drafted:
                yield memory.run(at, n, (at, 1))
            else:
                yield memory.run(at, n, whole, (whole[0] + 5, end))
            at += n


def together(
    bench: Bench, lines: list[Line], draw: Random
) -> Iterator[tuple[int, Run, list[bytes]]]:
    """What each run of each sequence gets in steps with the others."""
    queues = [pieces(bench, i, line, draw) for i, line in enumerate(lines)]
    left = {i: next(queue) for i, queue in enumerate(queues)}
    while left:
        parts: list[tuple[int, Run]] = []
        for i in draw.sample(sorted(left), draw.randint(1, len(left))):
            if sum(run.ids.size for _, run in parts) + left[i].ids.size <= MOST:
                parts.append((i, left[i]))
        for (i, run), rows in zip(parts, bench.run(parts), strict=True):
            yield i, run, rows
            if following := next(queues[i], None):
                left[i] = following
            else:
                del left[i]


@cache
def recorded(operation: Record, isa: str, threads: int, exact: bool, fmt: str = "bf16") -> Bench:
    bench = Bench(isa, threads, exact, FORMATS[fmt])
    operation(bench)
    return bench.finish()


def check(operation: Record, isa: str, exact: bool, fmt: str, lines: list[Line], seed: int) -> None:
    bench = recorded(operation, isa, 1, exact, fmt)
    wanted = [alone(bench, i, line) for i, line in enumerate(lines)]
    numbers = np.frombuffer(b"".join(wanted[0]), np.float32)
    assert np.isfinite(numbers).all() and (numbers.any() or len(wanted[0]) < PAGE)
    bench = recorded(operation, isa, 1 + seed % 3, exact, fmt)
    for i, run, rows in together(bench, lines, Random(seed)):
        end = run.start + run.ids.size
        assert rows == wanted[i][run.start : end], f"sequence {i}, positions {run.start}..{end}"


SEEDS = st.integers(0, 1 << 30)


@pytest.mark.each_once
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("isa", ROWS)
@pytest.mark.parametrize("operation", WALKING, ids=lambda each: each.__name__)
@settings(max_examples=6)
@given(LINES_OF_CHUNKS, SEEDS)
def test_operations_that_know_positions(operation, isa, exact, lines, seed) -> None:
    check(operation, isa, exact, "bf16", lines, seed)


def has_tiles_of_bf16(isa: str, fmt: str, exact: bool) -> bool:
    return isa == "amx" and FORMATS[fmt].bits == 16 and not exact


@pytest.mark.each_once("isa", "operation", "fmt")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("isa", ROWS)
@pytest.mark.parametrize("operation", PRODUCTS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=3)
@given(LINES_OF_CHUNKS, SEEDS)
def test_products(fmt, operation, isa, exact, lines, seed) -> None:
    if not has_tiles_of_bf16(isa, fmt, exact):
        check(operation, isa, exact, fmt, lines, seed)


@pytest.mark.skipif("amx" not in ROWS, reason="runs in a process that has the row amx")
@settings(max_examples=10)
@given(LINES_OF_CHUNKS, SEEDS)
def test_tiles_of_bf16_on_amx_are_within_the_bound(lines: list[Line], seed: int) -> None:
    """Twice (k + 2) 2^-23 sum |w x|; in other orders of additions, or the test would show nothing."""
    k, bench = 192, recorded(linear, "amx", 1, False)
    weight = bench.weight(37, k)
    packed = np.frombuffer(weight.owner.bytes, np.uint8)[: packed_bytes(weight.format, 37, k)]
    size = np.abs(unpack(weight.format, packed, 37, k)).astype(np.float64)
    wanted = [alone(bench, i, line) for i, line in enumerate(lines)]
    for i, run, rows in together(bench, lines, Random(seed)):
        end = run.start + run.ids.size
        x = np.abs(inputs()[i, run.start : end, :k]).astype(np.float64) * (1 + 2**-8)
        most = np.tile(2 * (k + 2) * 2.0**-23 * x @ size.T, len(Reads))
        got, want = (
            np.frombuffer(b"".join(each), np.float32).reshape(len(rows), -1).astype(np.float64)
            for each in (rows, wanted[i][run.start : end])
        )
        assert (np.abs(got - want) <= most).all()
