"""Shows which models run on a machine: as a document, and as a table, best first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ktcli.assembly.survey import READING_TOK_S, Surveyed
from ktcli.commands.view.bars import can_draw
from ktcli.errors import gib
from ktcli.hardware.machine import Disk
from ktcli.output import out, safe, table
from ktcli.planner.host import Host
from ktcli.planner.plan import Plan
from ktcli.settingsfile import shown

_LACKING = 5  # models that do not fit which are shown
_DEFERRED = "Where experts are deferred, which changes answers, the speed is with that; kt plan NAME says both."
_NARROW, _MIDDLE, _WIDE = 60, 96, 200  # columns below which a table has fewer; of no terminal


def survey_document(host: Host, found: Sequence[Surveyed]) -> dict[str, Any]:
    """Returns the survey of all models as the document for --json: the machine, the name of the best model, and each
    model, best first.
    """
    best = found[0] if found and found[0].fits else None
    return {
        "machine": {
            "name": host.name,
            "threads": host.threads,
            "isa": host.isa,
            "available_bytes": host.available_bytes,
            "gpus": [{"name": gpu.name, "free_bytes": gpu.free_bytes} for gpu in host.gpus],
            "measured": host.rates.measured,
        },
        "best": best.profile.name if best else None,
        "models": [surveyed_document(each) for each in found],
    }


def surveyed_document(each: Surveyed) -> dict[str, Any]:
    """Returns one model of a survey as a document for --json: size, licence, whether it fits and why not, memory, and
    predicted tokens per second.
    """
    profile, plan = each.profile, each.plan
    speed = plan.speed if plan else None
    return {
        "name": profile.name,
        "title": profile.title,
        "license": profile.license,
        "released": profile.released or None,
        "origin": str(profile.origin) if profile.origin else "kt",
        "parameters": profile.parameters,
        "download_bytes": profile.download_bytes,
        "on_disk": each.here or None,
        "fits": each.fits,
        "reason": each.reason,
        "need_bytes": plan.need_bytes if plan else None,
        "device_need_bytes": plan.device.need.total if plan and plan.device else 0,
        "missing_bytes": each.missing_bytes,
        "context": plan.context if plan else None,
        "experts": plan.recipe.experts_name if plan else None,
        "dense": plan.recipe.dense.name if plan else None,
        "instead": each.instead or None,
        "predicted": {"decode_tok_s": speed.decode, "prefill_tok_s": speed.prefill}
        if speed
        else None,
    }


def render_survey(
    host: Host, found: tuple[Surveyed, ...], machine: str = "", disk: Disk | None = None
) -> str:
    """Returns the survey of models on a machine as text: a table of those that run and of the smallest that do not, and
    what to do next.

    Args:
        machine: the name of another machine; empty: this one.
        disk: the disk of the library; None: unknown.
    """
    fits = [each for each in found if each.fits]
    count = f"{len(fits)} of {len(found)} models run"
    first = out.fold(f"{count} on {machine or 'this machine'}: {_machine_words(host)}", "  ")
    words = [first.replace(count, out.style(count, "green"), 1)]
    listed = found[: len(fits) + _LACKING]
    words += ["", survey_table(listed)]
    if listed != found:
        words.append(
            f"  {len(found) - len(listed)} larger models do not fit either (--json lists them)"
        )
    words += origins(listed)
    words.append("")
    order = f"Order: models faster than reading speed ({READING_TOK_S:g} tokens/s), newest first; then slower ones."
    words.append(out.fold(order, "  "))
    if not host.rates.measured:
        assumed = "~ marks estimates; kt doctor --measure replaces them with measurements."
        words.append(out.fold(assumed, "  "))
    if any(each.defers for each in fits):
        words.append(out.fold(_DEFERRED, "  "))
    if fits and not machine:
        words += _next(fits, disk)
    return "\n".join(words)


def origins(found: Sequence[Surveyed]) -> list[str]:
    """Returns a line for each model whose profile comes from a file of the user: its name and the path of the file."""
    return [
        out.fold(f"{each.profile.name}: from {safe(shown(each.profile.origin))}", "  ")
        for each in found
        if each.profile.origin is not None
    ]


def _next(fits: Sequence[Surveyed], disk: Disk | None) -> list[str]:
    """The best model for which there is room on the disk, too."""
    free = disk.free_bytes if disk else 0
    chosen = next((each for each in fits if disk is None or each.disk_bytes <= free), fits[-1])
    best, name, words = fits[0], chosen.profile.name, list[str]()
    if chosen is not best:
        lack = (
            f"{best.profile.name} needs up to {gib(best.disk_bytes)} of disk space, even if it is "
            f"converted during the download"
            f" (kt pull --stream); {gib(free)} is free."
        )
        words.append(out.fold(lack, "  "))
    return [*words, f"Next: {out.style(f'kt chat {name}', 'bold')}, or kt plan {name} for details"]


def _machine_words(host: Host) -> str:
    gpus = ", ".join(f"{safe(gpu.name)} with {gib(gpu.free_bytes)}" for gpu in host.gpus)
    read = f"read {host.rates.read_bps / 1e9:.0f} GB/s"
    return f"{gib(host.available_bytes)} free, {read}, {gpus or 'no GPU'}"


def survey_table(found: Sequence[Surveyed]) -> str:
    """Returns the table of a survey (model, memory, speed and so on), with as many columns as the terminal has room
    for; each line begins with a mark for whether the model runs here.
    """
    columns = columns_for(3, 5, 7)
    speed = "TOKENS/S" if columns > 3 else "T/S"
    head = ("MODEL", "MEMORY", speed, "READS/S", "DOWNLOAD", "RELEASED", "LICENCE")
    rows = [_cells(each, short=columns == 3)[:columns] for each in found]
    return marked_table(rows, head[:columns], [each.fits for each in found], right=(1, 2, 3, 4))


def columns_for(narrow: int, middle: int, wide: int) -> int:
    """Returns `narrow`, `middle` or `wide`, numbers of table columns, by the width of the terminal."""
    width = out.width or _WIDE
    return narrow if width < _NARROW else middle if width < _MIDDLE else wide


def marked_table(
    rows: Sequence[Sequence[str]], head: Sequence[str], good: Sequence[bool], right: Sequence[int]
) -> str:
    """Returns the text of a table whose lines begin with a mark for whether the model runs here.

    Args:
        good: whether it does, for each row.
        right: the columns that are right-aligned.
    """
    kept = [i for i in right if i < len(head)]
    first, *lines = table(rows, head, right=kept).splitlines()
    yes, no = ("\u2713", "\u2717") if can_draw() else ("+", "-")
    marks = (out.style(yes, "green") if each else no for each in good)
    return "\n".join([f"  {safe(first)}", *map("{} {}".format, marks, lines)])


def download_words(each: Surveyed) -> str:
    """Returns where a model is, "built in", "pack" or "checkpoint", or the size of its download if
    it is not on disk.
    """
    profile = each.profile
    return "built in" if profile.builtin else each.here or gib(profile.download_bytes or 0)


def memory_words(plan: Plan) -> str:
    """Returns the memory that a plan takes of the machine and of the GPUs together, as text: "3.2 GiB"."""
    return gib(plan.need_bytes + (plan.device.need.total if plan.device else 0))


def _cells(each: Surveyed, short: bool) -> tuple[str, ...]:
    profile, plan = each.profile, each.plan
    last = (download_words(each), profile.released, profile.license)
    if plan is None:
        return profile.name, "-", "-" if short else "not as requested", "", *last
    need = memory_words(plan)
    if not each.fits:
        return profile.name, need, "-" if short else f"lacks {gib(each.missing_bytes)}", "", *last
    speed = plan.speed
    name = f"{profile.name} as {each.instead}" if each.instead else profile.name
    return name, need, plan.rate(speed.decode), plan.rate(speed.prefill), *last
