"""`kt doctor`: what this machine is, what kt would use of it, and what stands in the way."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ktcli import __version__, config
from ktcli.commands.options import JsonOpt
from ktcli.errors import DeviceError, KtError, NativeError, UsageError, gib
from ktcli.hardware import amx, gpu, profile
from ktcli.hardware.datasheet import data_sheet
from ktcli.hardware.diagnosis import Kernel, Level, Problem, Setting, diagnose, explain_rows
from ktcli.hardware.machine import Gpu, Machine
from ktcli.hardware.numa import AUTO, Numa, asked_numa
from ktcli.hardware.probe import amx_facts, probe
from ktcli.hardware.team import NodeTeam, node_teams, on_nodes
from ktcli.hardware.text import cpu_text, numbered
from ktcli.measure import rates, tiles
from ktcli.output import out, safe, table


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
      kt doctor --measure                some seconds of all cores
      kt doctor --json > server.json     a machine file for: kt plan NAME --machine server.json
    """
    problems: list[Problem] = []
    kernels, native_error = _kernels()
    setting = _setting(native_error, problems)
    machine = probe()
    threads = _threads(machine, setting, problems)
    if measure and not native_error:
        machine = _measure(machine, threads.count)
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
    out.result(document, lambda: _render(machine, kernels, setting, threads, begin, problems))
    if code:
        raise typer.Exit(int(code))


def _kernels() -> tuple[tuple[Kernel, ...], str]:
    """The rows of the native library, or why there are none."""
    from ktcli import native

    try:
        rows = tuple((row.name, row.usable, row.missing) for row in native.isa_rows())
    except NativeError as error:
        return (), str(error)
    return explain_rows(rows, config.forced_isa()), ""


def _setting(native_error: str, problems: list[Problem]) -> Setting:
    """Environment and installation; what cannot be read becomes a problem."""
    threads: int | None = None
    try:
        threads = config.forced_threads()
    except KtError as error:
        problems.append(Problem(Level.ERROR, str(error), "unset KT_THREADS"))
    home, home_error, home_warning = os.environ.get("KT_HOME", ""), "", ""
    try:
        home = str(config.home())
        home_error, home_warning = _unwritable(config.home())
    except KtError as error:
        home_error = str(error)
    return Setting(
        system=f"{platform.system()} {platform.machine()}",
        native_error=native_error,
        forced_isa=config.forced_isa(),
        forced_threads=threads,
        torch=gpu.torch_installed(),
        nvidia_driver=Path("/proc/driver/nvidia").is_dir(),
        home=home,
        home_error=home_error,
        home_warning=home_warning,
    )


def _unwritable(folder: Path) -> tuple[str, str]:
    """Why a folder can be neither read nor made, and why nothing can be written to one that is there."""
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


@dataclass(frozen=True, slots=True)
class _Threads:
    """The teams that a command would start now, and what asks for them."""

    teams: tuple[NodeTeam, ...]
    numa: Numa
    forced: bool  # by KT_THREADS

    @property
    def count(self) -> int:
        return sum(team.threads for team in self.teams)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        teams = [asdict(team) for team in self.teams]
        return {"threads": self.count, "numa": str(self.numa), "teams": teams}

    def rows(self) -> list[tuple[str, str]]:
        """For people: one row, or one for each team below it."""
        said = ", because KT_THREADS says so" if self.forced else ""
        if len(self.teams) == 1:
            return [("Threads", f"{_team_words(self.teams[0])}{said}")]
        why = "--numa auto" if self.numa == AUTO else f"KT_NUMA={self.numa}"
        rows = [("Threads", f"{self.count} in {len(self.teams)} teams ({why}){said}")]
        return rows + [("", _team_words(team)) for team in self.teams]


def _team_words(team: NodeTeam) -> str:
    pins = f"pinned to {numbered('CPU', team.cpus)}" if team.cpus else "not pinned"
    beside = f", memory of {numbered('node', team.memory)}" if team.memory else ""
    return f"{team.threads}, {pins}{beside}"


def _threads(machine: Machine, setting: Setting, problems: list[Problem]) -> _Threads:
    """What KT_NUMA and KT_THREADS make of the machine; a wrong KT_NUMA becomes a problem.

    A KT_THREADS above the cores is one that `diagnose` names.
    """
    cpu, numa = machine.cpu, AUTO
    try:
        asked = asked_numa(None)
        cpu, numa = on_nodes(machine.nodes, cpu, asked), asked
    except UsageError as error:
        problems.append(Problem(Level.ERROR, f"{error}; {error.hint}", "unset KT_NUMA"))
    threads = min(setting.forced_threads or cpu.threads, max(1, len(cpu.cores)))
    teams = node_teams(machine.nodes, cpu, threads, numa)
    return _Threads(teams, numa, setting.forced_threads is not None)


