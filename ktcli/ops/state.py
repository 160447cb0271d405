"""Declares the memory of a layer: what it stores for a sequence between steps, with the cost of reading it, and what a
step takes in addition to the rows that it records.

The parts of a model declare both (`state`, `scratch`); engine and planner lay out and count memory from it. Positions
lie in pages that can leave memory and come back; what has no positions (the state of a recurrent layer) lies beside.
Widths of scratch are columns of f32 per token of the step. How many buffers of a width there are is the engine's
matter, so the planner has one formula for each engine over these (`planner.memory`, `planner.device`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import reduce
from operator import attrgetter

from ktcli.ops.kvformat import CacheFormat
from ktcli.ops.tensors import Role, Tensor
from ktcli.records import dataclass

# States that are kept of earlier positions, to go back to or to begin with (see `engine.pages`): of one sequence
# alone as many as of several together.
SNAPSHOTS = 4
# The most tokens that go together absorbed, MLA_ABSORBED of mla.h. A step of more is counted as if all were expanded: a
# prompt's last 1 … 64 are not, see `engine.forms`.
ABSORBED_TOKENS = 128
# Pages of a sequence that one program of a GPU attends to, see ops/triton/attention.py: what it finds is merged with
# what the others do.
GQA_SPLIT_PAGES, MLA_SPLIT_PAGES = 2, 4


def state_slots(streams: int = 1) -> int:
    """Returns the number of memory slots for recurrent states with `streams` sequences at once: two per sequence, as a
    step reads one and writes the other, and `SNAPSHOTS` for states of earlier positions.
    """
    return 2 * streams + SNAPSHOTS


@dataclass(frozen=True, slots=True)
class LayerState:
    """The sizes of one layer's state of one sequence.

    Attributes:
        position_elements: elements cached for each position, in pages, all of them together.
        position_heads: the heads that these are of, each with a scale where the cache is fp8 (`ops.kvformat`).
        sequence_elements: f32 elements that are kept whatever the length, and rewritten by every token.
        ops_per_token: operations (a multiply-add is two) of one token on these elements.
        ops_per_position: operations of one token against one cached position.
        expanded_ops: the same, where a step expands keys and values from what is cached (latent attention); 0: none
            does.
        expansion_ops: operations of expanding one cached position. Those of the step's own tokens are counted with the
            weights, as are the products that they replace.
        window: the number of last positions that a token reads, its own included; 0: all.
        chosen: the number of positions that a token attends to at most, chosen among all that it sees; 0: to all.
        index_elements: the part of `position_elements` that positions are chosen by, which is read at every position.
        index_ops: operations of a token's choice against one cached position.
    """

    position_elements: int = 0
    position_heads: int = 0
    sequence_elements: int = 0
    ops_per_token: int = 0
    ops_per_position: int = 0
    expanded_ops: int = 0
    expansion_ops: int = 0
    window: int = 0
    chosen: int = 0
    index_elements: int = 0
    index_ops: int = 0

    @property
    def windowed(self) -> bool:
        """Whether the layer's cached positions lie in window pages, which a sequence releases when its sliding window
        has passed.
        """
        return self.window > 0 and self.position_elements > 0 and not self.chosen

    @property
    def chooses(self) -> bool:
        """Whether tokens attend in this layer to positions that an indexer chose, or to pooled rows; what the layer
        caches is then stored as plain numbers, without the scales of an fp8 cache.
        """
        return self.position_elements > 0 and not self.position_heads

    def position_bytes(self, fmt: CacheFormat) -> int:
        """Returns the bytes that the layer caches for one position in the cache format `fmt`."""
        return fmt.bytes_of(self.position_elements, self.position_heads)

    def bytes_read(self, start: int, n_tokens: int, fmt: CacheFormat) -> int:
        """Returns the bytes of the layer's cache, in the cache format `fmt`, that a step reads to compute `n_tokens`
        tokens of a sequence from position `start` on.
        """
        scales = self._positions_read(start, n_tokens) * self.position_heads
        return fmt.bytes_of(self.elements_read(start, n_tokens), scales)

    def elements_read(self, start: int, n_tokens: int) -> int:
        """Returns the number of elements of the layer's cache that a step reads to compute `n_tokens` tokens of a
        sequence from position `start` on.

        Index keys are read only if the step ends after the first `chosen` positions; before, tokens attend to all.
        """
        positions = self._positions_read(start, n_tokens)
        attended = self.position_elements - self.index_elements
        if not self._chooses(start, n_tokens):
            return positions * attended
        some = min(positions, n_tokens * self.chosen)
        return some * attended + positions * self.index_elements

    def _positions_read(self, start: int, n_tokens: int) -> int:
        return n_tokens + (min(start, self.window - 1) if self.window else start)

    def ops(self, start: int, n_tokens: int) -> int:
        """Returns the number of arithmetic operations (a multiply-add is two) on the layer's cache in a step that
        computes `n_tokens` tokens of a sequence from position `start` on.
        """
        if not self._chooses(start, n_tokens):
            return self._attending_ops(start, n_tokens)
        choosing = _pairs(start, n_tokens, 0) * self.index_ops
        return choosing + _pairs(start, n_tokens, self.chosen) * self.ops_per_position

    def _attending_ops(self, start: int, n_tokens: int) -> int:
        """Returns the operations of a step in which every token attends to all that it sees: in the form that takes
        fewer, except that steps of many tokens always expand, since the other form would need too large buffers."""
        pairs = _pairs(start, n_tokens, self.window)
        direct = pairs * self.ops_per_position
        if not self.expanded_ops:
            return direct
        expanded = pairs * self.expanded_ops + start * self.expansion_ops
        return expanded if n_tokens > ABSORBED_TOKENS else min(direct, expanded)

    def _chooses(self, start: int, n_tokens: int) -> bool:
        return 0 < self.chosen < start + n_tokens


def _pairs(start: int, n_tokens: int, most: int) -> int:
    """Counts the (token, position) pairs of a step whose tokens see at most `most` positions; 0: all."""
    end = start + n_tokens
    whole = end * (end + 1) // 2 - start * (start + 1) // 2
    if not most:
        return whole
    beyond = max(0, end - most), max(0, start - most)
    return whole - (beyond[0] * (beyond[0] + 1) - beyond[1] * (beyond[1] + 1)) // 2


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
        """Returns the buffer widths (columns of f32 per token) of a layer with these tensors that needs buffers for
        projections only: `dense` is the largest number of outputs of a dense matrix, all other widths are 0.
        """
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
        """The declarations of the weight tensors of this part of a layer."""

    @property
    def scratch(self) -> Scratch:
        """The widths (columns of f32 per token) of the buffers that the projections of this part of a layer need in a
        step.
        """
        return Scratch.of(self.tensors)


_WIDTHS = attrgetter(*(each.name for each in fields(Scratch)))  # as a tuple


def largest(needs: Iterable[Scratch]) -> Scratch:
    """Returns the largest of each buffer width in `needs`; buffers of these widths satisfy all of them."""
    return reduce(Scratch.__or__, needs, Scratch())
