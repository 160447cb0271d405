"""The steps of a session on the CPU: a recorded program and the session's pages."""

from __future__ import annotations

from dataclasses import dataclass

from ktcli.engine.kvcache import KvCache, PageLayout
from ktcli.engine.logits import F32Array, Logits
from ktcli.engine.session import Chunk
from ktcli.native import Program, Step, View


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a program leaves its results: rows of logits and their summary (see `Logits`)."""

    logits: View
    best: View
    peaks: View
    sums: View


class ProgramSteps:
    """Runs chunks as steps of a program.

    Args:
        program: of the engine; shared by its sessions, which take turns.
        outputs: where the program leaves its results.
        context: positions the cache can hold.
    """

    def __init__(
        self, program: Program, outputs: Outputs, layout: PageLayout, context: int
    ) -> None:
        self._program, self._outputs = program, outputs
        views = outputs.logits, outputs.best, outputs.peaks, outputs.sums
        self._row = tuple(program.rows(view, 1)[0] for view in views)
        self._cache = KvCache(layout, context, program.pool.arena(layout.cache_bytes(context)))
        self.vocab = outputs.logits.width

    @property
    def max_outputs(self) -> int:
        return self._program.max_outputs

    def chunk_tokens(self, left: int) -> int:
        return min(left, self._program.max_tokens)

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
        self._program.run(step)

    def last(self, temperature: float) -> Logits:
        values, best, peaks, sums = self._row
        return Logits(values, int(best[0]), peaks, sums, temperature)

    def logits(self, n: int) -> F32Array:
        return self._program.rows(self._outputs.logits, n)
