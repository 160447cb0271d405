"""The feed-forward half of a layer: one dense MLP, or routed experts with an optional shared one.

Gate and up are stored as one matrix whose 16-row panels alternate, so that a NUMA node's share of both
is one range and the activation finds both halves in one cache line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ktcli.layers.backend import Backend, Reads, Routing, Value
from ktcli.layers.tensors import Cut, Role, Stored, Tensor, ceil_to, whole
from ktcli.native import PANEL_ROWS


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Checkpoint names below the prefix of a dense MLP."""

    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"


@dataclass(frozen=True, slots=True)
class SparseNames:
    """Checkpoint names below the prefix of an MLP with experts; "{e}" is the expert's number.

    The fused ones, [E, 2I, H] with gate above up and [E, H, I], are taken where there are no others.
    """

    gate: str = "experts.{e}.gate_proj.weight"
    up: str = "experts.{e}.up_proj.weight"
    down: str = "experts.{e}.down_proj.weight"
    fused_gate_up: str = "experts.gate_up_proj"
    fused_down: str = "experts.down_proj"
    router: str = "gate.weight"
    correction: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate.weight"


USUAL_MLP, USUAL_SPARSE = MlpNames(), SparseNames()


@dataclass(frozen=True)
class DenseMlp:
    """down(silu(gate x) * up x).

    Attributes:
        layer: number of the decoder layer.
        name: prefix of the stored names, e.g. "layers.0.mlp".
        source: checkpoint prefix, e.g. "model.layers.0.mlp".
    """

    hidden: int
    width: int
    names: MlpNames = USUAL_MLP
    layer: int = 0
    name: str = ""
    source: str = ""

    @cached_property
    def gate_up(self) -> Tensor:
        names = self.names.gate, self.names.up
        return _gate_up(self, Role.DENSE, names, 1)

    @cached_property
    def down(self) -> Tensor:
        return _down(self, Role.DENSE, self.names.down, 1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.gate_up, self.down

    def forward(self, b: Backend, x: Value) -> Value:
        """x [T, hidden] -> [T, hidden]."""
        return b.linear(b.swiglu(b.linear(x, self.gate_up), self.width), self.down)


@dataclass(frozen=True)
class SparseMlp:
    """top_k of many experts per token, plus a shared expert where the family has one.

    Attributes:
        correction: the router chooses with a learned bias (DeepSeek-V3).
        shared_width: width of the shared expert; 0 = none.
        layer, name, source: as above.
    """

    hidden: int
    width: int
    routing: Routing
    correction: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    names: SparseNames = USUAL_SPARSE
    layer: int = 0
    name: str = ""
    source: str = ""

    @cached_property
    def router(self) -> Tensor:
        pieces = [(self.names.router, self.routing.experts)]
        if self.shared_gate:
            pieces.append((self.names.shared_gate, 1))
        return Tensor(
            f"{self.name}.router",
            sum(rows for _, rows in pieces),
            self.hidden,
            Role.KEPT,
            whole(*((f"{self.source}.{name}", (rows, self.hidden)) for name, rows in pieces)),
            layer=self.layer,
            cut=Cut.ROWS,
        )

    @cached_property
    def router_bias(self) -> Tensor | None:
        if not self.correction:
            return None
        n = self.routing.experts
        return Tensor(
            f"{self.name}.router_bias",
            1,
            n,
            Role.VECTOR,
            whole((f"{self.source}.{self.names.correction}", (n,))),
            layer=self.layer,
        )

    @cached_property
    def gate_up(self) -> Tensor:
        shape = (self.routing.experts, 2 * self.width, self.hidden)
        name = f"{self.source}.{self.names.fused_gate_up}"
        fused = Stored(name, shape, matrix=True, count=self.width)
        halves = (fused, replace(fused, first=self.width))
        names = self.names.gate, self.names.up
        return _gate_up(self, Role.EXPERTS, names, self.routing.experts, halves)

    @cached_property
    def down(self) -> Tensor:
        shape = (self.routing.experts, self.hidden, self.width)
        fused = Stored(f"{self.source}.{self.names.fused_down}", shape, matrix=True)
        return _down(self, Role.EXPERTS, self.names.down, self.routing.experts, (fused,))

    @cached_property
    def shared(self) -> DenseMlp | None:
        if not self.shared_width:
            return None
        name, source = f"{self.name}.shared", f"{self.source}.{self.names.shared}"
        return DenseMlp(self.hidden, self.shared_width, layer=self.layer, name=name, source=source)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        bias = (self.router_bias,) if self.router_bias else ()
        shared = self.shared.tensors if self.shared else ()
        return (self.gate_up, self.down, *shared, self.router, *bias)

    def forward(self, b: Backend, x: Value) -> Value:
        """x [T, hidden] -> [T, hidden]."""
        logits = b.linear(x, self.router, reads=Reads.F32)  # [T, experts]
        if self.shared_gate:
            logits, gate = b.split(logits, self.routing.experts, 1)
        routed = b.route(logits, self.routing, bias=self.router_bias)
        started = b.experts(x, routed, self.gate_up, self.down)
        shared = self.shared.forward(b, x) if self.shared else None  # meanwhile
        if shared is not None and self.shared_gate:
            shared = b.gate(shared, gate)
        mixed = b.collect(started)
        return mixed if shared is None else b.add(mixed, shared)


Mlp = DenseMlp | SparseMlp


def _gate_up(
    part: Mlp, role: Role, names: tuple[str, str], count: int, *alternatives: tuple[Stored, ...]
) -> Tensor:
    return Tensor(
        f"{part.name}.{'experts.' if role is Role.EXPERTS else ''}gate_up",
        2 * ceil_to(part.width, PANEL_ROWS),
        part.hidden,
        role,
        (
            *whole(*((f"{part.source}.{name}", (part.width, part.hidden)) for name in names)),
            *alternatives,
        ),
        count=count,
        alternate=True,
        layer=part.layer,
        cut=Cut.ROWS,
    )


def _down(
    part: Mlp, role: Role, name: str, count: int, *alternatives: tuple[Stored, ...]
) -> Tensor:
    return Tensor(
        f"{part.name}.{'experts.' if role is Role.EXPERTS else ''}down",
        part.hidden,
        part.width,
        role,
        (*whole((f"{part.source}.{name}", (part.hidden, part.width))), *alternatives),
        count=count,
        layer=part.layer,
        cut=Cut.COLUMNS if role is Role.EXPERTS else Cut.ROWS,
    )
