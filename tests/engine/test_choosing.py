"""The library chooses the ids that the rules choose, for many rows at once."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktcli.engine.logits import Logits
from ktcli.engine.sampler import History, Sampler, chosen_id
from ktcli.errors import BadPack, NativeError, UsageError
from ktcli.native import BLOCK_COLUMNS, Batch, Pool, Program, Run
from ktcli.native.choosing import Chooser
from ktcli.sampling import SamplingSettings
from tests.engine import oracle_sampler as oracle

SIZES = [1, 63, 91, 128, 4001]
MANY = 40_000


class NativeLogits:
    """Logits whose summary a program made."""

    def __init__(self, size: int, pool: Pool) -> None:
        blocks = -(-size // BLOCK_COLUMNS)
        self._program = Program(pool, max_tokens=1, max_outputs=1, exact=False)
        views = [self._program.buffer(width, outputs=True) for width in (size, 1, blocks, blocks)]
        self._program.append("summary", (*views[1:], views[0]))
        self._program.finish()
        self._rows = [self._program.rows(view, 1)[0] for view in views]

    def of(self, values: np.ndarray, temperature: float) -> Logits:
        self._rows[0][:] = values
        none = np.zeros(1, dtype=np.int32)
        self._program.run(Batch((Run(none, 0, none, 0, temperature),)))
        row, best, peaks, sums = (each.copy() for each in self._rows)
        return Logits(row, int(best[0]), peaks, sums, temperature)


@pytest.fixture(scope="module")
def choosers() -> dict[int, Chooser]:
    pool = Pool(2)
    return {size: Chooser(pool, size) for size in (*SIZES, MANY)}


@pytest.fixture(scope="module")
def native() -> dict[int, NativeLogits]:
    pool = Pool(2)
    return {size: NativeLogits(size, pool) for size in SIZES}


class Row(NamedTuple):
    """A row of logits and how its token is chosen.

    Attributes:
        allowed: 0: every id, 1: three of ten, 2: half of the blocks, 3: the first half is minus infinity.
        history: the ids that came before, half of them in the answer.
    """

    allowed: int
    spread: float
    ties: bool
    seed: int
    settings: SamplingSettings
    history: int

    def values(self, size: int) -> np.ndarray:
        values = np.random.default_rng(self.seed).normal(0, self.spread, size).astype(np.float32)
        if self.allowed == 3:
            values[: size // 2] = -np.inf
        return np.round(values) if self.ties else values

    def mask(self, size: int) -> np.ndarray | None:
        """A mask that leaves at least one id."""
        if self.allowed not in (1, 2):
            return None
        draw = np.random.default_rng(self.seed + 1)
        bits = draw.random(-(-size // 32) * 32) < 0.3
        if self.allowed == 2:
            bits = np.repeat(draw.random(-(-size // 64)) < 0.5, 64)[: bits.size]
        bits[draw.integers(size)] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)


rows = st.builds(
    Row,
    allowed=st.sampled_from([0, 0, 1, 2, 3]),
    spread=st.sampled_from([0.01, 1.0, 3.0, 12.0]),
    ties=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    settings=st.builds(
        SamplingSettings,
        temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
        top_k=st.sampled_from([0, 0, 1, 20, 500, 10**6]),
        top_p=st.sampled_from([1.0, 0.999, 0.8, 0.3, 0.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.01, 0.4]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        greedy=st.sampled_from([False] * 7 + [True]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, -0.3]),
    ),
    history=st.integers(0, 40),
)


@given(size=st.sampled_from(SIZES), some=st.lists(rows, min_size=1, max_size=5))
def test_the_choice_is_that_of_the_rules(
    choosers: dict[int, Chooser], native: dict[int, NativeLogits], size: int, some: list[Row]
) -> None:
    """Whoever summarises the logits: a program, numpy, or nobody."""
    choices, expected = [], []
    for row in some:
        draw = np.random.default_rng(row.seed + 2)
        biased = draw.choice(size, min(size, row.history % 3), replace=False)
        bias = tuple((int(id), 1.5) for id in biased)
        settings = replace(row.settings, seed=row.seed, logit_bias=bias)
        prompt = draw.integers(0, size, row.history // 2).tolist()
        answer = draw.integers(0, size, row.history - row.history // 2).tolist()
        history = History(prompt, counts=settings.counts)
        for id in answer:
            history.append(id)
        values, mask = row.values(size), row.mask(size)
        before = values.copy()
        for logits in (
            Logits.of(values),
            Logits.of(values, Sampler(settings).sums_at),
            native[size].of(values, Sampler(settings).sums_at),
        ):
            choices.append(Sampler(settings).choice(logits, history, mask=mask))
            expected.append((oracle.changed(values, settings, prompt, answer, mask), settings))
        assert (values == before).all()
    for chosen, wanted in zip(choosers[size].choose(choices), expected, strict=True):
        assert oracle.is_choice(chosen.id, *wanted)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("uneven", [0.0, 4.0, -4.0])
def test_flat_rows_of_many_tokens(
    choosers: dict[int, Chooser], spread: float, uneven: float
) -> None:
    """Where most tokens survive, also where every few blocks are unlike the others."""
    choices, expected = [], []
    for seed, top_p in enumerate([0.05, 0.5, 0.95, 0.999] * 4):
        settings = SamplingSettings(top_p=top_p, seed=seed, min_p=0.02 if seed % 5 == 4 else 0.0)
        values = np.random.default_rng(seed).normal(0, spread, MANY).astype(np.float32)
        values[np.arange(MANY) // 64 % 5 == 0] += np.float32(uneven)
        logits = Logits.of(np.round(values, 2), Sampler(settings).sums_at)
        choices.append(Sampler(settings).choice(logits, History((), counts=False)))
        expected.append((logits.values, settings))
    for chosen, wanted in zip(choosers[MANY].choose(choices), expected, strict=True):
        assert oracle.is_choice(chosen.id, *wanted)


@given(size=st.sampled_from(SIZES), row=rows, wanted=st.integers(0, 8))
def test_logarithms_are_those_of_the_logits_as_they_came(
    choosers: dict[int, Chooser], size: int, row: Row, wanted: int
) -> None:
    sampler, history = Sampler(replace(row.settings, seed=1)), History([0, size - 1], counts=True)
    logits = Logits.of(row.values(size), sampler.sums_at)
    choice = sampler.choice(logits, history, mask=row.mask(size), likeliest=wanted)
    (chosen,) = choosers[size].choose([choice])
    exact = logits.values.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
    assert chosen.logprob == pytest.approx(exact[chosen.id], abs=1e-5)
    best = sorted(range(size), key=lambda id: (-logits.values[id], id))[:wanted]
    assert [id for id, _ in chosen.likeliest] == best
    assert [value for _, value in chosen.likeliest] == pytest.approx(exact[best], abs=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error_of_their_row_only(
    choosers: dict[int, Chooser], bad: float
) -> None:
    good = np.zeros(91, np.float32)
    broken = good.copy()
    broken[70] = bad
    both = [Logits.of(values) for values in (broken, good)]
    sampler, history = Sampler(SamplingSettings()), History((), counts=False)
    one, two = choosers[91].choose([sampler.choice(logits, history) for logits in both])
    with pytest.raises(BadPack, match="instead of a number"):
        chosen_id(one, both[0])
    assert 0 <= chosen_id(two, both[1]) < 91


def test_a_mask_without_a_token_is_an_error(choosers: dict[int, Chooser]) -> None:
    logits, history = Logits.of(np.zeros(91, np.float32)), History((), counts=False)
    choice = Sampler(SamplingSettings()).choice(logits, history, mask=np.zeros(3, np.uint32))
    with pytest.raises(UsageError, match="the mask excludes them all"):
        chosen_id(*choosers[91].choose([choice]), logits)


def test_an_id_outside_the_vocabulary_is_refused(choosers: dict[int, Chooser]) -> None:
    settings = SamplingSettings(logit_bias=((91, 1.0),))
    logits = Logits.of(np.zeros(91, np.float32))
    with pytest.raises(NativeError, match="outside the vocabulary of 91"):
        choosers[91].choose([Sampler(settings).choice(logits, History((), counts=False))])


@pytest.mark.parametrize("wrong", [((1, 101.0),), ((1, 1.0), (1, 2.0)), ((1, float("nan")),)])
def test_biases_out_of_range_are_refused(wrong: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(UsageError, match="logit bias"):
        SamplingSettings(logit_bias=wrong)
