"""The states of one sequence: where it stands, where its next step ends, and those it has gone on from."""

from __future__ import annotations

from typing import NamedTuple

from ktcli.engine.pages import StatePool


class SpareState(NamedTuple):
    """A state that the sequence has gone on from, and finds again if nobody took its slot."""

    position: int
    slot: int
    ticket: int


class OwnStates:
    """The slots that a sequence holds, and those that it finds again if nobody took them.

    Attributes:
        pool: the slots of all sequences.
        slot: that of the state where the sequence stands; -1: it stands at its beginning.
        next_slot: that of the next step's end; -1: none is taken yet.
    """

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self.slot = self.next_slot = -1
        self._spares: list[SpareState] = []

    def reserve(self) -> None:
        """Takes a slot for the next step's end.

        Raises:
            PoolFull: others hold them.
        """
        if self.next_slot < 0:
            self.next_slot = self.pool.take()

    def go_on(self, length: int) -> None:
        """The step's end is where the sequence stands; the state before, of `length` positions, is spare."""
        ticket = self.pool.spare(self.slot) if self.slot >= 0 else None
        if ticket is not None:
            self._spares.append(SpareState(length, self.slot, ticket))
            del self._spares[: -self.pool.count]  # nobody has more
        self.slot, self.next_slot = self.next_slot, -1

    def latest_spare(self, position: int) -> SpareState | None:
        """The last state up to a position that was gone on from and is still there."""
        there = [
            each
            for each in self._spares
            if each.position <= position and self.pool.has(each.slot, each.ticket)
        ]
        return max(there, default=None)

    def go_back(self, length: int, spare: SpareState | None, kept: int) -> None:
        """Stands where `length` positions are computed: at a spare state, or else at a snapshot's slot, or else (-1) at
        the beginning."""
        if spare is not None:
            found = self.pool.back(spare.slot, spare.ticket)
            assert found
        elif kept >= 0:
            self.pool.hold(kept)
        self._leave()
        self.slot = spare.slot if spare is not None else kept
        self._spares = [each for each in self._spares if each is not spare]
        self._drop_after(length)

    def share(self, other: OwnStates) -> None:
        """Stands, as an empty one, where another does."""
        if other.slot >= 0:
            self.pool.hold(other.slot)
            self.slot = other.slot

    def close(self) -> None:
        """Gives everything up."""
        self._leave()
        self._drop_after(-1)
        if self.next_slot >= 0:  # of a step that failed
            self.pool.release(self.next_slot)
        self.next_slot = -1

    def _leave(self) -> None:
        if self.slot >= 0:
            self.pool.release(self.slot)
        self.slot = -1

    def _drop_after(self, length: int) -> None:
        """Gives up the states of positions after `length`."""
        for each in self._spares:
            if each.position > length:
                self.pool.discard(each.slot, each.ticket)
        self._spares = [each for each in self._spares if each.position <= length]
