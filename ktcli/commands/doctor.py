"""`kt doctor`: show what this machine is, what kt would use of it, and which problems it has."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ktcli import __version__, config, smallfiles
from ktcli.assembly.host import host_here
from ktcli.assembly.measuring import measure_machine
from ktcli.assembly.survey import Surveyed, best_here
from ktcli.commands.cli.declarations import option, writable
from ktcli.commands.view.machine import Examination, TeamsHere, TilesHere, render, render_all
from ktcli.commands.view.survey import surveyed_document
from ktcli.errors import KtError, NativeError, UsageError
from ktcli.hardware import amx, gpu, profile
from ktcli.hardware.diagnosis import (
    HostSetting,
    Kernel,
    Level,
    Problem,
    diagnose,
    explain_rows,
    in_order,
)
from ktcli.hardware.machine import Machine
from ktcli.hardware.numa import AUTO, asked_numa
from ktcli.hardware.probe import SYSTEM_ROOT, amx_facts, probe
from ktcli.hardware.redaction import names_of, redacted
from ktcli.hardware.team import node_teams, on_nodes
from ktcli.hardware.tuning import read_tuning
from ktcli.measure import tiles
from ktcli.output import out
from ktcli.store import engines
from ktcli.store.engines import InstalledEngine

_MODELS = 3  # that run here, of those named


def doctor(
    measure: Annotated[
        bool, option("--measure", "Also measure bandwidth and arithmetic, and remember the result.")
    ] = False,
    verbose: Annotated[
        bool, option("--verbose -v", "Also show kernels, threads, caches and notes.")
    ] = False,
    record: Annotated[
        Path | None,
        option(
            "--record FILE",
            "Write a description of this machine to a file, for kt plan --machine FILE.",
            callback=writable,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        option(
            "--report FILE",
            "Write a file for a bug report, without names, paths or tokens.",
            callback=writable,
        ),
    ] = None,
) -> None:
    """Show what this machine is and can do.

    Exit code 0: good. 1: usable, with warnings. 2: kt cannot run here.

    Examples:

      kt doctor
      kt doctor -v                     kernels, threads, caches and notes too
      kt doctor --measure              some seconds of all cores
      kt doctor --record server.json   for: kt plan --machine server.json
      kt doctor --report report.json   what a bug report needs, without names
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
    here = _engines(problems)
    found = in_order(
        [*problems, *diagnose(machine, kernels, setting, verdict, read_tuning(SYSTEM_ROOT))]
    )
    code = max((problem.level for problem in found), default=Level.NOTE)
    models = _models(machine) if code is not Level.ERROR else ()
    installed = tuple(each.label for each in here)
    shown = Examination(machine, kernels, setting, threads, begin, found, models, installed)
    document = _document(shown, code)
    if record is not None:
        record_machine(machine, record)
    if report is not None:
        write_report(document, report)
    out.result(document, lambda: render_all(shown) if verbose else render(shown))
    _tell_written(record, report)
    if code:
        raise typer.Exit(int(code))


def _document(found: Examination, code: int) -> dict[str, Any]:
    """What was found, as JSON."""
    return {
        "version": __version__,
        "machine": profile.document(found.machine),
        **found.threads.document(),
        "kernels": [asdict(kernel) for kernel in found.kernels],
        "amx": found.begin.document() if found.begin else None,
        "torch": found.setting.torch,
        "home": found.setting.home,
        "problems": [{**asdict(each), "level": each.level.name.lower()} for each in found.problems],
        "models": [surveyed_document(each) for each in found.models],
        "engines": list(found.engines),
        "exit_code": int(code),
    }


def _engines(problems: list[Problem]) -> tuple[InstalledEngine, ...]:
    """The programs by others that are installed; one that cannot be used becomes a problem."""
    try:
        found = engines.every()
    except KtError:  # the library cannot be read, which is a problem already
        return ()
    for each in found:
        again = f"kt engine rm {each.name}, then kt engine install {each.name}"
        if each.problem:
            said = f"{each.label} cannot be used: {each.problem}"
            problems.append(Problem(Level.WARNING, said, each.remedy))
        elif not each.is_current:
            said = f"{each.label} is installed, and this kt uses another version"
            problems.append(Problem(Level.NOTE, said, again))
    return found


def _tell_written(record: Path | None, report: Path | None) -> None:
    if record is not None:
        out.note(f"Wrote {record}; plan for it anywhere: kt plan --machine {record}")
    if report is not None:
        out.note(f"Wrote {report}: it contains no names, paths or tokens; check it, then attach it")


def _models(machine: Machine) -> tuple[Surveyed, ...]:
    """The best models that run here; none where the environment says what cannot be."""
    try:
        host = host_here(machine, None, None, torch=gpu.torch_installed())
        return best_here(host, _MODELS)
    except UsageError:
        return ()


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
        nvidia_driver=gpu.driver_loaded(),
        home=home,
        home_error=home_error,
        home_warning=home_warning,
        threads_source=asked.source,
        threads_undo=asked.undo,
        gpus_hidden=gpu.hidden(),
        other_kt=_other_kt(),
        program_folder=str(Path(sys.argv[0]).absolute().parent),
    )


def _other_kt() -> str:
    """Returns the program that a shell starts as kt if it is not of this package; empty: it is, or there is none."""
    found = shutil.which("kt")
    try:  # a script that an installer wrote names the package that it starts
        with open(found or "", "rb") as file:
            return "" if b"ktcli" in file.read(4096) else str(found)
    except OSError:
        return ""


def _unwritable(folder: Path) -> tuple[str, str]:
    """The reasons why a folder can be neither read nor made, and why an existing one cannot be written to."""
    here = folder
    while not here.exists() and here != here.parent:
        here = here.parent
    if not here.is_dir():
        return f"{folder} cannot be created, because {here} is a file", ""
    if os.access(here, os.W_OK | os.X_OK):
        return "", ""
    if here != folder:
        return f"the library folder {folder} cannot be created", ""
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


def record_machine(machine: Machine, path: Path) -> None:
    """Writes a description of this machine to a file that `kt plan --machine` reads, without the path of the library.

    Raises:
        KtError: the file cannot be written.
    """
    disk = replace(machine.disk, path="") if machine.disk else None
    _write(path, profile.document(replace(machine, name=path.stem or "recorded", disk=disk)))


def write_report(found: Mapping[str, Any], path: Path) -> None:
    """Writes a bug report to a file: `found`, the output of `kt doctor --json`, and the versions of Python and the
    system, without names, folders and tokens.

    Raises:
        KtError: the file cannot be written.
    """
    variables = {key: value for key, value in os.environ.items() if key.startswith("KT_")}
    report = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "terminal": {
            "TERM": os.environ.get("TERM", ""),
            "encoding": sys.stdout.encoding,
            "is_terminal": sys.stdout.isatty(),
        },
        "variables": variables,
        **found,
    }
    names = names_of(os.environ, _user(), platform.node(), os.path.expanduser("~"))
    _write(path, redacted({**report, "home": "KT_HOME"}, {str(found["home"]): "KT_HOME", **names}))


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return ""


def _write(path: Path, found: Any) -> None:
    smallfiles.write_named(path, json.dumps(found, indent=2, ensure_ascii=True) + "\n")
