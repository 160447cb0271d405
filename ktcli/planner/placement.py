"""Where every part of a model goes on a machine, whether it fits, and how fast it will be.

`place` is pure: no device, no disk, the same answer every time. Memory is decided first (weights, the
cache for the asked context, scratch, a margin), then time from the roofline in `cost`. Each line of the
plan says its bytes, its reason and its predicted time; a plan that does not fit says what would.
Where memory is bound to NUMA nodes, each node is a memory of its own that must hold its share.
This version runs every layer on the CPU: a GPU is named with its memory, and stays unused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ktcli.errors import NotEnoughMemory, UsageError, gib
from ktcli.models.model import Model, Spec
from ktcli.planner.cost import Rates, seconds, step_seconds
from ktcli.planner.host import Host, node_words
from ktcli.planner.memory import (
    LEAST_CONTEXT,
    PREFILL_CHUNK,
    PROCESS_BYTES,
    default_context,
    fitting_context,
    need_bytes,
    node_room_bytes,
    scratch_bytes,
)
from ktcli.planner.nodes import NodeNeed, extra_bytes, node_needs, traffic_bytes
from ktcli.planner.spec import (
    KV_CACHE,
    Step,
    Work,
    kv_bytes,
    kv_bytes_per_token,
    parts,
    step_work,
)
from ktcli.weights.formats import FORMATS
from ktcli.weights.recipe import Recipe

EARLY_TOKENS = 512  # where in a chat the first predicted decode speed is taken


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks for.

    Attributes:
        recipe: number formats.
        context: positions to reserve; None = `memory.default_context`.
    """

    recipe: Recipe = field(default_factory=Recipe)
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One part of the plan.

    Attributes:
        where: the memory it lies in: "memory" (anywhere), or which nodes and how they share it.
        decode_bytes: read for one token at EARLY_TOKENS.
        decode_s, prefill_s: predicted share of one decode step, and of one token of a prefill chunk.
    """

    part: str
    format: str
    where: str
    size_bytes: int
    decode_bytes: int
    decode_s: float
    prefill_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicted tokens per second: decode early in a chat and at the full context, and prefill."""

    decode: float
    decode_full: float
    prefill: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of `place`.

    Attributes:
        need_bytes: memory the plan takes.
        advice: what would make a refused plan fit, the smallest sacrifice first; empty if it fits.
        nodes: what each node must hold; (): no memory is bound to a node.
        traffic_bytes: activations that pass between the teams per decoded token (`nodes.traffic_bytes`);
            0 with one team.
    """

    host: Host
    recipe: Recipe
    context: int
    lines: tuple[Line, ...]
    need_bytes: int
    speed: Speed
    advice: tuple[str, ...]
    nodes: tuple[NodeNeed, ...] = ()
    traffic_bytes: int = 0

    @property
    def fits(self) -> bool:
        return self.need_bytes <= self.host.available_bytes and all(n.fits for n in self.nodes)

    def require(self, what: str) -> None:
        """Raise if the plan does not fit.

        Raises:
            NotEnoughMemory: with what would make it fit.
        """
        hint = "; ".join(self.advice)
        if self.need_bytes > self.host.available_bytes:
            raise NotEnoughMemory(what, self.need_bytes, self.host.available_bytes, hint=hint)
        for each in self.nodes:
            if not each.fits:
                raise NotEnoughMemory(
                    what, each.need_bytes, each.free_bytes, node=each.node, hint=hint
                )


def place(model: Model, host: Host, request: Request) -> Plan:
    """Plan `model` on `host`.

    Raises:
        UsageError: the asked context is beyond the model's.
    """
    spec, recipe = model.spec, request.recipe
    if request.context is not None and request.context > spec.context:
        raise UsageError(
            f"the model was made for {spec.context} positions, --context asks for {request.context}"
        )
    room = _room_bytes(model, recipe, host)
    context = request.context or default_context(model, recipe, room)
    need = _total_bytes(model, recipe, host, context) + host.margin_bytes
    fits = need_bytes(model, recipe, context) <= room
    return Plan(
        host=host,
        recipe=recipe,
        context=context,
        lines=tuple(_lines(model, host, recipe, context)),
        need_bytes=need,
        speed=predict(model, recipe, context, host.rates),
        advice=() if fits else tuple(_advice(model, host, recipe, context)),
        nodes=_node_needs(model, recipe, host, context),
        traffic_bytes=traffic_bytes(model, recipe, max(1, len(host.teams))),
    )


# --- memory ---------------------------------------------------------------------------------------


def _total_bytes(model: Model, recipe: Recipe, host: Host, context: int) -> int:
    """Memory of everything, with what cutting adds."""
    extra = sum(extra_bytes(model, recipe, host.teams).values())
    return need_bytes(model, recipe, context) + extra


def _node_needs(model: Model, recipe: Recipe, host: Host, context: int) -> tuple[NodeNeed, ...]:
    if not host.nodes:
        return ()
    others = kv_bytes(model.spec, context) + scratch_bytes(model) + PROCESS_BYTES
    return node_needs(model, recipe, host.teams, host.nodes, others + host.margin_bytes)


def _room_bytes(model: Model, recipe: Recipe, host: Host) -> int:
    """The `need_bytes` that fits: in the whole memory, and in that of the node which is full first."""
    extra = sum(extra_bytes(model, recipe, host.teams).values())
    room = host.room_bytes - extra
    fullest = node_room_bytes(model, recipe, host.teams, host.nodes, host.margin_bytes)
    return room if fullest is None else min(room, fullest)


# --- advice ---------------------------------------------------------------------------------------


def _advice(model: Model, host: Host, recipe: Recipe, context: int) -> Iterator[str]:
    """What would make the plan fit, the smallest sacrifice first."""
    shorter = fitting_context(model, recipe, _room_bytes(model, recipe, host))
    if shorter >= LEAST_CONTEXT:
        yield f"--context {shorter} fits"
    if host.nodes and need_bytes(model, recipe, context) <= host.room_bytes:
        yield "--numa off fits, but reads most weights from far memory"
    for smaller in _smaller(recipe):
        if need_bytes(model, smaller, context) <= _room_bytes(model, smaller, host):
            yield f"--experts {smaller.experts.name} --dense {smaller.dense.name} fits"
            break
    missing = _total_bytes(model, recipe, host, context) - host.room_bytes
    if missing > 0:
        yield f"{gib(missing)} more memory would do"
        return
    for need in _node_needs(model, recipe, host, context):
        if not need.fits:
            yield f"{gib(need.need_bytes - need.free_bytes)} more free on node {need.node} would do"


def _smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes that take less memory, the least change first: experts, then dense, then both."""
    experts = [
        FORMATS[name] for name in ("int8", "int4") if FORMATS[name].bits < recipe.experts.bits
    ]
    dense = [FORMATS["int8"]] if recipe.dense.bits > 8 else []
    yield from (Recipe(fmt, recipe.dense) for fmt in experts)
    yield from (Recipe(fmt, small) for small in dense for fmt in [recipe.experts, *experts])


