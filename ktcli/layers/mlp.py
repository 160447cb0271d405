"""The feed-forward half of a layer: one dense MLP, or routed experts with an optional shared one.

Gate and up are stored as one matrix whose 16-row panels alternate, so that a NUMA node's share of both
is one range and the activation finds both halves in one cache line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ktcli.native import PANEL_ROWS, SILU, Glu
from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import Access, ModelPart
from ktcli.ops.scratch import Scratch
from ktcli.ops.table.experts import Routing
from ktcli.ops.table.rowwise import Reads
from ktcli.ops.tensors import Cut, Role, Stored, Tensor, ceil_to, matrix, vector


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Checkpoint names below the prefix of a dense MLP; `fused`, [2I, H] with gate above up, is one for both."""

    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"
    fused: str = ""


USUAL_MLP = MlpNames()


@dataclass(frozen=True, slots=True)
class SparseNames:
    """Checkpoint names below the prefix of an MLP with experts; "{e}" is the expert's number.

    The fused ones, [E, 2I, H] with gate above up and [E, H, I], are taken where there are no others; where they
    are `interleaved`, rows of gate and up lie in turn, and numbers that are not packed lie transposed (gpt-oss).
    Those that are `fused_across` lie transposed with gate beside up (Qwen3-VL). `correction_is_row`: [1, E] (ERNIE);
    one that `correction_may_lack` is then of zeros (A.X K1).
    `shared_beside`: the shared expert lies beside the MLP, not in it (Granite). Names of gate, up and down without
    "{e}" are of fused ones, [E, I, H] and [E, H, I] (Step-3.5).
    """

    gate: str = "experts.{e}.gate_proj.weight"
    up: str = "experts.{e}.up_proj.weight"
    down: str = "experts.{e}.down_proj.weight"
    fused_gate_up: str = "experts.gate_up_proj"
    fused_down: str = "experts.down_proj"
    interleaved: bool = False
    packed_gate_up: str = "experts.gate_up_proj_blocks"
    packed_down: str = "experts.down_proj_blocks"
    router: str = "gate.weight"
    router_bias: str = "gate.bias"
    correction: str = "gate.e_score_correction_bias"
    correction_is_row: bool = False
    correction_may_lack: bool = False
    fused_across: bool = False
    gate_up_bias: str = "experts.gate_up_proj_bias"
    down_bias: str = "experts.down_proj_bias"
    shared: str = "shared_experts"
    shared_names: MlpNames = USUAL_MLP
    shared_beside: bool = False
    table: str = "gate.tid2eid"
    shared_gate: str = "shared_expert_gate.weight"


USUAL_SPARSE = SparseNames()


@dataclass(frozen=True)
class DenseMlp:
    """down(silu(gate x) * up x).

    Attributes:
        glu: the activation, where it is another.
        part: what its tensors are counted under.
        layer: number of the decoder layer.
        name: prefix of the stored names, e.g. "layers.0.mlp".
        source: checkpoint prefix, e.g. "model.layers.0.mlp".
    """

    hidden: int
    width: int
    names: MlpNames = USUAL_MLP
    glu: Glu = SILU
    part: ModelPart = ModelPart.DENSE_MLP
    layer: int = 0
    name: str = ""
    source: str = ""

    @cached_property
    def gate_up(self) -> Tensor:
        shape = (self.width, self.hidden)
        pieces = _each(self, (self.names.gate, self.names.up), shape)
        if self.names.fused:
            name = f"{self.source}.{self.names.fused}"
            both = Stored(name, (2 * self.width, self.hidden), count=self.width)
            pieces = both, replace(both, first=self.width)
        return _gate_up(self, (pieces,))

    @cached_property
    def down(self) -> Tensor:
        shape = (self.hidden, self.width)
        return _down(self, (_each(self, (self.names.down,), shape),))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.gate_up, self.down

    @property
    def scratch(self) -> Scratch:
        return Scratch.of(self.tensors)

    def forward(self, b: Backend, x: Value) -> Value:
        """x [T, hidden] -> [T, hidden]."""
        return b.linear(b.swiglu(b.linear(x, self.gate_up), self.width, self.glu), self.down)


