"""What a forward is made of: the operations every backend offers.

A family's forward is written once, over this protocol. The native backend records the calls into a
program that C replays; a torch backend executes them. `Value` is whatever a backend passes between
operations (a view of a program buffer, a torch tensor); the forward only hands it on.

Shapes: T rows of the step (or its outputs after `select`), widths as the tensors give them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from ktcli.native import SILU, Glu
from ktcli.ops.tensors import Tensor, ceil_to
from ktcli.ops.windows import MqaShape, PoolShape, paged_elements

Value = Any


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding.

    Attributes:
        dim: rotated columns per head, even.
        inv_freq: radians per position of each pair, length dim/2.
        scale: factor on cos and sin (YaRN's attention factor).
        interleaved: pairs are (2i, 2i+1) instead of (i, i + dim/2).
        shift: added to positions.
    """

    dim: int
    inv_freq: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False
    shift: int = 0


class Reads(IntEnum):
    """What a product reads its activations as; values of `kt_reads`."""

    FORMAT = 0
    F32 = 1
    WIDE = 2


class Gate(IntEnum):
    """What of a gate multiplies; values of `kt_gate`."""

    SIGMOID = 0
    SILU = 1
    SOFTPLUS = 2


class Score(IntEnum):
    """Router scores; values of `kt_score`."""

    SOFTMAX = 0
    SIGMOID = 1
    SQRT_SOFTPLUS = 2


class GroupScore(IntEnum):
    """How a group of experts is scored; values of `kt_group_score`."""

    MAX = 0
    TOP2 = 1


@dataclass(frozen=True, slots=True)
class Routing:
    """How the experts of a token are chosen; see kt_program_route for the exact rule."""

    experts: int
    top_k: int
    score: Score = Score.SOFTMAX
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = GroupScore.MAX
    normalize: bool = True
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class GqaShape:
    """Grouped-query attention of one layer.

    Attributes:
        window: a token sees the last so many positions, its own included; 0: all.
        beside: elements that the layer caches for each position behind k and v: an indexer's key.
        v: columns of a head's values; 0: as many as of its keys. Read `value_dim`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    beside: int = 0
    v: int = 0

    @property
    def value_dim(self) -> int:
        """Columns of a head's values, and of what it gives."""
        return self.v or self.head_dim

    @property
    def kept(self) -> int:
        """Elements of k and v of one position."""
        return self.kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Multi-head latent attention of one layer: widths per head, and of the latent.

    Attributes:
        beside: elements that the layer caches for each position behind the latent: an indexer's key.
    """

    heads: int
    nope: int
    rope: int
    v: int
    lora: int
    scale: float
    beside: int = 0


@dataclass(frozen=True, slots=True)
class ChooseShape:
    """How the positions that a token attends to are chosen; see kt_program_choose for the exact rule.

    Attributes:
        heads, dim: of the index queries; `dim` of the one index key.
        top_k: places of a token.
        scale: of the scores, positive.
        behind: elements that the layer caches for each position before the index key.
        block: positions of a place.
        local: so many blocks, the token's own and those before it, are always chosen.
        every: positions of a window that is a place, whose key is that of its last one.
    """

    heads: int
    dim: int
    top_k: int
    scale: float
    behind: int
    block: int = 1
    local: int = 0
    every: int = 1

    @property
    def positions(self) -> int:
        """The most that a token attends to."""
        return self.top_k * self.block * self.every

    @property
    def elements(self) -> int:
        """Cached for each position."""
        return paged_elements(self.dim, self.every, 16)


@dataclass(frozen=True, slots=True)
class MixShape:
    """Hyper-connections: a residual of several streams; see kt_program_mix for the exact rule.

    Attributes:
        streams: side by side in a row of the residual.
        iterations: of the division of rows and columns by their sums.
        eps: added to what is divided by, and to weights.
    """

    streams: int
    iterations: int
    eps: float

    @property
    def weights(self) -> int:
        """Weights of a token: those of entry, of leaving, and of streams among each other."""
        return (2 + self.streams) * self.streams


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The gated delta rule of one layer: a state [dk, dv] for each of `heads`, of which so many in a row share
    one of `key_heads`.

    Attributes:
        by_channel: each of a head's dk rows decays by itself, else all of a head alike.
        lowest: the logarithm of what a token leaves of a state is above this, negative; 0: nothing bounds it.
    """

    heads: int
    key_heads: int
    dk: int
    dv: int
    by_channel: bool = False
    lowest: float = 0.0

    @property
    def decays(self) -> int:
        """Columns of the decay."""
        return self.heads * (self.dk if self.by_channel else 1)

    @property
    def state_elements(self) -> int:
        """f32 of a sequence's states: columns in whole lines."""
        return self.heads * self.dk * ceil_to(self.dv, 16)


