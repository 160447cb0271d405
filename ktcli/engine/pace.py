"""Estimates the duration of a step from its rows and positions, based on measured steps.

Other programs come and go, so newer steps count for more. Steps of answers alone are kept by the number of answers. Of
steps that read a prompt only one thing is kept: how much slower they are than a model of the machine predicts. The
model knows what more tokens cost, and more positions before them, better than a few disturbed steps could tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.balance import PieceSize, best_piece, pure_steps
from ktcli.planner.cost import PieceTimes

_NEW = 0.25  # the weight of a new measurement: the last dozen steps count
# Without any measurement yet: a piece that reads most experts anyway (four times E/k, 64 for 128 choose 8).
FIRST_PIECE = 64
PIECE_STEP = 16  # tokens: pieces are multiples of it, and none is smaller
_LONGER = 1.45  # times the piece in the middle of a prompt, another may take
# Of answers alone: what a step may take that reads several prompts. With 8 streams beside prompts of 126 tokens, one
# takes 3.4 steps, two 5.0 and three 6.5 (docs/serving.md).
FEW_STEPS = 4.5
_PARTS = (32, 16, 12, 8, 6, 4, 3, 2, 1)  # of a chunk that pieces are


class PromptPiece(NamedTuple):
    """The part of a prompt that a step computes.

    Attributes:
        tokens: how many.
        start: the position of the first.
    """

    tokens: int
    start: float


class Pace:
    """Estimates the seconds of steps from those measured, and chooses the size of the next step's piece of a prompt.

    Args:
        longest_s: the most seconds that a step should take while answers wait for it; None: as few as cost little
            of the speed of answers and prompts together.
        modelled: the times of steps that read prompts as a model has them. Only their ratios count.
    """

    def __init__(self, longest_s: float | None, modelled: PieceTimes) -> None:
        self._longest_s = longest_s
        self._middle_s = None if longest_s is None else longest_s / _LONGER
        self._modelled = modelled
        self._size = 0  # of the pieces chosen last
        self._decode: dict[int, float] = {}  # answers: seconds of a step of so many alone
        self._factor = 0.0  # of the model's seconds that steps take which read prompts

    def record(self, answers: int, piece: PromptPiece, seconds: float) -> None:
        """Records that a step that computed `answers` rows of answers and read `piece` of prompts took `seconds`; does
        nothing if the piece has 1 to 15 tokens.
        """
        if piece.tokens >= PIECE_STEP:
            modelled_s = self._modelled.seconds(answers, np.array([piece.tokens]), piece.start)
            self._factor = _newer(self._factor, seconds / float(modelled_s[0]))
        elif not piece.tokens:
            self._decode[answers] = _newer(self._decode.get(answers, 0.0), seconds)

    def decode_s(self, answers: int) -> float | None:
        """Returns the expected seconds of a step of `answers` rows of answers alone; None: no step of answers alone was
        measured.
        """
        if not self._decode:
            return None
        known = sorted(self._decode)
        return float(np.interp(answers, known, [self._decode[rows] for rows in known]))

    def mixed_s(self, answers: int, piece: PromptPiece) -> float | None:
        """Returns the expected seconds of a step of `answers` rows of answers that also reads a piece of a prompt;
        None: no step that reads a prompt was measured.
        """
        if not self._factor:
            return None
        return float(self._mixed_s(answers, [piece.tokens], piece.start)[0])

    def _mixed_s(self, answers: int, sizes: Sequence[int], start: float) -> NDArray[np.float64]:
        """The seconds of steps that read pieces of these sizes from `start` on beside so many answers."""
        tokens = np.array(sizes, dtype=float)
        return self._factor * self._modelled.seconds(answers, tokens, start)

    def piece(self, answers: int, chunk: int, start: int, end: int) -> int:
        """Returns the most tokens of a prompt's chunk that a step should read beside `answers` rows of answers,
        1..chunk.

        The more positions come before a piece, the smaller it is, so that answers wait about equally long for each.

        Args:
            chunk: the tokens of a whole chunk.
            start: the position from which the prompt is to be read.
            end: the tokens of the prompt.
        """
        if not answers:
            return chunk
        decode_s = self.decode_s(answers)
        if decode_s is None or not self._factor:
            return min(chunk, FIRST_PIECE)
        sizes = _sizes(chunk)
        half_s = self._mixed_s(answers, sizes, end / 2).tolist()
        alone_s = self._alone_s(PromptPiece(1, end / 2), chunk)
        half = [PieceSize(n, s, n * alone_s) for n, s in zip(sizes, half_s, strict=True)]
        self._size = best_piece(half, decode_s, self._middle_s, self._size)
        tokens = range(PIECE_STEP, sizes[-1] + 1, PIECE_STEP)
        most_s = _LONGER * half_s[sizes.index(self._size)]
        fit = self._mixed_s(answers, tokens, start) <= most_s
        return max(int(fit.sum()) * PIECE_STEP, sizes[0])

    def shared(self, answers: int, prompts: int, chunk: int) -> int:
        """Returns the most prompt tokens, up to `chunk`, that a step should read beside `answers` rows of answers if
        they belong to several prompts: as many as keep it within FEW_STEPS times a step of answers alone.

        It is `chunk` if there are no answers, if a longest wait was asked for, or until both a step of answers alone
        and one that reads a prompt were measured.

        Args:
            prompts: the number of prompts being read, whose answers count as rows of the step of answers alone.
            chunk: the tokens of a whole chunk.
        """
        decode_s = self.decode_s(answers + prompts)
        if not answers or decode_s is None or not self._factor or self._longest_s is not None:
            return chunk
        tokens = range(1, chunk + 1)
        return int((self._mixed_s(answers, tokens, 0.0) <= FEW_STEPS * decode_s).sum())

    def _alone_s(self, piece: PromptPiece, chunk: int) -> float:
        """The seconds of a piece as a part of a whole chunk that nobody else has a part in."""
        return piece.tokens / chunk * float(self._mixed_s(0, [chunk], piece.start)[0])

    def pure_steps(self, answers: int, piece: PromptPiece, chunk: int) -> float:
        """Returns the number of steps of `answers` rows of answers alone, perhaps a fraction, that should follow a step
        that also read a piece of a prompt.

        Args:
            chunk: the tokens of a whole chunk.
        """
        decode_s = self.decode_s(answers)
        if decode_s is None or not self._factor:
            return 1.0
        return pure_steps(self._alone_s(piece, chunk), decode_s)


def _newer(old: float, new: float) -> float:
    """The estimate after another measurement; 0: there was none."""
    return old + _NEW * (new - old) if old else new


def _sizes(chunk: int) -> list[int]:
    """The sizes of pieces that a chunk divides into, ascending."""
    return sorted({size for n in _PARTS if (size := -(-chunk // n)) >= PIECE_STEP} | {chunk})