def _measure(machine: Machine, threads: int) -> Machine:
    out.note("Measuring for a few seconds; other work on this machine falsifies the result.")
    cpu = machine.cpu
    if tiles.look(cpu, threads).measurable:
        out.note("  tiles against vectors …")
        tiles.save(cpu, threads, amx.ROW, tiles.measure(cpu, threads, amx.ROW))
    found = rates.measure(machine, lambda what: out.note(f"  {what} …"))
    rates.save(machine.cpu, found)
    return replace(machine, measured=found, gpus=tuple(_measured_gpus(machine.gpus)))


def _measured_gpus(gpus: Sequence[Gpu]) -> Iterator[Gpu]:
    """Each with its rates, measured now and kept, as far as torch can use it."""
    from ktcli.engine.device.usable import why_not

    reason = why_not() if gpus else ""
    for each in gpus:
        if reason:
            out.warn(f"{each.name} is not measured: {reason}")
            yield each
            continue
        from ktcli.assembly.host import torch_device
        from ktcli.measure.device_ceilings import measure_rates

        out.note(f"  {each.name} …")
        try:
            found = measure_rates(torch_device(each.index))
        except DeviceError as error:
            out.warn(f"{each.name} is not measured: {error}")
            yield each
            continue
        made = replace(
            each, read_bps=found.read_bps, bf16_ops=found.bf16_ops, copy_bps=found.copy_bps
        )
        rates.save_gpu(made)
        yield made


@dataclass(frozen=True, slots=True)
class _Tiles:
    """What is said about AMX: its conditions, and where its use begins (None: KT_TILE_MIN is wrong)."""

    verdict: amx.Verdict
    choice: tiles.Choice | None

    def document(self) -> dict[str, Any]:
        """For JSON."""
        found, choice = self.verdict, self.choice
        least = choice.tile_min if choice else None
        return {
            "cpuid": asdict(found.cpuid),
            "os": asdict(found.os),
            "permission": asdict(found.permission),
            "used": found.used,
            "reason": found.reason,
            "tile_min": least._asdict() if least else None,
            "tile_min_from": choice.source.value if choice else None,
        }

    def rows(self) -> list[tuple[str, str]]:
        """For people: the verdict, and below it what it rests on."""
        found = self.verdict
        checks = {"CPU": found.cpuid, "system": found.os, "permission": found.permission}
        words = {True: "yes", False: "no", None: "–"}
        rows = [
            ("AMX", f"{'used' if found.used else 'not used'}: {found.reason}"),
            *(("", f"{n:<12}{words[check.ok]:<6}{check.detail}") for n, check in checks.items()),
        ]
        if found.used and self.choice:
            rows.append(("", f"{'tiles':<12}{_begin_words(self.choice)}"))
        return rows


def _tiles(
    machine: Machine, kernels: tuple[Kernel, ...], threads: int, problems: list[Problem]
) -> _Tiles:
    used = next((kernel.name for kernel in kernels if kernel.used), "")
    choice = None
    try:
        choice = tiles.look(machine.cpu, threads, used)
    except UsageError as error:
        problems.append(Problem(Level.ERROR, str(error), "unset KT_TILE_MIN"))
    return _Tiles(amx.explain(amx_facts(machine, used)), choice)


def _begin_words(choice: tiles.Choice) -> str:
    least, source = choice.tile_min, choice.source
    if least is None:
        return "from how many tokens on is not measured yet; the first model that is loaded does it"
    if source is tiles.TileSource.MEASURED:
        each = ", ".join(f"{n} ({kind})" for kind, n in least._asdict().items())
        return f"from {each} tokens per expert, measured {choice.date}"
    reason = (
        "as KT_TILE_MIN says"
        if source is tiles.TileSource.FORCED
        else "not measured under KT_ISA or an emulator"
    )
    return f"from {least.int4} tokens per expert, {reason}"


def _render(
    machine: Machine,
    kernels: tuple[Kernel, ...],
    setting: Setting,
    threads: _Threads,
    begin: _Tiles | None,
    problems: list[Problem],
) -> str:
    rows = [
        *_processor_rows(machine, kernels, threads),
        *(begin.rows() if begin else []),
        *_memory_rows(machine),
        *_device_rows(machine, setting),
    ]
    words = [table(rows, width=out.width), "", *map(_problem, problems)]
    worst = max((problem.level for problem in problems), default=Level.NOTE)
    verdict, colour = {
        Level.NOTE: ("Good: this machine can run kt.", "green"),
        Level.WARNING: ("Usable, with warnings.", "yellow"),
        Level.ERROR: ("kt cannot run here until the errors above are fixed.", "red"),
    }[worst]
    gap = [""] if problems else []
    return "\n".join([*words, *gap, out.style(verdict, colour)])


