"""The law of the batch on a device: what a sequence computes does not depend on who shares its step.

With f32 throughout, a sum's terms are the same in any company, in another order at most: a matrix of one row is
multiplied by another loop than one of several. So logits agree within the rounding of f32 sums, 1e-4 of their
deviation on these models; in captured steps of one size not a bit differs, as no row sees another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hybrid import CONTEXT, Made, close
from hypothesis import given, settings
from hypothesis import strategies as st

from ktcli.engine.device.decode import DecodeStep
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.passes import LongPrompts, passes
from ktcli.engine.device.steps import DeviceSteps
from ktcli.engine.device.stream import HostStream
from ktcli.engine.logits import Logits
from ktcli.engine.sequence import Sequence
from ktcli.errors import OutOfDeviceMemory
from ktcli.native import Batch, Run
from ktcli.ops.kvformat import FP8
from ktcli.ops.torch.kernels import Kernel

LINES = 4
# Grouped and latent attention, windows, states, pooled windows, chosen positions and blocks.
FAMILIES = (
    "qwen3 deepseek-v3 gpt-oss qwen3-next deepseek-v4 deepseek-v3.2 minimax-m3 nemotron-3-super"
    " minimax-m1"
).split()
QUICK = ("qwen3-next",)
TEXTS = np.random.default_rng(7).integers(0, 99, (LINES, CONTEXT)).astype(np.int32)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in FAMILIES
    ],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    made = Made.convert(request.param, tmp_path_factory.mktemp(request.param))
    long = LongPrompts(100, 160)  # two prompts together, or a long one, are streamed
    return made.engine(made.placed("some", streams=LINES, long_prompts=long, slab_bytes=1 << 14))


@dataclass(frozen=True)
class Line:
    """A sequence: its text, and the tokens of each of its chunks."""

    text: int
    sizes: tuple[int, ...]

    def runs(self, sequence: Sequence, draw: Random | None = None) -> Iterator[Run]:
        """Its runs; each must have been computed before the next is asked for.

        Args:
            draw: cuts chunks into pieces; None: each is a run.
        """
        for n in self.sizes:
            chunk = sequence.length, n
            while left := sum(chunk) - sequence.length:
                size = draw.randint(1, left) if draw and draw.random() < 0.3 else left
                first = sequence.length
                run = sequence.extend(
                    TEXTS[self.text][first : first + size],
                    first_output=size - (size == left),
                    temperature=0.5 * self.text,
                    defer=self.text % 2 if n == 1 else 0,
                    chunk=None if size == n else chunk,
                )
                yield run
                sequence.commit(run)


def compute(engine: DeviceEngine, runs: list[Run]) -> list[list[Logits]]:
    """The logits of each run; looks at counts and summaries."""
    before = engine.chosen()
    rows = iter(engine.run(Batch(tuple(runs))))
    found = [[next(rows) for _ in range(run.first_output, run.ids.size)] for run in runs]
    tokens = sum(run.ids.size for run in runs)
    assert ((engine.chosen() - before).sum(axis=1) == tokens * engine.spec.top_k).all()
    for run, some in zip(runs, found, strict=True):
        for each in some:
            wanted = Logits.of(each.values, run.temperature)
            assert each.best == wanted.best and np.array_equal(each.peaks, wanted.peaks)
            np.testing.assert_allclose(each.sums, wanted.sums, rtol=1e-5)
    return found


def alone(engine: DeviceEngine, line: Line) -> list[np.ndarray]:
    sequence = engine.sequence()
    found = [
        each.values.copy() for run in line.runs(sequence) for each in compute(engine, [run])[0]
    ]
    sequence.close()
    return found


sizes = st.lists(st.sampled_from([1, 1, 1, 2, 17, 64, 65, 110]), min_size=1, max_size=7)


@pytest.mark.thorough
@pytest.mark.rotates(3)
@settings(max_examples=4, deadline=None)
@given(st.lists(sizes, min_size=2, max_size=LINES), st.integers(0, 1 << 30))
def test_company_changes_nothing(engine: DeviceEngine, plan: list[list[int]], seed: int) -> None:
    lines, draw = [], Random(seed)
    for text, wished in enumerate(plan):
        fitting = [n for i, n in enumerate(wished) if sum(wished[: i + 1]) <= CONTEXT]
        lines.append(Line(text, tuple(fitting)))
    engine.pools.forget()
    wanted = [alone(engine, line) for line in lines]
    engine.pools.forget()
    sequences = [engine.sequence() for _ in lines]
    queues = [line.runs(each, draw) for line, each in zip(lines, sequences, strict=True)]
    left = {i: run for i, queue in enumerate(queues) if (run := next(queue, None))}
    while left:
        chosen = draw.sample(sorted(left), draw.randint(1, len(left)))
        for i, some in zip(chosen, compute(engine, [left[i] for i in chosen]), strict=True):
            for each in some:
                assert close(each.values, wanted[i].pop(0))
        for i in chosen:
            if following := next(queues[i], None):
                left[i] = following
            else:
                del left[i]
    for each in sequences:
        each.close()
    assert not any(wanted)


@contextmanager
def beginnings(engine: DeviceEngine) -> Iterator[list[Sequence]]:
    """Sequences of different lengths."""
    engine.pools.forget()
    sequences = [engine.sequence() for _ in range(LINES)]
    for n, (each, ids) in enumerate(zip(sequences, TEXTS, strict=True)):
        run = each.extend(ids[: 3 * n + 2])
        compute(engine, [run])
        each.commit(run)
    yield sequences
    for each in sequences:
        each.close()


def go_on(
    engine: DeviceEngine, some: list[Sequence], ids: tuple[int, ...] = (50, 7, 8, 9)
) -> list[np.ndarray]:
    """The logits of one more token of each, which does not count."""
    lines = [each.fork() for each in some]
    try:
        pairs = zip(lines, ids, strict=False)
        runs = [line.extend(np.array([id], np.int32), defer=1) for line, id in pairs]
        return [each[0].values.copy() for each in compute(engine, runs)]
    finally:
        for line in lines:
            line.close()


def test_who_else_is_in_a_captured_step_changes_no_bit(engine: DeviceEngine) -> None:
    """A row of a full step, and the same with others, or with nobody, beside it."""
    with beginnings(engine) as (a, b, c, d):
        wanted = go_on(engine, [a, b, c, d])[0]
        np.testing.assert_array_equal(go_on(engine, [a, d, c, b], (50, 4, 5, 6))[0], wanted)
        np.testing.assert_array_equal(go_on(engine, [a, b, c], (50, 7, 3))[0], wanted)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("deepseek-v3", marks=pytest.mark.thorough)])
def test_nor_with_an_fp8_cache(name: str, tmp_path: Path) -> None:
    made = Made.convert(name, tmp_path)
    engine = made.engine(made.placed("some", streams=LINES, cache="fp8"), exact=False)
    assert engine.cache_format == FP8
    test_who_else_is_in_a_captured_step_changes_no_bit(engine)


def test_rows_of_nobody_leave_no_trace(engine: DeviceEngine) -> None:
    """A step of three is one of four: what the fourth writes belongs to nobody."""
    engine.pools.forget()
    pages, states = engine.pools.pages, engine.pools.states
    others = sorted(
        pages.take(pages.available)
    )  # all but three: those of nobody are not among them
    slots = [] if states is None else sorted(states.take() for _ in range(states.count))
    for _ in range(3):
        pages.release(others.pop())
        if states is not None:
            states.release(slots.pop())
    sequences = [engine.sequence() for _ in range(3)]
    runs = [each.extend(TEXTS[0][:1]) for each in sequences]
    own = {int(page) for run in runs for page in run.pages} | {engine._cache.scratch}
    written = {run.next_state for run in runs} | {engine._cache.scratch_slot}
    kept = [*engine.pools.copy._parts, *engine._cache.states]
    before = [each.fill_(7.0).clone() for each in kept]
    compute(engine, runs)
    for each, old in zip(kept, before, strict=True):
        changed = set(torch.nonzero((each != old).any(1))[:, 0].tolist())
        assert changed <= (written if any(each is state for state in engine._cache.states) else own)
    for each in sequences:
        each.close()
    for page in others:
        pages.release(page)
    for slot in slots:
        states.release(slot)


def test_where_memory_is_short_a_larger_step_runs_as_it_comes(
    engine: DeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, asked = engine._ways.decode, []

    def full(n: int) -> DecodeStep:
        asked.append(n)
        raise OutOfDeviceMemory("the GPU's memory is full")

    assert decode is not None
    with beginnings(engine) as sequences:
        wanted = go_on(engine, sequences[:3])
        monkeypatch.setattr(decode, "_made", {1: decode.of(1)})
        monkeypatch.setattr(decode, "_make", full)
        for _ in range(2):
            for a, b in zip(go_on(engine, sequences[:3]), wanted, strict=True):
                assert close(a, b)
    assert asked == [4]


@pytest.mark.each_once
@pytest.mark.parametrize(("n", "copies"), [(3, 0), (3, 5), (2, 2)])
def test_an_interrupted_batch_counts_for_nobody(
    engine: DeviceEngine, n: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at some copy to or from the device: the next step of all gives the same bits."""
    copy, left = HostStream.copy, [copies]

    def copied(self: HostStream, target: torch.Tensor, source: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        copy(self, target, source)

    with beginnings(engine) as sequences:
        wanted = go_on(engine, sequences[:n])
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(HostStream, "copy", copied)
            go_on(engine, sequences[:n])
        np.testing.assert_array_equal(go_on(engine, sequences[:n]), wanted)


def test_the_form_of_a_run_is_that_of_its_chunk(engine: DeviceEngine) -> None:
    """Drafted tokens are computed as if each came alone, a piece of one token as if with all of its chunk."""
    seen: dict[str, list[tuple[int, bool]]] = {}

    def watched(name: str, kernel: Kernel) -> Kernel:
        def noted(**given: object) -> object:
            if "cache" in given or "state" in given:
                rows = given["rows"]
                found = seen.setdefault(f"{name}{' of a state' * ('state' in given)}", [])
                found.append((rows.run, rows.single))
            return kernel(**given)

        return noted

    ways = engine._ways
    kernels = ways.forwards[0].kernels
    operations = {name: watched(name, each) for name, each in kernels.operations.items()}
    forward = replace(ways.forwards[0], kernels=replace(kernels, operations=operations))
    steps = DeviceSteps(replace(ways, forwards=[forward], decode=None))
    with beginnings(engine) as lines:
        wanted = [(None, 1), (1, 3), (9, 1), (9, 5)]  # tokens of the chunk, and of the run
        chunks = [
            None if tokens is None else (line.length, tokens)
            for line, (tokens, _) in zip(lines, wanted, strict=True)
        ]
        parts = zip(lines, wanted, chunks, strict=True)
        runs = [line.extend(TEXTS[0][:n], chunk=chunk) for line, (_, n), chunk in parts]
        steps.run(Batch(tuple(runs)))
    assert seen
    for name, forms in seen.items():
        drafted = (3, False) if name.endswith("state") else (1, True)
        expected = [(1, True), drafted, (1, False), (5, False)]
        assert forms == expected * (len(forms) // 4), name


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 3, 40, 90]), st.integers(0, 1)), min_size=1, max_size=9
    ),
    st.sampled_from([None, 0, 60, 100]),
    st.sampled_from([16, 50, 128]),
)
def test_passes_compute_every_row_once_and_in_order(
    plan: list[tuple[int, int]], threshold: int | None, most: int
) -> None:
    pages = np.zeros(1, np.int32)
    runs = [
        Run(
            np.arange(n, dtype=np.int32),
            5,
            pages,
            n - 1,
            defer=defer,
            state=2 * i,
            next_state=2 * i + 1,
        )
        for i, (n, defer) in enumerate(plan)
    ]
    rule = LongPrompts(threshold, 130)
    left = {i: (run.start, run.ids.tolist(), run.state) for i, run in enumerate(runs)}
    for each in passes(runs, rule, most):
        assert sum(run.ids.size for _, run in each.runs) <= (rule.chunk if each.streamed else most)
        for i, run in each.runs:
            start, ids, state = left[i]
            assert (run.start, run.state, run.next_state) == (start, state, runs[i].next_state)
            assert run.ids.tolist() == ids[: run.ids.size] and not (each.streamed and run.defer)
            last = run.ids.size == len(ids)
            assert run.first_output == run.ids.size - last
            left[i] = start + run.ids.size, ids[run.ids.size :], run.next_state
    assert not any(ids for _, ids, _ in left.values())
