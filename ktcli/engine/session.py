"""A timeline that is computed alone: ids in, logits out.

A session holds the ids that were computed and the pages and states behind them; `feed` appends, and `truncate` goes
back. Prompt and decode are the same step; a long prompt is cut into chunks, and an interrupt between two chunks leaves
a valid shorter timeline. It works on each device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Numbers
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.logits import Logits
from ktcli.engine.pools import Pools
from ktcli.engine.sequence import Sequence, context_full
from ktcli.errors import UsageError
from ktcli.models import Spec
from ktcli.native import Batch


class Steps(Protocol):
    """The part of `Engine` that a session needs."""

    @property
    def spec(self) -> Spec:
        """The sizes of the engine's model."""

    @property
    def pools(self) -> Pools:
        """The pools of KV-cache pages and states that the engine's sequences share."""

    def run(self, batch: Batch) -> list[Logits]:
        """Computes one step for a batch of runs; returns the logits of each row that gives some, see `Engine.run`."""

    def chunk_tokens(self, left: int) -> int:
        """Returns the number of tokens of the next chunk of a prompt, which one step computes, when `left` tokens are
        still to be computed.
        """


class Session:
    """A sequence of an engine that is computed by itself, without a scheduler.

    Attributes:
        context: the number of positions that it can have.
        sequence: the timeline.
    """

    def __init__(self, engine: Steps) -> None:
        self._engine = engine
        self.sequence = Sequence(engine.pools)
        self.context = engine.pools.context
        weakref.finalize(self, engine.pools.later, self.sequence.close)

    @property
    def length(self) -> int:
        """The number of token ids of the session that were computed."""
        return self.sequence.length

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids of the session that were computed."""
        return self.sequence.ids

    def truncate(self, position: int) -> int:
        """Drops all ids from `position` on, or from an earlier one where that is not cached any more; returns the
        length that remains (see `rewind`). Ids that are fed next count as a new prompt.
        """
        reached = self.sequence.truncate(position)
        self.sequence.forget_plan()
        return reached

    def rewind(self, position: int) -> None:
        """Drops all ids from exactly `position` on; positions before it that are not cached any more are computed
        again.
        """
        ids = self.ids[:position]
        reached = self.sequence.truncate(position)  # what was there keeps its form
        if reached < len(ids):
            self.feed(ids[reached:])

    def feed(self, ids: Numbers[int], *, temperature: float = 0.0, defer: int = 0) -> Logits:
        """Appends token ids to the session and computes them; returns the logits after the last one, as views that are
        valid until the engine's next step.

        Args:
            temperature: the temperature for the sums of `Logits`; 0: no sums are made.
            defer: the most experts of a token that may be deferred.
        Raises:
            ContextFull: the ids do not fit into the context; nothing was appended.
            PoolFull: other sequences hold the pages for them.
            UsageError: there are no ids, or one is outside the vocabulary.
            KtError: the engine failed; ids of the steps before, as with PoolFull, stay appended.
        """
        fresh = self._checked(ids)
        self.sequence.plan(fresh.size)
        while fresh.size:
            chunk = self.length, self._engine.chunk_tokens(fresh.size)
            while fresh.size and self.length < sum(chunk):
                n = self.sequence.until_mark(sum(chunk) - self.length)
                run = self.sequence.extend(
                    fresh[:n],
                    first_output=n - (n == fresh.size),
                    temperature=temperature,
                    defer=defer,
                    chunk=chunk,
                )
                outputs = self._engine.run(Batch((run,)))
                self.sequence.commit(run)
                fresh = fresh[n:]
        return outputs[-1]

    def _checked(self, ids: Numbers[int]) -> NDArray[np.int32]:
        """The ids that are to follow."""
        wanted, vocab = np.asarray(ids, dtype=np.int64), self._engine.spec.vocab
        if wanted.ndim != 1 or wanted.size == 0:
            raise UsageError("there is nothing to compute: no token ids were given")
        # Python's own: numpy takes ten times as long for one id.
        if min(ids) < 0 or max(ids) >= vocab:
            bad = next(int(i) for i in wanted if not 0 <= i < vocab)
            raise UsageError(f"token id {bad} is outside the vocabulary of {vocab}")
        if self.length + wanted.size > self.context:
            raise context_full(self.length + wanted.size, self.context)
        return wanted.astype(np.int32)
