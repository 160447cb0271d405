"""Measures one layer alone, its experts or a dense product, on random weights, compared with the machine's ceiling.

The operation is measured as a model runs it, from quantising the activations to the weighted sum, and
until the last thread is done. The experts of a token are dealt like cards, so that all have the same load: a token's id
picks a row of logits, and the router does the rest outside the clock. A stack of equal layers is many times as large as
the caches, and the walk through it never comes back early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.arenas import NodeMemory, aligned
from ktcli.errors import NotEnoughMemory
from ktcli.measure.bench import Ceilings
from ktcli.measure.clock import PAIRS, Measurement, alternate
from ktcli.measure.shapes import LayerCase, LayerShape, Work
from ktcli.native import (
    PAGE_TOKENS,
    PANEL_ROWS,
    Batch,
    Ceiling,
    Format,
    Pool,
    Program,
    Run,
    View,
    Weight,
    cache_bytes,
    packed_bytes,
)
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Cut, Role, Tensor, ceil_to
from ktcli.planner.slices import Slice, slices_of
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe

# A stack of layers: far larger than a usual last cache, or 8 times this machine's, within reason.
_STACK_BYTES = 512 << 20
_STACK_CACHES = 8
_MOST_STACK_BYTES = 4 << 30
_MOST_LAYERS = 64  # tiny shapes of tests: they would need thousands
_RUN_S = 0.1  # seconds for which a run repeats its step
_SEED = 20_260_102
_LINEAR_TOKENS = (1, 512)


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The result of one measured row; all times are those of one layer and one step.

    Attributes:
        shape, format: the names of shape and format.
        ceiling: the ceiling that it was compared with.
        rate: that ceiling in this measurement, per second.
        layers: the number of layers of the stack.
    """

    shape: str
    format: str
    case: LayerCase
    measured: Measurement
    ceiling: Ceiling
    rate: float
    layers: int
    stack_bytes: int

    @property
    def cached(self) -> bool:
        """Whether the CPU's caches may have held part of the weights: the whole stack is less than 4 times as large as
        its last-level cache."""
        return self.stack_bytes < _STACK_CACHES / 2 * cache_bytes(3)

    @property
    def read_bps(self) -> float:
        """The bytes per second at which the layer read its weights in the median run."""
        return self.case.read_bytes / self.measured.seconds

    @property
    def ops(self) -> float:
        """The operations per second that the layer computed in the median run."""
        return self.case.ops / self.measured.seconds


class LayerStack:
    """A stack of equal layers recorded as a program, with the sequence of token ids that are fed to it.

    Attributes:
        name: the name of the shape.
        layers: the number of layers.
        size_bytes: the bytes of all weights.
    """

    def __init__(
        self,
        name: str,
        pool: Pool,
        fmt: Format,
        matrices: Sequence[Tensor],
        max_tokens: int,
        free_bytes: int,
    ) -> None:
        """`matrices`: the weights of one layer."""
        layer_bytes = sum(packed_bytes(fmt, t.n, t.k) * t.count for t in matrices)
        self.layers = min(_MOST_LAYERS, ceil(_stack_bytes() / layer_bytes))
        self.size_bytes = self.layers * layer_bytes
        # Beside the weights: each layer's input, a copy of it as products read it, what comes out.
        width = max(max(tensor.n, tensor.k) for tensor in matrices)
        need = self.size_bytes + (self.layers + 4) * max_tokens * width * 4
        if need > free_bytes:
            raise NotEnoughMemory("the layers to measure", need, free_bytes)
        self.name, self.pool, self.format = name, pool, fmt
        self.draw = np.random.default_rng(_SEED)
        self.program = Program(pool, max_tokens=max_tokens, max_outputs=1, exact=False)
        self._matrices = matrices
        self._slices = [_slices(tensor, fmt, pool.node_threads) for tensor in matrices]
        self._memory = NodeMemory(
            pool,
            [
                self.layers * sum(aligned(slices[node].size_bytes) for slices in self._slices)
                for node in range(len(pool.node_threads))
            ],
            0,
        )
        self._seed = 0
        self._first = 0
        self._pages = np.zeros(ceil(max_tokens / PAGE_TOKENS), np.int32)

    def cases(self, works: Sequence[Work], per_expert: Sequence[int]) -> list[LayerCase]:
        """Returns the cases to measure on this stack for the kinds of work `works` and the tokens per expert
        `per_expert`; each has its number of tokens and the bytes and operations of a layer."""
        raise NotImplementedError

    def ids(self, n_tokens: int) -> NDArray[np.int32]:
        """Returns the token ids to feed in the next step, int32 [n_tokens]."""
        raise NotImplementedError

    def run(self, n_tokens: int, steps: int) -> float:
        """Runs `steps` steps of `n_tokens` tokens each; returns the seconds that the layers alone took in all of
        them."""
        before = self._seconds()
        for _ in range(steps):
            ids = self.ids(n_tokens)
            self.program.run(Batch((Run(ids, 0, self._pages, n_tokens),)))
        return self._seconds() - before

    def _weights(self) -> list[tuple[Weight, ...]]:
        """The matrices of the next layer, filled: the nodes' slices of each."""
        return [
            tuple(self._weight(each, tensor, node) for node, each in enumerate(slices))
            for tensor, slices in zip(self._matrices, self._slices, strict=True)
        ]

    def _weight(self, of: Slice, tensor: Tensor, node: int) -> Weight:
        piece = self._memory.take(of.size_bytes, node)
        fmt = self.format.of_columns(tensor.k)
        weight = Weight(fmt, of.n, of.k, tensor.count, piece.address, piece.owner)
        self._seed += 1
        if weight.size_bytes:
            self.pool.fill_random(weight, self._seed)
        return weight

    def _record(self, width: int, layer: Callable[[View], View]) -> None:
        """Records all layers. Each reads inputs of its own, else they would be quantised only once."""
        self._first = len(self.program.labels)
        inputs = [self.program.buffer(width) for _ in range(self.layers)]
        for view in inputs:
            out = layer(view)
        # Reads a little of the last result, so that its time holds the wait for the last thread.
        end, part = self.program.buffer(1), View(out.buffer, 0, 1)
        self.program.append("add", (end, part, part))
        self.program.finish()
        for view in inputs:
            rows = self.program.rows(view, self.program.max_tokens)
            rows[:] = self.draw.standard_normal(rows.shape, np.float32)

    def _seconds(self) -> float:
        return sum(ns for _, ns in self.program.profile()[self._first :]) / 1e9


