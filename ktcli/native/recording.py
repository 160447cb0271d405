"""What a program can record: one method for each operation, which checks its arguments and keeps what C borrows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import NativeError
from ktcli.native.library import PANEL_ROWS, DType, Weight, library, require
from ktcli.native.operands import SILU, Glu, View
from ktcli.native.pool import Pool

F32Array = NDArray[np.float32]

_F32_BYTES = 4


class Recording:
    """The operations of a program, in the order of the calls. See kt.h for what each computes.

    Attributes:
        labels: the kind of each operation.
    """

    def __init__(self, handle: Any, pool: Pool) -> None:
        """`handle`: a kt_program, which frees itself."""
        self._ffi, self._lib = library()
        self.handle, self.pool = handle, pool
        self.labels: list[str] = []
        self._experts: list[int] = []  # of each routing
        self._keep: list[Any] = []

    def buffer(self, width: int, *, outputs: bool = False) -> View:
        """A new buffer; one row per token, or per wanted output."""
        number = self._check(self._lib.kt_program_buffer(self.handle, width, int(outputs)))
        return View(number, 0, width)

    def embed(self, out: View, table: NDArray[np.uint16] | F32Array) -> None:
        """`table` [vocab, width], bf16 bits or f32."""
        require(
            table.dtype in (np.uint16, np.float32) and table.shape[1] == out.width,
            "embedding table does not fit",
        )
        dtype = DType.F32 if table.dtype == np.float32 else DType.BF16
        pointer = self._borrow("float[]" if dtype is DType.F32 else "uint16_t[]", table)
        record = self._lib.kt_program_embed
        self._record("embed", record, self._view(out), pointer, int(dtype), table.shape[0])

    def norm(
        self, out: View, x: View, gain: F32Array | None, eps: float, run: int | None = None
    ) -> None:
        """RMSNorm of each run of `run` columns, or of as many as the gain has; without either, of each row."""
        pointer = self._ffi.NULL if gain is None else self._borrow("float[]", gain)
        width = run or (x.width if gain is None else gain.size)
        require(gain is None or gain.size == width, f"a gain for runs of {width} columns")
        views = self._view(out), self._view(x)
        self._record("norm", self._lib.kt_program_norm, *views, width, pointer, eps)

    def layer_norm(self, out: View, x: View, gain: F32Array, bias: F32Array, eps: float) -> None:
        """LayerNorm of each row; gain and bias [width]."""
        require(gain.size == bias.size == x.width, "gain and bias do not fit")
        values = self._borrow("float[]", gain), self._borrow("float[]", bias)
        views = self._view(out), self._view(x)
        self._record("norm", self._lib.kt_program_layer_norm, *views, *values, eps)

    def linear(
        self, out: View, x: View, slices: Sequence[Weight], bias: F32Array | None, reads: int
    ) -> None:
        """`slices`: of each node of the pool its rows of the matrix."""
        bias_pointer = self._ffi.NULL if bias is None else self._borrow("float[]", bias)
        self._record(
            "linear",
            self._lib.kt_program_linear,
            self._view(out),
            self._view(x),
            self._slices(slices),
            bias_pointer,
            reads,
        )

    def rope_table(self, inv_freq: F32Array, scale: float, shift: int = 0) -> int:
        """A rotation table; returns its number."""
        pointer = self._borrow("float[]", inv_freq)
        return self._check(
            self._lib.kt_program_rope_table(self.handle, 2 * inv_freq.size, pointer, scale, shift)
        )

    def rope(self, x: View, table: int, head_width: int, first: int, interleaved: bool) -> None:
        self._record(
            "rope",
            self._lib.kt_program_rope,
            self._view(x),
            table,
            head_width,
            first,
            int(interleaved),
        )

    def gqa(
        self,
        out: View,
        q: View,
        k: View,
        v: View,
        shape: tuple[int, int, int, float, int, int],
        sinks: F32Array | None = None,
        choice: int = 0,
        value_dim: int = 0,
    ) -> None:
        """`shape`: heads, kv_heads, head_dim, score scale, layer offset in bytes into a page, window;
        `choice`: whose blocks are attended to, 0: all; `value_dim`: columns of a head's values, 0: head_dim."""
        require(sinks is None or sinks.size == shape[0], f"one sink for each of {shape[0]} heads")
        views = (self._view(view) for view in (out, q, k, v))
        pointer = self._ffi.NULL if sinks is None else self._borrow("float[]", sinks)
        struct = self._ffi.new("kt_gqa *", (*shape, pointer, choice, value_dim))
        self._record("gqa", self._lib.kt_program_gqa, *views, struct)

    def choose(
        self,
        q: View,
        key: View,
        weight: View | None,
        shape: tuple[int, int, int, int, int, float, int, int],
    ) -> int:
        """`shape`: heads, dim, top_k, block, local blocks, score scale, layer offset, positions of a window.

        Returns the number of the choice.
        """
        self.labels.append("choose")
        struct = self._ffi.new("kt_choose *", shape)
        views = map(self._view, (q, key, weight or View(0, 0, 0)))
        return self._check(self._lib.kt_program_choose(self.handle, *views, struct))

    def mla(
        self,
        out: View,
        q: View,
        latent: View,
        shape: tuple[int, int, int, int, int, float, int],
        weights: tuple[Weight, Weight, Weight],
        choice: int = 0,
    ) -> None:
        """`shape`: heads, nope, rope, v, lora, score scale, layer offset; `weights`: uk_in, uk_out, uv;
        `choice`: whose positions are attended to, 0: all."""
        packed = self._weights(weights)  # an item of a C array lives as long as the array
        fields = (*shape, *(packed[i] for i in range(len(weights))), choice)
        struct = self._ffi.new("kt_mla *", fields)
        self._record("mla", self._lib.kt_program_mla, *map(self._view, (out, q, latent)), struct)

    def conv(self, out: View, x: View, weight: F32Array, state_first: int) -> None:
        """`weight` [width, columns]; its state begins with this f32 element."""
        require(weight.ndim == 2 and weight.shape[1] == x.width, "weights of another width")
        pointer = self._borrow("float[]", weight)
        struct = self._ffi.new("kt_conv *", (weight.shape[0], pointer, _F32_BYTES * state_first))
        self._record("conv", self._lib.kt_program_conv, self._view(out), self._view(x), struct)

    def mqa(
        self,
        out: View,
        q: View,
        kv: View,
        pooled: View | None,
        rule: tuple[int, int, float, int],
        windows: tuple[int, int, int, int],
        sinks: F32Array | None,
        state_first: int,
    ) -> None:
        """
        Args:
            rule: heads, dim, score scale, window.
            windows: positions of each, choice, most that a token sees, layer offset.
            sinks: [heads] or None.
            state_first: f32 element with which its state begins.
        """
        require(sinks is None or sinks.size == rule[0], "sinks of another number of heads")
        pointer = self._ffi.NULL if sinks is None else self._borrow("float[]", sinks)
        struct = self._ffi.new("kt_mqa *", (*rule, pointer, _F32_BYTES * state_first, *windows))
        views = map(self._view, (out, q, kv, pooled or View(0, 0, 0)))
        self._record("mqa", self._lib.kt_program_mqa, *views, struct)

    def windows(
        self, out: View, x: View, score: View, every: int, bias: F32Array, state_first: int
    ) -> None:
        """`bias` [every, width of x], which is that of out, or twice that; the state begins with this f32
        element."""
        require(bias.shape == (every, x.width), "a bias of another shape")
        pointer, overlap = self._borrow("float[]", bias), x.width > out.width
        rule = (every, overlap, pointer, _F32_BYTES * state_first)
        struct = self._ffi.new("kt_pooling *", rule)
        self._record(
            "windows", self._lib.kt_program_pool, *map(self._view, (out, x, score)), struct
        )

    def delta(
        self,
        out: View,
        qkv: tuple[View, View, View],
        gates: tuple[View, View],
        shape: tuple[int, int, int, int, float],
        learned: tuple[F32Array, F32Array],
        state_first: int,
    ) -> None:
        """Consumes q, k and the gates.

        Args:
            gates: decay, beta.
            shape: heads, key heads, columns of a key, columns of a value, lowest logarithm of decay.
            learned: log_rate, bias.
            state_first: f32 element with which its state begins.
        """
        sizes = shape[0], gates[0].width
        require(tuple(a.size for a in learned) == sizes, "rates of another number of heads")
        rates = (self._borrow("float[]", array) for array in learned)
        struct = self._ffi.new(
            "kt_delta *", (*shape[:4], *rates, _F32_BYTES * state_first, shape[4])
        )
        views = self._ffi.new("kt_view[3]", [self._view(view) for view in qkv])
        others = map(self._view, gates)
        self._record("delta", self._lib.kt_program_delta, self._view(out), views, *others, struct)

    def route(
        self,
        logits: View,
        rule: tuple[int, int, int, int, int, int, int, float],
        bias: F32Array | None,
        table: NDArray[np.int32] | None = None,
    ) -> int:
        """`rule`: experts, top_k, n_group, topk_group, score, group_score, normalize, scale.

        Args:
            table: [vocab, top_k], the experts of each token id.
        Returns:
            The routing's number.
        """
        null = self._ffi.NULL
        pointer = null if bias is None else self._borrow("float[]", bias)
        router = self._ffi.new("kt_router *", (*rule, pointer, null, 0))
        if table is not None:
            require(table.dtype == np.int32 and table.shape[1:] == (rule[1],), "table does not fit")
            router.table, router.vocab = self._borrow("int32_t[]", table), len(table)
        self.labels.append("route")
        number = self._check(self._lib.kt_program_route(self.handle, self._view(logits), router))
        self._experts.append(rule[0])
        return number

    def given(self, experts: int, top_k: int) -> int:
        """A routing whose ids and gate the caller writes before each run (`routing` gives the arrays).

        Returns its number.
        """
        number = self._check(self._lib.kt_program_given(self.handle, experts, top_k))
        self._experts.append(experts)
        return number

    def split(
        self, routing: int, elsewhere: NDArray[np.uint8] | None, *, late: bool
    ) -> tuple[int, int]:
        """A routing without the experts that are computed elsewhere, in two where `late`.

        Args:
            elsewhere: [E] uint8, read at each run: not 0 where something else computes the expert.
            late: some experts are deferred, as many as `Step.defer` says.
        Returns:
            The numbers of what is computed now and of what is late; -1 for the latter without `late`.
        """
        ffi = self._ffi
        require(0 <= routing < len(self._experts), f"routing {routing} of {len(self._experts)}")
        experts = self._experts[routing]
        fits = elsewhere is None or (elsewhere.dtype == np.uint8 and elsewhere.shape == (experts,))
        require(fits, f"elsewhere says it of each of {experts} experts, in uint8")
        mask = ffi.NULL if elsewhere is None else self._borrow("uint8_t[]", elsewhere)
        numbers = ffi.new("int32_t[2]", (-1, -1))
        second = numbers + 1 if late else ffi.NULL
        self._record("split", self._lib.kt_program_split, routing, mask, numbers, second)
        self._experts += [experts] * (1 + late)
        return int(numbers[0]), int(numbers[1])

    def experts(
        self,
        out: View,
        x: View,
        routing: int,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        glu: Glu = SILU,
        biases: tuple[F32Array, F32Array] | None = None,
    ) -> None:
        """
        Args:
            gate_up, down: of each node of the pool its rows, and its columns.
            biases: of all experts, [E, 2I'] in the order of the rows of gate_up, and [E, H].
        """
        weights = self._slices(gate_up), self._slices(down)
        ffi, activation = self._ffi, self._ffi.new("kt_glu *", glu)
        options = ffi.new("kt_experts *", (activation, ffi.NULL, ffi.NULL))
        if biases is not None:
            rows = 2 * sum(-(-weight.k // PANEL_ROWS) * PANEL_ROWS for weight in down)
            sizes = tuple(self._experts[routing] * n for n in (rows, out.width))
            require(tuple(b.size for b in biases) == sizes, f"biases of {sizes} values")
            options.gate_up_bias, options.down_bias = (self._borrow("float[]", b) for b in biases)
        self._record(
            "experts",
            self._lib.kt_program_experts,
            self._view(out),
            self._view(x),
            routing,
            *weights,
            options,
        )

    def swiglu(self, out: View, x: View, glu: Glu = SILU) -> None:
        struct = self._ffi.new("kt_glu *", glu)
        self._record("swiglu", self._lib.kt_program_swiglu, self._view(out), self._view(x), struct)

    def gate(self, out: View, x: View, by: View, kind: int) -> None:
        """`kind`: KT_GATE_*"""
        self._record("gate", self._lib.kt_program_gate, *map(self._view, (out, x, by)), kind)

    def add(self, out: View, a: View, b: View) -> None:
        self._record("add", self._lib.kt_program_add, *map(self._view, (out, a, b)))

    def spread(self, out: View, x: View) -> None:
        """x to each stream of out."""
        self._record("spread", self._lib.kt_program_spread, *map(self._view, (out, x)))

    def mix(self, x: View, rule: tuple[int, int, float], scale: F32Array, base: F32Array) -> None:
        """`rule`: streams, iterations, eps."""
        parts = 1 if x.width == rule[0] else 3
        require((scale.size, base.size) == (parts, x.width), "scales or base do not fit")
        values = self._borrow("float[]", scale), self._borrow("float[]", base)
        struct = self._ffi.new("kt_mix *", (*rule, *values))
        self._record("mix", self._lib.kt_program_mix, self._view(x), struct)

    def collapse(self, out: View, x: View, by: View) -> None:
        self._record("collapse", self._lib.kt_program_collapse, *map(self._view, (out, x, by)))

    def expand(self, out: View, x: View, y: View, by: View) -> None:
        self._record("expand", self._lib.kt_program_expand, *map(self._view, (out, x, y, by)))

    def scale(self, out: View, x: View, by: float) -> None:
        self._record("scale", self._lib.kt_program_scale, *map(self._view, (out, x)), by)

    def carry(self, out: View, x: View) -> None:
        """out += x, in steps that defer."""
        self._record("carry", self._lib.kt_program_carry, self._view(out), self._view(x))

    def input(self, x: View) -> None:
        """The caller writes `x` before what is recorded next runs."""
        self._check(self._lib.kt_program_input(self.handle, self._view(x)))

    def part(self) -> int:
        """What is recorded from here on is the next part; returns its number."""
        return self._check(self._lib.kt_program_part(self.handle))

    def select(self, out: View, x: View) -> None:
        """Copy the rows that are wanted as outputs."""
        self._record("select", self._lib.kt_program_select, self._view(out), self._view(x))

    def summary(self, best: View, peaks: View, sums: View, logits: View) -> None:
        views = map(self._view, (best, peaks, sums, logits))
        self._record("summary", self._lib.kt_program_summary, *views)

    def _record(self, label: str, function: Any, *args: Any) -> None:
        self.labels.append(label)
        self._check(function(self.handle, *args))

    def _view(self, view: View) -> Any:
        return self._ffi.new("kt_view *", (view.buffer, view.column, view.width))[0]

    def _slices(self, slices: Sequence[Weight]) -> Any:
        """One weight of each node."""
        nodes = len(self.pool.node_threads)
        require(len(slices) == nodes, f"{len(slices)} slices of a weight for {nodes} nodes")
        return self._weights(slices)

    def _weights(self, weights: Sequence[Weight]) -> Any:
        self._keep += weights
        return self.pool.c_weight(*weights)

    def _borrow(self, ctype: str, array: NDArray[Any]) -> Any:
        """The array's address, the array kept alive as long as the program."""
        require(array.flags.c_contiguous, "array is not contiguous")
        pointer = self._ffi.from_buffer(ctype, array)
        self._keep.append(pointer)
        return pointer

    def _check(self, result: int) -> int:
        if result < 0:
            raise NativeError(self._error())
        return result

    def _error(self) -> str:
        text: bytes = self._ffi.string(self._lib.kt_program_error(self.handle))
        return text.decode()
