"""The device backend: executes a forward in torch, on a GPU or, in tests, on the CPU.

One backend is one step: it is made with what the step reads (embedded rows, positions, pages), runs the
forward once and is dropped; or it is run once under capture, and the graph replayed while the caller writes
the same tensors anew. The residual stream and all rows between operations are f32. Where the experts run is
not decided here: an `ExpertRunner` takes a layer's rows and gives back their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch

from ktcli.native import PAGE_TOKENS, SILU, Glu
from ktcli.ops.backend import (
    Backend,
    ChooseShape,
    DeltaShape,
    Gate,
    GqaShape,
    MixShape,
    MlaShape,
    Reads,
    Rope,
    Routing,
)
from ktcli.ops.tensors import Tensor
from ktcli.ops.torch import functions, hyper, pooling, recurrent
from ktcli.ops.torch.chosen import Chosen
from ktcli.ops.torch.functions import KvPages, RopeTable, Rows
from ktcli.ops.torch.kernels import EXACT, Absorbed, Kernels
from ktcli.ops.torch.packed import Matrix, Packed, Stack
from ktcli.ops.windows import MqaShape, PoolShape

Value = torch.Tensor
Routed = tuple[torch.Tensor, torch.Tensor]  # ids int32 [T, K], gate f32 [T, K]


_OPENED: dict[Gate, Callable[[torch.Tensor], torch.Tensor]] = {
    Gate.SIGMOID: torch.sigmoid,
    Gate.SILU: torch.nn.functional.silu,
    Gate.SOFTPLUS: torch.nn.functional.softplus,
}


class ExpertRunner(Protocol):
    """Where the chosen experts of a layer run. `layer` counts the layers with experts from 0."""

    def start(self, layer: int, x: Value, ids: torch.Tensor, gate: torch.Tensor) -> Any:
        """Begin x [T, H] through the experts ids [T, K], weighted by gate [T, K]; what `finish` takes."""

    def finish(self, pending: Any) -> Value:
        """The weighted sum [T, H] f32, with what the runner kept of the layer before, if it defers."""


class ResidentRunner:
    """All experts on the device.

    Args:
        stacks: of each layer with experts. What a layer's slots leave out counts as zero.
    """

    def __init__(self, kernels: Kernels, stacks: Sequence[Stack]) -> None:
        self._kernels, self._stacks = kernels, stacks

    def start(self, layer: int, x: Value, ids: torch.Tensor, gate: torch.Tensor) -> Value:
        stack = self._stacks[layer]
        return self._kernels.experts(
            x, ids, gate, stack.slots, stack.gate_up, stack.down, stack.extras
        )

    def finish(self, pending: Value) -> Value:
        return pending


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's tensors on the device, by name; experts and embedding are not among them.

    Attributes:
        matrices: dense matrices and the router, and latent attention's, packed, with one matrix per head.
        vectors: f32.
    """

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step reads, all on the device.

    Attributes:
        x: [T, H], the embedded rows.
        caches: of each layer its pages, flat: 64 * elements per position * pages.
        first_output: rows from here on give logits.
        states: of each layer what it keeps of sequences, f32 [slots, elements]; (): no layer does.
    """

    x: torch.Tensor
    rows: Rows
    caches: Sequence[torch.Tensor]
    first_output: int = 0
    states: Sequence[torch.Tensor] = ()


class TorchBackend(Backend):
    """Executes one step.

    Attributes:
        routings: of each layer with experts so far, what the router chose.
    """

    def __init__(
        self, weights: Weights, step: StepInputs, kernels: Kernels, runner: ExpertRunner
    ) -> None:
        self._weights, self._step = weights, step
        self._kernels, self._runner = kernels, runner
        self.routings: list[Routed] = []
        self._chosen: Chosen | None = None

    def embed(self, table: Tensor) -> Value:
        """The rows that the caller gathered: the table itself stays in host memory."""
        assert self._step.x.shape[1] == table.k, table.name
        return self._step.x.float()

    def norm(
        self,
        x: Value,
        gain: Tensor | None,
        eps: float,
        *,
        head_width: int | None = None,
        columns: int | None = None,
    ) -> Value:
        width = head_width or columns or x.shape[1]
        values = x.new_ones(width) if gain is None else self._weights.vectors[gain.name]
        if columns is None:
            return self._kernels.norm(x, values, eps)
        x[:, :columns] = self._kernels.norm(x[:, :columns], values, eps)
        return x

    def layer_norm(self, x: Value, gain: Tensor, bias: Tensor, eps: float) -> Value:
        scale, offset = (self._weights.vectors[each.name] for each in (gain, bias))
        return torch.nn.functional.layer_norm(x, (x.shape[1],), scale, offset, eps)

    def linear(
        self, x: Value, weight: Tensor, *, bias: Tensor | None = None, reads: Reads = Reads.FORMAT
    ) -> Value:
        """WIDE is nothing special here: bf16 has no columns that are too large."""
        kernels = EXACT if reads is Reads.F32 else self._kernels
        offsets = None if bias is None else self._weights.vectors[bias.name]
        return kernels.linear(x, self._weights.matrices[weight.name], offsets)

    def grouped(self, x: Value, weights: tuple[Tensor, ...]) -> Value:
        columns = self.split(x, *(weight.k for weight in weights))
        done = (self.linear(part, w) for part, w in zip(columns, weights, strict=True))
        return torch.cat(list(done), -1)

    def split(self, x: Value, *widths: int) -> tuple[Value, ...]:
        return torch.split(x, list(widths), dim=-1)

    def rope(self, x: Value, rope: Rope, *, head_width: int, first: int = 0) -> Value:
        table, rows = rope_table(rope, x.device), self._step.rows
        if rope.shift:
            rows = replace(rows, positions=rows.positions + rope.shift)
        return self._kernels.rope(x, rows, table, head_width, first, rope.interleaved)

    def gqa(
        self,
        q: Value,
        k: Value,
        v: Value,
        shape: GqaShape,
        *,
        layer: int,
        sinks: Tensor | None = None,
        chosen: bool = False,
    ) -> Value:
        pages = kv_pages(self._step.caches[layer], shape)
        if chosen and self._chosen is not None:
            assert sinks is None and not shape.window, "no family has both"
            return self._kernels.gqa_chosen(q, k, v, pages, self._chosen, self._step.rows, shape)
        scores = None if sinks is None else self._weights.vectors[sinks.name]
        return self._kernels.gqa(q, k, v, pages, self._step.rows, shape, scores)

    def mla(
        self,
        q: Value,
        latent: Value,
        weights: tuple[Tensor, Tensor, Tensor],
        shape: MlaShape,
        *,
        layer: int,
        chosen: bool = False,
    ) -> Value:
        pages, _ = both_parts(self._step.caches[layer], shape.lora + shape.rope, shape.beside)
        rest = self._step.rows, shape
        if chosen and self._chosen is not None:
            absorbed = self._absorbed(weights)
            return self._kernels.mla_chosen(q, latent, pages, absorbed, self._chosen, *rest)
        return self._kernels.mla(q, latent, pages, self._absorbed(weights), *rest)

    def choose(
        self, q: Value, key: Value, weight: Value | None, shape: ChooseShape, *, layer: int
    ) -> None:
        _, part = both_parts(self._step.caches[layer], shape.behind, shape.elements)
        keys = window_rows(part, shape.dim, shape.every)
        self._chosen = self._kernels.choose(q, key, weight, keys, self._step.rows, shape)

    def mqa(
        self,
        q: Value,
        kv: Value,
        pooled: Value | None,
        shape: MqaShape,
        *,
        layer: int,
        first: int,
        sinks: Tensor | None = None,
        chosen: bool = False,
    ) -> Value:
        pages = kv.new_empty(0)  # of a layer without pooled rows
        if shape.every:
            part, _ = both_parts(self._step.caches[layer], shape.paged, shape.beside)
            pages = window_rows(part, shape.dim, shape.every)
        scores = None if sinks is None else self._weights.vectors[sinks.name]
        kept, choice = (self._states(layer), first), self._chosen if chosen else None
        return self._kernels.mqa(q, kv, pooled, pages, self._step.rows, shape, kept, scores, choice)

    def conv(self, x: Value, weight: Tensor, *, layer: int, first: int = 0) -> Value:
        rows = self._weights.vectors[weight.name].view(-1, x.shape[1])
        return recurrent.conv(x, rows, self._states(layer), self._step.rows.run, first)

    def pool(
        self, x: Value, score: Value, bias: Tensor, shape: PoolShape, *, layer: int, first: int
    ) -> Value:
        rows = self._weights.vectors[bias.name].view(shape.every, -1)
        return pooling.pool(
            x,
            score + rows[self._step.rows.positions % shape.every],
            self._step.rows,
            shape,
            self._states(layer),
            first,
        )

    def delta(
        self,
        qkv: tuple[Value, Value, Value],
        gates: tuple[Value, Value],
        learned: tuple[Tensor, Tensor],
        shape: DeltaShape,
        *,
        layer: int,
        first: int,
    ) -> Value:
        rate, bias = (self._weights.vectors[each.name] for each in learned)
        states, run = self._states(layer), self._step.rows.run
        return recurrent.delta(qkv, gates, (rate, bias), shape, states, first=first, run=run)

    def _states(self, layer: int) -> recurrent.States:
        slots = self._step.rows.slots
        assert slots is not None, "the step says nothing of states"
        return recurrent.States(self._step.states[layer], slots)

    def route(
        self,
        logits: Value,
        routing: Routing,
        *,
        bias: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Routed:
        offsets = None if bias is None else self._weights.vectors[bias.name]
        if table is not None:
            ids = self._step.rows.ids
            assert ids is not None, "the step says nothing of ids"
            every = self._weights.vectors[table.name].view(-1, routing.top_k)
            routed = functions.weigh(logits, routing, every.index_select(0, ids).long())
        else:
            routed = self._kernels.route(logits, routing, offsets)
        self.routings.append(routed)
        return routed

    def experts(
        self,
        x: Value,
        routed: Routed,
        gate_up: Tensor,
        down: Tensor,
        *,
        glu: Glu = SILU,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """What an expert is made of, the runner knows."""
        return self._runner.start(len(self.routings) - 1, x, *routed)

    def collect(self, started: Any) -> Value:
        return self._runner.finish(started)

    def swiglu(self, x: Value, width: int, glu: Glu = SILU) -> Value:
        return self._kernels.swiglu(x, width, glu)

    def gate(self, x: Value, by: Value, kind: Gate = Gate.SIGMOID) -> Value:
        opened = _OPENED[kind](by)
        runs = torch.unflatten(x, -1, (by.shape[-1], -1))
        return (runs * opened[..., None]).flatten(-2)

    def add(self, a: Value, b: Value) -> Value:
        return a + b

    def spread(self, x: Value, streams: int) -> Value:
        return x.repeat(1, streams)

    def mix(self, x: Value, scale: Tensor, base: Tensor, shape: MixShape) -> Value:
        vectors = self._weights.vectors
        return hyper.mix(x, vectors[scale.name], vectors[base.name], shape)

    def collapse(self, x: Value, by: Value) -> Value:
        return hyper.collapse(x, by)

    def expand(self, x: Value, y: Value, by: Value) -> Value:
        return hyper.expand(x, y, by)

    def scale(self, x: Value, by: float) -> Value:
        return x * by

    def select(self, x: Value) -> Value:
        return x[self._step.first_output :]

    def _absorbed(self, weights: tuple[Tensor, Tensor, Tensor]) -> Absorbed:
        found = [self._weights.matrices[tensor.name] for tensor in weights]
        uk_in, uk_out, uv = (each for each in found if isinstance(each, Packed))
        return uk_in, uk_out, uv


def kv_pages(flat: torch.Tensor, shape: GqaShape) -> KvPages:
    """K and V of a layer's cache, [pages, 64, kv_heads, head_dim] and [pages, 64, kv_heads, value_dim]."""
    heads, wide = shape.kv_heads, shape.kv_heads * shape.head_dim
    keys, rest = both_parts(flat, wide, shape.kept - wide + shape.beside)
    values, _ = both_parts(rest.view(-1), shape.kept - wide, shape.beside)
    return torch.unflatten(keys, -1, (heads, -1)), torch.unflatten(values, -1, (heads, -1))


def both_parts(flat: torch.Tensor, first: int, behind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's cache as pages of two parts, [pages, 64, first] and [pages, 64, behind]."""
    pages = flat.shape[0] // (PAGE_TOKENS * (first + behind))
    cut = pages * PAGE_TOKENS * first
    rest = flat[cut:].view(pages, PAGE_TOKENS, behind)
    return flat[:cut].view(pages, PAGE_TOKENS, first), rest


def window_rows(part: torch.Tensor, dim: int, every: int) -> torch.Tensor:
    """Rows [pages, 64 / every, dim], one at least, at the beginning of each page of a part [pages, 64, …]."""
    rows = max(1, PAGE_TOKENS // every)
    return torch.unflatten(part.flatten(1)[:, : rows * dim], 1, (rows, dim))


@cache
def rope_table(rope: Rope, device: torch.device) -> RopeTable:
    """The rotation's frequencies. Made at the first use on a device: before anything is captured there."""
    return torch.tensor(rope.inv_freq, dtype=torch.float32, device=device), rope.scale