class ExpertStack(LayerStack):
    """A stack of layers of routed experts."""

    def __init__(
        self, pool: Pool, shape: LayerShape, fmt: Format, max_tokens: int, free_bytes: int
    ) -> None:
        inner = 2 * ceil_to(shape.width, PANEL_ROWS)
        e, part = shape.experts, ModelPart.EXPERTS
        hidden, width, role = shape.hidden, shape.width, Role.EXPERTS
        matrices = (
            Tensor("gate_up", inner, hidden, role, (), e, True, cut=Cut.ROWS, part=part),
            Tensor("down", hidden, width, role, (), e, cut=Cut.COLUMNS, part=part),
        )
        super().__init__(shape.name, pool, fmt, matrices, max_tokens, free_bytes)
        self._shape = shape
        self._deal, table = _deals(shape, max_tokens, self.draw)
        self._rows, self._next = len(table), 0
        logits, out = self.program.buffer(e), self.program.buffer(shape.hidden)
        self.program.append("embed", (logits,), table=table, vocab=len(table))
        rule = {"experts": e, "top_k": shape.top_k, "normalize": True, "scale": 1.0}
        self.routing = self.program.append("route", (logits,), **rule)

        def layer(x: View) -> View:
            gate_up, down = self._weights()
            self.program.append(
                "experts", (out, x), routing=self.routing, gate_up=gate_up, down=down
            )
            return out

        self._record(shape.hidden, layer)

    def cases(self, works: Sequence[Work], per_expert: Sequence[int]) -> list[LayerCase]:
        """Returns the cases to measure on this stack of experts: for decode one, of a single token; for prefill one for
        each number of tokens per expert."""
        tokens = [1] if Work.DECODE in works else []
        if Work.PREFILL in works:
            tokens += [self._shape.tokens(n) for n in per_expert]
        return [self._case(n) for n in tokens]

    def _case(self, n_tokens: int) -> LayerCase:
        shape, slots = self._shape, n_tokens * self._shape.top_k
        expert_bytes = self.size_bytes // self.layers // shape.experts
        return LayerCase(
            Work.DECODE if n_tokens == 1 else Work.PREFILL,
            n_tokens,
            1.0 if n_tokens == 1 else slots / shape.experts,
            min(slots, shape.experts) * expert_bytes,
            2 * 3 * shape.hidden * shape.width * slots,
        )

    def ids(self, n_tokens: int) -> NDArray[np.int32]:
        """Returns the token ids to feed in the next step, int32 [n_tokens]: for a single token the next of a cycle,
        otherwise consecutive ids, shuffled. A token's id decides its experts."""
        # Always the same deal: an expert comes again when all others had their turn.
        if n_tokens == 1:
            self._next = (self._next + 1) % self._deal
            return np.array([self._next], np.int32)
        first = int(self.draw.integers(self._rows // self._deal)) * self._deal
        ids = (first + np.arange(n_tokens)) % self._rows
        self.draw.shuffle(ids)
        return ids.astype(np.int32)


class LinearStack(LayerStack):
    """A stack of dense products [4096, 2048]."""

    N, K = 4096, 2048

    def __init__(self, pool: Pool, fmt: Format, free_bytes: int) -> None:
        name = f"{self.N}x{self.K}"
        matrices = (
            Tensor(name, self.N, self.K, Role.DENSE, (), cut=Cut.ROWS, part=ModelPart.DENSE_MLP),
        )
        super().__init__(name, pool, fmt, matrices, max(_LINEAR_TOKENS), free_bytes)
        out = self.program.buffer(self.N)

        def layer(x: View) -> View:
            (slices,) = self._weights()
            self.program.append("linear", (out, x), weight=slices)
            return out

        self._record(self.K, layer)

    def cases(self, works: Sequence[Work], per_expert: Sequence[int]) -> list[LayerCase]:
        """Returns the cases to measure on this stack of dense products, one for each number of tokens; [] if `works`
        does not contain LINEAR."""
        if Work.LINEAR not in works:
            return []
        size, elements = self.size_bytes // self.layers, self.N * self.K
        return [LayerCase(Work.LINEAR, n, None, size, 2 * elements * n) for n in _LINEAR_TOKENS]

    def ids(self, n_tokens: int) -> NDArray[np.int32]:
        """Returns token ids that are all 0, as products do not depend on them, int32 [n_tokens]."""
        return np.zeros(n_tokens, np.int32)


def measure(
    stack: LayerStack,
    case: LayerCase,
    ceilings: Ceilings,
    *,
    pairs: int = PAIRS,
    progress: Callable[[int], None] = lambda done: None,
) -> LayerResult:
    """Returns the measured seconds of one layer in one step of a case, with the machine's limit (reading or arithmetic)
    that they are compared with.

    Args:
        pairs: the number of runs, each between two measurements of the ceiling.
        progress: called after each run with the number of runs done.
    """
    kind = _ceiling(stack, case)
    amount = case.read_bytes if kind is Ceiling.READ else case.ops
    # Steps through all weights.
    warm = max(1, ceil(stack.size_bytes / case.read_bytes / stack.layers))
    stack.run(case.n_tokens, warm)
    steps = max(1, ceil(_RUN_S * warm / stack.run(case.n_tokens, warm)))
    rates: list[float] = []

    def work() -> float:
        return stack.run(case.n_tokens, steps) / (steps * stack.layers)

    def ideal() -> float:
        rates.append(ceilings.measure(kind))
        return amount / rates[-1]

    measured = alternate(work, ideal, pairs=pairs, progress=progress)
    return LayerResult(
        stack.name,
        stack.format.name,
        case,
        measured,
        kind,
        float(np.median(rates)),
        stack.layers,
        stack.size_bytes,
    )


def _ceiling(stack: LayerStack, case: LayerCase) -> Ceiling:
    if case.n_tokens == 1:
        return Ceiling.READ
    return Ceiling.INT8 if stack.format.activation_bits == 8 else Ceiling.BF16


def _slices(tensor: Tensor, fmt: Format, shares: Sequence[int]) -> tuple[Slice, ...]:
    """The slice of each node; the whole tensor where there is one node."""
    size = packed_bytes(fmt, tensor.n, tensor.k) * tensor.count
    slices = slices_of(tensor, Recipe(fmt, fmt), shares)
    return slices or (Slice(range(tensor.n), tensor.n, tensor.k, size),)


def _stack_bytes() -> int:
    return min(_MOST_STACK_BYTES, max(_STACK_BYTES, _STACK_CACHES * cache_bytes(3)))


def _deals(
    shape: LayerShape, n_tokens: int, draw: np.random.Generator
) -> tuple[int, NDArray[np.uint16]]:
    """The tokens of a deal, and logits [at least n_tokens, E] as bf16 bits.

    A deal hands out a shuffled deck of all experts, K to each token, until everybody had the same.
    """
    deal = lcm(shape.experts, shape.top_k) // shape.top_k
    rows = ceil_to(max(n_tokens, deal), deal)
    hands = [
        np.resize(draw.permutation(shape.experts), (deal, shape.top_k)) for _ in range(rows // deal)
    ]
    chosen: NDArray[Any] = np.concatenate(hands)
    logits = np.full((rows, shape.experts), -8.0, np.float32)
    logits[np.arange(rows)[:, None], chosen] = draw.uniform(0, 2, chosen.shape)
    return deal, (logits.view(np.uint32) >> 16).astype(np.uint16)
