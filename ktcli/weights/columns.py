"""Columns of a matrix on one scale.

In a trained output head some columns are many times as large as the others, in all rows. A format with one scale for
many columns then rounds all the others away (kt-mini: one column 14 times as large, nearly all of the 0.005 nats per
token that dense parts at 8 bits cost). W x = (W / f) (f x), and f x is the norm before the head with another gain. What
f balances are weights and activations, as in SmoothQuant (Xiao et al., 2022); what typical activations are is read off
the norm's gain.
"""

from __future__ import annotations

import numpy as np

from ktcli.native import Codes, Format
from ktcli.weights.storage import Matrix

MOST = 256.0  # between the factors of two columns, either way from the middle


def suffers(fmt: Format) -> bool:
    """Whether large columns spoil others of this format: integer codes with shared scales, and nothing that spreads
    what is large."""
    return fmt.bits <= 8 and fmt.codes is Codes.INTEGER and not fmt.rotation


def factors_of(largest: Matrix, gain: Matrix) -> Matrix:
    """Factors [k] f32 by which to divide the columns of a matrix, and to multiply the gain with.

    Args:
        largest: of each column of a sample of its rows, the largest magnitude [k].
        gain: [k], which its input was multiplied with.
    """
    typical = np.abs(gain)
    factors = np.ones(len(largest), np.float32)
    used = (largest > 0) & (typical > 0)
    if used.any():
        balanced = np.sqrt(largest[used], dtype=np.float64) / np.sqrt(typical[used])
        factors[used] = np.clip(balanced / np.median(balanced), 1 / MOST, MOST)
    return factors
