"""The steps of a session on the CPU: a recorded program and the session's pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ktcli.engine.kvcache import KvCache, PageLayout
from ktcli.engine.logits import F32Array, Logits
from ktcli.engine.session import Chunk
from ktcli.engine.states import StateLayout, StateSlots
from ktcli.native import Program, Step, View
from ktcli.ops.state import STATE_SLOTS


@dataclass(frozen=True, slots=True)
class Outputs:
    """The views in which a program leaves its results: rows of logits and their summary (see `Logits`)."""

    logits: View
    best: View
    peaks: View
    sums: View


class ProgramSteps:
    """Runs chunks as steps of a program.

    Args:
        program: the engine's program; shared by its sessions, which take turns.
        outputs: the views in which it leaves its results.
        context: the number of positions that the cache can hold.
    """

    def __init__(
        self,
        program: Program,
        outputs: Outputs,
        layout: PageLayout,
        states: StateLayout,
        context: int,
    ) -> None:
        self._program, self._outputs = program, outputs
        views = outputs.logits, outputs.best, outputs.peaks, outputs.sums
        self._rows = tuple(program.rows(view, program.max_outputs) for view in views)
        self._cache = KvCache(layout, context, program.pool.arena(layout.cache_bytes(context)))
        self._states = _States(program, states) if states.elements else None
        self.vocab = outputs.logits.width

    @property
    def recurrent(self) -> bool:
        return self._states is not None

    @property
    def max_outputs(self) -> int:
        return self._program.max_outputs

    def chunk_tokens(self, left: int) -> int:
        return min(left, self._program.max_tokens)

    def truncate(self, position: int) -> int:
        return position if self._states is None else self._states.slots.truncate(position)

    def run(self, chunk: Chunk) -> None:
        self._program.attach(self._cache.memory, self._cache.layout.page_bytes)
        step = Step(
            chunk.ids,
            chunk.start,
            self._cache.table,
            chunk.first_output,
            chunk.temperature,
            chunk.defer,
        )
        if self._states is None:
            self._program.run(step)
        else:
            self._states.run(step, snapshot=chunk.ids.size > 1 and not chunk.tried)

    def last(self, temperature: float) -> Logits:
        return self.rows(1, temperature)[0]

    def rows(self, n: int, temperature: float) -> list[Logits]:
        values, best, peaks, sums = self._rows
        return [
            Logits(values[i], int(best[i, 0]), peaks[i], sums[i], temperature) for i in range(n)
        ]

    def logits(self, n: int) -> F32Array:
        return self._program.rows(self._outputs.logits, n)


class _States:
    """The states of a session, in main memory.

    Attributes:
        slots: the position of each state.
    """

    def __init__(self, program: Program, layout: StateLayout) -> None:
        self._program, self.slots = program, StateSlots()
        self._memory = program.pool.arena(4 * STATE_SLOTS * layout.elements)
        shape = STATE_SLOTS, layout.elements
        self._states = self._memory.bytes.view(np.float32).reshape(shape)

    def run(self, step: Step, *, snapshot: bool) -> None:
        """Runs a step from the state at its start; a snapshot of the state at its end is one to go back to."""
        source, target = self.slots.begin(step.start)
        state = None if source is None else self._states[source]
        self._program.run(replace(step, state=state, next_state=self._states[target]))
        self.slots.end(target, step.start + step.ids.size, snapshot=snapshot)
