"""The library chooses the ids that the plain sampler in numpy chooses, for many rows at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktcli.engine.logits import Logits
from ktcli.engine.sampler import History, Sampler, SamplingSettings, chosen_id
from ktcli.errors import BadPack, NativeError, UsageError
from ktcli.native import Pool
from ktcli.native.choosing import Chooser
from tests.engine.test_sampler import plain as by_the_rules

SIZES = [1, 63, 91, 128, 4001]
MANY = 40_000
Row = tuple[int, float, bool, bool, int, SamplingSettings, int]


@pytest.fixture(scope="module")
def choosers() -> dict[int, Chooser]:
    pool = Pool(2)
    return {size: Chooser(pool, size) for size in (*SIZES, MANY)}


rows = st.tuples(
    st.sampled_from([0, 0, 1, 2]),  # ids masked: none, most, all of some blocks
    st.sampled_from([0.01, 1.0, 3.0, 12.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.builds(
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
    st.integers(0, 40),
)


def logits_of(size: int, row: Row) -> Logits:
    _, spread, ties, summed, seed, settings, _ = row
    values = np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)
    return Logits.of(
        np.round(values) if ties else values, Sampler(settings).sums_at if summed else 0.0
    )


def mask_of(size: int, row: Row) -> np.ndarray | None:
    """A mask that leaves at least one id."""
    if not row[0]:
        return None
    draw = np.random.default_rng(row[4] + 1)
    bits = draw.random(-(-size // 32) * 32) < 0.3
    if row[0] == 2:
        bits = np.repeat(draw.random(-(-size // 64)) < 0.5, 64)[: bits.size]
    bits[draw.integers(size)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


@given(size=st.sampled_from(SIZES), some=st.lists(rows, min_size=1, max_size=5))
def test_the_same_ids_as_in_numpy(choosers: dict[int, Chooser], size: int, some: list[Row]) -> None:
    choices, expected, changed = [], [], []
    for row in some:
        draw = np.random.default_rng(row[4] + 2)
        bias = tuple(
            (int(id), 1.5) for id in draw.choice(size, min(size, row[6] % 3), replace=False)
        )
        settings = replace(row[5], seed=row[4], logit_bias=bias)
        prompt = draw.integers(0, size, row[6] // 2).tolist()
        answer = draw.integers(0, size, row[6] - row[6] // 2).tolist()
        history = History(prompt, counts=settings.counts)
        for id in answer:
            history.append(id)
        logits, sampler, plain = logits_of(size, row), Sampler(settings), Sampler(settings)
        sampler.mask = plain.mask = mask_of(size, row)
        before = logits.values.copy()
        choices.append(sampler.choice(logits, history))
        expected.append(plain.next(logits, [*prompt, *answer], len(answer)))
        changed.append(plain._changed(logits, [*prompt, *answer], len(answer)).values)
        assert (logits.values == before).all()
    chosen = [each.id for each in choosers[size].choose(choices)]
    for row, mine, theirs, values in zip(some, chosen, expected, changed, strict=True):
        assert mine == theirs or is_rounding(values, row, mine)


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
        expected.append(Sampler(settings).next(logits, ()))
    assert [each.id for each in choosers[MANY].choose(choices)] == expected


def is_rounding(values: np.ndarray, row: Row, id: int) -> bool:
    """Tells whether the number drawn lies so close to the edge of this id that the last bit of an exponential decides,
    which may also put the last token that top-p keeps in or out."""
    assert not row[5].greedy
    chances = by_the_rules(values, replace(row[5], repetition_penalty=1.0), [])
    end, drawn = chances[: id + 1].sum(), np.random.default_rng(row[4]).random()
    off = 1e-6 + (chances[chances > 0].min() if row[5].top_p < 1 else 0)
    return bool(end - chances[id] - off <= drawn <= end + off)


@given(size=st.sampled_from(SIZES), row=rows, wanted=st.integers(0, 8))
def test_logarithms_are_those_of_the_logits_as_they_came(
    choosers: dict[int, Chooser], size: int, row: Row, wanted: int
) -> None:
    logits, sampler = logits_of(size, row), Sampler(replace(row[5], seed=1))
    sampler.mask = mask_of(size, row)
    history = History([0, size - 1], counts=True)
    (chosen,) = choosers[size].choose([sampler.choice(logits, history, likeliest=wanted)])
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
    with pytest.raises(BadPack, match="where a number is due"):
        chosen_id(one, both[0])
    assert 0 <= chosen_id(two, both[1]) < 91


def test_a_mask_without_a_token_is_an_error(choosers: dict[int, Chooser]) -> None:
    logits, sampler = Logits.of(np.zeros(91, np.float32)), Sampler(SamplingSettings())
    sampler.mask = np.zeros(3, np.uint32)
    (chosen,) = choosers[91].choose([sampler.choice(logits, History((), counts=False))])
    for choose in (lambda: chosen_id(chosen, logits), lambda: sampler.next(logits, ())):
        with pytest.raises(UsageError, match="the mask leaves none"):
            choose()


def test_an_id_outside_the_vocabulary_is_refused(choosers: dict[int, Chooser]) -> None:
    settings = SamplingSettings(logit_bias=((91, 1.0),))
    logits = Logits.of(np.zeros(91, np.float32))
    with pytest.raises(NativeError, match="outside the vocabulary of 91"):
        choosers[91].choose([Sampler(settings).choice(logits, History((), counts=False))])


@pytest.mark.parametrize("wrong", [((1, 101.0),), ((1, 1.0), (1, 2.0)), ((1, float("nan")),)])
def test_biases_out_of_range_are_refused(wrong: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(UsageError, match="logit bias"):
        SamplingSettings(logit_bias=wrong)
