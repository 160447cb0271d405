"""Finds factors that bring the columns of a matrix to one scale.

In a trained output head some columns are many times as large as the others, in all rows. A format with one scale for
many columns then rounds all the others away (kt-mini: one column 14 times as large, nearly all of the 0.005 nats per
token that dense parts at 8 bits cost). W x = (W / f) (f x), and f x is the norm before the head with another gain. What
f balances are weights and activations, as in SmoothQuant (Xiao et al., 2022); what typical activations are is read off
the norm's gain.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from ktcli.native import Codes, Format, Pool
from ktcli.ops.tensors import Tensor
from ktcli.weights.storage import ByteSpan, Matrix, Reader
from ktcli.weights.strips import cut, sample, vector_of

MOST = 256.0  # the largest factor, and the inverse of the smallest


def suffers(fmt: Format) -> bool:
    """Returns whether a few columns with large values cost precision in all columns of a matrix in this format: true
    for integer codes of 8 bits and, without a rotation, of fewer."""
    return fmt.bits <= 8 and fmt.codes is Codes.INTEGER and (fmt.bits == 8 or not fmt.rotation)


def factors_of(largest: Matrix, gain: Matrix) -> Matrix:
    """Returns the factors [k] f32, 1/256..256, by which to divide the columns of a matrix [n, k], so that they have
    similar magnitudes, and to multiply the gain of the norm before it.

    Args:
        largest: the largest magnitude of each column in a sample of the rows, [k].
        gain: the norm's gain that the matrix's input was multiplied with, [k].
    """
    typical = np.abs(gain)
    factors = np.ones(len(largest), np.float32)
    used = (largest > 0) & (typical > 0)
    if used.any():
        balanced = np.sqrt(largest[used], dtype=np.float64) / np.sqrt(typical[used])
        factors[used] = np.clip(balanced / np.median(balanced), 1 / MOST, MOST)
    return factors


class Factors:
    """The factors of a checkpoint's matrices, found once for each vector that takes them over."""

    def __init__(self, checkpoint: Reader, pool: Pool) -> None:
        self._checkpoint, self._pool = checkpoint, pool
        self._found: dict[str, Matrix] = {}  # [k], by the vector

    def of_vector(self, name: str) -> Matrix | None:
        """Returns the factors [k] f32 that `of_columns` found for the norm gain `name`, which the gain is multiplied
        by; None: it found none."""
        return self._found.get(name)

    def of_columns(self, tensor: Tensor, gain: Tensor) -> Matrix:
        """Returns the factors [k] f32 by which the columns of the matrix `tensor` are divided, and the gain `gain` of
        the norm before it is multiplied. They are computed once for each gain.

        Raises:
            BadCheckpoint: a value is NaN or Inf, or a file cannot be read.
        """
        if gain.name not in self._found:
            (strip,) = cut(gain, self._checkpoint)
            values = vector_of(strip, [self._values(span) for span in strip.spans])
            largest = self.largest(sample(tensor, self._checkpoint))
            self._found[gain.name] = factors_of(largest, values)
        return self._found[gain.name]

    def largest(self, spans: list[ByteSpan]) -> Matrix:
        """Returns the largest magnitude of each column, [k] f32, over the rows of all spans."""
        return reduce(np.maximum, (np.abs(self._values(span)).max(axis=0) for span in spans))

    def _values(self, span: ByteSpan) -> Matrix:
        """Reads and decodes a span, f32."""
        raws = [self._checkpoint.read(each) for each in span.source.storage.reads(span)]
        return self._checkpoint.decode(self._pool, span, raws)
