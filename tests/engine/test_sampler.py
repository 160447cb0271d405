"""The sampler keeps and weighs the same tokens as transformers' processors, in the same order."""

from __future__ import annotations

import numpy as np
import pytest

from ktcli.engine.logits import Logits
from ktcli.engine.sampler import History, Sampler, chosen_id
from ktcli.errors import BadPack, UsageError
from ktcli.native import Pool
from ktcli.native.choosing import Chooser
from ktcli.sampling import SamplingSettings
from tests.engine import oracle_sampler as oracle

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
def test_the_oracle_equals_transformers(settings: SamplingSettings, size: int) -> None:
    logits = np.random.default_rng(size).normal(0, 3, size).astype(np.float32)
    mine = oracle.chances(oracle.changed(logits, settings, HISTORY), settings)
    np.testing.assert_allclose(mine, judge(logits, settings), rtol=1e-4, atol=1e-7)


class Drawing:
    """Tokens of one random sequence, chosen by the library from the same logits again and again."""

    def __init__(self, values: list[float], prompt: list[int], **settings: float | None) -> None:
        sampling = SamplingSettings(**settings)  # type: ignore[arg-type]
        self._logits = Logits.of(np.array(values, dtype=np.float32))
        self._sampler = Sampler(sampling)
        self._history = History(prompt, counts=sampling.counts)
        self._chooser = Chooser(Pool(1), len(values))

    def next(self) -> int:
        choice = self._sampler.choice(self._logits, self._history)
        return chosen_id(*self._chooser.choose([choice]), self._logits)

    def many(self, n: int) -> list[int]:
        return [self.next() for _ in range(n)]


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
    assert set(Drawing([1, 2, 2, 2, 0], [], top_k=2, seed=0).many(50)) == {1, 2, 3}


def test_greedy_takes_the_best_and_heeds_the_penalty() -> None:
    values = [1.0, 5.0, 4.9]
    assert Drawing(values, [], greedy=True).next() == 1
    assert Drawing(values, [], temperature=0).next() == 1
    assert Drawing(values, [1], greedy=True, repetition_penalty=1.1).next() == 2


def test_a_seed_fixes_the_sequence() -> None:
    def draw(seed: int | None) -> list[int]:
        return Drawing([0] * 50, [], seed=seed).many(30)

    assert draw(7) == draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_frequencies_follow_the_chances() -> None:
    drawing = Drawing(np.log([0.5, 0.3, 0.2, 1e-9]).tolist(), [], seed=1)
    counts = np.bincount(drawing.many(4000), minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.2, 0], atol=0.03)


def test_masked_logits_are_never_drawn() -> None:
    drawing = Drawing([-np.inf, 0, -np.inf, 0], [0, 1], seed=3, repetition_penalty=2)
    assert set(drawing.many(50)) == {1, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error(bad: float) -> None:
    with pytest.raises(BadPack, match="instead of a number"):
        Drawing([0, bad, 1], []).next()


def test_all_minus_infinity_is_an_error() -> None:
    with pytest.raises(BadPack):
        Drawing([-np.inf] * 3, []).next()


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 1.5}, {"min_p": -0.1},
     {"top_k": -1}, {"repetition_penalty": 0}, {"seed": -1}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SamplingSettings(**wrong)  # type: ignore[arg-type]
