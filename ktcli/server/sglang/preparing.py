"""Prepares the engine's command line for the name of a model: its files, the machine, kt's plan, the engine's flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ktcli.assembly.host import machine_here
from ktcli.assembly.request import Wanted
from ktcli.assembly.subject import Subject, find_with_adapter
from ktcli.errors import NotFound, UsageError
from ktcli.hardware.gpu import AUTO, gpu_numbers
from ktcli.hardware.machine import Machine
from ktcli.hardware.profile import read_machine
from ktcli.hardware.text import whole
from ktcli.models import build
from ktcli.planner.host import host_of
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan, Request
from ktcli.records import dataclass
from ktcli.server.sglang.families import changes_experts, code_of, require_code, stored_of
from ktcli.server.sglang.flags import FlagTable, recorded, require_accepted
from ktcli.server.sglang.line import ServerLine
from ktcli.server.sglang.question import ServedAdapter, ServingQuestion, SglangOptions
from ktcli.server.sglang.source import read_flags
from ktcli.server.sglang.translation import command_line, require_class
from ktcli.store import adapters, library, places
from ktcli.store.engines import InstalledEngine
from ktcli.store.places import EntryKind
from ktcli.weights.recipe import Recipe


@dataclass(frozen=True, slots=True)
class AskedServing:
    """The user's options for the engine.

    Attributes:
        model: the name as typed, which may end in +ADAPTER.
        adapters: the names of further ones.
        options: as far as they need no files: `model_path`, `name` and `adapters` are filled in.
        described: a file that describes another machine; None: this one.
    """

    model: str
    wanted: Wanted
    options: SglangOptions
    adapters: Sequence[str] = ()
    described: Path | None = None


@dataclass(frozen=True, slots=True)
class PreparedLine:
    """A command line, and the facts that it was derived from."""

    line: ServerLine
    plan: Plan
    machine: Machine


def prepare(asked: AskedServing, engine: InstalledEngine | None, *, starts: bool) -> PreparedLine:
    """Returns the engine's command line for a model, with kt's plan and the machine that it was derived from.

    Args:
        engine: the installed engine that must accept the line; None: the version that kt was tested with.
        starts: whether the engine is to be started, so that the checkpoint must be here.
    Raises:
        UsageError, DeviceError, NotEnoughMemory: as `command_line`. NotFound: there is no such model, or no checkpoint.
        OtherFlags: the installed engine does not accept the line.
    """
    tested = recorded()
    flags = tested if engine is None else flags_of(engine)
    machine = machine_here() if asked.described is None else read_machine(asked.described)
    subject = find_with_adapter(asked.model)
    require_class(subject.config, tested.architectures)
    folder, is_here = checkpoint_of(subject, needed=starts)
    code = code_of(folder, subject.config) if is_here else None
    plan, question = _planned(asked, subject, machine, folder)
    if code is not None:
        question = replace(question, code=code.why)
    line = command_line(question)
    weights = asked.options.weight_path
    if weights and starts and not Path(weights).is_dir():
        raise NotFound(
            f"--expert-weights {weights} is not a folder",
            hint="name that of kt-kernel's conversion",
        )
    if code is not None and starts:
        require_code(code, subject.name, folder)
    require_accepted(line, flags, tested)
    return PreparedLine(line, plan, machine)


def flags_of(engine: InstalledEngine) -> FlagTable:
    """Returns the flags of the command line of an installed SGLang, read from its source. Raises: KtError: it is
    damaged."""
    packages = sorted(engine.path.glob("lib/python3*/site-packages/sglang"))
    return read_flags(packages[0] if packages else engine.path, engine.version)


def checkpoint_of(subject: Subject, *, needed: bool) -> tuple[Path, bool]:
    """Returns the folder of a model's checkpoint, or the one where it would be, and whether it is there.

    Args:
        needed: whether it must be there.
    Raises:
        NotFound: it is not there, but must be.
    """
    found = library.find(subject.said, EntryKind.CHECKPOINT)
    if found is not None and found.path.is_dir():
        return found.path, True
    if needed:
        raise NotFound(
            f"sglang-kt reads the checkpoint of {subject.name}, which is not here; kt's conversions do not fit it",
            hint=f"kt pull {subject.said} --no-stream",
        )
    return places.checkpoint_path(re.sub(r"[^A-Za-z0-9_.-]", "-", subject.name)), False


def _planned(
    asked: AskedServing, subject: Subject, machine: Machine, folder: Path
) -> tuple[Plan, ServingQuestion]:
    wanted, words, model = asked.wanted, asked.wanted.device, build(subject.config)
    stored = stored_of(subject.config)
    recipe = Recipe.named(stored.experts, stored.dense)
    gpus = gpu_numbers(words.gpus) if words.gpus is not None else None
    host = host_of(machine, threads=wanted.threads, torch=True)
    request = Request(recipe, wanted.context, AUTO, use=wanted.use, defer=words.defer)
    # How many experts lie on the GPUs is decided where their memory is counted as this engine uses it.
    alone = replace(words, device=AUTO, gpu_experts=None, placement=None)
    plan = place(model, host, alone.apply(request, model.spec))
    options = replace(
        asked.options,
        model_path=str(folder),
        name=subject.name,
        experts=_experts(words.gpu_experts),
        streams=wanted.streams,
        adapters=_adapters(asked, subject),
    )
    classes = recorded().architectures
    question = ServingQuestion(model, subject.config, machine, plan, options, classes, gpus or ())
    return plan, question


def _experts(said: str | None) -> int | None:
    """Returns the number of experts that --gpu-experts means. Raises: UsageError: it means none."""
    if said is None:
        return None
    if (number := whole(said)) is None:
        raise UsageError(
            f"--gpu-experts {said[:60]!r} is not a number of experts, which sglang-kt needs",
            hint="it chooses which experts lie on the GPUs, and changes them as prompts need",
        )
    return number


def _adapters(asked: AskedServing, subject: Subject) -> tuple[ServedAdapter, ...]:
    names = [*([subject.adapter] if subject.adapter else []), *asked.adapters]
    found = [adapters.resolve(name) for name in names]
    return tuple(
        ServedAdapter(f"{subject.name}+{each.name}", str(each.path), changes_experts(each.path))
        for each in dict.fromkeys(found)
    )
