"""Where every part of a model goes on a machine, whether it fits, and how fast it will be.

`place` is pure: no device, no disk, the same answer every time. Memory is decided first (weights, the
cache for the asked context, scratch, a margin), then time from the roofline in `cost`. Each line of the
plan says its bytes, its reason and its predicted time; a plan that does not fit says what would.
Where memory is bound to NUMA nodes, each node is a memory of its own that must hold its share.
Plans that use a GPU are made in `hybrid`; this is the CPU alone, and the choice between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ktcli.errors import NotEnoughMemory, UsageError, gib
from ktcli.hardware.gpu import AUTO, CPU, parse_device
from ktcli.hardware.machine import Gpu
from ktcli.hardware.text import cpu_text
from ktcli.models.model import Model, Spec
from ktcli.ops.part import ModelPart
from ktcli.planner import deferral
from ktcli.planner.cost import Rates, seconds, step_seconds
from ktcli.planner.host import Host, node_words
from ktcli.planner.hybrid import plan_with
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
from ktcli.planner.plan import EARLY_TOKENS, Cost, Line, Plan, Request, Speed
from ktcli.planner.prefill import NEVER
from ktcli.planner.spec import (
    STATES_REASON,
    Step,
    Work,
    kv_bytes,
    kv_bytes_per_token,
    parts,
    sequence_bytes,
    step_work,
    weight_bytes,
)
from ktcli.weights.formats import steps_from
from ktcli.weights.recipe import Recipe

# With `auto` such a model stays on the CPU: it answers before torch and CUDA have started.
SMALL_BYTES = 256 << 20


def place(model: Model, host: Host, request: Request) -> Plan:
    """Plan `model` on `host`.

    Raises:
        UsageError: what is asked for is beyond the model, or of another, or there is no such GPU.
        NotEnoughMemory: a GPU was asked for that cannot hold what must lie on it.
    """
    _check(model.spec, request)
    made = _placed(model, host, request)
    return replace(made, costs=tuple(_costs(model, host, request, made)))


def _check(spec: Spec, request: Request) -> None:
    if request.context is not None and request.context > spec.context:
        raise UsageError(
            f"the model was made for {spec.context} positions, --context asks for {request.context}"
        )
    deferral.require(request.defer, spec.top_k)


def _placed(model: Model, host: Host, request: Request) -> Plan:
    """The plan on a GPU or on the CPU alone, whichever is asked for or faster."""
    gpu = candidate(host.gpus, request.device)
    if gpu is None:
        return _on_cpu(model, host, request, _unused(host.gpus, "as --device cpu asks"))
    others = _unused([each for each in host.gpus if each != gpu], "as one GPU is used")
    if request.device == AUTO and is_small(model, request.recipe):
        return _on_cpu(model, host, request, _unused(host.gpus, "for a model as small as this one"))
    assert host.beside is not None
    try:
        made = plan_with(model, host.beside, gpu, request)
    except NotEnoughMemory as error:
        if request.device != AUTO:
            raise
        return _on_cpu(model, host, request, (f"{error}: every layer runs on the CPU",))
    if request.device == AUTO:
        slower = made.speed.decode < _plain_decode(model, host, request)
        if (slower or not made.fits) and _fits_plain(model, host, request):
            why = "as the CPU alone is faster" if slower else "as main memory is too small with it"
            return _on_cpu(model, host, request, _unused(host.gpus, why))
    if not made.fits:
        made = replace(made, advice=tuple(_hybrid_advice(model, host, gpu, request, made)))
    return replace(made, notes=(*others, *made.notes))


def candidate(gpus: Sequence[Gpu], device: str) -> Gpu | None:
    """The GPU that a request means: the one with most memory free, or that of the number; None: the CPU.

    Raises:
        UsageError: it cannot be used, or the words mean none.
    """
    kind, number = parse_device(device)
    if kind == CPU or (kind == AUTO and not gpus):
        return None
    found = [gpu for gpu in gpus if number is None or gpu.index == number]
    if not found:
        have = ", ".join(f"cuda:{gpu.index}" for gpu in gpus) or "none that can be used"
        raise UsageError(
            f"there is no GPU {device}", hint=f"GPUs here: {have}; kt doctor says more"
        )
    return max(found, key=lambda gpu: (gpu.free_bytes, -gpu.index))


def is_small(model: Model, recipe: Recipe) -> bool:
    """Whether a model stays on the CPU with `auto`, whatever GPUs there are."""
    return weight_bytes(model, recipe) < SMALL_BYTES


def _unused(gpus: Sequence[Gpu], why: str) -> tuple[str, ...]:
    """One sentence for all GPUs that are not used."""
    if not gpus:
        return ()
    alike: dict[str, list[int]] = {}
    for gpu in gpus:
        alike.setdefault(f"{gpu.name}, {gib(gpu.vram_bytes)}", []).append(gpu.index)
    each = ", ".join(f"cuda:{cpu_text(ids)} ({kind})" for kind, ids in alike.items())
    return (f"{each} stay{'s' if len(gpus) == 1 else ''} unused, {why}",)


def _plain_context(model: Model, host: Host, request: Request) -> int:
    room = _room_bytes(model, request.recipe, host)
    return request.context or default_context(model, request.recipe, room)


def _fits_plain(model: Model, host: Host, request: Request) -> bool:
    """Whether the CPU alone could do it."""
    need = need_bytes(model, request.recipe, _plain_context(model, host, request))
    return need <= _room_bytes(model, request.recipe, host)


def _plain_decode(model: Model, host: Host, request: Request) -> float:
    """Tokens per second of the CPU alone."""
    early = min(EARLY_TOKENS, _plain_context(model, host, request) - 1)
    works = step_work(model, request.recipe, Step(1, early))
    return 1 / step_seconds(works, model.spec, host.rates, 1)


def _on_cpu(model: Model, host: Host, request: Request, notes: Sequence[str]) -> Plan:
    """Every layer on the CPU."""
    recipe = request.recipe
    context = _plain_context(model, host, request)
    need = _total_bytes(model, recipe, host, context) + host.margin_bytes
    fits = _fits_plain(model, host, request)
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
        notes=(*notes, *host.notes),
    )


# --- what was forced --------------------------------------------------------------------------------


def _costs(model: Model, host: Host, request: Request, made: Plan) -> Iterator[Cost]:
    """What each forced option does to the speed, the others left as they are."""
    for option, what, own in _forced(request, made):
        plan = _placed(model, host, own)
        before, after = getattr(plan.speed, what), getattr(made.speed, what)
        yield Cost(option, what, before, after)


def _forced(request: Request, made: Plan) -> Iterator[tuple[str, str, Request]]:
    """(option as typed, the speed it is about, the request without it)."""
    if request.device != AUTO:
        yield f"--device {request.device}", "decode", replace(request, device=AUTO)
    if made.device is None:
        return
    wish, threshold = request.gpu_experts, request.prefill_threshold
    if wish is not None:
        said = "FILE" if isinstance(wish, np.ndarray) else wish
        yield f"--gpu-experts {said}", "decode", replace(request, gpu_experts=None)
    if request.defer is not None:
        yield f"--defer {request.defer}", "decode", replace(request, defer=None)
    if threshold is not None:
        said = "never" if threshold == NEVER else threshold
        own = replace(request, prefill_threshold=None)
        yield f"--prefill-threshold {said}", "prefill", own


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
            yield f"--experts {smaller.experts_name} --dense {smaller.dense.name} fits"
            break
    missing = _total_bytes(model, recipe, host, context) - host.room_bytes
    if missing > 0:
        yield f"{gib(missing)} more memory would do"
        return
    for need in _node_needs(model, recipe, host, context):
        if not need.fits:
            yield f"{gib(need.need_bytes - need.free_bytes)} more free on node {need.node} would do"


def _hybrid_advice(
    model: Model, host: Host, gpu: Gpu, request: Request, made: Plan
) -> Iterator[str]:
    """What would make a plan with a GPU fit into main memory."""
    assert host.beside is not None
    if _fits_plain(model, host, request):
        yield "--device cpu fits"
    for smaller in _smaller(request.recipe):
        try:
            fits = plan_with(model, host.beside, gpu, replace(request, recipe=smaller)).fits
        except NotEnoughMemory:
            continue
        if fits:
            yield f"--experts {smaller.experts_name} --dense {smaller.dense.name} fits"
            break
    missing = made.need_bytes - made.host.available_bytes
    if missing > 0:
        yield f"{gib(missing)} more memory would do"
        return
    for need in made.nodes:
        if not need.fits:
            yield f"{gib(need.need_bytes - need.free_bytes)} more free on node {need.node} would do"


def _smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes that take less memory, the least change first: experts, then dense, then both."""
    usual = Recipe()
    steps = reversed((usual.experts, *steps_from(usual.experts)))  # bf16, int8, int4
    experts = [
        fmt
        for fmt in steps
        if fmt.bits < recipe.experts.bits or (recipe.down and fmt == usual.experts)
    ]
    dense = [usual.dense] if recipe.dense.bits > usual.dense.bits else []
    pairs = [(fmt, recipe.dense) for fmt in experts]
    pairs += [(fmt, small) for small in dense for fmt in [recipe.experts, *experts]]
    yield from (Recipe(*pair, in_f32=recipe.in_f32) for pair in pairs)


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

    decode: Mapping[ModelPart, Work]
    prefill: Mapping[ModelPart, Work]
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

    def line(self, part: ModelPart, fmt: str, where: str, size_bytes: int, reason: str) -> Line:
        one, many = self.decode.get(part), self.prefill.get(part)
        return Line(
            part=part.value,
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
        where = split if part.part in extra else spread
        size = part.size_bytes + extra.get(part.part, 0)
        yield line(part.part, part.format, where, size, _reason(part.part, spec))
    positions = f"{context} positions, {gib(kv_bytes_per_token(spec))} each"
    states = sequence_bytes(spec)
    yield line(ModelPart.CACHE, "bf16", spread, kv_bytes(spec, context) - states, positions)
    if states:
        yield line(ModelPart.STATES, "f32", spread, states, STATES_REASON)
    buffers = f"buffers of a step of {PREFILL_CHUNK} tokens"
    yield Line.reserved("scratch", "f32", spread, scratch_bytes(model), buffers)
    others = f"the program; {gib(host.margin_bytes)} for others"
    yield Line.reserved("process, margin", "", spread, PROCESS_BYTES + host.margin_bytes, others)


_REASONS: Mapping[ModelPart, str] = {
    ModelPart.EMBEDDING: "one row per token",
    ModelPart.ATTENTION: "every token reads all of it",
    ModelPart.LATENT: "cached latents to keys and values",
    ModelPart.LINEAR: "every token reads all of it",
    ModelPart.LINEAR_GATES: "what is learned and forgotten",
    ModelPart.POOLING: "windows of positions become a row each",
    ModelPart.INDEXER: "what chooses the positions",
    ModelPart.HYPER: "how the residual's streams are mixed",
    ModelPart.DENSE_MLP: "every token reads all of it",
    ModelPart.SHARED: "every token uses them",
    ModelPart.ROUTER: "chooses the experts",
    ModelPart.VECTORS: "small, kept exact",
    ModelPart.HEAD: "read once per token that is sampled",
}


def _reason(part: ModelPart, spec: Spec) -> str:
    if part is ModelPart.EXPERTS:
        return f"{spec.top_k} of {spec.experts} per token in {spec.moe_layers} layers"
    return _REASONS[part]
