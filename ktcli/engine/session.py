"""One timeline on an engine: the ids in the cache, and the way forward and back.

Prefill and decode are the same call with many ids or one. Each chunk either completes or leaves no
trace, so that an interrupt between chunks leaves a valid prefix. Its `Steps` know what runs a chunk, on which device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.logits import F32Array, Logits
from ktcli.engine.states import before_tail
from ktcli.errors import ContextFull, UsageError

# progress(tokens done, tokens in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The ids that are computed in one step.

    Attributes:
        ids: the ids [T] int32.
        start: the position of the first.
        first_output: the first row that gives logits, as all after it do; T: none.
        temperature: the temperature of the sums of the logits' summary; 0: no sums are wanted.
        defer: the most experts of a token that may be deferred.
        tried: whether the ids are an answer's, of which not all may count: no place to go back to.
    """

    ids: NDArray[np.int32]
    start: int
    first_output: int
    temperature: float = 0.0
    defer: int = 0
    tried: bool = False


@dataclass(slots=True)
class _Attempt:
    """Ids that were computed in one step, of which the first `kept` count."""

    chunk: Chunk
    kept: int = 0


class Steps(Protocol):
    """Computes the chunks of one session, with the session's own KV cache."""

    @property
    def vocab(self) -> int:
        """The width of the logits."""

    @property
    def max_outputs(self) -> int:
        """The number of rows of a chunk that can give logits."""

    @property
    def recurrent(self) -> bool:
        """Tells whether going back is possible to some positions only."""

    def chunk_tokens(self, left: int) -> int:
        """The tokens of the next chunk, when `left` are left; 1..left."""

    def run(self, chunk: Chunk) -> None:
        """Computes a chunk; either all of it is in the cache afterwards, or nothing counts."""

    def truncate(self, position: int) -> int:
        """Forgets everything from `position` on; returns the position really reached: the same, or an earlier one if
        its state is not kept any more."""

    def last(self, temperature: float) -> Logits:
        """The logits of the only output of the last chunk, in place: valid until the next one."""

    def rows(self, n: int, temperature: float) -> list[Logits]:
        """The logits of each of the n outputs of the last chunk, in place: valid until the next one."""

    def logits(self, n: int) -> F32Array:
        """The logits [n, vocab] of the n outputs of the last chunk, in place."""


