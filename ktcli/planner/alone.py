"""Accounts for a model with every layer on the CPU: its memory, the context that fits, its speed, part by part.

Memory is the sum of what `memory` and `nodes` count, time the roofline of `cost`. Whether it is wanted so is decided in
`placement`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial

from ktcli.errors import gib
from ktcli.models.model import Model, Spec
from ktcli.ops.part import ModelPart
from ktcli.planner.cost import Rates, seconds, step_seconds
from ktcli.planner.host import Host
from ktcli.planner.memory import (
    PREFILL_CHUNK,
    PROCESS_BYTES,
    Use,
    beside_bytes,
    default_context,
    need_bytes,
    node_room_bytes,
    scratch_bytes,
)
from ktcli.planner.nodes import NodeNeed, extra_bytes, node_needs
from ktcli.planner.plan import Line, Request, Speed, early_position
from ktcli.planner.slices import ALL_TEAMS, ExpertTeams
from ktcli.planner.spec import STATES_REASON, PartWork, StepShape, parts, step_work
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Alone:
    """The memory and speed of a model with every layer on the CPU of a host.

    Attributes:
        experts_on: the teams that have the experts of some layers.
    """

    model: Model
    host: Host
    recipe: Recipe
    use: Use
    experts_on: ExpertTeams = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Model, host: Host, request: Request, experts_on: ExpertTeams = ALL_TEAMS
    ) -> Alone:
        """Returns the predicted memory and times of a model with every layer on the CPU of a host, in the number
        formats and for the use that a request names.
        """
        return cls(model, host, request.recipe, request.use, experts_on)

    @property
    def extra_bytes(self) -> int:
        """The bytes by which packed weights grow when they are cut between the teams of threads."""
        return sum(self._extra.values())

    @property
    def _extra(self) -> Mapping[ModelPart, int]:
        return extra_bytes(self.model, self.recipe, self.host.teams, self.experts_on)

    @property
    def room_bytes(self) -> int:
        """The most bytes, counted as by `need_bytes`, that the model may take and still fit into the host's main memory
        and into each of its NUMA nodes.
        """
        host = self.host
        room = host.room_bytes - self.extra_bytes
        fullest = node_room_bytes(
            self.model,
            self.recipe,
            host.teams,
            host.nodes,
            host.margin_bytes,
            self.use,
            self.experts_on,
        )
        return room if fullest is None else min(room, fullest)

    def context(self, asked: int | None) -> int:
        """Returns the number of context positions to reserve: `asked`, or the default of this model and host if it is
        None.
        """
        return asked or default_context(self.model, self.recipe, self.room_bytes, self.use)

    def need_bytes(self, context: int) -> int:
        """Returns the bytes of main memory that a model with a context of `context` positions takes: weights, cache,
        scratch and process, without what cutting weights between teams adds.
        """
        return need_bytes(self.model, self.recipe, context, self.use)

    def fits(self, context: int) -> bool:
        """Returns whether the model with a context of `context` positions fits into the host's memory."""
        return self.need_bytes(context) <= self.room_bytes

    def total_bytes(self, context: int) -> int:
        """Returns the bytes of main memory that a plan with a context of `context` positions counts: weights, cache,
        scratch and process, what cutting weights between teams adds, and what is left free.
        """
        return self.need_bytes(context) + self.extra_bytes + self.host.margin_bytes

    def node_needs(self, context: int) -> tuple[NodeNeed, ...]:
        """Returns for each NUMA node its number, the bytes that it must hold and the bytes free there; (): no memory is
        bound to a node.
        """
        host = self.host
        if not host.nodes:
            return ()
        others = beside_bytes(self.model, context, self.use) + host.margin_bytes
        return node_needs(self.model, self.recipe, host.teams, host.nodes, others, self.experts_on)

    def step_s(self, n_tokens: int, start: int = 0) -> float:
        """Returns the predicted seconds of a step of `n_tokens` tokens behind `start` cached positions, with every
        layer on the CPU.
        """
        step = StepShape(n_tokens, start, cache=self.use.cache_format)
        works = _works(self.model, self.recipe, step, self.use)
        whole = step_seconds(works, self.model.operations, self.host.rates, n_tokens)
        longer = self._experts_longer - 1.0
        experts = (work for work in works if longer and work.part is ModelPart.EXPERTS)
        return whole + longer * sum(seconds(work, self.host.rates, n_tokens) for work in experts)

    @property
    def _experts_longer(self) -> float:
        """How many times as long the experts take as with all teams at work in each layer, on average."""
        layers = self.model.spec.moe_layers
        if not self.experts_on or not layers:
            return 1.0
        more = (slowed(self.host, teams) - 1.0 for teams in self.experts_on.values())
        return 1.0 + sum(more) / layers

    def speed(self, context: int) -> Speed:
        """Returns the predicted tokens per second with a context of `context` positions: decode at `early_position` and
        at the full context, and prefill.
        """
        return Speed.of(context, PREFILL_CHUNK, partial(self.step_s, 1), self.step_s)

    def decode_tok_s(self, context: int) -> float:
        """Returns the predicted decode speed at `early_position`, in tokens per second, with a context of `context`
        positions.
        """
        return 1 / self.step_s(1, early_position(context))

    def lines(self, context: int) -> Iterator[Line]:
        """Yields the lines of a plan with a context of `context` positions: for each part of the model its place, bytes
        and predicted seconds, the largest part first; then lines for memory other than weights.
        """
        model, host, recipe, use = self.model, self.host, self.recipe, self.use
        spec, line = model.spec, _Timing.of(self, context).line
        extra, spread = self._extra, host.spread_words
        for part in parts(model, recipe):
            where = host.cut_words if part.part in extra else spread
            size = part.size_bytes + extra.get(part.part, 0)
            yield line(part.part, part.format, where, size, _reason(part.part, spec))
        states = use.states_bytes(spec)
        cache, fmt = use.cache_bytes(spec, context), use.cache_format.name
        yield line(ModelPart.CACHE, fmt, spread, cache, use.cache_words(spec, context))
        if states:
            yield line(ModelPart.STATES, "f32", spread, states, STATES_REASON)
        if adapters := use.adapter_bytes(spec):
            yield line(
                ModelPart.ADAPTERS,
                "bf16",
                "memory",
                adapters,
                "next to the products that they change",
            )
        buffers = f"buffers of a step of {PREFILL_CHUNK} tokens"
        scratch = scratch_bytes(model, use.streams) + use.logits_bytes(spec, context)
        yield Line.reserved("scratch", "f32", spread, scratch, buffers)
        others = f"the program; {gib(host.margin_bytes)} for other programs"
        yield Line.reserved(
            "process, margin", "", spread, PROCESS_BYTES + host.margin_bytes, others
        )


