"""The state slots of one sequence: the current one, the one that its next step writes, and spare earlier ones."""

from __future__ import annotations

from typing import NamedTuple

from ktcli.engine.statepool import StatePool


class SpareState(NamedTuple):
    """A state before the current one, which can be restored as long as its slot is not reused."""

    position: int
    slot: int
    ticket: int


class OwnStates:
    """The state slots of one sequence: those it holds, and spare ones, which can be restored as long as they are not
    reused.

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
        """Allocates the slot to which the next step writes the sequence's recurrent state, unless there is one.

        Raises:
            PoolFull: all slots are held.
        """
        if self.next_slot < 0:
            self.next_slot = self.pool.take()

    def go_on(self, length: int) -> None:
        """Makes the state that the step has written the sequence's current one; the state before it, of `length`
        positions, becomes spare, unless others hold its slot: it can be restored until the slot is reused.
        """
        ticket = self.pool.spare(self.slot) if self.slot >= 0 else None
        if ticket is not None:
            self._spares.append(SpareState(length, self.slot, ticket))
            del self._spares[: -self.pool.count]  # nobody has more
        self.slot, self.next_slot = self.next_slot, -1

    def latest_spare(self, position: int) -> SpareState | None:
        """Returns the sequence's spare state with the most positions, up to `position`, whose slot was not reused yet;
        None: there is none.
        """
        there = [
            each
            for each in self._spares
            if each.position <= position and self.pool.has(each.slot, each.ticket)
        ]
        return max(there, default=None)

    def go_back(self, length: int, spare: SpareState | None, kept: int) -> None:
        """Makes the state of `length` positions the sequence's current one again, and drops later spare states. The
        state is `spare`; if that is None, the snapshot in slot `kept`; if `kept` is -1, none: the sequence is at its
        beginning.
        """
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
        """Makes another sequence's current state this sequence's, too, with a reference to its slot; to be called
        before any state is held.
        """
        if other.slot >= 0:
            self.pool.hold(other.slot)
            self.slot = other.slot

    def close(self) -> None:
        """Releases all slots that the sequence holds, spare ones included."""
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