class Session:
    """A sequence of ids with its KV cache.

    Args:
        context: the number of positions that the cache can hold.
    """

    def __init__(self, steps: Steps, context: int) -> None:
        self._steps = steps
        self._ids = np.zeros(context, dtype=np.int32)
        self.context = context
        self.length = 0
        self._attempt: _Attempt | None = None  # the last, until other ids are fed

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids in the cache."""
        return tuple(self._ids[: self.length].tolist())

    def truncate(self, position: int) -> int:
        """Forgets everything from `position` on, or from an earlier one; returns the position really reached (see
        `rewind`)."""
        self._attempt = None
        self.length = self._steps.truncate(max(0, min(position, self.length)))
        return self.length

    def rewind(self, position: int) -> None:
        """Goes back to `position` exactly, computing again what is no longer known."""
        ids = self.ids[:position]
        reached = self.truncate(position)
        if reached < len(ids):
            self.feed(ids[reached:])

    def feed(
        self,
        ids: Sequence[int],
        *,
        progress: Progress | None = None,
        temperature: float = 0.0,
        defer: int = 0,
    ) -> Logits:
        """Appends ids; returns the logits after the last one, in place: valid until the engine's next step.

        Args:
            temperature: the temperature of the logits' sums; 0: without sums.
            defer: the most experts of a token that may be deferred.
        Raises:
            ContextFull: they do not fit; nothing was appended.
            UsageError: no ids, or one outside the vocabulary.
        """
        fresh = self._checked(ids)
        for done in self._chunks(fresh, temperature, defer):
            if progress:
                progress(done, fresh.size)
        return self._steps.last(temperature)

    def advance(
        self, ids: Sequence[int], *, progress: Progress | None = None, temperature: float = 0.0
    ) -> tuple[Logits, int]:
        """Makes the timeline equal `ids`, reusing the common prefix, as far as it can be gone back to; returns the
        logits after the last, and the number of ids reused.

        At least the last id is computed, since its logits are wanted.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        self._catch_up(wanted)
        n = min(self.length, wanted.size - 1)
        different = (
            np.nonzero(self._ids[:n] != wanted[:n])[0] if n > 0 else np.empty(0, dtype=np.int64)
        )
        common = max(0, int(different[0]) if different.size else n)
        if wanted.size > self.context:
            self._refuse(wanted.size)
        reused = self.truncate(common)
        return self.feed(ids[reused:], progress=progress, temperature=temperature), reused

    @property
    def most_tried(self) -> int:
        """The most ids whose logits `attempt` can give."""
        return self._steps.max_outputs

    @property
    def recurrent(self) -> bool:
        """Tells whether going back is possible to some positions only."""
        return self._steps.recurrent

    def attempt(
        self, ids: Sequence[int], outputs: int, *, temperature: float = 0.0, defer: int = 0
    ) -> list[Logits]:
        """Computes ids in one step, of which none counts until `keep` says how many; returns the logits after each of
        the last `outputs`, in place: valid until the engine's next step. What is not kept leaves no trace.

        Raises:
            ContextFull, UsageError: as `feed`.
        """
        fresh = self._checked(ids)
        first = fresh.size - outputs
        self._attempt = None
        chunk = Chunk(fresh, self.length, first, temperature, defer, tried=True)
        self._steps.run(chunk)
        self._attempt = _Attempt(chunk)
        return self._steps.rows(outputs, temperature)

    def keep(self, n: int) -> None:
        """Counts the first n ids of the last `attempt`; n is at least that of earlier calls.

        Where layers keep states, `length` goes on when all ids count: the states between them are not known. `advance`
        computes those again that do.
        """
        assert self._attempt is not None, "nothing was attempted"
        self._attempt.kept = n
        ids, start = self._attempt.chunk.ids, self._attempt.chunk.start
        if n == ids.size or not self._steps.recurrent:
            self._ids[start : start + n] = ids[:n]
            self.length = start + n

    def _catch_up(self, wanted: NDArray[np.int64]) -> None:
        """Computes again what counts of the last attempt, if `wanted` goes on with it: as a step of its own, since a
        prompt's chunk may round otherwise."""
        if self._attempt is None or not self._steps.recurrent:
            return
        chunk, n = self._attempt.chunk, self._attempt.kept
        end = chunk.start + n
        missing = self.length < end < min(wanted.size, self.context + 1)
        if missing and np.array_equal(wanted[chunk.start : end], chunk.ids[:n]):
            self.attempt(chunk.ids[:n].tolist(), 0, defer=chunk.defer)
            self.keep(n)

    def logits(self, ids: Sequence[int], *, defer: int = 0) -> F32Array:
        """Appends ids; returns the logits of every one, [T, vocab] f32."""
        fresh = self._checked(ids)
        out = np.empty((fresh.size, self._steps.vocab), dtype=np.float32)
        before = 0
        for done in self._chunks(fresh, None, defer):
            out[before:done] = self._steps.logits(done - before)
            before = done
        return out

    def _checked(self, ids: Sequence[int]) -> NDArray[np.int32]:
        wanted = np.asarray(ids, dtype=np.int64)
        if wanted.ndim != 1 or wanted.size == 0:
            raise UsageError("there is nothing to compute: no token ids were given")
        if int(wanted.min()) < 0 or int(wanted.max()) >= self._steps.vocab:
            bad = next(int(i) for i in wanted if not 0 <= i < self._steps.vocab)
            raise UsageError(f"token id {bad} is outside the vocabulary of {self._steps.vocab}")
        if self.length + wanted.size > self.context:
            self._refuse(self.length + wanted.size)
        return wanted.astype(np.int32)

    def _refuse(self, needed: int) -> None:
        raise ContextFull(
            f"the conversation needs {needed} tokens, the context holds {self.context}",
            hint="start afresh with /clear, or start kt with a larger --context",
        )

    def _chunks(
        self, fresh: NDArray[np.int32], temperature: float | None, defer: int
    ) -> Iterator[int]:
        """Runs the ids in chunks; yields the number of ids done after each. Outputs are the last id's, with sums for
        this temperature; None: every id's."""
        done = 0
        self._attempt = None
        while done < fresh.size:
            size = self._steps.chunk_tokens(fresh.size - done)
            if temperature is None:
                size = min(size, self._steps.max_outputs)
            elif self._steps.recurrent:
                size = before_tail(size, fresh.size - done)
            ids = fresh[done : done + size]
            done += ids.size
            first_output = 0 if temperature is None else ids.size - (done == fresh.size)
            self._steps.run(Chunk(ids, self.length, first_output, temperature or 0.0, defer))
            self._ids[self.length : self.length + ids.size] = ids
            self.length += ids.size
            yield done
