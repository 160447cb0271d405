"""Several answers at once: their total tokens per second, compared with the bytes that their steps really need.

A step of several answers reads the dense weights once, each expert once that at least one of them chose, and of each
its own context. So the experts that are really chosen are counted, and the ceiling is reading just these bytes.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ktcli.engine import Engine, Sequence
from ktcli.engine.logits import Logits
from ktcli.engine.sampler import History, Sampler
from ktcli.models import Model
from ktcli.native import Batch
from ktcli.native.choosing import Chooser
from ktcli.ops.part import ModelPart
from ktcli.planner.spec import PartWork, StepShape, experts_touched, step_work
from ktcli.sampling import SamplingSettings
from ktcli.weights.recipe import Recipe

I32Array = NDArray[np.int32]
_OF_EACH = (ModelPart.CACHE, ModelPart.STATES)


def streams_work(
    model: Model, recipe: Recipe, step: StepShape, touched: float | None
) -> tuple[PartWork, ...]:
    """Returns the bytes read and the operations of one step that decodes one token of each of several answers, for each
    part of the model.

    Args:
        step: the step: one token of each answer, after `step.start` tokens of each.
        touched: the mean number of experts of a layer that at least one answer chose; None: assumes all to be equally
            likely.
    """
    alone = {work.part: work for work in step_work(model, recipe, replace(step, n_tokens=1))}
    found = []
    for work in step_work(model, recipe, step):
        if work.part in _OF_EACH:
            one = alone[work.part]
            work = replace(
                work, read_bytes=step.n_tokens * one.read_bytes, ops=step.n_tokens * one.ops
            )
        elif work.part is ModelPart.EXPERTS and touched is not None:
            share = touched / experts_touched(model.spec, step.n_tokens)
            work = replace(work, read_bytes=round(share * work.read_bytes))
        found.append(work)
    return tuple(found)


class GreedyChoice:
    """Chooses the most likely token of rows of logits, with the code that answers use: no answer is needed at the end
    of a decode step, but its time is included."""

    def __init__(self, engine: Engine) -> None:
        self._chooser = Chooser(engine.pool, engine.spec.output_width)
        self._sampler = Sampler(SamplingSettings(greedy=True))
        self._nothing = History((), counts=False)

    def choose(self, rows: Several[Logits]) -> None:
        """Chooses the most likely token of each row of logits, and discards it: only the time counts."""
        self._chooser.choose([self._sampler.choice(each, self._nothing) for each in rows])


class Streams:
    """Several sequences that are decoded together, each after a context of its own.

    Args:
        n: how many.
        context: the tokens of each before a run.
    """

    def __init__(self, engine: Engine, n: int, context: int, draw: np.random.Generator) -> None:
        self._engine, self._choice = engine, GreedyChoice(engine)
        self._before = [engine.sequence() for _ in range(n)]
        for sequence in self._before:
            while sequence.length < context:
                size = engine.chunk_tokens(context - sequence.length)
                ids = draw.integers(0, engine.spec.vocab, size).astype(np.int32)
                sequence.plan(size)
                run = sequence.extend(ids, first_output=size)
                engine.run(Batch((run,)))
                sequence.commit(run)

    def once(self, ids: I32Array) -> None:
        """Decodes the given ids as continuations of all sequences together, then drops them, so that the sequences are
        as before. Each step ends with choosing a token for each sequence, as in answers.

        Args:
            ids: the ids [steps, sequences].
        """
        lines = [sequence.fork() for sequence in self._before]
        try:
            for row in ids:
                self._step(lines, row)
        finally:
            for line in lines:
                line.close()

    def touched(self, ids: I32Array) -> float | None:
        """Returns the mean, over layers and decode steps, of the number of experts that at least one of the sequences
        chooses; None: the model has no experts.

        Args:
            ids: the ids that are decoded, [steps, sequences].
        """
        spec = self._engine.spec
        if not spec.moe_layers:
            return None
        lines, counts = [sequence.fork() for sequence in self._before], []
        for row in ids:
            before = self._engine.chosen()
            self._step(lines, row)
            counts.append((self._engine.chosen() > before).sum() / spec.moe_layers)
        for line in lines:
            line.close()
        return float(np.mean(counts))

    def close(self) -> None:
        """Closes all sequences, so that their cache pages are free again."""
        for sequence in self._before:
            sequence.close()

    def _step(self, lines: list[Sequence], row: I32Array) -> None:
        depth = self._engine.depth_at(lines[0].length)
        runs = [line.extend(row[i : i + 1], defer=depth) for i, line in enumerate(lines)]
        rows = self._engine.run(Batch(tuple(runs)))
        for line, run in zip(lines, runs, strict=True):
            line.commit(run)
        self._choice.choose(rows)