def _processor_rows(
    machine: Machine, kernels: tuple[Kernel, ...], threads: _Threads
) -> list[tuple[str, str]]:
    cpu = machine.cpu
    sockets = f", {cpu.sockets} sockets" if cpu.sockets > 1 else ""
    rows = [
        ("CPU", cpu.model or "unknown"),
        (
            "",
            f"{_n(cpu.physical_cores, 'physical core')}, {cpu.logical_cpus} with hyperthreads{sockets}",
        ),
    ]
    if cpu.logical_cpus == cpu.physical_cores:
        rows[1] = ("", f"{_n(cpu.physical_cores, 'physical core')}{sockets}")
    rows += threads.rows()
    if cpu.caches:
        caches = (
            f"L{c.level} {gib(c.size_bytes)}{f' × {c.count}' if c.count > 1 else ''}"
            for c in cpu.caches
        )
        rows.append(("Caches", ", ".join(caches)))
    for i, kernel in enumerate(kernels):
        state = "USED" if kernel.used else "yes" if kernel.usable else "no"
        rows.append(("Kernels" if i == 0 else "", f"{kernel.name:<12}{state:<6}{kernel.reason}"))
    return rows


def _memory_rows(machine: Machine) -> list[tuple[str, str]]:
    memory = machine.memory
    rows = [("Memory", f"{gib(memory.total_bytes)}, {gib(memory.free_bytes)} free")]
    if memory.huge_pages:
        rows.append(("", f"huge pages: {memory.huge_pages}"))
    if len(machine.nodes) > 1:
        for node in machine.nodes:
            cores = f"cores {cpu_text(node.cores)}" if node.cores else "no usable cores"
            size = f"{gib(node.size_bytes)}, {gib(node.free_bytes)} free"
            ours = "" if node.allowed else " (not for this process)"
            rows.append(
                (f"Node {node.id}", f"{size if node.size_bytes else 'no memory'}{ours}, {cores}")
            )
    found = machine.measured
    if found is None:
        rows.append(("Speed", "not measured; kt doctor --measure takes some seconds"))
    else:
        rows.append(
            (
                "Speed",
                f"read {found.read_bps / 1e9:.1f} GB/s, int8 {found.int8_ops / 1e12:.2f} TOP/s, "
                f"bf16 {found.bf16_ops / 1e12:.2f} TFLOP/s",
            )
        )
        nodes = f" on {found.nodes} nodes" if found.nodes > 1 else ""
        rows.append(
            ("", f"measured {found.date} with {_n(found.threads, 'thread')} of {found.isa}{nodes}")
        )
    return rows


def _device_rows(machine: Machine, setting: Setting) -> list[tuple[str, str]]:
    rows = []
    for found in machine.gpus:
        link = f", link {found.link_bps / 1e9:.0f} GB/s" if found.link_bps else ""
        words = f"{safe(found.name)}, {gib(found.vram_bytes)}, {gib(found.free_bytes)} free{link}"
        rows += [(f"GPU {found.index}", words), ("", _gpu_rates(found))]
    if not machine.gpus:
        rows.append(("GPU", "none; kt runs on the CPU"))
    disk = machine.disk
    if disk is not None:
        rows.append(("Disk", f"{gib(disk.free_bytes)} free of {gib(disk.size_bytes)}"))
    rows.append(("Library", safe(setting.home)))
    return rows


def _gpu_rates(found: Gpu) -> str:
    """What it reads and computes per second: measured, or of its data sheet and marked as assumed."""
    sheet = data_sheet(found)
    read, ops = found.read_bps or sheet.read_bps, found.bf16_ops or sheet.bf16_ops
    words = f"read {read / 1e9:.0f} GB/s, bf16 {ops / 1e12:.0f} TFLOP/s"
    if found.read_bps and found.bf16_ops:
        return f"{words}, measured"
    source = f"the data sheet of {sheet.name}" if sheet.known else f"the slowest of {sheet.name}"
    return f"{words}, assumed from {source}"


def _problem(problem: Problem) -> str:
    label, colour = {
        Level.NOTE: ("note:", "cyan"),
        Level.WARNING: ("warning:", "yellow"),
        Level.ERROR: ("error:", "red"),
    }[problem.level]
    line = f"{out.style(label, colour)} {safe(problem.message)}"
    return f"{line}\n  {safe(problem.fix)}" if problem.fix else line


def _n(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
