"""A timeline that is computed by itself: ids in, logits out.

A session holds the ids that were computed and the pages and states behind them. `feed` appends, `truncate` goes
back, and `advance` makes the timeline equal a given list of ids while computing only what is new, to it or to the
engine. Prompt and decode are the same step; a long prompt is cut into chunks, and an interrupt between two chunks
leaves a valid shorter timeline. It works on each device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Numbers
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.logits import F32Array, Logits
from ktcli.engine.sequence import Pools, Sequence
from ktcli.errors import ContextFull, UsageError
from ktcli.models import Spec
from ktcli.native import Batch

# progress(tokens done, tokens in all)
Progress = Callable[[int, int], None]


class Steps(Protocol):
    """What a session needs of an engine, see `Engine`."""

    @property
    def spec(self) -> Spec: ...

    @property
    def max_outputs(self) -> int: ...

    @property
    def pools(self) -> Pools: ...

    def run(self, batch: Batch) -> list[Logits]: ...

    def chunk_tokens(self, left: int, *, tail: bool = True) -> int: ...


class Session:
    """A sequence of an engine, with what it takes to compute it alone.

    Attributes:
        context: the number of positions that it can have.
        sequence: the timeline.
    """

    def __init__(self, engine: Steps) -> None:
        self._engine = engine
        self.sequence = Sequence(engine.pools)
        self.context = engine.pools.context
        weakref.finalize(self, self.sequence.close)

    @property
    def length(self) -> int:
        """The number of ids that were computed."""
        return self.sequence.length

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids that were computed."""
        return self.sequence.ids

    def truncate(self, position: int) -> int:
        """Forgets everything from `position` on, or from an earlier one; returns the position really reached (see
        `rewind`)."""
        return self.sequence.truncate(position)

    def rewind(self, position: int) -> None:
        """Goes back to `position` exactly, computing again what is no longer known."""
        ids = self.ids[:position]
        reached = self.truncate(position)
        if reached < len(ids):
            self.feed(ids[reached:])

    def feed(
        self,
        ids: Numbers[int],
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
            PoolFull: other sequences hold the pages for them.
            UsageError: no ids, or one outside the vocabulary.
        """
        fresh = self._checked(ids, self.length)
        for done, outputs in self._chunks(fresh, temperature, defer):
            last = outputs
            if progress:
                progress(done, fresh.size)
        return last[-1]

    def advance(
        self, ids: Numbers[int], *, progress: Progress | None = None, temperature: float = 0.0
    ) -> tuple[Logits, int]:
        """Makes the timeline equal `ids`, reusing the longest beginning that it has itself, as far as it can be gone
        back to, or that the engine still knows of other sequences; returns the logits after the last, and the number
        of ids reused.

        At least the last id is computed, since its logits are wanted.
        """
        wanted = self._checked(ids, 0)
        reused = self.sequence.adopt(wanted)
        return self.feed(ids[reused:], progress=progress, temperature=temperature), reused

    def logits(self, ids: Numbers[int], *, defer: int = 0) -> F32Array:
        """Appends ids; returns the logits of every one, [T, vocab] f32."""
        fresh = self._checked(ids, self.length)
        out = np.empty((fresh.size, self._engine.spec.vocab), dtype=np.float32)
        for done, outputs in self._chunks(fresh, None, defer):
            for row, each in enumerate(outputs, done - len(outputs)):
                out[row] = each.values
        return out

    def _checked(self, ids: Numbers[int], length: int) -> NDArray[np.int32]:
        """The ids that are to follow `length` others."""
        wanted, vocab = np.asarray(ids, dtype=np.int64), self._engine.spec.vocab
        if wanted.ndim != 1 or wanted.size == 0:
            raise UsageError("there is nothing to compute: no token ids were given")
        if (
            min(ids) < 0 or max(ids) >= vocab
        ):  # Python's own: numpy takes ten times as long for one id
            bad = next(int(i) for i in wanted if not 0 <= i < vocab)
            raise UsageError(f"token id {bad} is outside the vocabulary of {vocab}")
        if length + wanted.size > self.context:
            raise ContextFull(
                f"the conversation needs {length + wanted.size} tokens, the context holds {self.context}",
                hint="start afresh with /clear, or start kt with a larger --context",
            )
        return wanted.astype(np.int32)

    def _chunks(
        self, fresh: NDArray[np.int32], temperature: float | None, defer: int
    ) -> Iterator[tuple[int, list[Logits]]]:
        """Runs the ids in chunks; yields the number of ids done after each, and its outputs: the last id's, with sums
        for this temperature; None: every id's."""
        done, every = 0, temperature is None
        while done < fresh.size:
            size = self._engine.chunk_tokens(fresh.size - done, tail=not every)
            if every:
                size = min(size, self._engine.max_outputs)
            chunk, end = (self.length, size), done + size
            while done < end:
                n = self.sequence.until_mark(end - done)
                ids = fresh[done : done + n]
                done += n
                run = self.sequence.extend(
                    ids,
                    first_output=0 if every else n - (done == fresh.size),
                    temperature=temperature or 0.0,
                    defer=defer,
                    chunk=None if n == size else chunk,
                )
                outputs = self._engine.run(Batch((run,)))
                self.sequence.commit(run)
                yield done, outputs
