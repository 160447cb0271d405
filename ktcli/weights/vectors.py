"""Assembles a model's vectors from the values of a checkpoint: elements selected, moved, joined or interleaved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktcli.native import PANEL_ROWS
from ktcli.weights.storage import Matrix
from ktcli.weights.strips import Strip, StripRows


def vector_of(strip: Strip, values: Sequence[Matrix]) -> Matrix:
    """Returns the vector [k] that a strip stores, from the values of its spans.

    Args:
        values: the values of each span, [rows, columns] f32.
    """
    parts = [_taken(values[rows.span], rows) for rows in strip.rows]
    if not parts:
        return np.zeros(strip.tensor.k, np.float32)
    joined = _in_turn(parts) if strip.tensor.alternate else np.concatenate(parts)
    return joined.reshape(-1)


def _taken(values: Matrix, rows: StripRows) -> Matrix:
    """The chosen elements or rows of a span."""
    if len(rows.stored.one) < 2:
        values = values.reshape(-1, 1)
    taken = (values.T if rows.stored.transposed else values)[rows.chosen]
    return taken + np.float32(rows.stored.plus) if rows.stored.plus else taken


def _in_turn(parts: Sequence[Matrix]) -> Matrix:
    """Interleaves two vectors [I, 1], padded with zeros to whole runs of 16: a run of the first, one of the second …"""
    gap = -len(parts[0]) % PANEL_ROWS
    runs = [np.pad(each, ((0, gap), (0, 0))).reshape(-1, 1, PANEL_ROWS) for each in parts]
    return np.concatenate(runs, axis=1)
