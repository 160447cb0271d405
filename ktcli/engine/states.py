"""Fixed-size states, which some layers store for a sequence instead of its positions.

A step reads the state at its start from one slot and writes the state at its end to another (see `sequence`). Here is
where each layer's part of a state lies, and how prompts are cut so that states are left where reuse begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from ktcli.models import Spec
from ktcli.ops.tensors import ceil_to
from ktcli.records import dataclass

_LINE_ELEMENTS = 16  # f32: layers begin on cache lines
# A prompt's last tokens are a chunk of their own, so that a position right before them can be gone back to: to
# answer again, or because a template writes the opening of an answer otherwise once the answer is there.
_TAIL = 16
_LONG = 4 * _TAIL  # tokens of the shortest prompt for which that is worth a step


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The layout of a state: the offset of each layer's part.

    Attributes:
        offsets: the first f32 element of each layer's part.
        elements: the f32 elements of a whole state.
    """

    offsets: tuple[int, ...]
    elements: int

    @property
    def size_bytes(self) -> int:
        """The bytes of a whole state."""
        return 4 * self.elements

    @classmethod
    def of(cls, spec: Spec) -> StateLayout:
        """Returns the layout of a model's states, one layer behind the other."""
        sizes = [ceil_to(s.sequence_elements, _LINE_ELEMENTS) for s in spec.states]
        ends = tuple(accumulate(sizes))
        return cls((0, *ends[:-1]), ends[-1])


def before_tail(size: int, left: int) -> int:
    """Returns the number of tokens of the next chunk of a prompt, at most `size`, when `left` are left: a long rest
    is cut before its tail, see _TAIL."""
    return min(size, left - _TAIL) if left >= _LONG else size


def worth_a_step(positions: Iterable[int], start: int, end: int) -> list[int]:
    """Returns the positions at which a step should end to leave a state there, of a prompt whose tokens from `start` to
    `end` are new: none right behind the start, and none in the tail, before which a step ends anyway.
    """
    last = end - _TAIL if end - start >= _LONG else end - 1
    return [position for position in positions if start + _TAIL <= position <= last]
