"""Plans models that are only shown, or not yet converted, on this machine or a described one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ktcli.assembly.adapted import with_room
from ktcli.assembly.auto import chosen, kept_by
from ktcli.assembly.host import machine_here, usable, where_now
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.planner import host_for, informed
from ktcli.assembly.request import Wanted, require_rows
from ktcli.assembly.subject import Subject
from ktcli.errors import BadCheckpoint
from ktcli.hardware.gpu import AUTO, CPU, torch_installed
from ktcli.hardware.numa import AUTO as AUTO_NUMA
from ktcli.hardware.profile import read_machine
from ktcli.models import Model, build
from ktcli.planner.host import Host, host_of
from ktcli.planner.placement import advised, place
from ktcli.planner.plan import Plan, Request
from ktcli.planner.planrules import rules_of
from ktcli.planner.rules import rules_text
from ktcli.weights.recipe import Recipe
from ktcli.weights.scheme import loss_of


def plan_ahead(model: Model, recipe: Recipe, wanted: Wanted, listener: Listener = SILENT) -> Plan:
    """Returns the plan of a model that is not converted yet on this machine: the place of its parts, the bytes of
    memory and the predicted speed.

    Raises:
        UsageError: an option does not fit this model or machine.
        DeviceError: a GPU was asked for, and there is none or it cannot be used.
        NotEnoughMemory: a GPU was asked for that cannot hold what must lie on it.
    """
    machine, where = machine_here(), where_now(wanted.where)
    if where not in (AUTO, CPU):
        usable(machine, where, listener)
    host = host_for(machine, wanted, torch=where != CPU and torch_installed())
    return place(model, host, wanted.request(recipe, model.spec, where))


def host_described(wanted: Wanted, described: Path | None = None) -> Host:
    """Returns what the planner needs to know of this machine, or of the one that `described` describes, for plans that
    are only shown.

    Args:
        described: a machine file, or text as `read_machine` reads it; None: this machine.
    Raises:
        NotFound: there is no such file.
        UsageError: it describes no machine, or the machine does not have what is asked for.
    """
    if described is None:
        return host_for(machine_here(), wanted, torch=torch_installed())
    numa = AUTO_NUMA if wanted.numa is None else wanted.numa
    machine = read_machine(described)
    require_rows(wanted, machine.cpu.isa)
    return host_of(machine, threads=wanted.threads, isa=wanted.row, numa=numa, torch=True)


def plan_subject(
    subject: Subject,
    wanted: Wanted,
    *,
    described: Path | None = None,
    by_memory: bool = False,
    tok_s: float | None = None,
    listener: Listener = SILENT,
) -> Plan:
    """Returns the plan of a model that is only shown (the place of its parts, bytes and predicted speed), with advice
    on what would make it fit or faster.

    Args:
        described: a file that describes another machine; None: this one.
        by_memory: take the most precise number format of the experts that fits.
        tok_s: the tokens per second that are wanted; None: any speed is enough.
    Raises:
        UsageError, NotFound: what is asked for is not of this model or machine.
        NotEnoughMemory: a GPU was asked for that cannot hold what must lie on it.
        BadCheckpoint: the adapter is damaged, or for another model.
    """
    host = host_described(wanted, described)
    model = build(subject.config)
    wanted = with_room(subject, wanted, model)
    request = Request(subject.recipe, wanted.context, use=wanted.use)
    request = wanted.device.apply(request, model.spec)
    if by_memory:
        best = chosen(model, host, request, kept_by(subject.said, model), listener)
        recipe = subject.recipe.like(best, subject.recipe.dense.name)
        request = replace(request, recipe=recipe)
    if subject.pack is None and (said := loss_of(subject.config, request.recipe.experts.name)):
        listener.note(f"{subject.name}: {said}")
    if described is None and subject.pack is not None:
        request = informed(request, subject.pack, model.spec, host.gpus, listener.warn)
    made = place(model, host, request)
    exact = made.fits and _is_exact(subject, model, request.recipe)
    return advised(model, host, request, made, exact=exact, tok_s=tok_s)


def placement_text(subject: Subject, made: Plan) -> str:
    """Returns the placement of a plan as the text of a TOML file of placement rules, which give the same plan when they
    are read back.
    """
    head = (
        f"Where kt plan puts {subject.title[:200]} on {made.host.name[:200]}, with {made.context} positions.",
        "The first rule that names a part counts; docs/placement.md has more.",
    )
    return rules_text(rules_of(made, build(subject.config)), *head)


def _is_exact(subject: Subject, model: Model, recipe: Recipe) -> bool:
    """Returns whether a recipe holds the experts of a model's checkpoint as they are, as far as that is known."""
    try:
        return kept_by(subject.said, model) == recipe.experts
    except BadCheckpoint:  # a folder with a config.json alone can be planned, too
        return False