@dataclass(frozen=True, slots=True)
class _Timing:
    """The work of each part in one decode step and in one prefill chunk, and the rates that time it."""

    decode: Mapping[ModelPart, PartWork]
    prefill: Mapping[ModelPart, PartWork]
    chunk: int
    rates: Rates
    experts_longer: float

    @classmethod
    def of(cls, alone: Alone, context: int) -> _Timing:
        model, recipe, use = alone.model, alone.recipe, alone.use
        chunk, cache = min(PREFILL_CHUNK, context), use.cache_format
        decode, prefill = (
            {work.part: work for work in _works(model, recipe, step, use)}
            for step in (
                StepShape(1, early_position(context), cache=cache),
                StepShape(chunk, cache=cache),
            )
        )
        return cls(decode, prefill, chunk, alone.host.rates, alone._experts_longer)

    def line(self, part: ModelPart, fmt: str, where: str, size_bytes: int, reason: str) -> Line:
        one, many = self.decode.get(part), self.prefill.get(part)
        longer = self.experts_longer if part is ModelPart.EXPERTS else 1.0
        return Line(
            part=part.value,
            format=fmt,
            where=where,
            size_bytes=size_bytes,
            decode_bytes=one.read_bytes if one else 0,
            decode_s=longer * seconds(one, self.rates, 1) if one else 0.0,
            prefill_s=longer * seconds(many, self.rates, self.chunk) / self.chunk if many else 0.0,
            reason=reason,
        )


def slowed(host: Host, teams: Sequence[int]) -> float:
    """Returns how many times as long a job takes on the teams of threads with these indices as on all teams of the
    host: the ratio of their thread counts.
    """
    own = sum(host.teams[team].threads for team in teams)
    return sum(team.threads for team in host.teams) / max(1, own)


def _works(model: Model, recipe: Recipe, step: StepShape, use: Use) -> tuple[PartWork, ...]:
    """The work of a step, that with adapters among it."""
    return step_work(model, recipe, step) + use.adapter_work(model.spec, step.n_tokens)


_REASONS: Mapping[ModelPart, str] = {
    ModelPart.EMBEDDING: "one row per token",
    ModelPart.ATTENTION: "every token reads all of it",
    ModelPart.LATENT: "turns cached latents into keys and values",
    ModelPart.LINEAR: "every token reads all of it",
    ModelPart.LINEAR_GATES: "decides what the state keeps",
    ModelPart.POOLING: "turns each window of positions into a row",
    ModelPart.INDEXER: "chooses the positions",
    ModelPart.HYPER: "mixes the residual streams",
    ModelPart.NORM_GATES: "scales what each part reads",
    ModelPart.DENSE_MLP: "every token reads all of it",
    ModelPart.SHARED: "every token uses them",
    ModelPart.ROUTER: "chooses the experts",
    ModelPart.EXPERT_LATENT: "input and output of the experts",
    ModelPart.VECTORS: "small, stored exactly",
    ModelPart.HEAD: "read once per sampled token",
}


def _reason(part: ModelPart, spec: Spec) -> str:
    if part is ModelPart.EXPERTS:
        return f"{spec.top_k} of {spec.experts} per token in {spec.moe_layers} layers"
    return _REASONS[part]
