"""Answers with drafts are the answers without them, bit for bit: whatever is drafted, however ids are chosen, and for
every kind of layer; and what was drafted in vain leaves no trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
from convert import convert_checkpoint
from cores import TWO
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loading import load_engine, without_tiles
from reference import ONE_OF_EACH, case_named, write_checkpoint

from ktcli.engine import CpuEngine
from ktcli.engine.draft import DraftSource, Lookup
from ktcli.engine.draft_length import StepTimes
from ktcli.engine.drafting import Drafting
from ktcli.engine.logits import Logits
from ktcli.engine.request import Finish, GenerationRequest, Stats
from ktcli.engine.sampler import History, Sampler
from ktcli.engine.scheduler import Scheduler
from ktcli.engine.sequence import Sequence as Timeline
from ktcli.native import Batch
from ktcli.native.choosing import TokenChoice
from ktcli.sampling import SamplingSettings
from tests.engine.toy import Oracle

CONTEXT = 200
VOCAB = 99
IDS = np.random.default_rng(0).integers(0, VOCAB, 150).tolist()
# Of each kind of layer one: GQA, windows and sinks, MLA, chosen positions, chosen blocks, the delta rule, pooled
# windows beside a ring, the other delta rule beside chosen windows.
KINDS = (
    "qwen3",
    "gpt-oss",
    "deepseek-v3",
    "deepseek-v3.2",
    "minimax-m3",
    "qwen3-next",
    "deepseek-v4",
    "glm-5.3",
)
OTHERS = sorted({case.name for case in ONE_OF_EACH} - {*KINDS})
MODELS = [*KINDS, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)]


pytestmark = pytest.mark.in_turn("engine")


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    case = case_named(request.param)
    folder = tmp_path_factory.mktemp(case.name)
    checkpoint = write_checkpoint(case, folder / "checkpoint")
    path = convert_checkpoint(checkpoint, folder / "pack", experts="int4", dense="int8")
    with without_tiles():
        return load_engine(path, context=CONTEXT, threads=TWO)


@dataclass
class Watched(Sampler):
    """A sampler that remembers what it was asked."""

    given: SamplingSettings
    rows: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        Sampler.__init__(self, self.given)

    def choice(self, logits: Logits, history: History, **wanted: Any) -> TokenChoice:
        sums = logits.sums if logits.temperature else np.zeros(1)
        parts = logits.values, logits.peaks, sums, np.array([logits.best])
        self.rows.append(np.concatenate([part.astype(np.float64) for part in parts]))
        return super().choice(logits, history, **wanted)


@dataclass
class Asked:
    """A question to a model."""

    prompt: list[int]
    sampling: SamplingSettings
    max_tokens: int | None = 40
    stop_ids: frozenset[int] = frozenset()
    left_after: int | None = None  # ids after which nobody listens any more


@dataclass
class Answer:
    ids: list[int]
    rows: list[np.ndarray]
    finish: Finish
    drawn: float
    stats: Stats


_OPEN: list[Timeline] = []


def alone(engine: CpuEngine) -> Timeline:
    """A timeline that finds nothing that others computed."""
    for before in _OPEN:
        before.close()
    engine.pools.forget()
    _OPEN[:] = [engine.sequence()]
    return _OPEN[0]


def ask(
    engine: CpuEngine, line: Timeline, asked: Asked, drafting: Drafting | None = None
) -> Answer:
    sampler, heard = Watched(asked.sampling), count(1)
    request = GenerationRequest(
        asked.prompt,
        asked.sampling,
        asked.stop_ids,
        asked.max_tokens,
        ends=lambda id: next(heard) == asked.left_after,
    )
    scheduler = Scheduler(engine)
    made = scheduler.submit(request, sampler=sampler, sequence=line, drafting=drafting)
    while not scheduler.idle:
        scheduler.step()
    assert made.finish is not None
    return Answer(made.ids, sampler.rows, made.finish, sampler._random.random(), made.stats)


def drafting_of(engine: CpuEngine, source: DraftSource, length: int | None) -> Drafting:
    assert engine.step_times is not None
    repeats = engine.pools.states is not None
    return Drafting(source, engine.step_times, length=length, repeats=repeats)


def assert_same(got: Answer, want: Answer) -> None:
    assert got.ids == want.ids
    assert (got.finish, got.drawn, got.stats.tokens) == (want.finish, want.drawn, want.stats.tokens)
    for i, (a, b) in enumerate(zip(got.rows, want.rows, strict=True)):
        assert np.array_equal(a, b), f"token {i}: {np.abs(a - b).max()}"


SAMPLING = st.one_of(
    st.just(SamplingSettings(greedy=True, seed=0)),
    st.builds(
        SamplingSettings, greedy=st.just(True), seed=st.just(0), repetition_penalty=st.just(1.3)
    ),
    st.builds(
        SamplingSettings,
        temperature=st.sampled_from([0.2, 0.8, 1.5]),
        top_k=st.sampled_from([0, 0, 5]),
        top_p=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.05]),
        repetition_penalty=st.sampled_from([1.0, 1.2]),
        seed=st.integers(0, 9),
    ),
)
PROMPTS = st.one_of(
    st.integers(1, 140).map(lambda n: IDS[:n]),
    st.tuples(st.integers(2, 9), st.integers(3, 15)).map(lambda t: IDS[: t[0]] * t[1]),
    st.integers(55, 66).map(lambda n: IDS[:n]),  # drafts across the border of a page
)
ASKED = st.builds(
    Asked,
    PROMPTS,
    SAMPLING,
    st.sampled_from([1, 2, 9, 40, None]),
    st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
    st.sampled_from([None, None, 1, 4, 11]),
)
LENGTHS = st.sampled_from([None, 1, 2, 3, 5, 8])
SOURCES = st.sampled_from(["right", "wrong", "mixed", "lookup"])


def source_of(name: str, answer: list[int], seed: int) -> DraftSource:
    if name == "lookup":
        return Lookup()
    wrong = (
        np.random.default_rng(seed).random(CONTEXT) < {"right": 0, "wrong": 1, "mixed": 0.3}[name]
    )
    return Oracle(answer, lambda place: bool(wrong[place]), VOCAB)


@pytest.mark.thorough
@pytest.mark.rotates(3)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ASKED, LENGTHS, SOURCES, st.integers(0, 99))
@example(Asked(IDS[:60], SamplingSettings(greedy=True, seed=0)), 8, "right", 0)
@example(Asked(IDS[:60], SamplingSettings(greedy=True, seed=0)), 8, "wrong", 0)
@example(Asked(IDS[:60], SamplingSettings(seed=1)), 5, "mixed", 1)
@example(Asked(IDS[:140], SamplingSettings(greedy=True, seed=0), None), 8, "right", 0)
def test_an_answer_with_drafts_is_the_answer_without(
    engine: CpuEngine, asked: Asked, length: int | None, name: str, seed: int
) -> None:
    whole = ask(engine, alone(engine), Asked(asked.prompt, asked.sampling, asked.max_tokens)).ids
    answers, lengths = [], []
    for drafts in (False, True):
        line = alone(engine)
        source = source_of(name, whole, seed)
        drafting = drafting_of(engine, source, length) if drafts else None
        first = ask(engine, line, asked, drafting)
        # The timeline holds what was said, but perhaps the last id: nothing that was only tried.
        said = [*asked.prompt, *first.ids]
        assert line.ids == tuple(said[: line.length])
        lengths.append(line.length)
        again = Asked([*said, *IDS[:4]], SamplingSettings(seed=3), 5)
        if len(again.prompt) + 5 <= CONTEXT:
            # it goes on as one that never drafted
            answers.append((first, ask(engine, line, again)))
            assert line.ids == (*again.prompt, *answers[-1][1].ids)
        else:
            answers.append((first, first))
    for got, want in zip(*reversed(answers), strict=True):
        assert_same(got, want)
    # Who leaves in the middle may leave behind a step of several ids, of which the last is known, too.
    apart = abs(lengths[0] - lengths[1])
    assert apart <= (asked.left_after is not None) or line.recurrent


def test_right_drafts_save_steps_and_wrong_ones_cost_none(engine: CpuEngine) -> None:
    asked = Asked(IDS[:60], SamplingSettings(greedy=True, seed=0), 41)
    want = ask(engine, alone(engine), asked)
    for name, steps in (("right", 6), ("wrong", 41)):
        drafting = drafting_of(engine, source_of(name, want.ids, 0), 8)
        got = ask(engine, alone(engine), asked, drafting)
        assert got.ids == want.ids
        assert got.stats.steps == steps
        assert got.stats.accepted == (35 if name == "right" else 0)
        assert got.stats.accepted <= got.stats.drafted
    assert ask(engine, alone(engine), asked).stats.drafted == 0


def test_a_step_that_is_interrupted_leaves_no_trace(
    engine: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt after the step ran and before any of its ids was kept: the next one does it again."""
    asked = Asked(IDS[:70], SamplingSettings(greedy=True, seed=0), 20)
    want = ask(engine, alone(engine), asked)
    calls = count()

    def run(batch: Batch) -> list[Logits]:
        rows = CpuEngine.run(engine, batch)
        if next(calls) % 2:
            raise KeyboardInterrupt
        return rows

    monkeypatch.setattr(engine, "run", run)
    request = GenerationRequest(asked.prompt, asked.sampling, (), asked.max_tokens)
    scheduler, line = Scheduler(engine), alone(engine)
    drafting = drafting_of(engine, source_of("right", want.ids, 0), 8)
    made = scheduler.submit(request, sequence=line, drafting=drafting)
    interrupts = 0
    while not scheduler.idle:
        try:
            scheduler.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 1 and made.ids == want.ids


