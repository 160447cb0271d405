"""Divides a model's layers between GPUs: consecutive layers on each, in the given order of the GPUs.

The division is the one after which experts in main memory are fewest and most evenly spread: the sum over layers of the
squared share of experts that find no room is least. Where all of them, or as many as are worth it (`worth`), find room
on some of the GPUs, the fewest that are enough are used. One GPU has all layers, by the same rule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import field, replace

import numpy as np

from ktcli.hardware.machine import Gpu
from ktcli.models.model import Spec
from ktcli.native import PAGE_TOKENS
from ktcli.planner.constraints import Constraints
from ktcli.planner.device import Budget, DeviceSizes, cache_bytes, share_out
from ktcli.planner.memory import (
    DEFAULT_CONTEXT,
    LEAST_CONTEXT,
    PREFILL_CHUNK,
    SERVED_CONTEXT,
    SERVED_SHARE,
)
from ktcli.planner.stack import F64Array, ModelLoads
from ktcli.planner.worth import Worth
from ktcli.records import dataclass

# In units of a layer without any expert on its GPU. What a border costs a token is little beside that; one that
# gains next to nothing is not worth it.
_BORDER = 1e-2
# Whatever fits is better than what does not, and of what does not, what lacks the fewest bytes.
_OVERFULL = 1e6


@dataclass(frozen=True, slots=True, eq=False)
class Devices:
    """The GPUs that a model may have.

    Attributes:
        borders: the layers that may begin on another GPU.
        gpus: the GPUs in the order in which they take layers.
        worth: the shares of the chosen experts that are worth having on them.
        answers: the sequences that are decoded together, each with the whole context.
        limits: the most bytes that may be taken of a GPU, by its number; of others, all that are free.
        constraints: what rules say about the layers; None: nothing.
        outputs: the rows of a step that give logits, if every position can; 0: the last of each sequence.
    """

    spec: Spec
    borders: tuple[int, ...]
    stack: ModelLoads
    gpus: tuple[Gpu, ...]
    worth: Worth = field(default_factory=Worth)
    answers: int = 1
    limits: Mapping[int, int] = field(default_factory=dict)
    constraints: Constraints | None = None
    outputs: int = 0

    def limit(self, gpu: Gpu) -> int:
        """Returns the most bytes of a GPU that a plan may take: its free bytes or, if that is less, its entry in
        `limits`.
        """
        return min(self.limits.get(gpu.index, gpu.free_bytes), gpu.free_bytes)

    def sizes(self, layers: range) -> DeviceSizes:
        """Returns the bytes that the layers of a range take on a GPU, part by part."""
        return DeviceSizes.of(self.spec, self.stack, self.answers, layers, self.outputs)

    def budgets(self, context: int, *, streams: bool) -> tuple[Budget, ...]:
        """Returns how the memory of each GPU that gets layers is shared out for a context, before experts are chosen;
        parts may be larger than what is free. All have chunks of equal size.

        Args:
            streams: whether long prompts would be worth streaming.
        """
        if self.worth.all:
            found = self._budgets(context, 1.0, streams=streams)
            if all(each.without_stream().experts_bytes >= self._experts(each) for each in found):
                return found
        return self._budgets(context, self.worth.some, streams=streams)

    def _experts(self, of: Budget) -> int:
        """The bytes of all experts of a GPU's layers."""
        return self.stack.room(0, of.layers).all_bytes

    def _budgets(self, context: int, most: float, *, streams: bool) -> tuple[Budget, ...]:
        """The budgets where up to this share of the experts should find room."""
        divided = self._divided(context, most)

        def shared(longest: int | None) -> tuple[Budget, ...]:
            return tuple(
                share_out(
                    self.sizes(layers),
                    gpu,
                    context,
                    streams=streams,
                    limit=self.limit(gpu),
                    longest=longest,
                )
                for gpu, layers in divided
            )

        found = shared(None)
        least = min(each.chunk for each in found)
        return found if all(each.chunk == least for each in found) else shared(least)

    def fits(self, context: int) -> bool:
        """Returns whether the GPUs hold all parts of the model that must lie on them, without routed experts, with a
        context of `context` positions. The embedding, and MLPs that rules place in main memory, do not count.
        """
        return all(each.fits for each in self.budgets(context, streams=False))

    def fitting(self, most: int) -> int:
        """Returns the most context positions, `most` or fewer in whole pages, with which all parts of the model that
        must lie on the GPUs fit there (see `fits`); 0: none do.
        """
        if self.fits(most):
            return most
        pages = range(PAGE_TOKENS, most, PAGE_TOKENS)
        return bisect_left(pages, True, key=lambda n: not self.fits(n)) * PAGE_TOKENS

    def default_context(self, *, served: bool = False) -> int:
        """Returns the number of context positions to reserve if none is asked for: DEFAULT_CONTEXT, or what the model
        and the GPUs' memory allow if that is less; at least LEAST_CONTEXT (or the model's own) even without room.

        Args:
            served: whether a server asks: then up to SERVED_CONTEXT, with 1 / SERVED_SHARE of the memory that experts
                may take.
        """
        longest = self.spec.context
        wanted = min(DEFAULT_CONTEXT, longest)
        context = max(self.fitting(wanted), min(LEAST_CONTEXT, wanted))
        if not served:
            return context
        part = {
            each.gpu.index: each.need.total + max(0, each.experts_bytes) // SERVED_SHARE
            for each in self.budgets(PAGE_TOKENS, streams=False)
        }
        unused = {gpu.index: 0 for gpu in self.gpus if gpu.index not in part}
        most = min(SERVED_CONTEXT, longest)
        return max(context, replace(self, limits={**part, **unused}).fitting(most))

    # --- the division -------------------------------------------------------------------------------

    def _divided(self, context: int, most: float) -> tuple[tuple[Gpu, range], ...]:
        """The GPUs that get layers, with these."""
        layers = self.spec.layers
        lasting = self._lasting(context, range(0))
        head = self._lasting(context, range(layers, layers))
        near, experts, sparse = self._sums(context)
        best = np.full(layers + 1, np.inf)
        best[0] = 0.0
        begins = []
        for gpu in self.gpus:
            left = self.limit(gpu) - lasting[gpu.index] - near
            left[:-1, -1] -= head[gpu.index] - lasting[gpu.index]
            every = best[:, None] + self._lacking(left, experts * most, sparse)
            every += self._forbidden(gpu)
            # Of equal ones the fewest layers here.
            begins.append(layers - every[::-1].argmin(axis=0))
            best = every.min(axis=0)
        found, end = [], layers
        for gpu, begin in zip(reversed(self.gpus), reversed(begins), strict=True):
            first = int(begin[end])
            if first < end:
                found.append((gpu, range(first, end)))
            end = first
        return tuple(reversed(found))

    def _lasting(self, context: int, none: range) -> dict[int, int]:
        """The bytes that are taken of each GPU, by its number, when it has none of the layers: at the end of the model
        with the head, else without."""
        sizes = self.sizes(none)
        return {
            gpu.index: share_out(sizes, gpu, context, streams=False).need.total for gpu in self.gpus
        }

    def _sums(self, context: int) -> tuple[F64Array, F64Array, F64Array]:
        """For layers [first, last): the bytes of everything but experts, those of all experts, and how many layers
        have some, [L + 1, L + 1]."""
        spec, stack = self.spec, self.stack
        least = min(PREFILL_CHUNK, context)
        caches = {
            state: cache_bytes(
                replace(spec, states=(state,)), context, least, self.answers, stack.cache
            )
            for state in dict.fromkeys(spec.states)
        }
        always = stack.near_bytes[:-1] + [caches[state] for state in spec.states]
        experts = stack.expert.size_bytes * stack.experts
        return _between(always), _between(experts), _between((experts > 0).astype(np.float64))

    def _forbidden(self, gpu: Gpu) -> F64Array | float:
        """Infinite for layers [first, last) of which rules place one on another GPU, else 0."""
        if self.constraints is None:
            return 0.0
        return np.where(
            _between((~self.constraints.allowed(gpu.index)).astype(np.float64)) > 0, np.inf, 0.0
        )

    def _lacking(self, left: F64Array, experts: F64Array, sparse: F64Array) -> F64Array:
        """What the wanted experts lack on one GPU whose other parts leave so many bytes, for layers [first, last);
        infinite where none may begin there."""
        layers = self.spec.layers
        share = np.clip(left / np.maximum(experts, 1.0), 0.0, 1.0)
        found = sparse * (1.0 - np.where(experts > 0, share, 1.0)) ** 2 + _BORDER
        found = np.where(left < 0, _OVERFULL * (1.0 - left / 2**30), found)
        begin, end = np.indices(found.shape)
        allowed = np.isin(np.arange(layers + 1), (0, *self.borders))
        found = np.where((begin < end) & allowed[:, None], found, np.inf)
        return np.where(begin == end, 0.0, found)


def _between(values: F64Array) -> F64Array:
    """The sums of values [first, last), [L + 1, L + 1]."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    found: F64Array = ends[None, :] - ends[:, None]
    return found
