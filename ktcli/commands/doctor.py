"""`kt doctor`: what this machine is, what kt would use of it, and what stands in the way."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ktcli import __version__, config
from ktcli.assembly.measuring import measure_machine
from ktcli.commands.options import JsonOpt
from ktcli.commands.view.machine import TeamsHere, TilesHere, render
from ktcli.errors import KtError, NativeError, UsageError
from ktcli.hardware import amx, gpu, profile
from ktcli.hardware.diagnosis import HostSetting, Kernel, Level, Problem, diagnose, explain_rows
from ktcli.hardware.machine import Machine
from ktcli.hardware.numa import AUTO, asked_numa
from ktcli.hardware.probe import amx_facts, probe
from ktcli.hardware.team import node_teams, on_nodes
from ktcli.measure import tiles
from ktcli.output import out


def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure bandwidth and arithmetic too, and remember the result."
        ),
    ] = False,
    json: JsonOpt = False,
) -> None:
    """Show what this machine is and can do.

    Exit code 0: good. 1: usable, with warnings. 2: kt cannot run here.

    Examples:

      kt doctor
      kt doctor --measure              some seconds of all cores
      kt doctor --json > server.json   for: kt plan NAME --machine server.json
    """
    problems: list[Problem] = []
    kernels, native_error = _kernels()
    setting = _setting(native_error, problems)
    machine = probe()
    threads = _threads(machine, setting, problems)
    if measure and not native_error:
        machine = measure_machine(machine, threads.count, out)
    begin = None if native_error else _tiles(machine, kernels, threads.count, problems)
    verdict = begin.verdict if begin else None
    problems = sorted(
        [*problems, *diagnose(machine, kernels, setting, verdict)], key=lambda p: -p.level
    )
    code = max((problem.level for problem in problems), default=Level.NOTE)
    document = {
        "version": __version__,
        "machine": profile.document(machine),
        **threads.document(),
        "kernels": [asdict(kernel) for kernel in kernels],
        "amx": begin.document() if begin else None,
        "torch": setting.torch,
        "home": setting.home,
        "problems": [
            {"level": problem.level.name.lower(), "message": problem.message, "fix": problem.fix}
            for problem in problems
        ],
        "exit_code": int(code),
    }
    out.result(document, lambda: render(machine, kernels, setting, threads, begin, problems))
    if code:
        raise typer.Exit(int(code))


def _kernels() -> tuple[tuple[Kernel, ...], str]:
    """The rows of the native library, and if there are none the reason."""
    from ktcli import native

    try:
        rows = tuple((row.name, row.usable, row.missing) for row in native.isa_rows())
    except NativeError as error:
        return (), str(error)
    return explain_rows(rows, config.forced_isa()), ""


def _setting(native_error: str, problems: list[Problem]) -> HostSetting:
    """Reads environment and installation; what cannot be read becomes a problem."""
    threads: int | None = None
    asked = config.stated("threads")
    try:
        threads = asked.value
    except KtError as error:
        problems.append(Problem(Level.ERROR, str(error), asked.undo))
    home, home_error, home_warning = config.stated("home").text, "", ""
    try:
        home = str(config.home())
        home_error, home_warning = _unwritable(config.home())
    except KtError as error:
        home_error = str(error)
    return HostSetting(
        system=f"{platform.system()} {platform.machine()}",
        native_error=native_error,
        forced_isa=config.forced_isa(),
        forced_threads=threads,
        torch=gpu.torch_installed(),
        nvidia_driver=Path("/proc/driver/nvidia").is_dir(),
        home=home,
        home_error=home_error,
        home_warning=home_warning,
        threads_source=asked.source,
        threads_undo=asked.undo,
    )


def _unwritable(folder: Path) -> tuple[str, str]:
    """The reasons why a folder can be neither read nor made, and why an existing one cannot be written to."""
    here = folder
    while not here.exists() and here != here.parent:
        here = here.parent
    if not here.is_dir():
        return f"{folder} cannot be a folder, because {here} is a file", ""
    if os.access(here, os.W_OK | os.X_OK):
        return "", ""
    if here != folder:
        return f"the library folder {folder} cannot be made", ""
    return "", f"the library folder {folder} cannot be written: nothing can be added to it"


def _threads(machine: Machine, setting: HostSetting, problems: list[Problem]) -> TeamsHere:
    """The teams that the settings numa and threads ask for on this machine; a wrong numa becomes a problem.

    A number of threads above the number of cores is named by `diagnose`.
    """
    cpu, numa = machine.cpu, AUTO
    try:
        asked = asked_numa(None)
        cpu, numa = on_nodes(machine.nodes, cpu, asked), asked
    except UsageError as error:
        problems.append(Problem(Level.ERROR, f"{error}; {error.hint}", config.stated("numa").undo))
    threads = min(setting.forced_threads or cpu.threads, max(1, len(cpu.cores)))
    teams = node_teams(machine.nodes, cpu, threads, numa)
    said = setting.threads_source if setting.forced_threads else ""
    return TeamsHere(teams, numa, said, config.stated("numa").words)


def _tiles(
    machine: Machine, kernels: tuple[Kernel, ...], threads: int, problems: list[Problem]
) -> TilesHere:
    used = next((kernel.name for kernel in kernels if kernel.used), "")
    choice = None
    try:
        choice = tiles.look(machine.cpu, threads, used)
    except UsageError as error:
        problems.append(Problem(Level.ERROR, str(error), "unset KT_TILE_MIN"))
    return TilesHere(amx.explain(amx_facts(machine, used)), choice)
