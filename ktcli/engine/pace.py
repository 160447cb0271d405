"""The running estimate of what a step costs, from the steps that were: seconds as a function of rows.

Contexts grow and other programs come and go, so newer steps count for more. Steps of answers alone are kept by the
number of answers, steps that read a prompt by the rounded number of their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from ktcli.engine.balance import best_piece, pure_steps

_NEW = 0.25  # the weight of a new measurement: the last dozen steps count
# Without any measurement yet: a piece that reads most experts anyway (four times E/k, 64 for 128 choose 8).
FIRST_PIECE = 64
_LEAST_PIECE = 16
_PARTS = (32, 16, 12, 8, 6, 4, 3, 2, 1)  # of a chunk that pieces are: equal ones make equal waits


class Curve:
    """Measured seconds by rows; between two measured points the straight line."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # bucket: mean rows, mean seconds

    def record(self, bucket: int, rows: int, seconds: float) -> None:
        """Adds a measurement to a bucket of similar numbers of rows."""
        old = self._points.get(bucket, (float(rows), seconds))
        self._points[bucket] = (
            old[0] + _NEW * (rows - old[0]),
            old[1] + _NEW * (seconds - old[1]),
        )

    @property
    def points(self) -> list[tuple[float, float]]:
        """The (rows, seconds) pairs, rows ascending."""
        return sorted(self._points.values())


def between(points: list[tuple[float, float]], rows: float) -> float:
    """The seconds at `rows` on the line through the points; before the first they are constant. Beyond the last the
    line goes on with half its slope: the more rows share the experts, the less each costs."""
    if rows <= points[0][0]:
        return points[0][1]
    after = next((i for i, point in enumerate(points) if point[0] >= rows), len(points) - 1)
    low, low_s = points[after - 1] if after else (0.0, 0.0)
    high, high_s = points[after]
    slope = max(0.0, high_s - low_s) / (high - low)
    return low_s + slope * (rows - low) if rows <= high else high_s + slope / 2 * (rows - high)


class Pace:
    """What steps cost here and now, and what follows from it for the next one.

    Args:
        longest_s: the most seconds that a step should take while answers wait for it.
        modelled: the (rows, seconds) pairs of steps that read prompts, ascending, of which only the ratios count: they
            tell what lies between measurements, and beyond them. Empty: that is on a straight line.
    """

    def __init__(self, longest_s: float, modelled: Sequence[tuple[float, float]] = ()) -> None:
        self._longest_s, self._modelled = longest_s, list(modelled)
        self._piece = 0  # the last one
        self._decode, self._mixed = Curve(), Curve()
        self._most = 0  # the most tokens of a prompt in a step so far

    def record(self, answers: int, prompt_tokens: int, seconds: float) -> None:
        """Records a step: the rows of answers, the rows of prompts, and how long it took."""
        rows = answers + prompt_tokens
        if prompt_tokens >= _LEAST_PIECE:
            self._mixed.record(round(2 * math.log2(rows)), rows, seconds)
            self._most = max(self._most, prompt_tokens)
        elif not prompt_tokens:
            self._decode.record(rows, rows, seconds)

    def decode_s(self, answers: int) -> float | None:
        """The seconds of a step of so many answers alone; None: no such step was measured."""
        points = self._decode.points
        return between(points, answers) if points else None

    def mixed_s(self, answers: int, prompt_tokens: int) -> float | None:
        """The seconds of a step that also reads so many tokens of prompts; None: no such step was measured."""
        points = self._mixed.points
        if not points:
            return None
        if self._modelled:
            return self._as_modelled(points, answers + prompt_tokens)
        decode_s = self.decode_s(answers)
        if decode_s is not None and answers < points[0][0]:
            points = [(answers, decode_s), *points]
        return between(points, answers + prompt_tokens)

    def _as_modelled(self, points: list[tuple[float, float]], rows: float) -> float:
        """The seconds of `rows` rows: the model's, times how much slower measured steps near them were."""
        tokens, modelled_s = np.array(self._modelled).T
        measured, measured_s = np.array(points).T
        factors = measured_s / np.interp(measured, tokens, modelled_s)
        return float(np.interp(rows, tokens, modelled_s) * np.interp(rows, measured, factors))

    def piece(self, answers: int, chunk: int) -> int:
        """The tokens of a prompt's chunk, 1..chunk, that a step should read beside so many answers."""
        if not answers:
            return chunk
        decode_s, known = self.decode_s(answers), self.mixed_s(answers, chunk)
        if decode_s is None or known is None:
            return min(chunk, FIRST_PIECE)
        sizes = sorted({size for n in _PARTS if (size := -(-chunk // n)) >= _LEAST_PIECE})
        if not self._modelled:  # what was never measured is found out in small steps
            sizes = [size for size in sizes if size <= 2 * self._most]
        self._piece = best_piece(
            sizes or [chunk],
            chunk,
            partial(self._seconds, answers),
            decode_s,
            self._longest_s,
            self._piece,
        )
        return self._piece

    def _seconds(self, answers: int, prompt_tokens: int) -> float:
        known = self.mixed_s(answers, prompt_tokens)
        assert known is not None
        return known

    def pure_steps(self, answers: int, prompt_tokens: int, chunk: int, seconds: float) -> float:
        """The number of steps of answers alone that should follow a mixed one.

        Args:
            prompt_tokens: the tokens of prompts that it read.
            chunk: the tokens of a whole chunk.
            seconds: how long it took.
        """
        decode_s, whole_s = self.decode_s(answers), self.mixed_s(0, chunk)
        if decode_s is None or whole_s is None:
            return 1.0
        efficiency = min(1.0, prompt_tokens / seconds * whole_s / chunk)
        return pure_steps(seconds, decode_s, efficiency)