@dataclass(frozen=True)
class SparseMlp:
    """top_k of many experts per token, plus a shared expert where the family has one.

    Attributes:
        correction: the router chooses with a learned bias (DeepSeek-V3).
        shared_width: width of the shared expert; 0 = none.
        shared_gate: a sigmoid scales the shared expert's output (Qwen2-MoE). Its one row lies behind the
            router's: they read the same input.
        glu: the activation of experts and shared expert.
        shared_glu: the shared expert's, where it is another.
        biases: router and experts have them (gpt-oss).
        by_id: a token's experts are those of its id, of so many ids; 0: they are chosen.
        layer, name, source: as above.
    """

    hidden: int
    width: int
    routing: Routing
    correction: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    names: SparseNames = USUAL_SPARSE
    glu: Glu = SILU
    shared_glu: Glu | None = None
    biases: bool = False
    by_id: int = 0
    layer: int = 0
    name: str = ""
    source: str = ""

    @cached_property
    def router(self) -> Tensor:
        """[experts, hidden], with a shared gate one row more."""
        pieces = [(self.names.router, (self.routing.experts, self.hidden))]
        if self.shared_gate:
            pieces.append((self.names.shared_gate, (1, self.hidden)))
        stored = (Stored(f"{self.source}.{name}", shape) for name, shape in pieces)
        name, part = f"{self.name}.router", ModelPart.ROUTER
        return matrix(name, *stored, role=Role.KEPT, layer=self.layer, part=part)

    @cached_property
    def router_correction(self) -> Tensor | None:
        if not self.correction:
            return None
        names = self.names
        made = self._router_vector("router_bias", names.correction, names.correction_is_row)
        return replace(made, sources=(*made.sources, ())) if names.correction_may_lack else made

    @cached_property
    def router_bias(self) -> Tensor | None:
        return (
            self._router_vector("router_logit_bias", self.names.router_bias)
            if self.biases
            else None
        )

    @cached_property
    def table(self) -> Tensor | None:
        """[by_id, top_k] experts, row behind row: whole numbers, which f32 holds."""
        if not self.by_id:
            return None
        stored = Stored(f"{self.source}.{self.names.table}", (self.by_id, self.routing.top_k))
        name, below = f"{self.name}.router_table", self.routing.experts
        return vector(name, stored, layer=self.layer, below=below)

    def _router_vector(self, name: str, source: str, is_row: bool = False) -> Tensor:
        n = self.routing.experts
        stored = Stored(f"{self.source}.{source}", (1, n) if is_row else (n,))
        return vector(f"{self.name}.{name}", stored, layer=self.layer, neutral=0.0)

    @cached_property
    def expert_biases(self) -> tuple[Tensor, Tensor] | None:
        """Of gate_up, in the order of its rows, and of down."""
        if not self.biases:
            return None
        e, rows = self.routing.experts, 2 * self.width
        gate = Stored(f"{self.source}.{self.names.gate_up_bias}", (e, rows), matrix=True, step=2)
        down = Stored(f"{self.source}.{self.names.down_bias}", (e, self.hidden), matrix=True)
        wide = 2 * ceil_to(self.width, PANEL_ROWS)
        return (
            self._expert_vector(
                "gate_up_bias",
                wide,
                (gate, replace(gate, first=1)),
                self._own_biases(self.width, self.names.gate, self.names.up),
            ),
            self._expert_vector(
                "down_bias", self.hidden, (down,), self._own_biases(self.hidden, self.names.down)
            ),
        )

    def _own_biases(self, length: int, *weights: str) -> tuple[Stored, ...]:
        """The biases beside these weights, where each expert has tensors of its own."""
        names = (f"{self.source}.{name.removesuffix('weight')}bias" for name in weights)
        return tuple(Stored(name, (length,)) for name in names)

    def _expert_vector(self, name: str, k: int, *sources: tuple[Stored, ...]) -> Tensor:
        return Tensor(
            f"{self.name}.experts.{name}",
            1,
            k,
            Role.VECTOR,
            sources,
            count=self.routing.experts,
            alternate=len(sources[0]) > 1,
            layer=self.layer,
            neutral=0.0,
            part=ModelPart.VECTORS,
            access=Access.CHOSEN,
        )

    @cached_property
    def gate_up(self) -> Tensor:
        e, rows = self.routing.experts, 2 * self.width
        name = f"{self.source}.{self.names.fused_gate_up}"
        each = _each(self, (self.names.gate, self.names.up), (self.width, self.hidden), e)
        if self.names.interleaved:
            packed = f"{self.source}.{self.names.packed_gate_up}"
            across = Stored(name, (e, self.hidden, rows), matrix=True, transposed=True, step=2)
            along = Stored(packed, (e, rows, self.hidden), matrix=True, step=2)
            either = tuple((piece, replace(piece, first=1)) for piece in (across, along))
            return _gate_up(self, (*either, each))
        turned = self.names.fused_across
        shape = (e, self.hidden, rows) if turned else (e, rows, self.hidden)
        fused = Stored(name, shape, matrix=True, transposed=turned, count=self.width)
        return _gate_up(self, (each, (fused, replace(fused, first=self.width))))

    @cached_property
    def down(self) -> Tensor:
        e, shape = self.routing.experts, (self.hidden, self.width)
        name = f"{self.source}.{self.names.fused_down}"
        fused = Stored(name, (e, *shape), matrix=True)
        each = _each(self, (self.names.down,), shape, e)
        if self.names.interleaved:
            across = replace(fused, shape=(e, *shape[::-1]), transposed=True)
            packed = replace(fused, name=f"{self.source}.{self.names.packed_down}")
            return _down(self, ((across,), (packed,), each))
        if self.names.fused_across:
            fused = replace(fused, shape=(e, *shape[::-1]), transposed=True)
        return _down(self, (each, (fused,)))

    @cached_property
    def shared(self) -> DenseMlp | None:
        if not self.shared_width:
            return None
        above = self.source.rpartition(".")[0] if self.names.shared_beside else self.source
        name, source = f"{self.name}.shared", f"{above}.{self.names.shared}"
        names, glu = self.names.shared_names, self.shared_glu or self.glu
        made = DenseMlp(self.hidden, self.shared_width, names, glu)
        made = replace(made, part=ModelPart.SHARED)
        return replace(made, layer=self.layer, name=name, source=source)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        vectors = (
            self.router_bias,
            self.router_correction,
            self.table,
            *(self.expert_biases or ()),
        )
        shared = self.shared.tensors if self.shared else ()
        kept = (vector for vector in vectors if vector is not None)
        return (self.gate_up, self.down, *shared, self.router, *kept)

    @property
    def scratch(self) -> Scratch:
        """Those of the shared expert, and of the experts of a token side by side."""
        return replace(Scratch.of(self.tensors), experts=self.routing.top_k * self.width)

    def forward(self, b: Backend, x: Value) -> Value:
        """x [T, hidden] -> [T, hidden]."""
        # [T, experts], and a column for the gate
        logits = b.linear(x, self.router, bias=self.router_bias, reads=Reads.F32)
        if self.shared_gate:
            logits, gate = b.split(logits, self.routing.experts, 1)
        routed = b.route(logits, self.routing, bias=self.router_correction, table=self.table)
        gate_up_bias, down_bias = self.expert_biases or (None, None)
        started = b.experts(
            x,
            routed,
            self.gate_up,
            self.down,
            glu=self.glu,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )
        shared = self.shared.forward(b, x) if self.shared else None  # meanwhile
        if shared is not None and self.shared_gate:
            shared = b.gate(shared, gate)
        mixed = b.collect(started)
        return mixed if shared is None else b.add(mixed, shared)


