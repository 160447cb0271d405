"""The CPU backend: turns a forward into a native program.

The forward is traced once: each call notes one operation on virtual buffers, and `record` (trace.py) makes a
`native.Program` of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.native import BLOCK_COLUMNS, PAGE_TOKENS, SILU, Glu, Program, View, Weight
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
    Value,
)
from ktcli.ops.tensors import Tensor
from ktcli.ops.trace import Trace
from ktcli.ops.windows import MqaShape, PoolShape

# What the loader put into memory: packed weights, one slice per node of the pool, or a single weight where nodes
# do not share it; bf16 rows of the embedding, f32 vectors.
Loaded = tuple[Weight, ...] | NDArray[Any]


class _Routed:
    """A routing, before its operation is recorded and it has a number."""


class NativeBackend(Trace, Backend):
    """Traces a forward over loaded tensors.

    Args:
        loaded: tensor name -> what the loader made of it.
        offsets: where each layer's part of a KV page begins, bytes.
        states: where each layer's part of a sequence's state begins, f32 elements.
        deferring: how many layers with experts may defer some to the next one: all but the last, or none.
            Steps say how many experts (`Step.defer`).
    """

    def __init__(
        self,
        loaded: Mapping[str, Loaded],
        offsets: Sequence[int],
        states: Sequence[int] = (),
        *,
        deferring: int = 0,
    ) -> None:
        super().__init__()
        self._loaded = loaded
        self._offsets, self._states = offsets, states
        self._deferring = deferring
        self._late: View | None = None  # what the last layer with experts deferred
        self._routes: list[_Routed] = []  # in layer order
        self._numbers: dict[_Routed, int] = {}  # of those and of their parts, in the program
        self._ropes: dict[Rope, int] = {}
        self._choice = 0  # while recording: the number of the last one

    def embed(self, table: Tensor) -> Value:
        rows = self._array(table)
        out = self._buffer(table.k)
        self._note(lambda p, v: p.embed(v[0], rows), out)
        return out

    def norm(
        self,
        x: View,
        gain: Tensor | None,
        eps: float,
        *,
        head_width: int | None = None,
        columns: int | None = None,
    ) -> Value:
        values = None if gain is None else self._array(gain)
        if head_width is None and columns is None:
            out = self._buffer(x.width, like=x)
            self._note(lambda p, v: p.norm(v[0], v[1], values, eps), out, x)
            return out
        part = x if columns is None else replace(x, width=columns)
        self._note(lambda p, v: p.norm(v[0], v[0], values, eps, head_width), part)
        return x

    def layer_norm(self, x: View, gain: Tensor, bias: Tensor, eps: float) -> Value:
        values = self._array(gain), self._array(bias)
        out = self._buffer(x.width, like=x)
        self._note(lambda p, v: p.layer_norm(v[0], v[1], *values, eps), out, x)
        return out

    def linear(
        self, x: View, weight: Tensor, *, bias: Tensor | None = None, reads: Reads = Reads.FORMAT
    ) -> Value:
        packed = self._slices(weight)
        offsets = None if bias is None else self._array(bias)
        out = self._buffer(weight.n, like=x)
        self._note(lambda p, v: p.linear(v[0], v[1], packed, offsets, reads), out, x)
        return out

    def grouped(self, x: View, weights: tuple[Tensor, ...]) -> Value:
        out = self._buffer(sum(weight.n for weight in weights), like=x)
        columns = self.split(x, *(weight.k for weight in weights))
        parts = self.split(out, *(weight.n for weight in weights))
        for weight, one, part in zip(weights, columns, parts, strict=True):
            self._note(partial(_multiply, self._slices(weight)), part, one)
        return out

    def split(self, x: View, *widths: int) -> tuple[Value, ...]:
        ends = np.cumsum(widths).tolist()
        starts = [0, *ends[:-1]]
        return tuple(
            View(x.buffer, x.column + start, width)
            for start, width in zip(starts, widths, strict=True)
        )

    def rope(self, x: View, rope: Rope, *, head_width: int, first: int = 0) -> Value:
        def emit(p: Program, v: tuple[View, ...]) -> None:
            if rope not in self._ropes:
                self._ropes[rope] = p.rope_table(
                    np.array(rope.inv_freq, dtype=np.float32), rope.scale, rope.shift
                )
            p.rope(v[0], self._ropes[rope], head_width, first, rope.interleaved)

        self._note(emit, x)
        return x

    def gqa(
        self,
        q: View,
        k: View,
        v: View,
        shape: GqaShape,
        *,
        layer: int,
        sinks: Tensor | None = None,
        chosen: bool = False,
    ) -> Value:
        out = self._buffer(shape.heads * shape.value_dim, like=q)
        s, offset = shape, self._offsets[layer]
        facts = (s.heads, s.kv_heads, s.head_dim, s.scale, offset, s.window)
        values = None if sinks is None else self._array(sinks)

        def emit(p: Program, w: tuple[View, ...]) -> None:
            p.gqa(w[0], w[1], w[2], w[3], facts, values, self._choice if chosen else 0, s.v)

        self._note(emit, out, q, k, v)
        return out

    def choose(
        self, q: View, key: View, weight: View | None, shape: ChooseShape, *, layer: int
    ) -> None:
        s, offset = shape, self._offsets[layer]

        def emit(p: Program, v: tuple[View, ...]) -> None:
            at = offset + s.behind * PAGE_TOKENS * (4 if p.kv_f32 else 2)
            facts = (s.heads, s.dim, s.top_k, s.block, s.local, s.scale, at, s.every)
            self._choice = p.choose(v[0], v[1], v[2] if len(v) > 2 else None, facts)

        self._note(emit, q, key, *(() if weight is None else (weight,)))

    def mla(
        self,
        q: View,
        latent: View,
        weights: tuple[Tensor, Tensor, Tensor],
        shape: MlaShape,
        *,
        layer: int,
        chosen: bool = False,
    ) -> Value:
        out = self._buffer(shape.heads * shape.v, like=q)
        s = shape
        facts = (s.heads, s.nope, s.rope, s.v, s.lora, s.scale, self._offsets[layer])
        uk_in, uk_out, uv = (self._slices(tensor)[0] for tensor in weights)

        def emit(p: Program, v: tuple[View, ...]) -> None:
            choice = self._choice if chosen else 0
            p.mla(v[0], v[1], v[2], facts, (uk_in, uk_out, uv), choice)

        self._note(emit, out, q, latent)
        return out

    def mqa(
        self,
        q: View,
        kv: View,
        pooled: View | None,
        shape: MqaShape,
        *,
        layer: int,
        first: int,
        sinks: Tensor | None = None,
        chosen: bool = False,
    ) -> Value:
        s, offset, start = shape, self._offsets[layer], self._states[layer] + first
        values = None if sinks is None else self._array(sinks)
        most = s.context // s.every if s.every else 0

        def emit(p: Program, v: tuple[View, ...]) -> None:
            windows = (s.every, self._choice if chosen else 0, most, offset)
            rule = (s.heads, s.dim, s.scale, s.window)
            p.mqa(v[0], v[1], v[2], v[3] if s.every else None, rule, windows, values, start)

        out = self._buffer(s.heads * s.dim, like=q)
        self._note(emit, out, q, kv, *(() if pooled is None else (pooled,)))
        return out

    def conv(self, x: View, weight: Tensor, *, layer: int, first: int = 0) -> Value:
        rows = self._array(weight).reshape(-1, x.width)
        out, start = self._buffer(x.width, like=x), self._states[layer] + first
        self._note(lambda p, v: p.conv(v[0], v[1], rows, start), out, x)
        return out

    def pool(
        self, x: View, score: View, bias: Tensor, shape: PoolShape, *, layer: int, first: int
    ) -> Value:
        rows, start = self._array(bias).reshape(shape.every, -1), self._states[layer] + first
        out = self._buffer(shape.dim, like=x)
        self._note(
            lambda p, v: p.windows(v[0], v[1], v[2], shape.every, rows, start), out, x, score
        )
        return out

    def delta(
        self,
        qkv: tuple[View, View, View],
        gates: tuple[View, View],
        learned: tuple[Tensor, Tensor],
        shape: DeltaShape,
        *,
        layer: int,
        first: int,
    ) -> Value:
        s = shape
        facts = (s.heads, s.key_heads, s.dk, s.dv, s.lowest)
        arrays = self._array(learned[0]), self._array(learned[1])
        start = self._states[layer] + first
        out = self._buffer(s.heads * s.dv, like=qkv[2])

        def emit(p: Program, v: tuple[View, ...]) -> None:
            p.delta(v[0], (v[1], v[2], v[3]), (v[4], v[5]), facts, arrays, start)

        self._note(emit, out, *qkv, *gates)
        return out

    def route(
        self,
        logits: View,
        routing: Routing,
        *,
        bias: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Value:
        r = routing
        kinds = int(r.score), int(r.group_score), int(r.normalize)
        groups = (r.n_group, r.topk_group, *kinds, r.scale)
        offsets = None if bias is None else self._array(bias)
        given = None if table is None else self._array(table).reshape(-1, r.top_k).astype(np.int32)
        routed = _Routed()
        self._routes.append(routed)

        def emit(p: Program, v: tuple[View, ...]) -> None:
            self._numbers[routed] = p.route(v[0], (r.experts, r.top_k, *groups), offsets, given)

        self._note(emit, logits)
        return routed

    def experts(
        self,
        x: View,
        routed: _Routed,
        gate_up: Tensor,
        down: Tensor,
        *,
        glu: Glu = SILU,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> Value:
        packed = self._slices(gate_up), self._slices(down)
        offsets = None if biases is None else (self._array(biases[0]), self._array(biases[1]))

        def add(some: _Routed) -> View:
            def emit(p: Program, v: tuple[View, ...]) -> None:
                p.experts(v[0], v[1], self._numbers[some], *packed, glu, offsets)

            out = self._buffer(down.n, like=x)
            self._note(emit, out, x)
            return out

        before, self._late = self._late, None
        defers = len(self._routes) <= self._deferring
        now, later = self._split(routed) if defers else (routed, None)
        out = add(now)
        if before is not None:
            self._note(lambda p, v: p.carry(v[0], v[1]), out, before)
        if later is not None:
            self._late = add(later)
        return out

    def collect(self, started: View) -> Value:
        return started

    def _split(self, routed: _Routed) -> tuple[_Routed, _Routed]:
        """A routing's experts of now, and those that are deferred."""
        now, later = _Routed(), _Routed()

        def emit(p: Program, v: tuple[View, ...]) -> None:
            numbers = p.split(self._numbers[routed], None, late=True)
            self._numbers[now], self._numbers[later] = numbers

        self._note(emit)
        return now, later

    def swiglu(self, x: View, width: int, glu: Glu = SILU) -> Value:
        out = self._buffer(width, like=x)
        self._note(lambda p, v: p.swiglu(v[0], v[1], glu), out, x)
        return out

    def gate(self, x: View, by: View, kind: Gate = Gate.SIGMOID) -> Value:
        out = self._buffer(x.width, like=x)
        self._note(lambda p, v: p.gate(v[0], v[1], v[2], kind), out, x, by)
        return out

    def add(self, a: View, b: View) -> Value:
        out = self._buffer(a.width, like=a)
        self._note(lambda p, v: p.add(v[0], v[1], v[2]), out, a, b)
        return out

    def spread(self, x: View, streams: int) -> Value:
        out = self._buffer(streams * x.width, like=x)
        self._note(lambda p, v: p.spread(v[0], v[1]), out, x)
        return out

    def mix(self, x: View, scale: Tensor, base: Tensor, shape: MixShape) -> Value:
        arrays = self._array(scale), self._array(base)
        rule = (shape.streams, shape.iterations, shape.eps)
        self._note(lambda p, v: p.mix(v[0], rule, *arrays), x)
        return x

    def collapse(self, x: View, by: View) -> Value:
        out = self._buffer(x.width // by.width, like=x)
        self._note(lambda p, v: p.collapse(*v), out, x, by)
        return out

    def expand(self, x: View, y: View, by: View) -> Value:
        out = self._buffer(x.width, like=x)
        self._note(lambda p, v: p.expand(*v), out, x, y, by)
        return out

    def scale(self, x: View, by: float) -> Value:
        self._note(lambda p, v: p.scale(v[0], v[0], by), x)
        return x

    def select(self, x: View) -> Value:
        out = self._buffer(x.width, outputs=True)
        self._note(lambda p, v: p.select(v[0], v[1]), out, x)
        return out

    def summary(self, logits: View) -> tuple[View, View, View]:
        """What kt_program_summary finds: best [1], peaks [B] and sums [B] of every row."""
        blocks = -(-logits.width // BLOCK_COLUMNS)
        best, peaks, sums = (self._buffer(n, like=logits) for n in (1, blocks, blocks))
        self._note(lambda p, v: p.summary(*v), best, peaks, sums, logits)
        return best, peaks, sums

    @property
    def routings(self) -> tuple[int, ...]:
        """Numbers of the recorded routings, in layer order."""
        return tuple(self._numbers[routed] for routed in self._routes)

    def _slices(self, tensor: Tensor) -> tuple[Weight, ...]:
        found = self._loaded[tensor.name]
        assert isinstance(found, tuple), tensor.name
        return found

    def _array(self, tensor: Tensor) -> NDArray[Any]:
        found = self._loaded[tensor.name]
        assert isinstance(found, np.ndarray), tensor.name
        return found


def _multiply(packed: tuple[Weight, ...], program: Program, views: tuple[View, ...]) -> None:
    """views: out, in."""
    program.linear(views[0], views[1], packed, None, Reads.FORMAT)
