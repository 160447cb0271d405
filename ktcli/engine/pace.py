"""The running estimate of what a step costs, from the steps that were: seconds as a function of rows and positions.

Other programs come and go, so newer steps count for more. Steps of answers alone are kept by the number of answers.
Steps that read a prompt are kept by the rounded number of their rows, as multiples of what a model of the machine
predicts: the same piece takes longer the more positions lie before it, and the model knows by how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.balance import Choice, best_piece, pure_steps
from ktcli.planner.cost import PieceTimes

_NEW = 0.25  # the weight of a new measurement: the last dozen steps count
# Without any measurement yet: a piece that reads most experts anyway (four times E/k, 64 for 128 choose 8).
FIRST_PIECE = 64
PIECE_STEP = 16  # tokens: pieces are multiples of it, and none is smaller
# Of a prompt: from there on pieces get smaller, so that none takes longer.
_LATE = 0.6
_PARTS = (32, 16, 12, 8, 6, 4, 3, 2, 1)  # of a chunk that pieces are


class Piece(NamedTuple):
    """The part of a prompt that a step reads.

    Attributes:
        tokens: how many.
        start: the position of the first.
    """

    tokens: int
    start: float


class Curve:
    """Measured values by rows; between two measured points the straight line, beyond them the nearest."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # bucket: mean rows, mean value

    def __bool__(self) -> bool:
        return bool(self._points)

    def record(self, bucket: int, rows: int, value: float) -> None:
        """Adds a measurement to a bucket of similar numbers of rows."""
        old = self._points.get(bucket, (float(rows), value))
        self._points[bucket] = (
            old[0] + _NEW * (rows - old[0]),
            old[1] + _NEW * (value - old[1]),
        )

    def at(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values at each of `rows`; something must have been recorded."""
        points = sorted(self._points.values())
        return np.interp(rows, [x for x, _ in points], [y for _, y in points])


class Pace:
    """What steps cost here and now, and what follows from it for the next one.

    Args:
        longest_s: the most seconds that a step should take while answers wait for it.
        modelled: the times of steps that read prompts as a model has them. Only their ratios count: they tell what
            lies between measurements, and beyond them.
    """

    def __init__(self, longest_s: float, modelled: PieceTimes) -> None:
        self._longest_s, self._modelled = longest_s, modelled
        self._size = 0  # of the pieces chosen last
        self._decode, self._mixed = Curve(), Curve()  # seconds; multiples of the model's

    def record(self, answers: int, piece: Piece, seconds: float) -> None:
        """Records a step: the rows of answers, the tokens of prompts that it read, and how long it took."""
        rows = answers + piece.tokens
        if piece.tokens >= PIECE_STEP:
            modelled_s = self._modelled.seconds(answers, np.array([piece.tokens]), piece.start)
            self._mixed.record(round(2 * math.log2(rows)), rows, seconds / float(modelled_s[0]))
        elif not piece.tokens:
            self._decode.record(rows, rows, seconds)

    def decode_s(self, answers: int) -> float | None:
        """The seconds of a step of so many answers alone; None: no such step was measured."""
        return float(self._decode.at(np.array(answers, dtype=float))) if self._decode else None

    def mixed_s(self, answers: int, piece: Piece) -> float | None:
        """The seconds of a step that also reads a piece of a prompt; None: no such step was measured."""
        if not self._mixed:
            return None
        return float(self._mixed_s(answers, [piece.tokens], piece.start)[0])

    def _mixed_s(self, answers: int, sizes: Sequence[int], start: float) -> NDArray[np.float64]:
        """The seconds of steps that read pieces of these sizes from `start` on beside so many answers."""
        tokens = np.array(sizes, dtype=float)
        return self._mixed.at(answers + tokens) * self._modelled.seconds(answers, tokens, start)

    def piece(self, answers: int, chunk: int, start: int, end: int) -> int:
        """The most tokens of a prompt's chunk that a step should read beside so many answers, 1..chunk.

        Pieces get smaller where the positions before them become many, so that answers wait equally long for each.

        Args:
            chunk: the tokens of a whole chunk.
            start: the position where the prompt is read on.
            end: the tokens of the prompt.
        """
        if not answers:
            return chunk
        decode_s = self.decode_s(answers)
        if decode_s is None or not self._mixed:
            return min(chunk, FIRST_PIECE)
        sizes = _sizes(chunk)
        half_s = self._mixed_s(answers, sizes, end / 2).tolist()
        late_s = self._mixed_s(answers, sizes, _LATE * end).tolist()
        alone_s = self._alone_s(Piece(1, end / 2), chunk)
        half = [Choice(n, s, n * alone_s) for n, s in zip(sizes, half_s, strict=True)]
        self._size = best_piece(half, late_s, decode_s, self._longest_s, self._size)
        tokens = range(PIECE_STEP, sizes[-1] + 1, PIECE_STEP)
        fit = self._mixed_s(answers, tokens, start) <= late_s[sizes.index(self._size)]
        return max(int(fit.sum()) * PIECE_STEP, sizes[0])

    def _alone_s(self, piece: Piece, chunk: int) -> float:
        """The seconds of a piece as a part of a whole chunk that nobody else has a part in."""
        return piece.tokens / chunk * float(self._mixed_s(0, [chunk], piece.start)[0])

    def pure_steps(self, answers: int, piece: Piece, chunk: int) -> float:
        """The number of steps of answers alone that should follow one that read a piece of a prompt.

        Args:
            chunk: the tokens of a whole chunk.
        """
        decode_s = self.decode_s(answers)
        if decode_s is None or not self._mixed:
            return 1.0
        return pure_steps(self._alone_s(piece, chunk), decode_s)


def _sizes(chunk: int) -> list[int]:
    """The sizes of pieces that a chunk divides into, ascending."""
    return sorted({size for n in _PARTS if (size := -(-chunk // n)) >= PIECE_STEP} | {chunk})
