"""The sampler keeps and weighs the same tokens as transformers' processors, in the same order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktcli.engine.logits import Logits
from ktcli.engine.sampler import History, Sampler, SamplingSettings, penalise, shortlist
from ktcli.errors import BadPack, UsageError
from ktcli.native import BLOCK_COLUMNS, Batch, Pool, Program, Run

HISTORY = [3, 5, 5, 90, 0]

SETTINGS = [
    SamplingSettings(),
    SamplingSettings(temperature=0.6),
    SamplingSettings(top_k=1),
    SamplingSettings(temperature=0.7, top_k=20, top_p=0.8),
    SamplingSettings(top_p=0.95),
    SamplingSettings(top_p=0.3),
    SamplingSettings(top_p=0.0),
    SamplingSettings(min_p=0.1),
    SamplingSettings(temperature=1.7, top_k=50, top_p=0.9, min_p=0.05, repetition_penalty=1.3),
    SamplingSettings(repetition_penalty=0.8, top_k=10_000),
]


def row(*values: float) -> Logits:
    return Logits.of(np.array(values, dtype=np.float32))


def judge(logits: np.ndarray, settings: SamplingSettings) -> np.ndarray:
    """Probabilities [V] after transformers' processors, in the order of its `generate`."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as lp

    chain = [lp.RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)]
    chain.append(lp.TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        chain.append(lp.TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        chain.append(lp.TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        chain.append(lp.MinPLogitsWarper(settings.min_p))
    scores = torch.from_numpy(logits)[None].to(torch.float64)
    for step in chain:
        scores = step(torch.tensor([HISTORY]), scores)
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("size", [100, 4001, 50_003])
def test_equals_transformers(settings: SamplingSettings, size: int) -> None:
    logits = np.random.default_rng(size).normal(0, 3, size).astype(np.float32)
    scores = penalise(Logits.of(logits), HISTORY, settings.repetition_penalty)
    ids, chances = shortlist(scores, settings)
    mine = np.zeros(size)
    mine[ids] = chances / chances.sum()
    np.testing.assert_allclose(mine, judge(logits, settings), rtol=1e-4, atol=1e-7)


def plain(
    values: np.ndarray, settings: SamplingSettings, history: list[int] = HISTORY
) -> np.ndarray:
    """Probabilities [V] by the rules alone, token by token."""
    scores = values.astype(np.float64)
    seen = np.unique(np.array(history, dtype=np.int64))
    worse = scores[seen] < 0
    penalty = settings.repetition_penalty
    scores[seen] = np.where(worse, scores[seen] * penalty, scores[seen] / penalty)
    if settings.greedy:
        return (np.arange(scores.size) == scores.argmax()).astype(float)
    chances = np.exp((scores - scores.max()) / settings.temperature)
    if 0 < settings.top_k < scores.size:
        chances[scores < np.sort(scores)[-settings.top_k]] = 0
    if settings.top_p < 1:
        order = np.argsort(chances, kind="stable")
        out = np.cumsum(chances[order]) <= (1 - settings.top_p) * chances.sum()
        out[-1] = False
        chances[order[out]] = 0
    if settings.min_p:
        chances[chances < settings.min_p] = 0
    return chances / chances.sum()


class NativeLogits:
    """Logits whose summary a program made."""

    def __init__(self, size: int, pool: Pool) -> None:
        blocks = -(-size // BLOCK_COLUMNS)
        self._program = Program(pool, max_tokens=1, max_outputs=1, exact=False)
        widths = (size, 1, blocks, blocks)
        views = [self._program.buffer(width, outputs=True) for width in widths]
        self._program.append("summary", (*views[1:], views[0]))
        self._program.finish()
        self._rows = [self._program.rows(view, 1)[0] for view in views]

    def of(self, values: np.ndarray, temperature: float) -> Logits:
        row, best, peaks, sums = self._rows
        row[:] = values
        none = np.zeros(1, dtype=np.int32)
        self._program.run(Batch((Run(none, 0, none, 0, temperature),)))
        return Logits(row, int(best[0]), peaks, sums, temperature)


SIZES = [91, 128, 4001, 20_000]


@pytest.fixture(scope="module")
def native() -> dict[int, NativeLogits]:
    pool = Pool(2)
    return {size: NativeLogits(size, pool) for size in SIZES}


@given(
    size=st.sampled_from(SIZES),
    spread=st.sampled_from([0.01, 1.0, 3.0, 12.0]),
    ties=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    settings=st.builds(
        SamplingSettings,
        temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
        top_k=st.sampled_from([0, 0, 1, 20, 500, 10**6]),
        top_p=st.sampled_from([1.0, 0.999, 0.8, 0.3, 0.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.01, 0.4]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        greedy=st.sampled_from([False] * 7 + [True]),
    ),
)
def test_the_summary_changes_no_choice(
    native: dict[int, NativeLogits],
    size: int,
    spread: float,
    ties: bool,
    masked: bool,
    seed: int,
    settings: SamplingSettings,
) -> None:
    """Summed up by a program, in numpy, or not at all: the same id for the same number drawn, but for
    rounding, which may also put the last token that top-p keeps in or out."""
    random = np.random.default_rng(seed)
    values = random.normal(0, spread, size).astype(np.float32)
    values = np.round(values) if ties else values
    values[: size // 2] = -np.inf if masked else values[: size // 2]
    settings = replace(settings, seed=seed)
    chances = plain(values, settings)
    ends = chances.cumsum()
    drawn = np.random.default_rng(seed).random()
    off = 1e-6 + (chances[chances > 0].min() if settings.top_p < 1 else 0)
    sampler = Sampler(settings)
    for logits in (native[size].of(values, sampler.sums_at), Logits.of(values)):
        id = Sampler(settings).next(logits, HISTORY)
        assert np.isfinite(values[id])
        assert ends[id] - chances[id] - off <= drawn <= ends[id] + off


def test_a_history_counts_what_is_in_the_answer() -> None:
    history = History([7, 5, 7], counts=True)
    for id in [*range(100, 200), 5, 9, 9, 5, 9]:
        history.append(id)
    found = dict(zip(history.seen.tolist(), history.answered.tolist(), strict=True))
    assert found == {7: 0, 5: 2, 9: 3, **dict.fromkeys(range(100, 200), 1)}
    silent = History([7, 5], counts=False)
    silent.append(9)
    assert silent.seen.size == silent.answered.size == 0


def test_ties_at_the_edge_of_top_k_stay() -> None:
    logits = row(1, 2, 2, 2, 0)
    ids, _ = shortlist(logits, SamplingSettings(top_k=2))
    assert ids.tolist() == [1, 2, 3]


def test_greedy_takes_the_best_and_heeds_the_penalty() -> None:
    logits = row(1.0, 5.0, 4.9)
    assert Sampler(SamplingSettings(greedy=True)).next(logits, []) == 1
    assert Sampler(SamplingSettings(temperature=0)).next(logits, []) == 1
    assert Sampler(SamplingSettings(greedy=True, repetition_penalty=1.1)).next(logits, [1]) == 2


def test_a_seed_fixes_the_sequence() -> None:
    logits = row(*[0] * 50)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingSettings(seed=seed))
        return [sampler.next(logits, []) for _ in range(30)]

    assert draw(7) == draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_frequencies_follow_the_chances() -> None:
    logits = row(*np.log([0.5, 0.3, 0.2, 1e-9]))
    sampler = Sampler(SamplingSettings(seed=1))
    counts = np.bincount([sampler.next(logits, []) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.2, 0], atol=0.03)


def test_masked_logits_are_never_drawn() -> None:
    logits = row(-np.inf, 0, -np.inf, 0)
    sampler = Sampler(SamplingSettings(seed=3, repetition_penalty=2))
    assert {sampler.next(logits, [0, 1]) for _ in range(50)} == {1, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error(bad: float) -> None:
    with pytest.raises(BadPack, match="where a number is due"):
        Sampler(SamplingSettings()).next(row(0, bad, 1), [])


def test_all_minus_infinity_is_an_error() -> None:
    with pytest.raises(BadPack):
        Sampler(SamplingSettings()).next(row(*[-np.inf] * 3), [])


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 1.5}, {"min_p": -0.1},
     {"top_k": -1}, {"repetition_penalty": 0}, {"seed": -1}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SamplingSettings(**wrong)  # type: ignore[arg-type]
