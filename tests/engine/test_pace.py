"""Laws of the pace: what was measured last counts most, equal waits for pieces of one prompt, and steady sizes."""

from __future__ import annotations

import pytest

from ktcli.engine.balance import PieceSize, best_piece, pure_steps, shares
from ktcli.engine.pace import FEW_STEPS, FIRST_PIECE, PIECE_STEP, Pace, PromptPiece
from ktcli.planner.cost import PieceTimes

CHUNK, LONG = 512, 32_768
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NOTHING = PromptPiece(0, 0)


def machine(weights_s: float = 0.1, token_s: float = 0.00125) -> PieceTimes:
    """A pass over the weights, and then each token the same; 4,000 positions before it cost as much again."""
    return PieceTimes(SIZES, tuple(weights_s + token_s * n for n in SIZES), token_s / 4000)


def measured(longest_s: float = 2.0, *, decode_s: float = 0.1, answers: int = 4) -> Pace:
    """A pace of a machine that is as fast as its model."""
    pace = Pace(longest_s, machine())
    pace.record(0, PromptPiece(CHUNK, 0), 0.1 + 0.00125 * CHUNK)
    pace.record(answers, NOTHING, decode_s)
    return pace


def test_a_new_measurement_counts_a_quarter_and_the_first_counts_whole() -> None:
    pace = Pace(2.0, machine())
    for seconds, expected in ((1.0, 1.0), (2.0, 1.25), (1.25, 1.25)):
        pace.record(3, NOTHING, seconds)
        assert pace.decode_s(3) == expected


def test_steps_of_answers_and_steps_that_read_are_measured_apart() -> None:
    pace = Pace(2.0, machine())
    pace.record(2, PromptPiece(PIECE_STEP - 1, 0), 9.0)  # so few say little of either
    assert pace.decode_s(2) is None and pace.mixed_s(2, PromptPiece(64, 0)) is None
    pace.record(2, PromptPiece(PIECE_STEP, 0), 9.0)
    assert pace.decode_s(2) is None
    assert pace.mixed_s(2, PromptPiece(PIECE_STEP, 0)) == pytest.approx(9.0)
    pace.record(2, NOTHING, 0.5)
    assert pace.decode_s(2) == 0.5
    assert pace.mixed_s(2, PromptPiece(PIECE_STEP, 0)) == pytest.approx(9.0)


@pytest.mark.parametrize("known", ["nothing", "answers", "prompts"])
def test_before_both_are_measured_pieces_are_small_and_take_turns(known: str) -> None:
    pace = Pace(2.0, machine())
    if known == "answers":
        pace.record(4, NOTHING, 0.1)
    elif known == "prompts":
        pace.record(4, PromptPiece(CHUNK, 0), 0.7)
    assert pace.piece(4, CHUNK, 0, LONG) == FIRST_PIECE
    assert pace.piece(4, 32, 0, LONG) == 32
    assert pace.pure_steps(4, PromptPiece(64, 0), CHUNK) == 1.0


