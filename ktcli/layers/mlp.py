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


@dataclass(frozen=True)
class DenseMlp:
    """down(silu(gate x) * up x).

    Attributes:
        name: prefix of the stored names, e.g. "layers.0.mlp".
        source: checkpoint prefix, e.g. "model.layers.0.mlp".
    """

    layer: int
    name: str
    source: str
    hidden: int
    width: int

    @cached_property
    def gate_up(self) -> Tensor:
        names = [f"{self.source}.{part}_proj.weight" for part in ("gate", "up")]
        return _gate_up(self, Role.DENSE, names, 1)

    @cached_property
    def down(self) -> Tensor:
        return _down(self, Role.DENSE, f"{self.source}.down_proj.weight", 1)

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
    """

    layer: int
    name: str
    source: str
    hidden: int
    width: int
    routing: Routing
    correction: bool = False
    shared_width: int = 0

    @cached_property
    def router(self) -> Tensor:
        shape = (self.routing.experts, self.hidden)
        return Tensor(
            f"{self.name}.router",
            *shape,
            Role.KEPT,
            whole((f"{self.source}.gate.weight", shape)),
            layer=self.layer,
            cut=Cut.ROWS,
        )

    @cached_property
    def router_bias(self) -> Tensor | None:
        if not self.correction:
            return None
        name = f"{self.source}.gate.e_score_correction_bias"
        n = self.routing.experts
        return Tensor(
            f"{self.name}.router_bias",
            1,
            n,
            Role.VECTOR,
            whole((name, (n,))),
            layer=self.layer,
        )

    @cached_property
    def gate_up(self) -> Tensor:
        names = [f"{self.source}.experts.{{e}}.{part}_proj.weight" for part in ("gate", "up")]
        shape = (self.routing.experts, 2 * self.width, self.hidden)
        fused = Stored(f"{self.source}.experts.gate_up_proj", shape, matrix=True, count=self.width)
        halves = (fused, replace(fused, first=self.width))
        return _gate_up(self, Role.EXPERTS, names, self.routing.experts, halves)

    @cached_property
    def down(self) -> Tensor:
        shape = (self.routing.experts, self.hidden, self.width)
        fused = Stored(f"{self.source}.experts.down_proj", shape, matrix=True)
        name = f"{self.source}.experts.{{e}}.down_proj.weight"
        return _down(self, Role.EXPERTS, name, self.routing.experts, (fused,))

    @cached_property
    def shared(self) -> DenseMlp | None:
        if not self.shared_width:
            return None
        name, source = f"{self.name}.shared", f"{self.source}.shared_experts"
        return DenseMlp(self.layer, name, source, self.hidden, self.shared_width)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        bias = (self.router_bias,) if self.router_bias else ()
        shared = self.shared.tensors if self.shared else ()
        return (self.gate_up, self.down, *shared, self.router, *bias)

    def forward(self, b: Backend, x: Value) -> Value:
        """x [T, hidden] -> [T, hidden]."""
        logits = b.linear(x, self.router, reads=Reads.F32)  # [T, experts]
        routed = b.route(logits, self.routing, bias=self.router_bias)
        started = b.experts(x, routed, self.gate_up, self.down)
        shared = self.shared.forward(b, x) if self.shared else None  # meanwhile
        mixed = b.collect(started)
        return mixed if shared is None else b.add(mixed, shared)


Mlp = DenseMlp | SparseMlp


def _gate_up(
    part: Mlp, role: Role, names: list[str], count: int, *alternatives: tuple[Stored, ...]
) -> Tensor:
    return Tensor(
        f"{part.name}.{'experts.' if role is Role.EXPERTS else ''}gate_up",
        2 * ceil_to(part.width, PANEL_ROWS),
        part.hidden,
        role,
        (*whole(*((name, (part.width, part.hidden)) for name in names)), *alternatives),
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
        (*whole((name, (part.hidden, part.width))), *alternatives),
        count=count,
        layer=part.layer,
        cut=Cut.COLUMNS if role is Role.EXPERTS else Cut.ROWS,
    )
