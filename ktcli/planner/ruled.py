"""Applies what placement rules decide to a machine: the GPUs and their order, and the teams that hold experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ktcli.errors import UsageError
from ktcli.hardware.gpu import AUTO, CPU, parse_device
from ktcli.hardware.machine import Gpu
from ktcli.hardware.text import cpu_text
from ktcli.ops.part import ModelPart, RowOf
from ktcli.planner.host import Host
from ktcli.planner.partnames import word_of
from ktcli.planner.plan import Plan, Request
from ktcli.planner.rules import LAYERS
from ktcli.planner.slices import ExpertTeams

if TYPE_CHECKING:
    from ktcli.planner.constraints import Constraints


def require_device(request: Request, said: Constraints) -> None:
    """Raises an error if placement rules contradict the device that a request asks for.

    Raises:
        UsageError: the rules keep layers on the CPU, but a GPU is asked for; or they put layers on GPUs, but the CPU or
            another GPU is asked for.
    """
    kind, number = parse_device(request.device)
    words = ", ".join(f"cuda:{each}" for each in said.named)
    if said.on_cpu and kind not in (AUTO, CPU):
        raise UsageError(
            f"the placement rules keep layers on the CPU, but --device is {request.device}",
            hint="beside a GPU, only experts, shared experts, dense MLPs and the embedding can be in main memory",
        )
    if not said.named:
        return
    if kind == CPU or (number is not None and said.named != (number,)):
        raise UsageError(
            f"the placement rules use {words}, but {_asked(kind, request.device)}",
            hint="leave out --placement, or what asks for that; kt doctor shows the GPUs that kt can use",
        )


def _asked(kind: str, device: str) -> str:
    """What a request asks for instead: an exact engine, and one without a usable GPU, run on the CPU, too."""
    return "every layer is to run on the CPU" if kind == CPU else f"--device is {device}"


def in_order(gpus: Sequence[Gpu], said: Constraints) -> tuple[Gpu, ...]:
    """Returns all of `gpus` in the order in which placement rules give them layers; those without rules are inserted
    where most layers have no rule.
    """
    named = [gpu for number in said.named for gpu in gpus if gpu.index == number]
    others = [gpu for gpu in gpus if gpu not in named]
    if not named or not others:
        return (*named, *others)
    spans = [np.flatnonzero(said.gpus == gpu.index) for gpu in named]
    ends = [-1, *(int(span[-1]) for span in spans)]
    begins = [*(int(span[0]) for span in spans), len(said.gpus)]
    gaps = [begin - end for begin, end in zip(begins, ends, strict=True)]
    at = max(range(len(gaps)), key=lambda n: (gaps[n], n))  # of equal gaps the last
    return (*named[:at], *others, *named[at:])


def rows_of(plan: Plan, said: Constraints, moe: Sequence[int]) -> RowOf:
    """Returns the names of the rows of CPU kernels (instruction sets) that placement rules ask for, by (layer or None,
    part), for parts that the CPU computes in a plan.

    Args:
        moe: the numbers of the layers with routed experts.
    Raises:
        UsageError: a rule names a row for parts that are all on GPUs.
    """
    device = plan.device
    on_cpu = set(said.kernels)
    if device is not None:
        here = {layer for layer, n in zip(moe, device.n_experts, strict=True) if n < device.experts}
        on_cpu &= {(n, ModelPart.EXPERTS) for n in here} | set(device.apart)
    used = {said.kernels[key].number for key in on_cpu}
    for (layer, part), rule in said.kernels.items():
        if rule.number not in used:
            word = word_of(part) if layer is None else f"{LAYERS}.{layer}.{word_of(part)}"
            raise UsageError(
                f"{rule.name} asks for the row {rule.kernel}, but {word} is on a GPU in this plan",
                hint="rows of kernels are for what the CPU computes; --device cpu keeps the whole model there",
            )
    return {key: rule.kernel for key, rule in said.kernels.items() if key in on_cpu and rule.kernel}


def experts_on(host: Host, said: Constraints) -> ExpertTeams:
    """Returns the indices of the teams that hold a layer's experts, by the number of the layer, for layers whose
    experts placement rules put on a NUMA node.

    Raises:
        UsageError: no team has its memory on that node alone.
    """
    found = {}
    for layer, node in said.nodes.items():
        teams = tuple(n for n, team in enumerate(host.teams) if team.memory == (node,))
        if not teams:
            have = sorted({team.memory[0] for team in host.teams if len(team.memory) == 1})
            words = (
                f"nodes to choose from: {cpu_text(have)}"
                if have
                else "no memory is bound to nodes here"
            )
            raise UsageError(
                f"the placement rules place experts of layer {layer} on node:{node}, which has no threads of its own",
                hint=f"{words}; kt doctor -v shows them",
            )
        found[layer] = teams
    return found