def test_drafts_end_at_the_depth_of_deferral(
    engine: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token defers as many experts as it would alone."""
    asked = Asked(IDS[:60], SamplingSettings(greedy=True, seed=0), 30)
    want = ask(engine, alone(engine), asked)
    seen: list[tuple[int, int, int]] = []

    def run(batch: Batch) -> list[Logits]:
        seen.extend((run.start, run.ids.size, run.defer) for run in batch.runs)
        return CpuEngine.run(engine, batch)

    monkeypatch.setattr(engine, "run", run)
    monkeypatch.setattr(engine, "depth_at", lambda position: int(position >= 73))
    source = Oracle(want.ids, lambda place: place % 7 == 5, VOCAB)
    ask(engine, alone(engine), asked, drafting_of(engine, source, 8))
    answer = [step for step in seen if step[0] >= 60]
    assert any(n > 1 for _, n, _ in answer)
    for start, n, defer in answer:
        assert {int(position >= 73) for position in range(start, start + n)} == {defer}


def test_times_of_steps_are_shared_by_an_engine(engine: CpuEngine) -> None:
    assert isinstance(engine.step_times, StepTimes) and engine.step_times is engine.step_times
    assert all(engine.step_times.seconds(n) > 0 for n in range(1, 20))


def test_where_tiles_may_multiply_bf16_nothing_is_drafted(
    engine: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers are in bf16."""
    monkeypatch.setattr("ktcli.engine.cpu.has_tiles", lambda isa: True)
    for least, possible in ((2, False), (17, False), (18, True)):
        monkeypatch.delitem(engine.__dict__, "step_times", raising=False)
        monkeypatch.delitem(engine.__dict__, "batch_invariant", raising=False)
        monkeypatch.setattr(engine.pool, "tile_min", (2, 2, least))
        assert (engine.step_times is not None) == (possible or not engine.spec.moe_layers)
    monkeypatch.delitem(engine.__dict__, "step_times", raising=False)
