"""The law of the batch, on models of every kind of layer: what a sequence computes has the same bits alone and in any
company, whole or in pieces, token by token or drafted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
from convert import convert_checkpoint
from engine.made_adapters import ROOM, attach
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import load_engine, without_tiles
from numpy.typing import NDArray
from reference import case_named, write_checkpoint

from ktcli.engine import CpuEngine
from ktcli.engine.pagetable import pages_for
from ktcli.models import build
from ktcli.native import Batch, Run, isa_rows
from ktcli.weights.pack import Pack

CONTEXT, LINES, OUTPUTS = 320, 4, 16
MOST_DRAFTED = 4
# Grouped and latent attention, windows, states, pooled windows, chosen positions and blocks.
FAMILIES = "qwen3 deepseek-v3 gpt-oss qwen3-next deepseek-v4 deepseek-v3.2".split()
MORE = "glm-5.3 minimax-m3 mimo-v2-flash ling-3 mistral laguna".split()
# Those whose cache can be fp8: grouped attention, latent attention, windows; with states, and of other widths.
CODED = "qwen3 deepseek-v3 gpt-oss qwen3-next mimo-v2-flash ling-3 laguna".split()
# Those whose sequences have one of two adapters, or none.
ADAPTED = "qwen3 deepseek-v3 gpt-oss qwen3-next".split()
FORMATS = {"": ("int4", "int8"), "bf16": ("bf16", "bf16")}
TEXTS = np.random.default_rng(11).integers(0, 99, (LINES, CONTEXT)).astype(np.int32)
Ids = NDArray[np.int32]
Rows = dict[int, list[bytes]]  # what there is of each position's logits


pytestmark = pytest.mark.in_turn("engine")


def named(name: str, *, formats: str = "", exact: bool = False, cache: str = ""):
    """A model as a parameter: its family, formats, whether it is exact, and its cache."""
    usual = name in FAMILIES and not (formats or exact)
    marks = () if usual or (cache and name in CODED[:3]) else pytest.mark.thorough
    label = "-".join(part for part in (name, formats, "exact" * exact, cache) if part)
    return pytest.param((name, formats, exact, cache or None), id=label, marks=marks)


USUAL = (
    *(named(name) for name in (*FAMILIES, *MORE)),
    *(named(name, formats="bf16") for name in FAMILIES),
    *(named(name, cache="fp8") for name in CODED),
)
# Those of `make test`; test_company_changes_nothing_in_many_batches has all.
FEW = tuple(each for each in USUAL if not each.marks)
EXACT = tuple(named(name, exact=True) for name in FAMILIES)  # ten times as slow


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    name, formats, exact, cache = request.param
    with without_tiles():
        return loaded(name, formats, exact, tmp_path_factory.mktemp(name), cache)


def loaded(
    name: str, formats: str, exact: bool, folder: Path, cache: str | None = None
) -> CpuEngine:
    case = case_named(name)
    experts, dense = FORMATS[formats]
    checkpoint = write_checkpoint(case, folder / "checkpoint")
    path = convert_checkpoint(checkpoint, folder / "pack", experts=experts, dense=dense)
    defer = int(build(Pack.open(path).config).spec.experts > 0)
    adapts = name in ADAPTED and not formats
    how = {"exact": exact, "cache": cache, "adapters": ROOM if adapts else None}
    made = load_engine(path, context=CONTEXT, threads=2, streams=OUTPUTS, defer=defer, **how)
    assert not adapts or [attach(made, seed).number for seed in (1, 2)] == [1, 2]
    return made


@dataclass(frozen=True)
class Chunk:
    """Tokens that go together.

    Attributes:
        cuts: where it is cut into pieces when others are there.
        drafted: whether each gives what it gives alone.
    """

    tokens: int
    cuts: tuple[int, ...] = ()
    drafted: bool = False


@dataclass(frozen=True)
class Line:
    """A sequence: its text, chunk by chunk."""

    text: int
    chunks: tuple[Chunk, ...]

    @property
    def temperature(self) -> float:
        return 0.5 * self.text

    def expanded_at(self, position: int) -> tuple[int, int]:
        """The positions that are expanded of the chunk that a position lies in: all but the first five of many."""
        end = 0
        for chunk in self.chunks:
            first, end = end, end + chunk.tokens
            if position < end:
                return (0, 0) if chunk.drafted else (first + 5, end)
        raise AssertionError(position)

    @property
    def defer(self) -> int:
        return self.text % 2

    @property
    def adapter(self) -> int:
        return self.text % 3


class Memory:
    """Pages and states of a sequence of its own."""

    def __init__(self, engine: CpuEngine, draw: Random) -> None:
        self.pages = engine.pools.pages.take(pages_for(CONTEXT))
        draw.shuffle(self.pages)
        windows = engine.pools.windows
        self.windows = None if windows is None else windows.pool.take(pages_for(CONTEXT))
        states = engine.pools.states
        self.slots = [] if states is None else [states.take(), states.take()]
        self.turn, self.adapts = 0, engine.adapters is not None

    def run(self, line: Line, start: int, n: int, outputs: int, chunk=None) -> Run:
        before = self.slots[self.turn] if self.slots and start else -1
        self.turn = 1 - self.turn
        after = self.slots[self.turn] if self.slots else -1
        ids, table = TEXTS[line.text][start : start + n], np.array(self.pages, np.int32)
        windows = None if self.windows is None else np.array(self.windows, np.int32)
        run = Run(ids, start, table, n - outputs, line.temperature, line.defer, before, after)
        adapter = line.adapter if self.adapts else 0
        return run._replace(
            chunk=chunk,
            window_pages=windows,
            expanded=line.expanded_at(start),
            adapter=adapter,
        )


@contextmanager
def memories(engine: CpuEngine, n: int, draw: Random) -> Iterator[list[Memory]]:
    pools = engine.pools
    made = [Memory(engine, draw) for _ in range(n)]
    try:
        yield made
    finally:
        for memory in made:
            for page in memory.pages:
                pools.pages.release(page)
            for page in memory.windows or ():
                assert pools.windows is not None
                pools.windows.pool.release(page)
            for slot in memory.slots:
                assert pools.states is not None
                pools.states.release(slot)
        pools.forget()


def compute(engine: CpuEngine, runs: list[Run]) -> Iterator[tuple[Run, int, list[bytes]]]:
    """The (run, position, logits) of every output of a step."""
    rows = iter(engine.run(Batch(tuple(runs))))
    for run in runs:
        for token in range(run.first_output, run.ids.size):
            row = next(rows)
            sums = row.sums.tobytes() if run.temperature else b""
            yield run, run.start + token, [row.values.tobytes(), row.peaks.tobytes(), sums]


def alone(engine: CpuEngine, line: Line) -> Rows:
    """Every chunk in a step of its own, drafted tokens one by one."""
    found: Rows = {}
    with memories(engine, 1, Random(1)) as (memory,):
        at = 0
        for chunk in line.chunks:
            for n in [1] * chunk.tokens if chunk.drafted else [chunk.tokens]:
                for _, position, row in compute(engine, [memory.run(line, at, n, 1)]):
                    found[position] = row
                at += n
    return found


def pieces(line: Line, memory: Memory) -> Iterator[Run]:
    """The runs of a sequence in company."""
    at = 0
    for chunk in line.chunks:
        if chunk.drafted:
            yield memory.run(line, at, chunk.tokens, chunk.tokens, (at, 1))
        else:
            whole = at, chunk.tokens
            ends = [*sorted({cut % chunk.tokens for cut in chunk.cuts} - {0}), chunk.tokens]
            for first, last in zip([0, *ends], ends, strict=False):
                alone = len(ends) == 1 and chunk.tokens % 2
                yield memory.run(line, at + first, last - first, 1, None if alone else whole)
        at += chunk.tokens


Row = list[bytes]


def same(got: Row, want: Row) -> bool:
    return got == want


def check(
    engine: CpuEngine,
    lines: list[Line],
    draw: Random,
    alike: Callable[[Row, Row], bool] = same,
) -> None:
    wanted = [alone(engine, line) for line in lines]
    with memories(engine, len(lines), draw) as own:
        queues = [pieces(line, memory) for line, memory in zip(lines, own, strict=True)]
        left = {i: run for i, queue in enumerate(queues) if (run := next(queue, None))}
        while left:
            runs: dict[int, Run] = {}
            for i in draw.sample(sorted(left), draw.randint(1, len(left))):
                if Batch((*runs.values(), left[i])).rows <= engine.max_tokens:
                    runs[i] = left[i]
            for run, position, row in compute(engine, list(runs.values())):
                (i,) = (i for i, each in runs.items() if each is run)
                if position in wanted[i]:
                    assert alike(row, wanted[i].pop(position)), f"line {i} of {lines} at {position}"
            for i in runs:
                if not (following := next(queues[i], None)):
                    del left[i]
                else:
                    left[i] = following
    assert not any(wanted)


TOKENS = st.sampled_from([1, 1, 1, 2, 3, 17, 63, 64, 65, 130, 150])
CUTS = st.lists(st.integers(1, 149), max_size=3).map(tuple)
CHUNKS = st.one_of(
    st.builds(Chunk, TOKENS, CUTS),
    st.builds(Chunk, st.integers(1, MOST_DRAFTED), drafted=st.just(True)),
)


@st.composite
def made_up(draw: st.DrawFn) -> list[Line]:
    lines = []
    for text in range(draw(st.integers(2, LINES))):
        chunks, size = [Chunk(draw(TOKENS), draw(CUTS))], 0
        for chunk in draw(st.lists(CHUNKS, max_size=6)):
            chunks.append(chunk)
        fitting = []
        for chunk in chunks:
            size += chunk.tokens
            if size <= CONTEXT:
                fitting.append(chunk)
        lines.append(Line(text, tuple(fitting)))
    return lines


@pytest.mark.parametrize("engine", FEW, indirect=True)
@settings(max_examples=15, deadline=None)
@given(made_up(), st.integers(0, 1 << 30))
def test_company_changes_nothing(engine: CpuEngine, lines: list[Line], seed: int) -> None:
    check(engine, lines, Random(seed))


@pytest.mark.thorough
@pytest.mark.rotates(3)
@pytest.mark.parametrize("engine", EXACT, indirect=True)
@settings(max_examples=15, deadline=None)
@given(made_up(), st.integers(0, 1 << 30))
def test_company_changes_nothing_exactly(engine: CpuEngine, lines: list[Line], seed: int) -> None:
    check(engine, lines, Random(seed))


@pytest.mark.thorough
@pytest.mark.parametrize("engine", USUAL, indirect=True)
@settings(max_examples=60, deadline=None)
@given(made_up(), st.integers(0, 1 << 30))
def test_company_changes_nothing_in_many_batches(engine, lines, seed) -> None:
    check(engine, lines, Random(seed))


def close(got: Row, want: Row) -> bool:
    """Within the bound of docs/batches.md: as close as a fast row is to the model."""
    a, b = (np.frombuffer(row[0], np.float32) for row in (got, want))
    return bool(np.sqrt(((a - b) ** 2).mean()) <= 0.03 * b.std())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "qwen3-next"])
@settings(max_examples=3)
@given(lines=made_up(), seed=st.integers(0, 1 << 30))
def test_tiles_of_bf16_change_last_bits_only(
    tmp_path_factory: pytest.TempPathFactory, name: str, lines: list[Line], seed: int
) -> None:
    """On the row amx, where it can run: ops/test_amx.py starts this."""
    if not any(row.name == "amx" and row.usable for row in isa_rows()):
        pytest.skip("runs in a process that has the row amx")
    if name not in _ON_AMX:
        _ON_AMX[name] = loaded(name, "bf16", False, tmp_path_factory.mktemp(name))
    assert _ON_AMX[name].pool.isa == "amx"
    check(_ON_AMX[name], lines, Random(seed), close)


_ON_AMX: dict[str, CpuEngine] = {}
