"""`kt plan`: list what runs on this machine, or show for one model whether it fits, where its parts go, how fast, and
why."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ktcli import config, smallfiles
from ktcli.assembly.disk import DiskNeed, disk_need
from ktcli.assembly.plan import host_described, placement_text, plan_subject
from ktcli.assembly.request import Wanted
from ktcli.assembly.subject import Subject, find_with_adapter
from ktcli.assembly.survey import (
    READING_TOK_S,
    Formats,
    Surveyed,
    best_here,
    generating,
    ranked,
    survey,
)
from ktcli.commands.cli.declarations import argument, option, writable
from ktcli.commands.cli.engine_options import EngineOptions
from ktcli.commands.cli.faults import note_what_is_beside, warn_of_faults
from ktcli.commands.cli.options import ContextOpt, DenseOpt, ExpertsOpt, MachineOpt
from ktcli.commands.view.plan import document, render
from ktcli.commands.view.survey import render_survey, survey_document
from ktcli.errors import ExitCode, UsageError, gib
from ktcli.hardware.disk import read_disk
from ktcli.hardware.numa import parse_numa
from ktcli.models.pooling import KEY
from ktcli.output import out, safe
from ktcli.planner.choice import BY_MEMORY
from ktcli.planner.plan import Plan
from ktcli.settingsfile import shown
from ktcli.store import catalog, library
from ktcli.store.reference import parse

_ALTERNATIVES = 3  # smaller models that are named where one does not fit

NameArg = Annotated[
    str | None,
    argument(
        "MODEL",
        "Model, as for kt chat; from a repository, only small files are fetched."
        " Default: all models kt knows.",
    ),
]


def plan(
    *,
    model: NameArg = None,
    context: ContextOpt = None,
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    options: EngineOptions,
    want: Annotated[
        float | None,
        option(
            "--want TOK_S",
            "Tokens per second that you want; kt suggests how to reach this speed.",
            min=0.1,
            max=100_000,
        ),
    ] = None,
    machine: MachineOpt = None,
    write_placement: Annotated[
        Path | None,
        option(
            "--write-placement FILE",
            "Write where the parts go as rules for --placement.",
            callback=writable,
        ),
    ] = None,
) -> None:
    """Show which models run here, or where one model goes and how fast it is.

    Works for every name that kt list --all shows, pulled or not. Exit code 4: the model does not fit.

    Examples:

      kt plan                                       what runs here, best first

      kt plan --machine xeon-2x32-512gb             what runs there

      kt plan qwen3-30b-a3b --context 32768

      kt plan qwen3-30b-a3b+poet                    with an adapter

      kt plan deepseek-v3 --experts int8 --machine xeon-2x32-512gb --numa off

      kt plan qwen3-30b-a3b --machine laptop-8gb-gpu --gpu-experts front --defer 0

      kt plan qwen3-30b-a3b --write-placement rules.toml
    """
    # The settings of the environment are those of this machine only.
    teams = None if machine is None else parse_numa(options.numa or "auto")
    wanted = options.wanted(context, numa=teams)
    auto = experts == BY_MEMORY
    if model is None:
        if write_placement is not None or options.placement is not None:
            raise UsageError(
                "placement rules are about one model",
                hint="name it: kt plan MODEL --placement FILE",
            )
        _plan_all(wanted, Formats(None if auto else experts, dense, auto), machine)
        return
    formats = None if auto else experts, dense
    subject = find_with_adapter(model, *formats, ask_hub=True, tell=out.note)
    note_what_is_beside(library.find(subject.said))
    made = plan_subject(
        subject, wanted, described=machine, by_memory=auto, tok_s=want, listener=out
    )
    if write_placement is not None:
        smallfiles.write_named(write_placement, placement_text(subject, made))
        out.note(f"wrote the plan's placement to {safe(str(write_placement))}")
    _show(subject, made, wanted, machine, want)
    if not made.fits:
        raise typer.Exit(ExitCode.NO_ROOM)


def _show(
    subject: Subject, made: Plan, wanted: Wanted, machine: Path | None, want: float | None
) -> None:
    """Shows a plan, with what to do next, and what else runs there if it does not fit or is too slow."""
    slow = want is not None and made.speed.decode < want
    others = _smaller(subject, wanted, machine, want) if slow or not made.fits else ()
    disk = disk_need(subject, made.recipe) if machine is None else None
    profile = catalog.find(subject.name)
    origin = profile.origin if profile else None
    if origin is not None:
        out.note(f"{subject.name}: from {safe(shown(origin))}")
    found = {
        **document(subject.title, made),
        "origin": origin,
        "smaller": [each.profile.name for each in others],
    }
    if disk is not None:
        found["disk"] = asdict(disk)
    following = _next(subject, made, others, disk, want if slow else None)
    out.result(found, lambda: render(subject.title, made, disk, following))


def _plan_all(wanted: Wanted, formats: Formats, machine: Path | None) -> None:
    host = host_described(wanted, machine)
    warn_of_faults()
    found = []
    with out.progress("Planning", len(generating()), unit="models") as bar:
        for each in survey(host, wanted, formats):
            found.append(each)
            bar.advance()
    best = ranked(found)
    where = "" if machine is None else str(machine)
    disk = read_disk(config.home())
    out.result(survey_document(host, best), lambda: render_survey(host, best, safe(where), disk))


def _smaller(
    subject: Subject, wanted: Wanted, machine: Path | None, want: float | None
) -> tuple[Surveyed, ...]:
    """The best models on the same machine that are smaller than one that does not fit, or is slower than wanted."""
    profile = catalog.find(subject.name)
    host = host_described(wanted, machine)
    below = profile.parameters if profile else None
    found = best_here(host, _ALTERNATIVES, below, want or READING_TOK_S)
    return tuple(each for each in found if want is None or each.decodes(want))


def _short_of_disk(disk: DiskNeed, name: str) -> str:
    """What to do where there is no room for a checkpoint and its conversion together."""
    lack = f"It needs {gib(disk.need_bytes)} on disk, and only {gib(disk.free_bytes)} is free"
    if disk.download_bytes and disk.pack_bytes < disk.free_bytes and not parse(name).quant:
        return (
            f"{lack}; converted during the download, it needs {gib(disk.pack_bytes)} plus three files of its "
            f"checkpoint: kt pull {name} --stream"
        )
    return f"{lack}: free some space with kt rm NAME, or set KT_HOME to a folder on another disk."


def _next(
    subject: Subject,
    made: Plan,
    others: tuple[Surveyed, ...],
    disk: DiskNeed | None,
    want: float | None,
) -> list[str]:
    """The lines below the verdict at the end of a plan: what else runs on that machine, or what to do here.

    Args:
        want: the tokens per second that it does not reach; None: it is fast enough.
    """
    names = ", ".join(each.profile.name for each in others)
    if want is not None and made.fits:
        plans = [lever.plan for lever in made.advice if lever.plan is not None]
        reached = any(plan.speed.decode >= want for plan in plans)
        lines = [] if reached else [f"  no tried configuration reaches {want:g} tokens/s here"]
        lines += [f"  smaller models that reach {want:g} tokens/s: {names}"] if names else []
        return [out.fold(line, "    ") for line in lines]
    if not made.fits:
        return [out.fold(f"  smaller models that run: {names}", "    ")] if names else []
    if disk is None:
        return []
    name = safe(subject.remote or subject.said)
    adapter = f"+{safe(subject.adapter)}" if subject.adapter else ""
    if not disk.fits:
        return [out.fold(_short_of_disk(disk, name), "  ")]
    fetched = f" fetches {gib(disk.download_bytes)} and" if disk.download_bytes else ""
    first = f"; first it{fetched} writes {gib(disk.pack_bytes)}" if disk.need_bytes else ""
    command = f"kt {'chat' if subject.config.get(KEY) is None else 'serve'} {name}{adapter}"
    line = out.fold(f"Next: {command}{first}", "  ")
    return [line.replace(command, out.style(command, "bold"), 1)]
