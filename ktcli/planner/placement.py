"""Decides where every part of a model goes on a machine, whether it fits, and how fast it will be.

`place` is pure: no device, no disk, the same answer every time. Memory is decided first (weights, the
cache for the asked context, scratch, a margin), then time from the roofline in `cost`. Each line of the
plan says its bytes, its reason and its predicted time; a plan that does not fit says what would.
Where memory is bound to NUMA nodes, each node is a memory of its own that must hold its share.
Plans that use a GPU are made in `hybrid`; this is the CPU alone, and the choice between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ktcli.errors import NotEnoughMemory, UsageError, gib
from ktcli.hardware.gpu import AUTO, CPU, CUDA, parse_device
from ktcli.hardware.machine import Gpu
from ktcli.hardware.text import cpu_text
from ktcli.models.model import Model, Spec
from ktcli.ops.kvformat import FP8
from ktcli.planner import deferral
from ktcli.planner.alone import Alone
from ktcli.planner.host import Host
from ktcli.planner.nodes import traffic_bytes
from ktcli.planner.partnames import PartNames
from ktcli.planner.plan import Cost, Plan, Request
from ktcli.planner.prefill import NEVER
from ktcli.planner.ruled import experts_on, in_order, require_device, rows_of
from ktcli.planner.slices import ALL_TEAMS, ExpertTeams
from ktcli.planner.spec import weight_bytes
from ktcli.weights.recipe import Recipe

# A plan without GPUs, rules and advice is made in a start; what the others need is imported where they begin.
if TYPE_CHECKING:
    from ktcli.planner.constraints import Constraints
    from ktcli.planner.levers import Levers

# With `auto` such a model stays on the CPU: it answers before torch and CUDA have started.
SMALL_BYTES = 256 << 20
_MOST_COSTED = 8  # rules that are planned without, one after the other


def place(model: Model, host: Host, request: Request) -> Plan:
    """Returns the plan of `model` on `host`: the place of each part, the bytes of memory and whether they fit, and the
    predicted speed; if they do not fit, with advice on what would.

    Raises:
        UsageError: the request asks for more than the model has, is for another model, names a GPU that is not there,
            or has rules that cannot be followed.
        NotEnoughMemory: a GPU was asked for that cannot hold what must lie on it.
    """
    _check(model.spec, request)
    made = _placed(model, host, request)
    if not made.fits:
        made = replace(made, advice=_levers(model, host, request, made).fitting())
    return replace(made, costs=tuple(_costs(model, host, request, made)))


def advised(
    model: Model,
    host: Host,
    request: Request,
    made: Plan,
    *,
    exact: bool = False,
    tok_s: float | None = None,
) -> Plan:
    """Returns a plan that `place` made, with advice on improvements added if it fits; unchanged if it does not.

    Args:
        exact: whether the plan's formats hold the checkpoint's experts without loss.
        tok_s: the tokens per second that are wanted; None: any speed is enough.
    """
    if not made.fits:
        return made
    levers = _levers(model, host, request, made, exact=exact)
    slow = tok_s is not None and made.speed.decode < tok_s
    return replace(made, advice=levers.reaching(tok_s or 0.0) if slow else levers.improving())


def _levers(
    model: Model, host: Host, request: Request, made: Plan, *, exact: bool = False
) -> Levers:
    from ktcli.planner.levers import Levers

    def attempt(host: Host, request: Request) -> Plan | None:
        try:
            return _placed(model, host, request)
        except (NotEnoughMemory, UsageError):
            return None

    return Levers(model, host, request, made, attempt, exact)


def _check(spec: Spec, request: Request) -> None:
    if request.context is not None and not 1 <= request.context <= spec.context:
        raise UsageError(
            f"a context of {request.context} tokens is not possible:"
            f" this model supports 1 to {spec.context} positions",
            hint=f"use --context {spec.context} or less",
        )
    deferral.require(request.defer, spec.deferrable)
    if request.use.cache_format == FP8 and spec.chooses:
        raise UsageError(
            f"{spec.family} cannot use an fp8 cache: its layers attend to chosen positions or to pooled rows,"
            " which kt does not store in fp8",
            hint="leave out --kv, or use --kv bf16",
        )


def _placed(model: Model, host: Host, request: Request) -> Plan:
    """Makes the plan on GPUs or on the CPU alone, whichever is asked for or faster."""
    if request.rules is not None and request.rules.each:
        from ktcli.planner.constraints import constraints_of

        return _ruled(model, host, request, constraints_of(request.rules, model, request.recipe))
    gpus = candidates(host.gpus, request)
    if not gpus:
        return _on_cpu(model, host, request, _unused(host.gpus, "because of --device cpu"))
    if request.device == AUTO and is_small(model, request.recipe):
        return _on_cpu(model, host, request, _unused(host.gpus, "because the model is small"))
    assert host.beside is not None
    from ktcli.planner.hybrid import plan_with

    try:
        made = plan_with(model, host.beside, gpus, request)
    except NotEnoughMemory as error:
        if request.device != AUTO:
            raise
        return _on_cpu(model, host, request, (f"{error}: every layer runs on the CPU",))
    if request.device == AUTO:
        alone = Alone.of(model, host, request)
        context = alone.context(request.context)
        slower = made.speed.decode < alone.decode_tok_s(context)
        if (slower or not made.fits) and alone.fits(context):
            why = (
                "because the CPU alone is faster"
                if slower
                else "because main memory would be too small"
            )
            return _on_cpu(model, host, request, _unused(host.gpus, why))
    return replace(made, notes=(*_left_over(host.gpus, gpus, made), *made.notes))


def _ruled(model: Model, host: Host, request: Request, said: Constraints) -> Plan:
    """Makes the plan within what rules decide. Where they name a GPU it is as if it was asked for."""

    require_device(request, said)
    named, where = said.named, CPU if said.on_cpu else request.device
    own = None if named else _placed(model, host, replace(request, rules=None, device=where))
    if own is None or own.device is not None:
        for number in named:
            candidates(host.gpus, replace(request, device=f"{CUDA}:{number}"))
        gpus = in_order(candidates(host.gpus, request), said)
        made = _with_gpus(model, host, gpus, request, said)
    else:
        kept = _unused(host.gpus, "because the placement rules keep every layer on the CPU")
        notes = kept if said.on_cpu else own.notes
        made = _on_cpu(model, host, request, notes, experts_on(host, said))
    rows = rows_of(made, said, PartNames.of(model).moe) if said.kernels else {}
    return replace(made, rows=rows, notes=(*dict.fromkeys((*said.notes, *made.notes)),))


def _with_gpus(
    model: Model, host: Host, gpus: Sequence[Gpu], request: Request, said: Constraints
) -> Plan:
    from ktcli.planner.hybrid import plan_with

    assert host.beside is not None
    made = plan_with(model, host.beside, gpus, request, said, experts_on(host.beside, said))
    return replace(made, notes=(*_left_over(host.gpus, gpus, made), *made.notes))


def candidates(gpus: Sequence[Gpu], request: Request) -> tuple[Gpu, ...]:
    """Returns the GPUs that a request may use, in the order in which they take layers: those that it names, else all,
    those with most free memory first; (): only the CPU is used.

    Raises:
        UsageError: a GPU that the request names is not among `gpus`, or its device is not valid.
    """
    kind, number = parse_device(request.device)
    if kind == CPU or (kind == AUTO and not gpus):
        return ()
    if number is not None and request.gpus is not None and number not in request.gpus:
        allowed = cpu_text(sorted(request.gpus))
        raise UsageError(
            f"--device {request.device} is not one of the allowed GPUs: {allowed}",
            hint="--gpus or the gpus setting selects them; --gpus all allows all",
        )
    named = (number,) if number is not None else request.gpus
    by_number = {gpu.index: gpu for gpu in gpus}
    missing = [each for each in named or () if each not in by_number]
    if missing or not gpus:
        have = ", ".join(f"cuda:{gpu.index}" for gpu in gpus) or "none that can be used"
        what = f"cuda:{missing[0]}" if missing else request.device
        raise UsageError(f"there is no GPU {what}", hint=f"GPUs here: {have}; kt doctor shows more")
    if named is not None:
        return tuple(by_number[each] for each in named)
    return tuple(sorted(gpus, key=lambda gpu: (-gpu.free_bytes, gpu.index)))


def _left_over(gpus: Sequence[Gpu], candidates: Sequence[Gpu], made: Plan) -> tuple[str, ...]:
    """The notes on GPUs that a plan with some does not use."""
    assert made.device is not None
    used = made.device.gpus
    return (
        *_unused([gpu for gpu in gpus if gpu not in candidates], "because others were requested"),
        *_unused(
            [gpu for gpu in candidates if gpu not in used],
            "because the whole model is on other GPUs"
            if made.device.mask.all()
            else "because it would not help",
        ),
    )


def is_small(model: Model, recipe: Recipe) -> bool:
    """Returns whether the weights of a model take less than SMALL_BYTES, so that with --device auto it runs on the CPU
    whatever GPUs there are.
    """
    return weight_bytes(model, recipe) < SMALL_BYTES


def _unused(gpus: Sequence[Gpu], why: str) -> tuple[str, ...]:
    """The note on all GPUs that are not used, one sentence; () if there is no GPU."""
    if not gpus:
        return ()
    alike: dict[str, list[int]] = {}
    for gpu in gpus:
        alike.setdefault(f"{gpu.name}, {gib(gpu.vram_bytes)}", []).append(gpu.index)
    each = ", ".join(f"cuda:{cpu_text(ids)} ({kind})" for kind, ids in alike.items())
    return (f"{each} stay{'s' if len(gpus) == 1 else ''} unused, {why}",)


def _on_cpu(
    model: Model,
    host: Host,
    request: Request,
    notes: Sequence[str],
    experts_on: ExpertTeams = ALL_TEAMS,
) -> Plan:
    """Makes the plan with every layer on the CPU."""
    recipe, alone = request.recipe, Alone.of(model, host, request, experts_on)
    context = alone.context(request.context)
    return Plan(
        host=host,
        recipe=recipe,
        context=context,
        lines=tuple(alone.lines(context)),
        need_bytes=alone.total_bytes(context),
        speed=alone.speed(context),
        advice=(),
        nodes=alone.node_needs(context),
        traffic_bytes=traffic_bytes(model, recipe, max(1, len(host.teams))),
        notes=(*notes, *host.notes),
        use=request.use,
        defer=request.defer or 0,
        experts_on=experts_on,
    )


# --- what was forced --------------------------------------------------------------------------------


def _costs(model: Model, host: Host, request: Request, made: Plan) -> Iterator[Cost]:
    """Yields what each forced option does to the speed, the others left as they are."""
    for option, what, own in _forced(host, request, made):
        plan = _placed(model, host, own)
        before, after = getattr(plan.speed, what), getattr(made.speed, what)
        yield Cost(option, what, before, after)
    for option, own in _forced_by_rules(request):
        with suppress(NotEnoughMemory, UsageError):  # the other rules alone may be impossible
            plan = _placed(model, host, own)
            speeds = plan.speed.decode, made.speed.decode
            more = (now - before for now, before in zip(_bytes(made), _bytes(plan), strict=True))
            yield Cost(option, "decode", *speeds, *more)


def _bytes(plan: Plan) -> tuple[int, int]:
    """The bytes of main memory and of all GPUs that a plan takes."""
    return plan.need_bytes, 0 if plan.device is None else plan.device.need.total


def _forced_by_rules(request: Request) -> Iterator[tuple[str, Request]]:
    """Yields the placement rules as a whole, and each of a few, with the request without them."""
    rules = request.rules
    if rules is None or not rules.each:
        return
    yield "--placement", replace(request, rules=None)
    if 1 < len(rules.each) <= _MOST_COSTED:
        for index, rule in enumerate(rules.each):
            others = (*rules.each[:index], *rules.each[index + 1 :])
            yield rule.name, replace(request, rules=replace(rules, each=others))


def _forced(host: Host, request: Request, made: Plan) -> Iterator[tuple[str, str, Request]]:
    """Yields each forced option as typed, the speed it is about, and the request without it."""
    if request.device != AUTO and host.gpus:
        yield f"--device {request.device}", "decode", replace(request, device=AUTO)
    if made.device is None:
        return
    if request.gpus is not None and len(host.gpus) > 1:
        yield f"--gpus {','.join(map(str, request.gpus))}", "decode", replace(request, gpus=None)
    choice, threshold = request.gpu_experts, request.prefill_threshold
    if choice is not None:
        said = "FILE" if isinstance(choice, np.ndarray) else choice
        yield f"--gpu-experts {said}", "decode", replace(request, gpu_experts=None)
    if request.defer is not None:
        yield f"--defer {request.defer}", "decode", replace(request, defer=None)
    if threshold is not None:
        said = "never" if threshold == NEVER else threshold
        own = replace(request, prefill_threshold=None)
        yield f"--prefill-threshold {said}", "prefill", own
