"""Applies what placement rules decide to a machine: the GPUs and their order, and the teams that hold experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktcli.errors import UsageError
from ktcli.hardware.gpu import AUTO, CPU, parse_device
from ktcli.hardware.machine import Gpu
from ktcli.hardware.text import cpu_text
from ktcli.planner.constraints import Constraints
from ktcli.planner.host import Host
from ktcli.planner.plan import Request
from ktcli.planner.slices import ExpertTeams


def require_device(request: Request, said: Constraints) -> None:
    """Raises UsageError if what rules decide and what else is asked for cannot both be.

    Raises:
        UsageError: the device is another, or adapters are wanted, which run on the CPU.
    """
    kind, number = parse_device(request.device)
    words = ", ".join(f"cuda:{each}" for each in said.named)
    if said.on_cpu and kind not in (AUTO, CPU):
        raise UsageError(
            f"the placement rules keep layers on the CPU, but --device is {request.device}",
            hint="beside a GPU, only routed experts and the embedding can be in main memory",
        )
    if not said.named:
        return
    if request.use.adapters:
        raise UsageError(
            f"the placement rules use {words}, but adapters run on the CPU",
            hint="leave out --placement, or the adapter",
        )
    if kind == CPU or (number is not None and said.named != (number,)):
        raise UsageError(
            f"the placement rules use {words}, but {_asked(kind, request.device)}",
            hint="leave out --placement, or what asks for that; kt doctor shows the GPUs that kt can use",
        )


def _asked(kind: str, device: str) -> str:
    """What a request asks for instead: an exact engine, and one without a usable GPU, run on the CPU, too."""
    return "every layer is to run on the CPU" if kind == CPU else f"--device is {device}"


def in_order(gpus: Sequence[Gpu], said: Constraints) -> tuple[Gpu, ...]:
    """Returns the GPUs in the order in which rules give them layers; others come where most layers are between."""
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


def experts_on(host: Host, said: Constraints) -> ExpertTeams:
    """Returns the teams that have the experts of layers which rules place on a node.

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
