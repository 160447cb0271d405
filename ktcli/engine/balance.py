"""Shares the machine between answers that are written and prompts that are read: pure arithmetic.

A step that also reads a piece of a prompt (a *mixed* step) takes C seconds, a *pure* one of answers alone Td, and
all answers wait for either. After each mixed step come m pure ones. In that time of C + m·Td each answer gets 1 + m
tokens, which alone would take (1 + m)·Td; and the prompt a piece, which alone would take e·C, where e is the speed
of reading such pieces over that of reading whole chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# The parts of their own speed that answers and prompts are to keep. Together more than 1, because the tokens of
# answers cost little in a step that reads a prompt.
ANSWERS_KEEP = 0.40
PROMPT_KEEPS = 0.65
_AS_GOOD = 0.95  # of the best score: a size that has it is not changed


def shares(
    mixed_s: float, decode_s: float, pure_steps: float, efficiency: float = 1.0
) -> tuple[float, float]:
    """The parts of their own speed that answers and the prompt keep.

    Args:
        mixed_s: the seconds C of a mixed step.
        decode_s: the seconds Td of a pure step.
        pure_steps: the number m of pure steps after each mixed one.
        efficiency: the speed of reading such pieces over that of reading whole chunks.
    """
    cycle = mixed_s + pure_steps * decode_s
    return (1 + pure_steps) * decode_s / cycle, efficiency * mixed_s / cycle


def pure_steps(mixed_s: float, decode_s: float, efficiency: float = 1.0) -> float:
    """The number of pure steps, whole or not, that should follow a mixed one, 0 at least.

    Answers and prompt then keep parts that are as far above, or below, what they are to keep.
    """
    return max(0.0, ANSWERS_KEEP / PROMPT_KEEPS * efficiency * mixed_s / decode_s - 1)


def satisfaction(mixed_s: float, decode_s: float, efficiency: float = 1.0) -> float:
    """The lesser of what answers and prompt keep, over what they are to keep; 1: both keep enough."""
    after = pure_steps(mixed_s, decode_s, efficiency)
    answers, prompt = shares(mixed_s, decode_s, after, efficiency)
    return min(answers / ANSWERS_KEEP, prompt / PROMPT_KEEPS)


def best_piece(
    sizes: Sequence[int],
    chunk: int,
    mixed_s: Callable[[int], float],
    decode_s: float,
    longest_s: float,
    before: int = 0,
) -> int:
    """The number of tokens of a prompt that a mixed step should read.

    Small pieces make short waits, but each costs a pass over the weights.

    Args:
        sizes: the choices, ascending.
        chunk: the tokens of a whole chunk.
        mixed_s: the seconds of a mixed step that reads so many tokens.
        longest_s: the most seconds of a step. If even the smallest takes longer, waiting cannot be short: then
            the smallest one that reads at least at half the speed of a whole chunk.
        before: the size chosen before, which stays unless another is clearly better: equal pieces make equal waits.
    """
    whole_rate = chunk / mixed_s(chunk)
    efficiencies = {size: min(1.0, size / mixed_s(size) / whole_rate) for size in sizes}
    short = [size for size in sizes if mixed_s(size) <= longest_s]
    if not short:
        return next((size for size in sizes if efficiencies[size] >= 0.5), sizes[-1])
    scores = {size: satisfaction(mixed_s(size), decode_s, efficiencies[size]) for size in short}
    best = max(short, key=lambda size: (scores[size], -size))
    return before if scores.get(before, 0.0) >= _AS_GOOD * scores[best] else best
