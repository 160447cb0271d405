"""The feed-forward half of a layer with routed experts, and with a shared one if the family has it.

The experts' matrices are laid out like those of a dense MLP: gate and up as one, whose 16-row panels alternate, or up
alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ktcli.layers.mlp import DenseMlp
from ktcli.layers.names import USUAL_SPARSE, Pieces, SparseNames, StoredExperts
from ktcli.native import SILU, Glu
from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import Access, ModelPart
from ktcli.ops.state import Scratch
from ktcli.ops.table.experts import Routing
from ktcli.ops.table.rowwise import Reads
from ktcli.ops.tensors import Cut, Role, Stored, Tensor, matrix, vector
from ktcli.records import dataclass


@dataclass(frozen=True)
class SparseMlp:
    """A mixture of experts: the top_k of many experts per token, plus a shared expert where the family has one.

    Attributes:
        correction: whether the router chooses with a learned bias (DeepSeek-V3).
        shared_width: width of the shared expert; 0 = none.
        shared_gate: whether a sigmoid scales the shared expert's output (Qwen2-MoE). Its one row lies behind the
            router's: they read the same input.
        latent: the columns of the rows that experts read and give, between two projections (Nemotron 3 Super); 0: those
            of the residual. Router and shared expert read the residual's.
        glu: the activation of experts and shared expert; it may say that there is no gate.
        shared_glu: the activation of the shared expert, where it is another.
        shared_bias: whether gate, up and down of the shared expert have biases (DeepSeek-V2's `mlp_bias`).
        biases: whether router and experts have biases (gpt-oss).
        by_id: the number of token ids in the table that gives a token's experts; 0: the router chooses them.
        scale: the factor of the sum of experts and shared expert.
        gated_input: whether the router's score of the one chosen expert is not the factor of what that gives, but its
            sigmoid is that of what it reads (Llama 4).
        branch_eps: what norms add to the mean square, where router, experts and shared expert each
            norm the residual itself (Gemma 4); then the outputs of both branches are normed before they are added, and
            each expert's weight has a factor. None: all read the layer's normed input.
        layer, name, source: see `DenseMlp`.
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
    shared_bias: bool = False
    biases: bool = False
    by_id: int = 0
    latent: int = 0
    scale: float = 1.0
    gated_input: bool = False
    branch_eps: float | None = None
    layer: int = 0
    name: str = ""
    source: str = ""

    @cached_property
    def router(self) -> Tensor:
        """The router's weight [experts, hidden]; with one more row, which gates the shared expert, if `shared_gate`."""
        of, shape = self.names.router, (self.routing.experts, self.hidden)
        name = f"{self.source}.{of.weight}"
        stored = [Stored(name, shape[::-1] if of.across else shape, transposed=of.across)]
        if self.shared_gate:
            stored.append(Stored(f"{self.source}.{self.names.shared.gate}", (1, self.hidden)))
        name, part = f"{self.name}.router", ModelPart.ROUTER
        return matrix(name, *stored, role=Role.KEPT, layer=self.layer, part=part)

    @cached_property
    def router_correction(self) -> Tensor | None:
        """The bias [experts] that is added to the router's scores when experts are chosen, but not to the weights of
        the chosen experts; None: there is none."""
        if not self.correction:
            return None
        sources = self.names.router.correction.of(self._stored)
        name = f"{self.name}.router_bias"
        made = vector(name, *sources[0], layer=self.layer, neutral=0.0)
        return replace(made, sources=sources)

    @cached_property
    def router_bias(self) -> Tensor | None:
        """The bias [experts] of the router's logits; None: there is none."""
        if not self.biases:
            return None
        made = self._vector("router_logit_bias", self.names.router.bias, self.routing.experts)
        return replace(made, neutral=0.0)

    def _vector(self, name: str, of: str, *shape: int, below: int = 0) -> Tensor:
        stored = Stored(f"{self.source}.{of}", shape)
        return vector(f"{self.name}.{name}", stored, layer=self.layer, below=below)

    @cached_property
    def table(self) -> Tensor | None:
        """The table [token ids, top_k] of the expert numbers that each token id gets, integers stored as f32; None: the
        router chooses the experts."""
        if not self.by_id:
            return None
        shape, below = (self.by_id, self.routing.top_k), self.routing.experts
        return self._vector("router_table", self.names.router.table, *shape, below=below)

    @cached_property
    def factors(self) -> Tensor | None:
        """The factors [experts] that the router's weights of chosen experts are multiplied by; None: there are none."""
        if self.branch_eps is None:
            return None
        return self._vector("router_factors", self.names.router.factors, self.routing.experts)

    @cached_property
    def norms(self) -> tuple[Tensor, ...]:
        """The gains [hidden] of five norms: of the router's input, before and after the experts, before and after the
        shared expert; (): the MLP has no norms."""
        if self.branch_eps is None:
            return ()
        names = self.names.branches
        every = {
            "router_norm": names.router,
            **dict(zip(("experts_norm", "experts_norm_after"), names.experts, strict=True)),
            **dict(zip(("shared_norm", "shared_norm_after"), names.shared, strict=True)),
        }
        return tuple(self._vector(own, name, self.hidden) for own, name in every.items())

    @property
    def _stored(self) -> StoredExperts:
        gated = not self.glu.ungated
        return StoredExperts(
            self.source, self.routing.experts, self.width, self.expert_hidden, gated
        )

    @property
    def expert_hidden(self) -> int:
        """The number of columns of the rows that routed experts read and return: `latent`, or `hidden` where that is
        0."""
        return self.latent or self.hidden

    @cached_property
    def latents(self) -> tuple[Tensor, Tensor] | None:
        """The weights of two projections, of the input to what the experts read, [latent, hidden], and of what they
        return back to [hidden, latent]; None: experts read the input itself."""
        if not self.latent:
            return None
        names, shapes = self.names.latent, ((self.latent, self.hidden), (self.hidden, self.latent))
        entering, leaving = (
            matrix(
                f"{self.name}.{name}",
                Stored(f"{self.source}.{source}", shape),
                layer=self.layer,
                part=ModelPart.EXPERT_LATENT,
            )
            for name, source, shape in zip(("latent_in", "latent_out"), names, shapes, strict=True)
        )
        return entering, leaving

    @cached_property
    def expert_biases(self) -> tuple[Tensor, Tensor] | None:
        """Two biases with one vector per expert: that of `gate_up`, in the order of its rows, and that of `down`,
        [hidden]; None: there are none."""
        if not self.biases:
            return None
        assert not self.glu.ungated, "no family has biases on experts without a gate"
        ways, of = self.names.experts, self._stored
        both = [pieces for way in ways for pieces in way.gate_up_bias_of(of)]
        down = [pieces for way in ways for pieces in way.down_bias_of(of)]
        made = self._of_experts("gate_up_bias", 1, self.glu.rows(self.width), both, Role.VECTOR)
        return (
            replace(made, alternate=True, neutral=0.0),
            replace(self._of_experts("down_bias", 1, self.hidden, down, Role.VECTOR), neutral=0.0),
        )

    @cached_property
    def gate_up(self) -> Tensor:
        """The weights that project the input to gate and up, one matrix per expert, [2 * width, expert_hidden]: panels
        of 16 rows of gate and of up alternate, and both are padded to whole panels. Where there is no gate: those of
        up, [width, expert_hidden]."""
        sources = [p for way in self.names.experts for p in way.gate_up_of(self._stored)]
        name, gated = "up" if self.glu.ungated else "gate_up", not self.glu.ungated
        made = self._of_experts(name, self.glu.rows(self.width), self.expert_hidden, sources)
        return replace(made, alternate=gated, cut=Cut.ROWS)

    @cached_property
    def down(self) -> Tensor:
        """The weights that project the experts' activation to their output: one matrix [expert_hidden, width] per
        expert."""
        sources = [p for way in self.names.experts for p in way.down_of(self._stored)]
        made = self._of_experts("down", self.expert_hidden, self.width, sources)
        return replace(made, cut=Cut.COLUMNS)

    def _of_experts(
        self, name: str, n: int, k: int, sources: list[Pieces], role: Role = Role.EXPERTS
    ) -> Tensor:
        """A matrix or a vector of each expert."""
        part = ModelPart.EXPERTS if role is Role.EXPERTS else ModelPart.VECTORS
        name, count = f"{self.name}.experts.{name}", self.routing.experts
        made = Tensor(name, n, k, role, tuple(sources), count, part=part, access=Access.CHOSEN)
        return replace(made, layer=self.layer)

    @cached_property
    def shared(self) -> DenseMlp | None:
        """The shared expert, a dense MLP that every token passes; None: there is none."""
        if not self.shared_width:
            return None
        names, glu = self.names.shared, self.shared_glu or self.glu
        made = DenseMlp(self.hidden, self.shared_width, names.within, glu, ModelPart.SHARED)
        made = replace(made, bias=self.shared_bias)
        name, source = f"{self.name}.shared", names.source(self.source)
        return replace(made, layer=self.layer, name=name, source=source)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the MLP, those it has, in this order: experts, shared expert, projections around the
        experts, router, the router's biases, table of experts, biases of the experts, factors and norms."""
        vectors = (
            self.router_bias,
            self.router_correction,
            self.table,
            *(self.expert_biases or ()),
            self.factors,
            *self.norms,
        )
        shared = self.shared.tensors if self.shared else ()
        kept = (vector for vector in vectors if vector is not None)
        return (self.gate_up, self.down, *shared, *(self.latents or ()), self.router, *kept)

    @property
    def scratch(self) -> Scratch:
        """The widths of the buffers, in columns per token, that a step needs: for dense projections, and for the
        activations of all of a token's chosen experts together."""
        return replace(Scratch.of(self.tensors), experts=self.routing.top_k * self.width)

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the output [T, hidden] for the input x [T, hidden]: the weighted sum of the chosen experts, plus the
        shared expert, if any."""
        if self.branch_eps is not None:
            return self._branched(b, x, self.branch_eps)
        # [T, experts], and a column for the gate
        logits = b.linear(x, self.router, bias=self.router_bias, reads=Reads.F32)
        if self.shared_gate:
            logits, gate = b.split(logits, self.routing.experts, 1)
        routed = b.route(logits, self.routing, bias=self.router_correction, table=self.table)
        read = b.gate(x, b.greatest(logits)) if self.gated_input else x
        started = self._started(b, read, routed)
        shared = self.shared.forward(b, x) if self.shared else None  # meanwhile
        if shared is not None and self.shared_gate:
            shared = b.gate(shared, gate)
        mixed = b.collect(started)
        if self.latents:
            mixed = b.linear(mixed, self.latents[1])
        mixed = mixed if shared is None else b.add(mixed, shared)
        return mixed if self.scale == 1.0 else b.scale(mixed, self.scale)

    def _started(self, b: Backend, x: Value, routed: Value) -> Value:
        """Starts the chosen experts of x; returns what `collect` takes."""
        gate_up_bias, down_bias = self.expert_biases or (None, None)
        return b.experts(
            b.linear(x, self.latents[0]) if self.latents else x,
            routed,
            self.gate_up,
            self.down,
            glu=self.glu,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )

    def _branched(self, b: Backend, x: Value, eps: float) -> Value:
        """Returns the sum [T, hidden] of both branches of the residual x [T, hidden]."""
        assert self.shared is not None
        of_router, before, after, shared_before, shared_after = self.norms
        asked = b.scale(b.norm(x, of_router, eps), self.hidden**-0.5)
        logits = b.linear(asked, self.router, reads=Reads.F32)
        routed = b.route(logits, self.routing, factors=self.factors)
        started = self._started(b, b.norm(x, before, eps), routed)
        shared = self.shared.forward(b, b.norm(x, shared_before, eps))  # meanwhile
        mixed = b.norm(b.collect(started), after, eps)
        return b.add(b.norm(shared, shared_after, eps), mixed)
