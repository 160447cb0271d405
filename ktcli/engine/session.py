"""One timeline on an engine: the ids in the cache, and the way forward and back.

Prefill and decode are the same call with many ids or one. Each chunk either completes or leaves no
trace, so that an interrupt between chunks leaves a valid prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.kvcache import KvCache, PageLayout
from ktcli.engine.logits import F32Array, Logits
from ktcli.errors import ContextFull, UsageError
from ktcli.native import Program, Step, View

# progress(tokens done, tokens in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a program leaves its results: rows of logits and their summary (see `Logits`)."""

    logits: View
    best: View
    peaks: View
    sums: View


class Session:
    """A sequence of ids with its KV cache.

    Args:
        program: of the engine; shared by its sessions, which take turns.
        outputs: where the program leaves its results.
        context: positions the cache can hold.
    """

    def __init__(
        self, program: Program, outputs: Outputs, layout: PageLayout, context: int
    ) -> None:
        self._program, self._outputs, self._vocab = program, outputs, outputs.logits.width
        views = outputs.logits, outputs.best, outputs.peaks, outputs.sums
        self._row = tuple(program.rows(view, 1)[0] for view in views)
        self._cache = KvCache(layout, context, program.pool.arena(layout.cache_bytes(context)))
        self._ids = np.zeros(context, dtype=np.int32)
        self.context = context
        self.length = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids in the cache."""
        return tuple(self._ids[: self.length].tolist())

    def truncate(self, position: int) -> int:
        """Forget everything from `position` on; returns the position really reached."""
        self.length = max(0, min(position, self.length))
        return self.length

    def feed(
        self, ids: Sequence[int], *, progress: Progress | None = None, temperature: float = 0.0
    ) -> Logits:
        """Append ids; the logits after the last one, in place: valid until the program's next step.

        Args:
            temperature: of the logits' sums; 0: without sums.
        Raises:
            ContextFull: they do not fit; nothing was appended.
            UsageError: no ids, or one outside the vocabulary.
        """
        fresh = self._checked(ids)
        for done in self._chunks(fresh, self._program.max_tokens, temperature):
            if progress:
                progress(done, fresh.size)
        values, best, peaks, sums = self._row
        return Logits(values, int(best[0]), peaks, sums, temperature)

    def advance(
        self, ids: Sequence[int], *, progress: Progress | None = None, temperature: float = 0.0
    ) -> tuple[Logits, int]:
        """Make the timeline equal `ids`, reusing what is common: (logits after the last, ids reused).

        At least the last id is computed, since its logits are wanted.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        n = min(self.length, wanted.size - 1)
        different = (
            np.nonzero(self._ids[:n] != wanted[:n])[0] if n > 0 else np.empty(0, dtype=np.int64)
        )
        common = max(0, int(different[0]) if different.size else n)
        if wanted.size > self.context:
            self._refuse(wanted.size)
        self.truncate(common)
        return self.feed(ids[common:], progress=progress, temperature=temperature), common

    def logits(self, ids: Sequence[int]) -> F32Array:
        """Append ids; the logits of every one, [T, vocab] f32."""
        fresh = self._checked(ids)
        out = np.empty((fresh.size, self._vocab), dtype=np.float32)
        before = 0
        chunk = min(self._program.max_tokens, self._program.max_outputs)
        for done in self._chunks(fresh, chunk, None):
            out[before:done] = self._program.rows(self._outputs.logits, done - before)
            before = done
        return out

    def _checked(self, ids: Sequence[int]) -> NDArray[np.int32]:
        wanted = np.asarray(ids, dtype=np.int64)
        if wanted.ndim != 1 or wanted.size == 0:
            raise UsageError("there is nothing to compute: no token ids were given")
        if int(wanted.min()) < 0 or int(wanted.max()) >= self._vocab:
            bad = next(int(i) for i in wanted if not 0 <= i < self._vocab)
            raise UsageError(f"token id {bad} is outside the vocabulary of {self._vocab}")
        if self.length + wanted.size > self.context:
            self._refuse(self.length + wanted.size)
        return wanted.astype(np.int32)

    def _refuse(self, needed: int) -> None:
        raise ContextFull(
            f"the conversation needs {needed} tokens, the context holds {self.context}",
            hint="start afresh with /clear, or start kt with a larger --context",
        )

    def _chunks(
        self, fresh: NDArray[np.int32], size: int, temperature: float | None
    ) -> Iterator[int]:
        """Run the ids in chunks; yields how many are done after each. Outputs: the last id's, with sums
        for this temperature; None: every id's."""
        self._program.attach(self._cache.memory, self._cache.layout.page_bytes)
        for start in range(0, fresh.size, size):
            chunk = fresh[start : start + size]
            done = start + chunk.size
            first_output = 0 if temperature is None else chunk.size - (done == fresh.size)
            self._program.run(
                Step(chunk, self.length, self._cache.table, first_output, temperature or 0.0)
            )
            self._ids[self.length : self.length + chunk.size] = chunk
            self.length += chunk.size
            yield done
