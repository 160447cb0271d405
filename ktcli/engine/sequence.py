"""One timeline: its ids, and the pages and states that store the results for them.

A sequence takes pages when positions reach them. A full page is sealed under the key of its prefix, and whoever begins
with the same ids shares it; the last page, which is not full, is copied before it is written if anybody else may read
it. Where layers keep a state, each step reads one slot and writes another, so a step that fails leaves no trace, and
going back is possible where a state was kept: at the last few steps as long as nobody needs their slots, and at
*snapshots*, which other sequences find, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Numbers
from dataclasses import replace
from functools import wraps
from itertools import count
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.adapters import AttachedAdapter
from ktcli.engine.forms import ABSORBED, How, expanded_spans, how_to_read
from ktcli.engine.own_pages import OwnPages
from ktcli.engine.own_states import OwnStates, SpareState
from ktcli.engine.pagetable import pages_for
from ktcli.engine.pools import KnownPrefix, Pools
from ktcli.engine.prefix import Content, salted
from ktcli.engine.statepool import Place, worth_a_step
from ktcli.errors import ContextFull
from ktcli.native import PAGE_TOKENS, Run
from ktcli.pagelabel import PageKind

_LINES = count(1)
P = ParamSpec("P")
R = TypeVar("R")


def context_full(needs: int, holds: int) -> ContextFull:
    """Returns the error to raise for a sequence of `needs` positions where the context holds only `holds`."""
    return ContextFull(
        f"the conversation needs {needs} tokens, but the context holds {holds}",
        hint="start over with /clear, or start kt with a larger --context",
    )


def _operation(
    method: Callable[Concatenate[Sequence, P], R],
) -> Callable[Concatenate[Sequence, P], R]:
    """A method as an operation on the pools, see `Pools.begin`."""

    @wraps(method)
    def run(self: Sequence, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._pools.begin()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._pools.end()

    return run


class Sequence:
    """A sequence of ids with its pages and states. Close it, or what it holds stays held.

    Attributes:
        length: the number of ids that were computed.
        restored: the positions that the last `adopt` brought from stores, by their names.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._ids = np.zeros(pools.context, dtype=np.int32)
        # How each id was computed, and of the ids of a prompt that were not: how they are to be; up to `_planned`.
        self._how: How = np.zeros(pools.context, dtype=np.uint8)
        self._planned = 0
        self._adapter = pools.adapter
        self._pages = OwnPages(pools, Content(self._ids, self._how, self._empty("")))
        self._line = next(_LINES)
        self._states = None if pools.states is None else OwnStates(pools.states)
        self._marks: list[int] = []  # positions where a snapshot is wanted
        self.length = 0
        self.restored: dict[str, int] = {}

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids of the sequence that were computed."""
        return tuple(self._ids[: self.length].tolist())

    @property
    def depths(self) -> bytes:
        """The bytes that encode how each id of the sequence was computed, one for each (its depth of deferral, plus
        0x80 for the absorbed form of latent attention); zeros at the end are left out.
        """
        return self._how[: self.length].tobytes().rstrip(b"\0")

    @property
    def pages(self) -> tuple[int, ...]:
        """The numbers of the KV-cache pages that the sequence holds, in the order of their positions."""
        return self._pages.table.held

    @property
    def window_pages(self) -> tuple[int, ...]:
        """The numbers of the KV-cache pages of sliding-window layers that the sequence holds, those of its last
        positions; () if these layers have no pages of their own.
        """
        windows = self._pages.windows
        return windows.held if windows is not None else ()

    def windows_ahead(self, end: int) -> int:
        """Returns the number of KV-cache pages of sliding-window layers that the sequence needs beside those it holds
        to go on to position `end`, a token at a time.
        """
        windows = self._pools.windows
        return 0 if windows is None else max(0, windows.most(end) - len(self.window_pages))

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The content addresses of the sequence's full KV-cache pages, in order: hashes of all ids up to the end of
        each.
        """
        return tuple(self._pages.keys)

    @property
    def context(self) -> int:
        """The greatest number of positions that the sequence may have."""
        return self._pools.context

    @property
    def recurrent(self) -> bool:
        """Whether some layer of the model keeps a recurrent state for the sequence."""
        return self._states is not None

    # -- steps -----------------------------------------------------------------------------------------

    @_operation
    def extend(
        self,
        ids: NDArray[np.int32],
        *,
        first_output: int | None = None,
        temperature: float = 0.0,
        defer: int = 0,
        chunk: tuple[int, int] | None = None,
    ) -> Run:
        """Returns the run that computes the next ids of the sequence, with the KV-cache pages and the state slot to
        write, which are allocated here; the sequence itself changes only once the run is committed.

        Args:
            ids: [n] int32.
            first_output: see `Run`; None: the last id alone gives logits.
            temperature, defer, chunk: see `Run`.
        Raises:
            ContextFull: the context has too few positions for the ids.
            PoolFull: other sequences hold the pages or states; this one has the ids it had.
        """
        n = ids.size
        end = self.length + n
        if end > self.context:
            raise context_full(end, self.context)
        self._pages.reserve(self.length, end)
        states, windows = self._states, self._pages.windows
        if states is not None:
            states.reserve()
        first = n - 1 if first_output is None else first_output
        if self._pools.tier is not None:
            self._pools.tier.step_begins()
        return Run(
            ids,
            self.length,
            self._pages.table.numbers[: pages_for(end)],
            first,
            temperature,
            defer,
            -1 if states is None else states.slot,
            -1 if states is None else states.next_slot,
            chunk,
            None if windows is None else windows.numbers[: pages_for(end)],
            self._expanded(end),
            self._adapter.number if self._adapter else 0,
        )

    def _expanded(self, end: int) -> tuple[int, int]:
        """Of the positions from its length up to `end` those that are expanded."""
        if self._planned <= self.length or not self._pools.latent:
            return 0, 0
        spans = expanded_spans(self._how[self.length : min(end, self._planned)])
        assert len(spans) < 2, "a run has one expanded span at most, see `until_mark`"
        return (self.length + spans[0][0], self.length + spans[0][1]) if spans else (0, 0)

    @_operation
    def commit(self, run: Run, tokens: int | None = None, *, prompt: bool = True) -> None:
        """Appends the ids of a computed run to the sequence, and seals the KV-cache pages that are now full, so that
        other sequences can find them.

        Args:
            tokens: how many of the run's first ids to append; None: all, as is required where a layer keeps a state.
            prompt: whether a run of several tokens is a part of a prompt, at whose end a snapshot may be kept.
        """
        n = run.ids.size if tokens is None else tokens
        assert run.start == self.length and 0 <= n <= run.ids.size
        if self._pools.tier is not None:
            self._pools.tier.step_ended(run.ids.size)
        end = self.length + n
        self._ids[self.length : end] = run.ids[:n]
        self._how[self.length : end] = self._pools.how(run.defer)
        self._how[slice(*run.expanded)][: max(0, end - run.expanded[0])] = run.defer
        self._planned = max(self._planned, end)
        if self._states is not None:
            assert n == run.ids.size, "a state is of all tokens of its run"
            self._states.go_on(self.length)
        self.length = end
        self._pages.seal(end)
        chunk_ended = prompt and n > 1 and run.first_output > 0
        if chunk_ended or (self._marks and any(run.start < mark <= end for mark in self._marks)):
            self.keep()  # what others share may end here, too
        self._pages.pass_by(end)

    @_operation
    def keep(self) -> None:
        """Stores a snapshot of the sequence's recurrent state, if there is one, and lets the pages of the sliding
        window before it be evicted late, so that a sequence that begins with the same ids can continue from here.
        """
        states, border = self._states, self.length - self.length % PAGE_TOKENS
        self._pages.favour(border if states is None else self.length)
        if states is None or states.slot < 0:
            return
        label = self._pages.label(PageKind.STATE, border, self.length)
        states.pool.keep(label.key, states.slot, Place(label.previous, self.length), self._line)
        slot = states.pool.slot_of(label.key)
        if self._pools.tier is not None and slot is not None:
            marked = self.length in self._marks
            self._pools.tier.kept(slot, label, self._line, marked=marked)
        self._pages.seal_open(self.length)

    def mark(self, position: int) -> None:
        """Marks the ids up to `position` as a prefix that others will share (a system prompt with its tools): where
        layers have states, a run ends there and stores a snapshot.
        """
        if position > self.length and (self._pools.states or self._pools.windows):
            self._marks.append(position)

    def plan(self, n: int) -> None:
        """Sets the form of latent attention in which each of the next `n` ids is computed, as for a prompt that follows
        the present ids. Does nothing without latent attention, or if `adopt` planned just these ids.
        """
        end = self.length + n
        if not self._pools.latent or end == self._planned:
            return
        self._planned = self.length
        if n > 1:
            how = how_to_read(self._how[: self.length].tobytes(), end, latent=True)
            self._how[self.length : end] = how[self.length :]
            self._planned = end

    def forget_plan(self) -> None:
        """Drops what `plan` or `adopt` set for how the ids after the computed ones are to be computed."""
        self._planned = self.length

    def until_mark(self, n: int) -> int:
        """Returns the number of tokens that the next run should have, at most `n`: where layers keep states it ends at
        the next marked position, and it has at most one span of ids that latent attention expands.
        """
        if self._pools.latent and self._planned > self.length:
            spans = expanded_spans(self._how[self.length : min(self.length + n, self._planned)])
            n = spans[1][0] if len(spans) > 1 else n
        if self._pools.states is None:
            return n
        ahead = [mark - self.length for mark in self._marks if mark > self.length]
        return min(n, *ahead) if ahead else n

    # -- going elsewhere -------------------------------------------------------------------------------

    @_operation
    def truncate(self, position: int) -> int:
        """Drops all ids from `position` on; returns the length that remains: `position`, or less where layers keep a
        state or a sliding window and what they need at `position` is not cached any more.
        """
        wanted = max(0, min(position, self.length))
        self._planned = min(self._planned, wanted)
        reached, spare, kept = self._reachable(wanted)
        states = self._states
        if reached == self.length and states is not None and states.slot >= 0:
            return reached
        if states is not None:
            states.go_back(reached, spare, kept)
        self._cut(reached)
        return reached

    @_operation
    def fork(self) -> Sequence:
        """Returns a new sequence with the same ids, which shares all KV-cache pages and the state of this one."""
        made = Sequence(self._pools)
        made._adapter = self._adapter
        made._ids[: self.length] = self._ids[: self.length]
        made._how[:], made._planned = self._how, self._planned
        made.length = self.length
        made._pages.share(self._pages, self.length)
        if made._states is not None and self._states is not None:
            made._states.share(self._states)
        return made

    @_operation
    def adopt(
        self,
        ids: Numbers[int] | NDArray[np.int32],
        how: How | None = None,
        marks: Iterable[int] = (),
        salt: str = "",
        adapter: AttachedAdapter | None = None,
        *,
        bring: bool = True,
    ) -> int:
        """Makes the sequence the longest cached prefix of `ids`, but not all of it; returns the length of that prefix:
        at least the last id is left to compute, since its logits are needed.

        Args:
            how: how each id is computed; None: as a prompt of which nothing was computed. The deferral of what this
                sequence holds itself is taken as it is.
            marks: positions from which other prompts will probably go on, of which those of `worth_a_step` are marked,
                see `mark`.
            salt: pages are shared with sequences of the same salt only, and of the same adapter.
            adapter: the adapter with which the ids are computed; None: the default adapter, if there is one.
            bring: whether pages may come from disk, which takes room in memory.
        """
        self._adapter = adapter or self._pools.adapter
        root = self._empty(salt)
        if root != self._pages.content.root:
            self.truncate(0)
            self._pages.content = replace(self._pages.content, root=root)
        wanted = np.asarray(ids, dtype=np.int64)[: self.context]
        if how is None:
            how = how_to_read(b"", len(ids), latent=self._pools.latent)
        how = how[: self.context]
        common = self._common(wanted, how)
        content = Content(wanted.astype(np.int32), how, root)
        known = self._pools.find(content)
        self.restored = {}
        if bring and self._pools.tier is not None:
            have = max(known.length, self._reachable(common)[0])
            self.restored = self._pools.tier.bring(content, have)
            known = self._pools.find(content)
        if known.length > self._reachable(common)[0]:
            self._take_over(known, wanted, how)
        else:
            self.truncate(common)
        self._how[self.length : how.size], self._planned = how[self.length :], how.size
        # Where the pages of others end is where reuse begins: the next one finds a state there, too.
        self._marks.clear()
        self.mark(len(known.shared) * PAGE_TOKENS)
        for position in worth_a_step(marks, self.length, wanted.size):
            self.mark(position)
        return self.length

    def _common(self, wanted: NDArray[np.int64], how: How) -> int:
        """The number of its first ids that are also the first of `wanted`, in the same form, but not all of those."""
        n = max(0, min(self.length, wanted.size - 1))
        other_form = (self._how[:n] ^ how[:n]) & ABSORBED > 0
        different = np.flatnonzero((self._ids[:n] != wanted[:n]) | other_form)
        return int(different[0]) if different.size else n

    def _empty(self, salt: str) -> bytes:
        """The key of the empty prefix with a salt."""
        return salted(self._pools.seed, salt, self._adapter.digest if self._adapter else "")

    @_operation
    def close(self) -> None:
        """Releases all pages and states of the sequence, whose length is then 0; other sequences can still find what
        was computed, where layers have states up to the last snapshot.
        """
        self.keep()
        if self._states is None:
            self._pages.seal_open(self.length)
        else:
            self._states.close()
        self._cut(0)
        self._planned = 0

    def persist(self, *, whole: bool = True) -> None:
        """Has the sequence's full KV-cache pages written at once to each store (such as the disk) that lacks them; does
        nothing without stores.

        Args:
            whole: False if more will follow soon: then stores only go on writing what is queued until the end of the
                next step.
        """
        if self._pools.tier is None:
            return
        if not whole:
            self._pools.tier.hasten()
            return
        self._pools.tier.persist(self._pages.labels())

    def _cut(self, length: int) -> None:
        """Keeps the first `length` positions."""
        self._pages.cut(length)
        self.length = length

    # -- states ----------------------------------------------------------------------------------------

    def _reachable(self, position: int) -> tuple[int, SpareState | None, int]:
        """The last position up to `position` that can be gone back to, and its spare state or the slot of its
        snapshot; None and -1 where the sequence stands there, or nothing is kept."""
        while True:
            found = self._with_state(position)
            position = self._pages.reachable(found[0])
            if position == found[0]:
                return found

    def _with_state(self, position: int) -> tuple[int, SpareState | None, int]:
        """The same as far as states go."""
        states = self._states
        if states is None or position == self.length:
            return position, None, -1
        spare = states.latest_spare(position)
        best, key = max(self._own_snapshots(position), default=(0, b""))
        if spare is not None and spare.position >= best:
            return spare.position, spare, -1
        slot = states.pool.find(key) if best else None
        return (0, None, -1) if slot is None else (best, None, slot)

    def _own_snapshots(self, position: int) -> Iterator[tuple[int, bytes]]:
        """Positions up to `position` at which there is a snapshot of these ids, and their keys."""
        assert self._pools.states is not None
        for place, key in self._pools.states.places():
            rest = place.position % PAGE_TOKENS
            if not 0 < place.position <= position:
                continue
            page_key = self._pages.key_before(place.position)
            start = place.position - rest
            if page_key == place.page_key and (
                self._pages.content.link(page_key, start, place.position) == key
            ):
                yield place.position, key

    # -- what others know ------------------------------------------------------------------------------

    def _take_over(self, known: KnownPrefix, ids: NDArray[np.int64], how: How) -> None:
        """Becomes a prefix that the pools know."""
        self._pools.hold(known)
        self.close()
        self._pages.become(known)
        self.length = n = known.length
        self._ids[:n] = ids[:n]
        self._how[:n] = how[:n]
        if self._states is not None:
            self._states.slot = known.slot