def test_a_prompt_that_nobody_waits_for_is_read_in_whole_chunks() -> None:
    assert measured(0.01).piece(0, CHUNK, LONG // 2, LONG) == CHUNK


@pytest.mark.parametrize("longest_s", [0.4, 1.0, 2.0])
def test_answers_wait_about_equally_for_each_piece_of_a_prompt_and_never_longer_than_the_bound(
    longest_s: float,
) -> None:
    """One bound of time fits all pieces: each is as long as it allows, wherever in the prompt it begins."""
    pace = measured(longest_s)
    pieces = {at: pace.piece(4, CHUNK, at, LONG) for at in range(0, LONG, LONG // 16)}
    assert len(set(pieces.values())) > 4

    def waits_s(at: int, tokens: int) -> float:
        seconds = pace.mixed_s(4, PromptPiece(tokens, at))
        assert seconds is not None
        return seconds

    longest = max(waits_s(at, n) for at, n in pieces.items())
    more = [waits_s(at, n + PIECE_STEP) for at, n in pieces.items() if n + PIECE_STEP <= CHUNK]
    assert longest < min(more) and longest <= longest_s


def test_sizes_stay_while_times_go_up_and_down_a_little() -> None:
    """Equal pieces make equal waits: a size does not change to and fro with noise, wherever its border is."""
    seen = set()
    for n in range(120):
        decode_s = 0.02 * 1.03**n
        pace = measured(9.0, decode_s=decode_s)
        sizes = []
        for turn in range(12):
            pace.record(4, NOTHING, decode_s * (1.06 if turn % 2 else 0.94))
            sizes.append(pace.piece(4, CHUNK, LONG // 2, LONG))
        seen.add(sizes[-1])
        assert len({*sizes[2:]}) == 1, f"{decode_s}: {sizes}"
    assert len(seen) > 2


def sized(*seconds: tuple[int, float, float]) -> list[PieceSize]:
    return [PieceSize(*each) for each in seconds]


def test_of_sizes_that_are_nearly_as_good_the_smallest_is_taken() -> None:
    """Within a hundredth of the best."""
    # Answers alone would need the rest: what the prompt keeps, W / C, decides.
    for worse, expected in ((0.995, 16), (0.985, 512)):
        choices = sized((16, 1.0, 0.6 * worse), (512, 10.0, 6.0))
        assert best_piece(choices, 100.0, 20.0) == expected


def test_the_size_before_stays_while_it_is_nearly_as_good() -> None:
    """Within three hundredths of the best."""
    for worse, expected in ((0.98, 512), (0.96, 16)):
        choices = sized((16, 1.0, 0.6), (512, 10.0, 6.0 * worse))
        assert best_piece(choices, 100.0, 20.0, 512) == expected
        assert best_piece(choices, 100.0, 20.0) == 16
    assert best_piece(sized((16, 1.0, 0.6)), 100.0, 20.0, 64) == 16  # there is no such size


def test_a_step_may_take_as_long_as_the_longest() -> None:
    choices = sized((16, 1.0, 0.3), (512, 2.0, 1.6))
    assert best_piece(choices, 100.0, 2.0) == 512
    assert best_piece(choices, 100.0, 1.99) == 16


def test_where_no_step_is_short_the_prompt_reads_at_half_its_speed_at_least() -> None:
    choices = sized((16, 1.0, 0.1), (64, 2.0, 1.0), (512, 4.0, 4.0))
    assert best_piece(choices, 100.0, 0.5) == 64
    slow = sized((16, 1.0, 0.1), (64, 2.0, 0.5), (512, 10.0, 4.0))
    assert best_piece(slow, 100.0, 0.5) == 512  # the whole chunk


def together(choice: PieceSize, decode_s: float) -> float:
    """The parts of their own speed that answers and prompt keep, together."""
    return sum(shares(choice, decode_s, pure_steps(choice.alone_s, decode_s)))


@pytest.mark.parametrize("decode_s", [0.01, 0.05, 0.1, 0.4])
def test_without_a_bound_the_wait_is_the_shortest_that_costs_five_hundredths_at_most(
    decode_s: float,
) -> None:
    whole = PieceSize(CHUNK, 0.1 + 0.00125 * CHUNK + decode_s / 2, 0.1 + 0.00125 * CHUNK)
    choices = [
        PieceSize(n, 0.1 + 0.00125 * n + decode_s / 2, whole.alone_s * n / CHUNK)
        for n in (16, 32, 64, 128, 256)
    ] + [whole]
    chosen = best_piece(choices, decode_s, None)
    worth = {each.tokens: together(each, decode_s) for each in choices}
    enough = 0.95 * max(worth.values())
    assert chosen == min(tokens for tokens, parts in worth.items() if parts >= enough)
    assert best_piece(choices, decode_s, None, chosen) == chosen
    assert best_piece(choices, decode_s, None, CHUNK) in (chosen, CHUNK)


def test_without_a_bound_the_size_before_stays_where_another_is_hardly_better() -> None:
    choices = sized((16, 0.1, 0.06), (64, 0.3, 0.285), (512, 2.0, 2.0))
    parts = {each.tokens: together(each, 0.01) for each in choices}
    assert parts[16] < 0.93 * parts[512] and parts[64] > 0.97 * parts[512]
    assert [best_piece(choices, 0.01, None, before) for before in (0, 16, 64, 512)] == [64] * 4
    closer = sized((16, 0.1, 0.06), (64, 0.32, 0.285), (512, 2.0, 2.0))
    parts = {each.tokens: together(each, 0.01) for each in closer}
    assert 0.93 < parts[64] / parts[512] < 0.97, parts
    assert [best_piece(closer, 0.01, None, before) for before in (64, 512)] == [64, 512]


def test_several_prompts_share_a_step_that_takes_a_few_steps_of_all_their_answers() -> None:
    pace = Pace(None, machine())
    assert pace.shared(4, 2, CHUNK) == CHUNK  # nothing was measured
    pace.record(0, PromptPiece(CHUNK, 0), 0.1 + 0.00125 * CHUNK)
    pace.record(4, NOTHING, 0.05)
    pace.record(8, NOTHING, 0.075)
    most = [pace.shared(4, prompts, CHUNK) for prompts in (1, 2, 4)]
    assert 0 < most[0] < most[1] < most[2] < CHUNK
    for prompts, tokens in zip((1, 2, 4), most, strict=True):
        longest_s = FEW_STEPS * (pace.decode_s(4 + prompts) or 0.0)
        seconds = [pace.mixed_s(4, PromptPiece(tokens + more, 0)) or 0.0 for more in (0, 1)]
        assert seconds[0] <= longest_s < seconds[1]


def test_prompts_share_whole_steps_if_nobody_waits_or_a_longest_wait_was_asked_for() -> None:
    pace = measured(0.4)
    assert pace.shared(4, 2, CHUNK) == CHUNK
    assert Pace(None, machine()).shared(0, 2, CHUNK) == CHUNK