Mlp = DenseMlp | SparseMlp


Pieces = tuple[Stored, ...]


def _each(part: Mlp, names: tuple[str, ...], shape: tuple[int, int], experts: int = 0) -> Pieces:
    """A checkpoint tensor of each name; of experts, one for all where the name has no number."""

    def piece(name: str) -> Stored:
        if experts and "{e}" not in name:
            return Stored(f"{part.source}.{name}", (experts, *shape), matrix=True)
        return Stored(f"{part.source}.{name}", shape)

    return tuple(map(piece, names))


def _gate_up(part: Mlp, sources: tuple[Pieces, ...]) -> Tensor:
    shape = 2 * ceil_to(part.width, PANEL_ROWS), part.hidden
    return replace(_matrices(part, "gate_up", shape, sources), alternate=True)


def _down(part: Mlp, sources: tuple[Pieces, ...]) -> Tensor:
    made = _matrices(part, "down", (part.hidden, part.width), sources)
    return replace(made, cut=Cut.COLUMNS) if isinstance(part, SparseMlp) else made


def _matrices(part: Mlp, name: str, shape: tuple[int, int], sources: tuple[Pieces, ...]) -> Tensor:
    """The matrix of a dense MLP, or those of all experts, [n, k] each."""
    if isinstance(part, DenseMlp):
        whole = Tensor(f"{part.name}.{name}", *shape, Role.DENSE, sources, part=part.part)
    else:
        name, count = f"{part.name}.experts.{name}", part.routing.experts
        whole = Tensor(name, *shape, Role.EXPERTS, sources, count, part=ModelPart.EXPERTS)
        whole = replace(whole, access=Access.CHOSEN)
    return replace(whole, layer=part.layer, cut=Cut.ROWS)
