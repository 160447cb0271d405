"""Divides the machine between answers in progress and prompts being read: pure arithmetic.

A step that also reads a piece of a prompt (a *mixed* step) takes C seconds, a *pure* one of answers alone Td, and
all answers wait for either. After each mixed step come m pure ones. In that time of C + m·Td each answer gets 1 + m
tokens, which alone would take (1 + m)·Td; and the prompt a piece, which alone, as a part of a whole chunk, would take
W seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# The parts of their own speed that answers and prompts are to keep. Together more than 1, because the tokens of
# answers cost little in a step that reads a prompt.
ANSWERS_KEEP = 0.40
PROMPT_KEEPS = 0.65
# Parts of the best score: the smallest size that has the first makes the shortest waits; the size chosen before stays
# while it has the second.
_AS_GOOD, _STAYS = 0.99, 0.97
# Where no longest wait is asked for: the part of the speed of answers and prompt together that the shortest wait must
# keep; a size changes when that differs by so much.
_KEEPS, _CLEARLY = 0.95, 0.02
MOST_S = 2.0  # even then no step is to take longer


class PieceSize(NamedTuple):
    """A size of the pieces of a prompt.

    Attributes:
        tokens: the size.
        mixed_s: the seconds C of a mixed step that reads a piece.
        alone_s: the seconds W that the piece takes in a whole chunk, without answers.
    """

    tokens: int
    mixed_s: float
    alone_s: float


def shares(choice: PieceSize, decode_s: float, pure_steps: float) -> tuple[float, float]:
    """Returns the pair (answers, prompt) of the fractions of their full speed that answers and prompt keep while steps
    alternate: one mixed step, with answers and a piece of a prompt, then `pure_steps` steps of answers alone.

    Args:
        decode_s: the seconds Td of a pure step.
        pure_steps: the number m of pure steps after each mixed one.
    """
    cycle = choice.mixed_s + pure_steps * decode_s
    return (1 + pure_steps) * decode_s / cycle, choice.alone_s / cycle


def pure_steps(alone_s: float, decode_s: float) -> float:
    """Returns the number of steps of answers alone, whole or not and at least 0, that should follow a step that also
    reads a piece of a prompt.

    The fractions of their full speed that answers and prompt keep then have the same ratio as the targets for both.

    Args:
        alone_s: the seconds that the piece takes in a whole chunk, without answers.
        decode_s: the seconds of a step of answers alone.
    """
    return max(0.0, ANSWERS_KEEP / PROMPT_KEEPS * alone_s / decode_s - 1)


def satisfaction(choice: PieceSize, decode_s: float) -> float:
    """Returns how well a size of prompt pieces meets the speed targets: the lesser of the answers' and the prompt's
    fractions of full speed, each divided by its target; at 1 or more both targets are met. `decode_s` is the seconds of
    a step of answers alone.
    """
    answers, prompt = shares(choice, decode_s, pure_steps(choice.alone_s, decode_s))
    return min(answers / ANSWERS_KEEP, prompt / PROMPT_KEEPS)


def best_piece(
    choices: Sequence[PieceSize],
    decode_s: float,
    longest_s: float | None,
    before: int = 0,
) -> int:
    """Returns the number of prompt tokens that a step should read beside the answers in progress.

    Small pieces make short waits, but each costs a pass over the weights.

    Args:
        choices: the sizes, ascending, with their times in the middle of the prompt.
        decode_s: the seconds of a step of answers alone.
        longest_s: the most seconds of a step: the smallest piece is chosen whose `satisfaction` is at least 99 % of
            the best; None: MOST_S, and the smallest one with which the fractions of `shares`, added up, are at least
            95 % of the best. If even the smallest takes longer: the smallest one that reads at least at half the speed
            of a whole chunk, or else the largest.
        before: the size chosen before, which stays while it is about as good, by a margin of 2 %.
    """
    most_s = MOST_S if longest_s is None else longest_s
    short = [choice for choice in choices if choice.mixed_s <= most_s]
    if not short:
        worth = (choice.tokens for choice in choices if choice.alone_s >= 0.5 * choice.mixed_s)
        return next(worth, choices[-1].tokens)
    if longest_s is None:
        return _shortest_wait(short, decode_s, before)
    scores = {choice.tokens: satisfaction(choice, decode_s) for choice in short}
    best = max(scores.values())
    if scores.get(before, 0.0) >= _STAYS * best:
        return before
    return next(tokens for tokens, score in scores.items() if score >= _AS_GOOD * best)


def _shortest_wait(choices: Sequence[PieceSize], decode_s: float, before: int) -> int:
    """Returns the least number of tokens with which answers and prompt together lose little of their speed."""
    done = {
        choice.tokens: sum(shares(choice, decode_s, pure_steps(choice.alone_s, decode_s)))
        for choice in choices
    }
    best = max(done.values())

    def smallest(part: float) -> int:
        return next(tokens for tokens, speed in done.items() if speed >= part * best)

    if smallest(_KEEPS - _CLEARLY) <= before <= smallest(_KEEPS + _CLEARLY):
        return before
    return smallest(_KEEPS)
