"""Answers and prompts keep the parts of their speed that they are to keep, wherever both can."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ktcli.engine.balance import (
    ANSWERS_KEEP,
    PROMPT_KEEPS,
    best_piece,
    pure_steps,
    satisfaction,
    shares,
)
from ktcli.engine.pace import FIRST_PIECE, Pace

ratios = st.floats(1.0, 1000.0)


def test_the_example_of_a_mixed_step_of_five_pure_ones() -> None:
    answers, prompt = shares(5.0, 1.0, 2)
    assert (round(answers, 2), round(prompt, 2)) == (0.43, 0.71)
    assert 2 <= pure_steps(5.0, 1.0) < 2.1


@given(ratio=st.floats(1.0, 13.0))
def test_both_keep_their_parts_up_to_thirteen_pure_steps(ratio: float) -> None:
    answers, prompt = shares(ratio, 1.0, pure_steps(ratio, 1.0))
    assert answers >= ANSWERS_KEEP - 1e-9
    assert prompt >= PROMPT_KEEPS - 1e-9


@given(ratio=ratios, efficiency=st.floats(0.1, 1.0), other=st.floats(0, 100))
def test_no_other_number_of_pure_steps_satisfies_both_more(
    ratio: float, efficiency: float, other: float
) -> None:
    answers, prompt = shares(ratio, 1.0, other, efficiency)
    best = satisfaction(ratio, 1.0, efficiency)
    assert best >= min(answers / ANSWERS_KEEP, prompt / PROMPT_KEEPS) - 1e-9


@given(
    base=st.floats(0.0, 1.0),
    each=st.floats(0.0001, 0.01),
    decode=st.floats(0.001, 1.0),
    longest=st.floats(0.01, 5.0),
)
def test_a_piece_is_short_or_worth_its_pass_over_the_weights(
    base: float, each: float, decode: float, longest: float
) -> None:
    sizes = [16, 64, 256, 512]

    def seconds(size: int) -> float:
        return base + each * size

    best = best_piece(sizes, 512, seconds, decode, longest)
    if seconds(16) <= longest:
        assert seconds(best) <= longest
    else:
        assert best / seconds(best) >= 0.5 * 512 / seconds(512)
        assert best == 16 or sizes[sizes.index(best) - 1] / seconds(
            sizes[sizes.index(best) - 1]
        ) < 0.5 * 512 / seconds(512)


def test_a_machine_that_was_never_measured_is_tried_in_small_steps() -> None:
    pace, sizes = Pace(2.0), []
    assert pace.piece(0, 512) == 512
    for _ in range(8):
        sizes.append(pace.piece(4, 512))
        pace.record(4, sizes[-1], 0.2 + 0.001 * sizes[-1])
        pace.record(4, 0, 0.1)
    assert sizes[0] == FIRST_PIECE
    assert all(after <= 2 * before for before, after in pairwise(sizes))
    assert sizes[-1] > FIRST_PIECE


@given(steps=st.lists(st.tuples(st.integers(0, 16), st.integers(0, 512), st.floats(0.001, 3.0))))
def test_whatever_was_measured_a_piece_is_a_part_of_the_chunk(
    steps: list[tuple[int, int, float]],
) -> None:
    pace = Pace(2.0)
    for answers, prompt, seconds in steps:
        if answers + prompt:
            pace.record(answers, prompt, seconds)
    for answers in (0, 1, 16):
        for chunk in (1, 64, 512):
            assert 1 <= pace.piece(answers, chunk) <= chunk
            assert pace.pure_steps(max(1, answers), chunk, 512, 0.5) >= 0


def test_a_model_of_steps_leaves_nothing_to_try() -> None:
    """After one step of a whole chunk and one of answers alone, the size is chosen that would be with every time known,
    and stays: equal pieces make equal waits."""

    def true_s(rows: int) -> float:
        return 0.03 + 0.05 * (1 - (1 - 1 / 16) ** rows) + 0.001 * rows

    sizes = [32, 43, 64, 86, 128, 171, 256, 512]
    wanted = best_piece(sizes, 512, lambda n: true_s(4 + n), true_s(4), 2.0)
    pace = Pace(2.0, [(n, 7 * true_s(n)) for n in (16, 32, 64, 128, 256, 512)])
    pace.record(0, 512, true_s(512))
    pace.record(4, 0, true_s(4))
    chosen = set()
    for _ in range(20):
        chosen.add(size := pace.piece(4, 512))
        pace.record(4, size, true_s(4 + size))
        pace.record(4, 0, true_s(4))
    assert len(chosen) == 1
    (size,) = chosen
    assert size in sizes
    score = [
        satisfaction(true_s(4 + n), true_s(4), min(1.0, n / true_s(4 + n) * true_s(516) / 512))
        for n in (size, wanted)
    ]
    assert score[0] >= 0.95 * score[1]
