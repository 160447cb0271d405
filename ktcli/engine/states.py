"""States of fixed size, which some layers keep of a sequence instead of its positions.

A step reads the state at its start from one slot and writes the state at its end to another, so a step that fails,
or is interrupted before its end is recorded, leaves no trace. A few more slots hold the states of earlier positions:
going back means to read one of those.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ktcli.models import Spec
from ktcli.ops.state import STATE_SLOTS
from ktcli.ops.tensors import ceil_to

_LINE_ELEMENTS = 16  # f32: layers begin on cache lines
# A prompt's last tokens are a chunk of their own, so that a position right before them can be gone back to: to
# answer again, or because a template writes the opening of an answer otherwise once the answer is there.
_TAIL = 16
_LONG = 4 * _TAIL  # tokens of the shortest prompt for which that is worth a step


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The layout of a state: the place of each layer's part.

    Attributes:
        offsets: the first f32 element of each layer's part.
        elements: the f32 elements of a whole state.
    """

    offsets: tuple[int, ...]
    elements: int

    @classmethod
    def of(cls, spec: Spec) -> StateLayout:
        """The layout of a model's states, one layer behind the other."""
        sizes = [ceil_to(s.sequence_elements, _LINE_ELEMENTS) for s in spec.states]
        ends = tuple(accumulate(sizes))
        return cls((0, *ends[:-1]), ends[-1])


class StateSlots:
    """The positions whose states the slots of a session hold; the memory is elsewhere.

    Steps of a prompt leave *snapshots*, which stay as long as there are slots for them. Position 0 needs
    no slot: there, nothing is kept.
    """

    def __init__(self, slots: int = STATE_SLOTS) -> None:
        self._positions: list[int | None] = [None] * slots
        self._snapshots: set[int] = set()  # slots

    def truncate(self, position: int) -> int:
        """Forgets states of later positions; returns the nearest position that is left, 0 at least."""
        for slot, there in enumerate(self._positions):
            if there is not None and there > position:
                self._forget(slot)
        return max((there for there in self._positions if there is not None), default=0)

    def begin(self, start: int) -> tuple[int | None, int]:
        """The slot to read (None: there is no state yet) and the slot to write for a step that begins at `start`."""
        self.truncate(start)  # a step that ended, but does not count, may have left one
        source = self._positions.index(start) if start else None
        target = min((s for s in range(len(self._positions)) if s != source), key=self._worth)
        self._forget(target)
        return source, target

    def end(self, target: int, position: int, *, snapshot: bool) -> None:
        """Records that a step is over, and `target` holds the state of `position`: one to go back to, or not."""
        self._positions[target] = position
        if snapshot:
            self._snapshots.add(target)
        # One to read and one to write are needed beside the snapshots.
        if len(self._snapshots) > len(self._positions) - 2:
            self._snapshots.discard(self._crowded())

    def _forget(self, slot: int) -> None:
        self._positions[slot] = None
        self._snapshots.discard(slot)

    def _worth(self, slot: int) -> tuple[bool, int]:
        return slot in self._snapshots, self._positions[slot] or 0

    def _crowded(self) -> int:
        """The snapshot whose neighbours are closest together; not one of the two latest."""
        ordered = sorted((self._positions[slot] or 0, slot) for slot in self._snapshots)
        before = [0, *(position for position, _ in ordered)]
        gaps = [(ordered[i + 1][0] - before[i], ordered[i][1]) for i in range(len(ordered) - 2)]
        return min(gaps)[1]


def before_tail(size: int, left: int) -> int:
    """The tokens of the next chunk, of at most `size`, when `left` are left: see _TAIL."""
    return min(size, left - _TAIL) if left >= _LONG else size
