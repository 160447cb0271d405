"""The steps of a session on the CPU: a recorded program and the session's pages."""

from __future__ import annotations

from dataclasses import dataclass

from ktcli.engine.kvcache import KvCache, PageLayout
from ktcli.engine.logits import F32Array, Logits
from ktcli.engine.session import Chunk
from ktcli.engine.states import StateLayout, StateSlots
from ktcli.native import Batch, Program, Run, View
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
        self._row = tuple(program.rows(view, 1)[0] for view in views)
        self._cache = KvCache(layout, context, program.pool.arena(layout.cache_bytes(context)))
        self._slots = StateSlots() if states.elements else None
        self._states = (
            program.pool.arena(4 * STATE_SLOTS * states.elements) if self._slots else None
        )
        self._state_bytes = 4 * states.elements
        self.vocab = outputs.logits.width

    @property
    def recurrent(self) -> bool:
        return self._slots is not None

    @property
    def max_outputs(self) -> int:
        return self._program.max_outputs

    def chunk_tokens(self, left: int) -> int:
        return min(left, self._program.max_tokens)

    def truncate(self, position: int) -> int:
        return position if self._slots is None else self._slots.truncate(position)

    def run(self, chunk: Chunk) -> None:
        cache = self._cache
        self._program.attach(cache.memory, cache.layout.page_bytes, self._states, self._state_bytes)
        source, target = self._slots.begin(chunk.start) if self._slots else (None, -1)
        run = Run(
            chunk.ids,
            chunk.start,
            cache.table,
            chunk.first_output,
            chunk.temperature,
            chunk.defer,
            -1 if source is None else source,
            target,
        )
        self._program.run(Batch((run,)))
        if self._slots:
            n_tokens = chunk.ids.size
            self._slots.end(target, chunk.start + n_tokens, n_tokens=n_tokens)

    def last(self, temperature: float) -> Logits:
        values, best, peaks, sums = self._row
        return Logits(values, int(best[0]), peaks, sums, temperature)

    def logits(self, n: int) -> F32Array:
        return self._program.rows(self._outputs.logits, n)
