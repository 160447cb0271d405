"""Declares the memory that one step of a layer needs in addition to the rows that it records.

Widths are columns of f32 per token of the step. How many buffers of a width there are is the engine's matter, so
the planner has one formula for each engine over these (`planner.memory`, `planner.device`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import reduce
from operator import attrgetter

from ktcli.ops.tensors import Role, Tensor
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Scratch:
    """The widths of the buffers of a layer, or of several layers, which use the same ones in turn.

    Attributes:
        dense: the outputs of the widest dense projection.
        experts: the sum of the widths of the experts that a token chooses.
        heads: queries and results of all heads, where a step of few tokens needs them wider than the projections they
            come from (absorbed latent attention).
        streams: the width of a residual of several streams; 0: there is only one.
        chosen: the number of places that attention chooses for a token, in all its lists.
        partials: f32 elements for each page that a token can attend to, where its pages are worked on side by side
            (decode on a GPU): partial results of attention, or scores of places.
        expanded: whether prefill expands keys and values of all heads from what is cached, some heads at a time.
    """

    dense: int = 0
    experts: int = 0
    heads: int = 0
    streams: int = 0
    chosen: int = 0
    partials: int = 0
    expanded: bool = False

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Scratch:
        """Returns the buffer widths that any layer with these tensors needs: inputs and outputs of its dense
        projections."""
        return cls(dense=max((t.n for t in tensors if t.role is Role.DENSE), default=0))

    def __or__(self, other: Scratch) -> Scratch:
        """Returns the buffers that can hold either."""
        return self if self == other else Scratch(*map(max, _WIDTHS(self), _WIDTHS(other)))


class Projections:
    """A part of a layer that needs buffers for its projections only."""

    __slots__ = ()

    @property
    @abstractmethod
    def tensors(self) -> Sequence[Tensor]:
        """Its tensors."""

    @property
    def scratch(self) -> Scratch:
        """The buffer widths that its projections need in a step."""
        return Scratch.of(self.tensors)


_WIDTHS = attrgetter(*(each.name for each in fields(Scratch)))  # as a tuple


def largest(needs: Iterable[Scratch]) -> Scratch:
    """Returns the least scratch whose every width is at least that of each of `needs`."""
    return reduce(Scratch.__or__, needs, Scratch())
