"""Answers and prompts keep the parts of their speed that they are to keep, wherever both can."""

from hypothesis import given
from hypothesis import strategies as st

from ktcli.engine.balance import (
    ANSWERS_KEEP,
    PROMPT_KEEPS,
    PieceSize,
    best_piece,
    pure_steps,
    satisfaction,
    shares,
)
from ktcli.engine.pace import Pace, PromptPiece
from ktcli.planner.cost import PieceTimes

ratios = st.floats(1.0, 1000.0)


def test_the_example_of_a_mixed_step_of_five_pure_ones() -> None:
    answers, prompt = shares(PieceSize(512, 5.0, 5.0), 1.0, 2)
    assert (round(answers, 2), round(prompt, 2)) == (0.43, 0.71)
    assert 2 <= pure_steps(5.0, 1.0) < 2.1


@given(ratio=st.floats(1.0, 13.0))
def test_both_keep_their_parts_up_to_thirteen_pure_steps(ratio: float) -> None:
    answers, prompt = shares(PieceSize(512, ratio, ratio), 1.0, pure_steps(ratio, 1.0))
    assert answers >= ANSWERS_KEEP - 1e-9
    assert prompt >= PROMPT_KEEPS - 1e-9


@given(ratio=ratios, efficiency=st.floats(0.1, 1.0), other=st.floats(0, 100))
def test_no_other_number_of_pure_steps_satisfies_both_more(
    ratio: float, efficiency: float, other: float
) -> None:
    choice = PieceSize(64, ratio, efficiency * ratio)
    answers, prompt = shares(choice, 1.0, other)
    best = satisfaction(choice, 1.0)
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
    whole = base + each * 512
    choices = [PieceSize(size, base + each * size, size / 512 * whole) for size in sizes]
    best = best_piece(choices, decode, longest)
    at = sizes.index(best)
    if choices[0].mixed_s <= longest:
        assert choices[at].mixed_s <= longest
    else:
        assert choices[at].alone_s >= 0.5 * choices[at].mixed_s
        assert at == 0 or choices[at - 1].alone_s < 0.5 * choices[at - 1].mixed_s


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 16),
            st.integers(0, 512),
            st.integers(0, 100_000),
            st.floats(0.001, 3.0),
        )
    ),
    start=st.integers(0, 100_000),
    left=st.integers(1, 100_000),
)
def test_whatever_was_measured_a_piece_is_a_part_of_the_chunk(
    steps: list[tuple[int, int, int, float]], start: int, left: int
) -> None:
    pace = Pace(2.0, PieceTimes.assumed(512))
    for answers, tokens, at, seconds in steps:
        if answers + tokens:
            pace.record(answers, PromptPiece(tokens, at), seconds)
    for answers in (0, 1, 16):
        for chunk in (32, 64, 512):
            tokens = pace.piece(answers, chunk, start, start + left)
            assert 1 <= tokens <= chunk
            assert pace.pure_steps(max(1, answers), PromptPiece(tokens, start), chunk) >= 0


def _true_s(rows: float, tokens: int, start: float) -> float:
    """A machine on which a pass over the weights costs what 80 tokens do, and 4,000 positions as much as those."""
    weights = 0.02 + 0.08 * (1 - (1 - 1 / 16) ** rows)
    return weights + 0.00125 * rows + 0.00125 / 4000 * tokens * start


def _model() -> PieceTimes:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    return PieceTimes(sizes, tuple(7 * _true_s(n, n, 0) for n in sizes), 7 * 0.00125 / 4000)


def _read_beside(answers: int, prompt: int) -> list[tuple[int, float]]:
    """The tokens and seconds of the pieces of a prompt, in chunks of 512, after one of each kind of step."""
    pace, steps, at = Pace(2.0, _model()), [], 0
    pace.record(0, PromptPiece(512, 1024), _true_s(512, 512, 1024))
    pace.record(answers, PromptPiece(0, 0), _true_s(answers, 0, 0))
    while at < prompt:
        left = min(512 - at % 512, prompt - at)
        most = pace.piece(answers, 512, at, prompt)
        tokens = -(-left // -(-left // most))
        steps.append((tokens, _true_s(answers + tokens, tokens, at)))
        pace.record(answers, PromptPiece(tokens, at), steps[-1][1])
        pace.record(answers, PromptPiece(0, 0), _true_s(answers, 0, 0))
        at += tokens
    return steps


def test_late_pieces_of_a_long_prompt_make_answers_wait_little_longer_than_the_middle_ones() -> (
    None
):
    """What positions cost is known from the first piece on, so that pieces get smaller where they would take long."""
    for chunks in (8, 16, 64):
        steps = _read_beside(4, chunks * 512)
        size = max(tokens for tokens, _ in steps)
        assert max(seconds for _, seconds in steps) <= 1.5 * _true_s(4 + size, size, chunks * 256)
    assert steps[-1][0] < size


def test_the_steps_that_follow_give_each_the_part_that_it_is_to_keep() -> None:
    """Over a whole prompt both keep parts of their speed that are as far from what they are to keep."""
    answers, at, took, tokens_out = 4, 0, 0.0, 0.0
    decode_s = _true_s(answers, 0, 0)
    pace = Pace(2.0, _model())
    pace.record(0, PromptPiece(512, 0), _true_s(512, 512, 0))
    pace.record(answers, PromptPiece(0, 0), decode_s)
    for tokens, seconds in _read_beside(answers, 8 * 512):
        after = pace.pure_steps(answers, PromptPiece(tokens, at), 512)
        took += seconds + after * decode_s
        tokens_out += 1 + after
        at += tokens
    alone_s = sum(_true_s(512, 512, 512 * i) for i in range(8))
    kept = tokens_out * decode_s / took / ANSWERS_KEEP, alone_s / took / PROMPT_KEEPS
    assert abs(kept[0] / kept[1] - 1) < 0.05
