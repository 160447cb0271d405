"""The sampler keeps and weighs the same tokens as transformers' processors, in the same order."""

import numpy as np
import pytest

from ktcli.engine.sampler import Sampler, SamplingSettings, penalise, shortlist
from ktcli.errors import BadPack, UsageError

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
def test_equals_transformers(settings: SamplingSettings, size: int) -> None:
    logits = np.random.default_rng(size).normal(0, 3, size).astype(np.float32)
    ids, chances = shortlist(penalise(logits, HISTORY, settings.repetition_penalty), settings)
    mine = np.zeros(size)
    mine[ids] = chances / chances.sum()
    np.testing.assert_allclose(mine, judge(logits, settings), rtol=1e-4, atol=1e-7)


def test_ties_at_the_edge_of_top_k_stay() -> None:
    logits = np.array([1, 2, 2, 2, 0], dtype=np.float32)
    ids, _ = shortlist(logits, SamplingSettings(top_k=2))
    assert ids.tolist() == [1, 2, 3]


def test_greedy_takes_the_best_and_heeds_the_penalty() -> None:
    logits = np.array([1.0, 5.0, 4.9], dtype=np.float32)
    assert Sampler(SamplingSettings(greedy=True)).next(logits, []) == 1
    assert Sampler(SamplingSettings(temperature=0)).next(logits, []) == 1
    assert Sampler(SamplingSettings(greedy=True, repetition_penalty=1.1)).next(logits, [1]) == 2


def test_a_seed_fixes_the_sequence() -> None:
    logits = np.zeros(50, dtype=np.float32)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingSettings(seed=seed))
        return [sampler.next(logits, []) for _ in range(30)]

    assert draw(7) == draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_frequencies_follow_the_chances() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2, 1e-9], dtype=np.float32))
    sampler = Sampler(SamplingSettings(seed=1))
    counts = np.bincount([sampler.next(logits, []) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.2, 0], atol=0.03)


def test_masked_logits_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0, -np.inf, 0], dtype=np.float32)
    sampler = Sampler(SamplingSettings(seed=3, repetition_penalty=2))
    assert {sampler.next(logits, [0, 1]) for _ in range(50)} == {1, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error(bad: float) -> None:
    logits = np.array([0, bad, 1], dtype=np.float32)
    with pytest.raises(BadPack, match="where a number is due"):
        Sampler(SamplingSettings()).next(logits, [])


def test_all_minus_infinity_is_an_error() -> None:
    with pytest.raises(BadPack):
        Sampler(SamplingSettings()).next(np.full(3, -np.inf, dtype=np.float32), [])


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 1.5}, {"min_p": -0.1},
     {"top_k": -1}, {"repetition_penalty": 0}, {"seed": -1}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        SamplingSettings(**wrong)  # type: ignore[arg-type]
