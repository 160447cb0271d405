"""`kt plan`: whether a model fits, where its parts go, how fast it will be, and why."""

from __future__ import annotations

import typer

from ktcli.assembly.plan import plan_subject
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.subject import find_subject
from ktcli.commands.options import (
    ContextOpt,
    DeferOpt,
    DenseOpt,
    DeviceOpt,
    ExpertsOpt,
    GpuExpertsOpt,
    JsonOpt,
    MachineOpt,
    ModelArg,
    NumaOpt,
    PrefillThresholdOpt,
    ThreadsOpt,
)
from ktcli.commands.view.plan import document, render
from ktcli.errors import ExitCode
from ktcli.hardware.gpu import AUTO
from ktcli.hardware.numa import asked_numa, parse_numa
from ktcli.output import out
from ktcli.planner.choice import BY_MEMORY


def plan(
    model: ModelArg,
    context: ContextOpt = None,
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    threads: ThreadsOpt = None,
    numa: NumaOpt = None,
    device: DeviceOpt = AUTO,
    gpu_experts: GpuExpertsOpt = None,
    defer: DeferOpt = None,
    prefill_threshold: PrefillThresholdOpt = None,
    machine: MachineOpt = None,
    json: JsonOpt = False,
) -> None:
    """Show where a model would go and how fast it would be.

    Works for every name that kt list --all shows, pulled or not. Exit code 4: it does not fit.

    Examples:

      kt plan qwen3-30b-a3b --context 32768

      kt plan deepseek-v3 --experts int8 --machine xeon-2x32-512gb --numa off

      kt plan qwen3-30b-a3b --machine laptop-8gb-gpu --gpu-experts front --defer 0
    """
    words = DeviceWords(device, gpu_experts, defer, prefill_threshold)
    subject = find_subject(model, None if experts == BY_MEMORY else experts, dense)
    # The settings of the environment are those of this machine only.
    teams = asked_numa(numa) if machine is None else parse_numa(numa or "auto")
    wanted = Wanted(context, threads, numa=teams, device=words)
    auto = experts == BY_MEMORY
    made = plan_subject(subject, wanted, described=machine, by_memory=auto, listener=out)
    out.result(document(subject.name, made), lambda: render(subject.name, made))
    if not made.fits:
        raise typer.Exit(ExitCode.NO_ROOM)
