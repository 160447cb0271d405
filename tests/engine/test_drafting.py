"""Answers with drafts are the answers without them, bit for bit: whatever is drafted, however ids are chosen, and for
every kind of layer; and what was drafted in vain leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from convert import convert_checkpoint
from cores import TWO
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loading import load_engine
from reference import CASES, ONE_OF_EACH, write_checkpoint

from ktcli.engine import CpuEngine
from ktcli.engine.draft import Draft, DraftSource, Lookup
from ktcli.engine.draft_length import StepTimes
from ktcli.engine.drafting import Drafting
from ktcli.engine.generate import Finish, Generation, Stats
from ktcli.engine.logits import Logits
from ktcli.engine.sampler import Sampler, SamplingSettings
from ktcli.engine.session import Session
from ktcli.native import Batch

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


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    case = next(case for case in CASES if case.name == request.param)
    folder = tmp_path_factory.mktemp(case.name)
    checkpoint = write_checkpoint(case, folder / "checkpoint")
    path = convert_checkpoint(checkpoint, folder / "pack", experts="int4", dense="int8")
    return load_engine(path, context=CONTEXT, threads=TWO)


@dataclass
class Oracle:
    """Drafts what will be said, but for ids that are wrong."""

    answer: Sequence[int]
    is_wrong: Callable[[int], bool] = lambda place: False
    kinds: tuple[float, ...] = (0.5,)
    said: int = 0

    def follow(self, ids: Sequence[int]) -> None:
        self.said = 0

    def extend(self, id: int) -> None:
        self.said += 1

    def draft(self, most: int) -> Draft:
        places = range(self.said, min(self.said + most, len(self.answer)))
        return Draft(tuple((self.answer[i] + self.is_wrong(i)) % VOCAB for i in places))


@dataclass
class Watched(Sampler):
    """A sampler that remembers what it was asked."""

    given: SamplingSettings
    rows: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        Sampler.__init__(self, self.given)

    def next(self, logits: Logits, history: Sequence[int]) -> int:
        sums = logits.sums if logits.temperature else np.zeros(1)
        parts = logits.values, logits.peaks, sums, np.array([logits.best])
        self.rows.append(np.concatenate([part.astype(np.float64) for part in parts]))
        return super().next(logits, history)


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


_OPEN: list[Session] = []


def alone(engine: CpuEngine) -> Session:
    """A session that finds nothing that others computed."""
    for before in _OPEN:
        before.sequence.close()
    engine.pools.forget()
    _OPEN[:] = [engine.session()]
    return _OPEN[0]


def ask(session: Session, asked: Asked, drafting: Drafting | None = None) -> Answer:
    sampler = Watched(asked.sampling)
    made = Generation(
        session,
        asked.prompt,
        sampler,
        asked.stop_ids,
        asked.max_tokens,
        CONTEXT,
        drafting=drafting,
    )
    for n, _ in enumerate(made, 1):
        if n == asked.left_after:
            break
    return Answer(made.ids, sampler.rows, made.finish, sampler._random.random(), made.stats)


def drafting_of(
    engine: CpuEngine, session: Session, source: DraftSource, length: int | None
) -> Drafting:
    assert engine.step_times is not None
    return Drafting(source, engine.step_times, length=length, repeats=session.recurrent)


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
    return Oracle(answer, lambda place: bool(wrong[place]))


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
    whole = ask(alone(engine), Asked(asked.prompt, asked.sampling, asked.max_tokens)).ids
    answers, lengths = [], []
    for drafts in (False, True):
        session = alone(engine)
        source = source_of(name, whole, seed)
        drafting = drafting_of(engine, session, source, length) if drafts else None
        first = ask(session, asked, drafting)
        # The session holds what was said, but perhaps the last id: nothing that was only tried.
        said = [*asked.prompt, *first.ids]
        assert session.ids == tuple(said[: session.length])
        lengths.append(session.length)
        again = Asked([*said, *IDS[:4]], SamplingSettings(seed=3), 5)
        if len(again.prompt) + 5 <= CONTEXT:
            answers.append((first, ask(session, again)))  # it goes on as one that never drafted
            assert session.ids == (*again.prompt, *answers[-1][1].ids)
        else:
            answers.append((first, first))
    for got, want in zip(*reversed(answers), strict=True):
        assert_same(got, want)
    assert lengths[0] == lengths[1] or session.recurrent


def test_right_drafts_save_steps_and_wrong_ones_cost_none(engine: CpuEngine) -> None:
    asked = Asked(IDS[:60], SamplingSettings(greedy=True, seed=0), 41)
    want = ask(alone(engine), asked)
    for name, steps in (("right", 6), ("wrong", 41)):
        session = alone(engine)
        drafting = drafting_of(engine, session, source_of(name, want.ids, 0), 8)
        got = ask(session, asked, drafting)
        assert got.ids == want.ids
        assert got.stats.steps == steps
        assert got.stats.accepted == (35 if name == "right" else 0)
        assert got.stats.accepted <= got.stats.drafted
    assert ask(alone(engine), asked).stats.drafted == 0


def test_a_step_that_fails_leaves_no_trace(
    engine: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt after the step ran and before any of its ids was kept."""

    def run(batch: Batch) -> None:
        CpuEngine.run(engine, batch)
        raise KeyboardInterrupt

    rows = []
    for fails in (False, True):
        session = alone(engine)
        session.feed(IDS[:70])
        if fails:
            monkeypatch.setattr(engine, "run", run)
            with pytest.raises(KeyboardInterrupt):
                session.attempt(IDS[:9], 9)
            monkeypatch.undo()
        assert session.ids == tuple(IDS[:70])
        rows.append(session.feed([5]).values.copy())
    assert np.array_equal(*rows)


def test_drafts_end_at_the_depth_of_deferral(
    engine: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token defers as many experts as it would alone."""
    asked = Asked(IDS[:60], SamplingSettings(greedy=True, seed=0), 30)
    want = ask(alone(engine), asked)
    session = alone(engine)
    seen: list[tuple[int, int, int]] = []

    def run(batch: Batch) -> list[Logits]:
        seen.extend((run.start, run.ids.size, run.defer) for run in batch.runs)
        return CpuEngine.run(engine, batch)

    monkeypatch.setattr(engine, "run", run)
    source = Oracle(want.ids, lambda place: place % 7 == 5)
    made = Generation(
        session,
        asked.prompt,
        Sampler(asked.sampling),
        (),
        30,
        CONTEXT,
        depth_at=lambda position: int(position >= 73),
        drafting=drafting_of(engine, session, source, 8),
    )
    list(made)
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
        asked_anew(engine, monkeypatch)
        monkeypatch.setattr(engine.pool, "tile_min", (2, 2, least))
        assert (engine.step_times is not None) == (possible or not engine.spec.moe_layers)
    asked_anew(engine, monkeypatch)


def asked_anew(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("step_times", "batch_invariant"):
        monkeypatch.delitem(engine.__dict__, name, raising=False)
