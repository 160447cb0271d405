"""Reads several sequences side by side and returns the logits of their ids: one pass over the weights per step for
all.

A sequence is cut into pieces that fit into a step. Sequences of one piece share steps, as runs of one batch, as many as
fit; a longer one fills its steps alone. Each piece is computed in the form that it has alone, so by the law of batches
(docs/batches.md) its logits have the same bits in any company; with an engine that does not promise that, it has
none.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import nullcontext

import numpy as np
from numpy.typing import NDArray

from ktcli.engine import Engine, Sequence
from ktcli.engine.logits import F32Array
from ktcli.native import Batch
from ktcli.records import dataclass

I32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive ids of a sequence that are computed in one step.

    Attributes:
        ids: the ids [T] int32.
        skip: the logits after the first `skip` of them are not wanted, 0..T.
        begins: whether they begin a sequence; else they go on with that of the step before.
    """

    ids: I32Array
    skip: int = 0
    begins: bool = True


def pieces(ids: I32Array, skip: int, rows: int) -> list[Piece]:
    """Returns a sequence of ids cut into pieces of at most `rows` ids; each says after how many of its ids logits are
    not wanted, which are those after the first `skip` ids of the sequence."""
    return [
        Piece(part, min(max(0, skip - start), part.size), start == 0)
        for start in range(0, ids.size, rows)
        for part in (ids[start : start + rows],)
    ]


def steps(sequences: Several[Several[Piece]], rows: int, most: int) -> Iterator[list[Piece]]:
    """Yields, for each step, the list of pieces that are computed in it, in the order of the sequences: several
    sequences that are one piece each, or one piece of a longer sequence.

    Args:
        sequences: the pieces of each sequence.
        rows: the most ids in one step; no piece has more.
        most: the most sequences in one step.
    """
    step: list[Piece] = []
    for cut in sequences:
        if step and (
            len(cut) > 1
            or len(step) == most
            or sum(p.ids.size for p in step) + cut[0].ids.size > rows
        ):
            yield step
            step = []
        if len(cut) > 1:
            yield from ([piece] for piece in cut)
        else:
            step = [*step, *cut]
    if step:
        yield step


class TextReader:
    """Computes steps of pieces on an engine. Close it, or the sequences it holds stay held.

    Args:
        defer: the number of experts of each token that are deferred, at every position.
        adapted: whether the engine's adapter is used, if it has one.
    """

    def __init__(self, engine: Engine, defer: int = 0, *, adapted: bool = True) -> None:
        self._engine, self._defer, self._adapted = engine, defer, adapted
        self._lines: list[Sequence] = []

    def read(self, step: Several[Piece]) -> F32Array:
        """Computes the pieces of a step; returns the logits after each id but a piece's first `skip`, piece by piece,
        f32 [ids, vocabulary].

        Raises:
            ContextFull, PoolFull: a sequence is too long, or there are too many sequences.
        """
        if self._engine.batch_invariant:
            return self._run(step, [piece.skip for piece in step])
        # In company a piece would round otherwise, and with fewer outputs the head would.
        parts = [self._run([piece], [0])[piece.skip :] for piece in step]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        """Closes the sequences that the reader holds in the engine, so that their cache pages are free again."""
        for line in self._lines:
            line.close()
        self._lines = []

    def _run(self, step: Several[Piece], skips: list[int]) -> F32Array:
        """Runs pieces as one batch; returns the logits after the first ids of each, as many as `skips` says."""
        with nullcontext() if self._adapted else self._engine.pools.adapter_aside():
            while len(self._lines) < len(step):
                self._lines.append(self._engine.sequence())
        lines = self._lines[: len(step)]
        if step[0].begins:
            for line in self._lines:
                line.truncate(0)
        for line, piece in zip(lines, step, strict=True):
            line.plan(piece.ids.size)
        runs = [
            line.extend(piece.ids, first_output=skip, defer=self._defer)
            for line, piece, skip in zip(lines, step, skips, strict=True)
        ]
        outputs = self._engine.run(Batch(tuple(runs)))
        for line, run in zip(lines, runs, strict=True):
            line.commit(run, prompt=False)  # nobody goes on from here
        found = np.empty((len(outputs), self._engine.spec.vocab), dtype=np.float32)
        for row, logits in zip(found, outputs, strict=True):
            row[:] = logits.values
        return found
