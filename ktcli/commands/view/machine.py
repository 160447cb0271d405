"""Shows what `kt doctor` found about a machine: as documents, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ktcli.assembly.survey import Surveyed
from ktcli.errors import counted, gib, predicted
from ktcli.hardware import amx
from ktcli.hardware.datasheet import data_sheet
from ktcli.hardware.diagnosis import HostSetting, Kernel, Level, Problem
from ktcli.hardware.machine import Gpu, Machine
from ktcli.hardware.numa import AUTO, Numa
from ktcli.hardware.team import NodeTeam
from ktcli.hardware.text import cpu_text, numbered
from ktcli.measure import tiles
from ktcli.output import out, safe
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class TeamsHere:
    """The teams of threads that a command would start now, and the settings that ask for them."""

    teams: tuple[NodeTeam, ...]
    numa: Numa
    forced: str = ""  # who says how many threads: "KT_THREADS"; empty: nobody
    numa_words: str = ""  # what was said of teams: "KT_NUMA=2"

    @property
    def count(self) -> int:
        """The number of threads of all teams."""
        return sum(team.threads for team in self.teams)

    def document(self) -> dict[str, Any]:
        """Returns the teams of threads as the document for --json: the number of threads, the NUMA setting, and the
        threads, CPUs and memory nodes of each team.
        """
        teams = [asdict(team) for team in self.teams]
        return {"threads": self.count, "numa": str(self.numa), "teams": teams}

    def rows(self) -> list[tuple[str, str]]:
        """Returns rows for the table of `kt doctor`, each a label and a text: one about all threads and, if there are
        several teams, one for each.
        """
        said = f", set by {self.forced}" if self.forced else ""
        if len(self.teams) == 1:
            return [("Threads", f"{_team_words(self.teams[0])}{said}")]
        why = "--numa auto" if self.numa == AUTO else self.numa_words
        rows = [("Threads", f"{self.count} in {len(self.teams)} teams ({why}){said}")]
        return rows + [("", _team_words(team)) for team in self.teams]


def _team_words(team: NodeTeam) -> str:
    pins = f"pinned to {numbered('CPU', team.cpus)}" if team.cpus else "not pinned"
    beside = f", memory of {numbered('node', team.memory)}" if team.memory else ""
    return f"{team.threads}, {pins}{beside}"


@dataclass(frozen=True, slots=True)
class TilesHere:
    """The report on AMX: its conditions, and the batch size from which it is used (None: KT_TILE_MIN is wrong)."""

    verdict: amx.Verdict
    choice: tiles.Choice | None

    def document(self) -> dict[str, Any]:
        """Returns the report on AMX as the document for --json: the checks of CPU, operating system and permission,
        whether AMX is used and why, and for each number format the tokens per expert from which it is used.
        """
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
        """Returns rows for the table of `kt doctor`, each a label and a text: whether AMX is used, the checks of CPU,
        system and permission, and the tokens per expert from which it is used.
        """
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


def _begin_words(choice: tiles.Choice) -> str:
    least, source = choice.tile_min, choice.source
    if least is None:
        return "threshold not measured yet; loading the first model measures it"
    if source is tiles.TileMinSource.MEASURED:
        each = ", ".join(f"{n} ({kind})" for kind, n in least._asdict().items())
        return f"from {each} tokens per expert, measured {choice.date}"
    reason = "not measured under KT_ISA or an emulator"
    if source is tiles.TileMinSource.FORCED:
        reason = "set by KT_TILE_MIN"
    return f"from {least.int4} tokens per expert, {reason}"


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings of `kt doctor`, in the order in which they are shown."""

    machine: Machine
    kernels: tuple[Kernel, ...]
    setting: HostSetting
    threads: TeamsHere
    begin: TilesHere | None
    problems: tuple[Problem, ...]
    models: tuple[Surveyed, ...]
    engines: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The verdict of `kt doctor` on the machine, a sentence in colour: good, usable with warnings, or unable to run
        kt, by the most severe problem.
        """
        worst = max((problem.level for problem in self.problems), default=Level.NOTE)
        words, colour = {
            Level.NOTE: ("Good: this machine can run kt.", "green"),
            Level.WARNING: ("Usable, with warnings.", "yellow"),
            Level.ERROR: ("kt cannot run here until the errors below are fixed.", "red"),
        }[worst]
        return out.style(words, colour)

    @property
    def has_tiles(self) -> bool:
        """Whether this CPU has, or may have, AMX, so that the report on it is worth showing."""
        return self.begin is not None and self.begin.verdict.possible


def render(found: Examination) -> str:
    """Returns the short report of `kt doctor` as text: the verdict, a few rows of facts, and the problems without the
    notes.
    """
    notes = [problem for problem in found.problems if problem.level is Level.NOTE]
    shown = [problem for problem in found.problems if problem.level is not Level.NOTE]
    words = [found.verdict, out.table(_short_rows(found))]
    words += map(_problem, shown)
    more = f"{counted(len(notes), 'note')} and the rest" if notes else "the rest"
    return "\n".join([*words, out.style(f"kt doctor -v shows {more}.", "dim")])


def render_all(found: Examination) -> str:
    """Returns the full report of `kt doctor -v` as text: the verdict, all facts, and all problems and notes."""
    begin = found.begin.rows() if found.begin and found.has_tiles else []
    rows = [
        *_processor_rows(found.machine, _shown_kernels(found), found.threads),
        *begin,
        *_memory_rows(found.machine),
        *_device_rows(found.machine, found.setting),
        *_model_rows(found.models),
        *_engine_rows(found.engines),
    ]
    words = [found.verdict, "", out.table(rows)]
    return "\n".join([*words, *([""] if found.problems else []), *map(_problem, found.problems)])


def _shown_kernels(found: Examination) -> tuple[Kernel, ...]:
    return tuple(row for row in found.kernels if row.name != amx.ROW or found.has_tiles)


def _short_rows(found: Examination) -> list[tuple[str, str]]:
    """A row each for the processor, memory, GPUs, disk and models."""
    machine, memory = found.machine, found.machine.memory
    used = next((kernel.name for kernel in found.kernels if kernel.used), "")
    said = f", set by {found.threads.forced}" if found.threads.forced else ""
    teams = f" in {len(found.threads.teams)} teams" if len(found.threads.teams) > 1 else ""
    threads = (
        f"{counted(found.threads.count, 'thread')}{teams}{f' of {used}' if used else ''}{said}"
    )
    rates = machine.measured
    speed = "speed not measured: kt doctor --measure"
    if rates:
        speed = f"read {rates.read_bps / 1e9:.0f} GB/s, measured {rates.date}"
    rows = [
        ("CPU", f"{machine.cpu.model or 'unknown'}, {threads}"),
        ("Memory", f"{gib(memory.total_bytes)}, {gib(memory.free_bytes)} free; {speed}"),
    ]
    rows += [*_device_rows(machine, found.setting)[:-1], *_model_rows(found.models)]
    return rows + _engine_rows(found.engines)


def _engine_rows(engines: Sequence[str]) -> list[tuple[str, str]]:
    """The programs by others that are installed; none where there are none."""
    return [("Engines", f"{', '.join(engines)}; all: kt engine list")] if engines else []


def _model_rows(models: Sequence[Surveyed]) -> list[tuple[str, str]]:
    """The models that run here, and the command that shows all."""
    each = [
        f"{one.profile.name} ({predicted(one.plan.speed.decode)} tokens/s)"
        for one in models
        if one.plan is not None
    ]
    return [("Runs", f"{', '.join(each)}; all: kt plan")] if each else []


def _processor_rows(
    machine: Machine, kernels: tuple[Kernel, ...], threads: TeamsHere
) -> list[tuple[str, str]]:
    cpu = machine.cpu
    sockets = f", {cpu.sockets} sockets" if cpu.sockets > 1 else ""
    cores = counted(cpu.physical_cores, "physical core")
    if cpu.logical_cpus != cpu.physical_cores:
        cores += f", {cpu.logical_cpus} with hyperthreads"
    rows = [("CPU", cpu.model or "unknown"), ("", f"{cores}{sockets}")]
    if len(cpu.fast) < len(cpu.cores):
        kinds = {"performance": cpu.fast, "efficiency": cpu.efficient}
        words = (
            f"{counted(len(each), f'{kind} core')} ({numbered('CPU', each)})"
            for kind, each in kinds.items()
        )
        rows.append(("", ", ".join(words)))
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
        rows.append(("Speed", "not measured; kt doctor --measure takes a few seconds"))
    else:
        rates = (
            f"read {found.read_bps / 1e9:.1f} GB/s, int8 {found.int8_ops / 1e12:.2f} TOP/s, "
            f"bf16 {found.bf16_ops / 1e12:.2f} TFLOP/s"
        )
        nodes = f" on {found.nodes} nodes" if found.nodes > 1 else ""
        threads = f"{counted(found.threads, 'thread')} of {found.isa}{nodes}"
        rows += [("Speed", rates), ("", f"measured {found.date} with {threads}")]
    return rows


def _device_rows(machine: Machine, setting: HostSetting) -> list[tuple[str, str]]:
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
    """The GPU's reading and computing rates: measured, or from its data sheet and marked as assumed."""
    sheet = data_sheet(found)
    read, ops = found.read_bps or sheet.read_bps, found.bf16_ops or sheet.bf16_ops
    words = f"read {read / 1e9:.0f} GB/s, bf16 {ops / 1e12:.0f} TFLOP/s"
    if found.read_bps and found.bf16_ops:
        return f"{words}, measured"
    source = f"the data sheet of {sheet.name}" if sheet.known else f"the slowest {sheet.name}"
    return f"{words}, assumed from {source}"


def _problem(problem: Problem) -> str:
    label, colour = {
        Level.NOTE: ("note:", "cyan"),
        Level.WARNING: ("warning:", "yellow"),
        Level.ERROR: ("error:", "red"),
    }[problem.level]
    sentence = out.fold(f"{label} {safe(problem.message)}", "  ")
    line = sentence.replace(label, out.style(label, colour), 1)
    gain = f"  -> {problem.gain}" if problem.gain else ""
    return f"{line}\n{out.fold(f'  {safe(problem.fix)}{gain}', '    ')}" if problem.fix else line
