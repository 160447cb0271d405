"""Which experts lie on the GPU: within the budget, as the rule says, and what is left to the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktcli.errors import UsageError
from ktcli.planner.experts import (
    CHOICES,
    FRONT,
    HOT,
    UNIFORM,
    Room,
    choose,
    hits,
    parse_mask,
    touched,
)

ROOM = Room((10,) * 6, 16, 320)  # 32 of 96 experts
HEAT = np.random.default_rng(1).integers(0, 100, (6, 16))


def bytes_of(mask: np.ndarray, room: Room) -> int:
    return int(np.array(room.sizes) @ mask.sum(axis=1))


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    experts=st.integers(1, 12),
    budget=st.integers(-5, 4000),
    choice=st.sampled_from([None, *CHOICES, 0, 1]),
    seed=st.integers(0, 9),
)
def test_never_beyond_the_budget_and_never_fewer_with_more(sizes, experts, budget, choice, seed):
    heat = np.random.default_rng(seed).integers(0, 9, (len(sizes), experts))
    counts = []
    for more in (budget, budget + 7, budget + 100):
        room = Room(tuple(sizes), experts, more)
        mask = choose(choice, heat, room).mask
        assert bytes_of(mask, room) <= max(0, more)
        counts.append(int(mask.sum()))
    if (
        len(set(sizes)) == 1
    ):  # of unequal layers, a larger and hotter expert may take the place of two
        assert counts == sorted(counts)


def test_uniform_is_the_same_number_everywhere_and_evenly_spread():
    mask = choose(UNIFORM, None, ROOM).mask
    assert mask.sum(axis=1).tolist() == [5] * 6
    ids = np.flatnonzero(mask[0])
    gaps = np.diff([*ids, ids[0] + 16])  # over all ids: the last is as far from the end
    assert gaps.max() - gaps.min() <= 1


def test_front_fills_the_first_layers():
    assert choose(FRONT, None, ROOM).mask.sum(axis=1).tolist() == [16, 16, 0, 0, 0, 0]
    odd = Room(ROOM.sizes, 16, 215)
    assert choose(FRONT, None, odd).mask.sum(axis=1).tolist() == [16, 5, 0, 0, 0, 0]


def test_hot_takes_the_most_hits_that_the_bytes_can_buy():
    mask = choose(HOT, HEAT, ROOM).mask
    best = np.sort(HEAT.ravel())[::-1][:32].sum()
    assert int(mask.sum()) == 32
    assert HEAT[mask].sum() == best
    assert hits(mask, 4, HEAT).rate > hits(choose(UNIFORM, None, ROOM).mask, 4, HEAT).rate


def test_hits_count_by_their_bytes():
    heat = np.array([[30, 30], [20, 20]])
    mask = choose(HOT, heat, Room((30, 10), 2, 20)).mask  # 1 and 2 hits per byte
    assert mask.tolist() == [[False, False], [True, True]]


def test_equally_hot_ones_are_spread_over_the_layers():
    for heat in (np.full((6, 16), 7), np.zeros((6, 16), int)):
        for budget, each in ((60, 1), (180, 3)):
            mask = choose(HOT, heat, Room((10,) * 6, 16, budget)).mask
            assert mask.sum(axis=1).tolist() == [each] * 6


def test_a_number_is_taken_or_cut_with_a_sentence():
    assert choose(3, None, ROOM).mask.sum(axis=1).tolist() == [3] * 6
    cut = choose(9, None, ROOM)
    assert cut.mask.sum(axis=1).tolist() == [5] * 6
    assert cut.reason == "9 experts per layer do not fit; 5 fit"


def test_a_mask_is_taken_or_every_layer_gives_up_its_last():
    asked = HEAT > 60
    fits = choose(asked, None, Room(ROOM.sizes, 16, 960))
    assert (fits.mask == asked).all() and fits.reason == ""
    cut = choose(np.ones((6, 16), bool), None, ROOM)
    assert sorted(cut.mask.sum(axis=1).tolist()) == [5, 5, 5, 5, 6, 6]
    assert cut.reason == "64 of the 96 requested experts do not fit"


def test_by_itself_all_that_fits_then_the_hottest_then_uniform():
    assert choose(None, None, Room(ROOM.sizes, 16, 960)).rule == "all"
    assert choose(None, HEAT, ROOM).rule == HOT
    assert choose(None, None, ROOM).rule == UNIFORM


@pytest.mark.parametrize(
    ("choice", "heat", "words"),
    [
        ("warm", None, "not a valid choice of GPU experts"),
        (HOT, None, "no heat map yet"),
        (17, None, "17 experts per layer were requested on the GPU, but the model has 16"),
        (-1, None, "-1 experts"),
        (np.ones((6, 15), bool), None, "the shape 6 x 15, but the model has 6 x 16"),
        (None, HEAT[1:], "heat map has 5 x 16 experts"),
    ],
)
def test_what_is_of_another_model_is_refused(choice, heat, words):
    with pytest.raises(UsageError, match=words):
        choose(choice, heat, ROOM)


def test_hits_of_a_mask():
    mask = np.zeros((2, 4), bool)
    mask[0, :2] = True
    assert hits(mask, 2).k_cpu == (1.0, 2.0)
    assert hits(mask, 2).rate == 0.25
    heat = np.array([[60, 20, 10, 10], [1, 1, 1, 1]])
    assert hits(mask, 2, heat).k_cpu == pytest.approx((0.4, 2.0))
    assert hits(np.ones((2, 4), bool), 2, heat).k_cpu == (0.0, 0.0)


def test_an_expert_that_was_never_seen_is_still_on_the_cpu():
    heat = np.array([[100, 0, 0, 0]])
    assert 0 < hits(np.array([[True, False, False, False]]), 2, heat).k_cpu[0] < 0.1
    heat = np.array([[1, 0]])  # it counts as half a hit
    assert hits(np.array([[True, False]]), 3, heat).k_cpu == pytest.approx((1.0,))


def test_tokens_touch_more_experts_the_more_they_are_and_never_more_than_there_are():
    assert touched(128, 8, 0) == 0
    assert touched(128, 8, 1) == 8
    assert touched(128, 8, 2) == pytest.approx(8 + 8 * 120 / 128)
    assert touched(4, 8, 1) == 4 and touched(0, 2, 5) == 0
    draw = np.random.default_rng(3)
    seen = [
        len({*np.array([draw.choice(32, 4, replace=False) for _ in range(6)]).ravel().tolist()})
        for _ in range(500)
    ]
    assert touched(32, 4, 6) == pytest.approx(np.mean(seen), rel=0.02)


def test_expected_hits_are_those_of_a_router():
    draw = np.random.default_rng(2)
    chosen = np.array([draw.choice(16, 4, replace=False) for _ in range(4000)])
    mask = choose(UNIFORM, None, ROOM).mask
    counted = (~mask[0][chosen]).sum(axis=1).mean()
    assert hits(mask, 4).k_cpu[0] == pytest.approx(counted, rel=0.02)


# --- a file -----------------------------------------------------------------------------------------


def test_a_file_has_a_line_per_layer():
    mask = parse_mask("# the first two\n0-1,3\n\n2 # one\n", 3, 4)
    assert mask.tolist() == [[True, True, False, True], [False] * 4, [False, False, True, False]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0\n", "1 lines, but the model has 2"),
        ("0\nx\n", "line 2 of the file of GPU experts is not a list of ids: 'x'"),
        ("0\n4\n", "names expert 4, but the model has 0-3"),
        ("0\n-1\n", "line 2"),
        ("0\n0-99999999999\n", "line 2"),
        ("\x00\n" * 2, "line 1"),
        ("# ids\n0\nx\n", "line 3 of the file of GPU experts is not a list of ids: 'x'"),
        ("# ids\n0\n# more\n4\n", "line 4 of the file of GPU experts names expert 4"),
        ("# ids\n0\n3-1\n", "line 3 of the file of GPU experts is not a list of ids: '3-1'"),
    ],
)
def test_a_file_that_says_something_else(text: str, words: str):
    with pytest.raises(UsageError, match=words):
        parse_mask(text, 2, 4)