# --- time -----------------------------------------------------------------------------------------


def predict(model: Model, recipe: Recipe, context: int, rates: Rates) -> Speed:
    """Tokens per second of decode and of a prefill chunk."""
    early = min(EARLY_TOKENS, context - 1)
    chunk = min(PREFILL_CHUNK, context)
    decode, full, prefill = (
        step_seconds(step_work(model, recipe, step), model.spec, rates, step.n_tokens)
        for step in (Step(1, early), Step(1, context - 1), Step(chunk))
    )
    return Speed(1 / decode, 1 / full, chunk / prefill)


@dataclass(frozen=True, slots=True)
class _Timing:
    """What each part does in one decode step and in one prefill chunk, and how fast that goes."""

    decode: Mapping[str, Work]
    prefill: Mapping[str, Work]
    chunk: int
    rates: Rates

    @classmethod
    def of(cls, model: Model, recipe: Recipe, context: int, rates: Rates) -> _Timing:
        chunk = min(PREFILL_CHUNK, context)
        decode, prefill = (
            {work.part: work for work in step_work(model, recipe, step)}
            for step in (Step(1, min(EARLY_TOKENS, context - 1)), Step(chunk))
        )
        return cls(decode, prefill, chunk, rates)

    def line(self, part: str, fmt: str, where: str, size_bytes: int, reason: str) -> Line:
        one, many = self.decode.get(part), self.prefill.get(part)
        return Line(
            part=part,
            format=fmt,
            where=where,
            size_bytes=size_bytes,
            decode_bytes=one.read_bytes if one else 0,
            decode_s=seconds(one, self.rates, 1) if one else 0.0,
            prefill_s=seconds(many, self.rates, self.chunk) / self.chunk if many else 0.0,
            reason=reason,
        )


def _lines(model: Model, host: Host, recipe: Recipe, context: int) -> Iterator[Line]:
    """Every part with its bytes and its predicted time, the largest first; then what has no weights."""
    spec, line = model.spec, _Timing.of(model, recipe, context, host.rates).line
    extra, teams = extra_bytes(model, recipe, host.teams), len(host.teams)
    spread = f"{node_words(host.nodes)}, interleaved" if host.nodes else "memory"
    split = f"{node_words(host.nodes)}, cut between {teams} teams"
    for part in parts(model, recipe):
        where = split if part.name in extra else spread
        size = part.size_bytes + extra.get(part.name, 0)
        yield line(part.name, part.format, where, size, _reason(part.name, spec))
    positions = f"{context} positions, {gib(kv_bytes_per_token(spec))} each"
    yield line(KV_CACHE, "bf16", spread, kv_bytes(spec, context), positions)
    buffers = f"buffers of a step of {PREFILL_CHUNK} tokens"
    yield line("scratch", "f32", spread, scratch_bytes(model), buffers)
    others = f"the program; {gib(host.margin_bytes)} for others"
    yield line("process, margin", "", spread, PROCESS_BYTES + host.margin_bytes, others)


_REASONS: Mapping[str, str] = {
    "embedding": "one row per token",
    "attention": "every token reads all of it",
    "latent attention": "cached latents to keys and values",
    "dense MLP": "every token reads all of it",
    "shared experts": "every token uses them",
    "router": "chooses the experts",
    "norms, biases": "small, kept exact",
    "output head": "read once per token that is sampled",
}


def _reason(part: str, spec: Spec) -> str:
    if part == "routed experts":
        return f"{spec.top_k} of {spec.experts} per token in {spec.moe_layers} layers"
    return _REASONS.get(part, "")