class Backend(Protocol):
    """The operations of a forward. `layer` numbers the cached layers from 0.

    An operation marked "consumes x" may overwrite x: use only its result afterwards.
    """

    def embed(self, table: Tensor) -> Value:
        """The step's ids -> [T, hidden]."""

    def norm(
        self,
        x: Value,
        gain: Tensor | None,
        eps: float,
        *,
        head_width: int | None = None,
        columns: int | None = None,
    ) -> Value:
        """RMSNorm of each row; of each run of `head_width` columns; or of the first `columns` only, the
        rest passing through. The last two consume x. Without a gain it only divides."""

    def layer_norm(self, x: Value, gain: Tensor, bias: Tensor, eps: float) -> Value:
        """LayerNorm of each row: less its mean, over its standard deviation, times gain, plus bias."""

    def linear(
        self, x: Value, weight: Tensor, *, bias: Tensor | None = None, reads: Reads = Reads.FORMAT
    ) -> Value:
        """x W^T + bias; activations as the weight's format says, or better."""

    def grouped(self, x: Value, weights: tuple[Tensor, ...]) -> Value:
        """As many equal runs of columns as there are weights, each by its own; the results side by side."""

    def split(self, x: Value, *widths: int) -> tuple[Value, ...]:
        """Views of consecutive columns."""

    def rope(self, x: Value, rope: Rope, *, head_width: int, first: int = 0) -> Value:
        """Rotate columns [first, first + dim) of each run of `head_width`; consumes x."""

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
        """Append k and v to the cache, attend causally -> [T, heads * value_dim].

        With `chosen`, to the blocks that the last `choose` chose for each of kv_heads.
        sinks [heads]: one more score in the softmax of each head, that of no key."""

    def choose(
        self, q: Value, key: Value, weight: Value | None, shape: ChooseShape, *, layer: int
    ) -> None:
        """Append the index key [T, dim], choose the positions that each token attends to by the index
        queries [T, heads * dim] and their weights [T, heads]; without weights each head chooses blocks for
        itself. Lasts until the next `choose`."""

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
        """Append the latent [T, lora + rope], attend -> [T, heads * v]. Weights: uk_in, uk_out, uv.

        With `chosen`, to what the last `choose` chose."""

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
        """Attend to the last positions and to pooled rows, which are appended -> [T, heads * dim].

        With `chosen`, to those of the pooled rows that the last `choose` chose.
        first: where its state begins in the layer's, f32 elements; whole lines of 16."""

    def conv(self, x: Value, weight: Tensor, *, layer: int, first: int = 0) -> Value:
        """Causal convolution of each column over the last rows of its sequence, then silu. weight [1, W * N]:
        rows of N columns for the last W rows of x, the oldest first. State: W - 1 rows.

        first: where it begins in the layer's, f32 elements; whole lines of 16."""

    def pool(
        self, x: Value, score: Value, bias: Tensor, shape: PoolShape, *, layer: int, first: int
    ) -> Value:
        """Rows of windows of positions, see kt_program_pool -> [T, dim].

        Args:
            bias: [1, every * columns of x].
            first: where its state begins in the layer's, f32 elements; whole lines of 16.
        """

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
        """Gated delta rule, see kt_program_delta -> [T, heads * dv]. Consumes q, k and the gates.

        Args:
            gates: decay [T, decays] and beta [T, heads].
            learned: log of each head's rate, and what is added to the decay.
            first: where its state begins in the layer's, f32 elements; whole lines of 16.
        """

    def route(
        self,
        logits: Value,
        routing: Routing,
        *,
        bias: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Value:
        """Choose experts per token -> a routing, for `experts`.

        table: [vocab * top_k] of experts, those of each token id, which then are not chosen."""

    def experts(
        self,
        x: Value,
        routed: Value,
        gate_up: Tensor,
        down: Tensor,
        *,
        glu: Glu = SILU,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> Value:
        """Start the chosen experts -> what `collect` takes. Once per layer with experts, in their order.

        biases: of gate_up, one value for each of its rows, and of down."""

    def collect(self, started: Value) -> Value:
        """Weighted sum of the chosen experts -> [T, hidden].

        With deferral, of those that were not deferred here and of those the layer before deferred."""

    def swiglu(self, x: Value, width: int, glu: Glu = SILU) -> Value:
        """silu(gate) * up, or another such activation, of alternating runs of 16 -> [T, width]."""

    def gate(self, x: Value, by: Value, kind: Gate = Gate.SIGMOID) -> Value:
        """x times sigmoid, silu or softplus of by; `by` has a column for each of as many runs of x's columns."""

    def add(self, a: Value, b: Value) -> Value: ...

    def spread(self, x: Value, streams: int) -> Value:
        """[T, width] -> [T, streams * width], each stream the same."""

    def mix(self, x: Value, scale: Tensor, base: Tensor, shape: MixShape) -> Value:
        """Weights of the streams [T, weights], or of entry alone [T, streams], from as many columns; consumes x.

        scale: [3], or [1]; base: as many as columns."""

    def collapse(self, x: Value, by: Value) -> Value:
        """The sum of the streams of x, weighted by the columns of `by` -> [T, width]."""

    def expand(self, x: Value, y: Value, by: Value) -> Value:
        """The streams of x, mixed among each other, each with its share of y. by: [T, streams + streams^2]."""

    def scale(self, x: Value, by: float) -> Value:
        """x times a number; consumes x."""

    def select(self, x: Value) -> Value:
        """The rows that are wanted as outputs -> [outputs, hidden]."""
