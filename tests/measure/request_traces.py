"""Request traces for tests: with the figures of Mooncake's two published ones (FAST'25), and small random ones.

A generated trace has the published number of requests, mean lengths and span, and, because each request decides between
a new beginning and another turn by what has been reused so far, the published share of tokens that can be cached.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]
_WAITING = 400  # conversations that may go on


@dataclass(frozen=True)
class Published:
    """The figures of a published trace, and how its requests follow each other.

    Attributes:
        share: the tokens that a cache without limit saves, 0..1.
        spread: the standard deviation of the logarithm of what a turn adds.
        turn_s: the mean seconds between two turns of a conversation.
        common: the blocks that all prompts begin with.
    """

    requests: int
    input_mean: float
    output_mean: float
    share: float
    span_s: float
    spread: float
    turn_s: float
    common: int


CONVERSATION = Published(12_031, 12_035, 343, 0.374, 3_600, 1.0, 120, 1)
SYNTHETIC = Published(3_993, 15_325, 149, 0.651, 1_200, 0.6, 60, 0)


def generated(like: Published, block: int = 512, seed: int = 7) -> list[Line]:
    """Returns the lines of a trace with the figures of a published one."""
    draw = random.Random(seed)
    fresh = iter(range(like.common, 1 << 40)).__next__
    waiting: list[
        tuple[float, list[int], int]
    ] = []  # when the next turn comes, the full blocks, and tokens so far
    lines: list[Line] = []
    used = reused = 0
    for n in range(like.requests):
        now_s = like.span_s * n / (like.requests - 1)
        lacking = like.share * used - reused
        due = [each for each in waiting if each[0] <= now_s] if lacking > 0 else []
        # The mean is kept as the share is: a prompt that is too long for it is followed by a shorter one.
        behind = like.input_mean * (n + 1) - used
        known, before = list(range(like.common)), like.common * block
        if due:
            turn = min(due, key=lambda each: abs(each[2] - lacking))
            waiting.remove(turn)
            known, before = turn[1], turn[2]
        added = (
            draw.lognormvariate(0, like.spread) * 0.6 * max(behind - before, like.input_mean / 8)
        )
        length = before + max(1, int(added))
        ids = known[: before // block]
        reused += len(ids) * block if n else 0
        used += length
        ids = ids + [fresh() for _ in range(-(-length // block) - len(ids))]
        answer = max(1, int(draw.expovariate(1 / like.output_mean)))
        lines.append(line(int(1e3 * now_s), length, answer, ids))
        waiting.append((now_s + draw.expovariate(1 / like.turn_s), ids, length))
        waiting = waiting[-_WAITING:]
    return lines


def line(timestamp: float, length: int, answer: int, ids: list[int]) -> Line:
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": answer,
        "hash_ids": ids,
    }


def written(path: Path, lines: list[Line]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path
