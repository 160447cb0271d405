"""Shows the results of a search: as a document, and as tables of the catalogue and of the hubs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ktcli.assembly.search import Judged
from ktcli.assembly.survey import Surveyed
from ktcli.commands.view.bars import can_draw
from ktcli.commands.view.counts import billions
from ktcli.commands.view.survey import origins, surveyed_document
from ktcli.errors import gib, predicted
from ktcli.output import out, safe, table
from ktcli.store.catalog import Published

_NARROW, _MIDDLE, _WIDE = 60, 96, 200  # columns below which a table has fewer; of no terminal
_MOST_REASON = 60


def found_document(
    found: Sequence[Surveyed], published: Sequence[Published], judged: Sequence[Judged]
) -> dict[str, Any]:
    """Returns the results of a search for --json."""
    return {
        "models": [_known(each) for each in found],
        "published": [
            {"family": each.model_type, "repositories": dict(each.repositories)}
            for each in published
        ],
        "hubs": [_judged(each) for each in judged],
    }


def _known(each: Surveyed) -> dict[str, Any]:
    profile = each.profile
    return {
        **surveyed_document(each),
        "family": profile.config.get("model_type"),
        "repositories": dict(profile.repositories),
    }


def _judged(each: Judged) -> dict[str, Any]:
    plan = each.plan
    return {
        "reference": each.hit.reference,
        "hub": each.hit.hub,
        "repository": each.hit.repository,
        "known_as": each.known or None,
        "downloads": each.hit.downloads,
        "gated": each.hit.gated,
        "family": each.model_type or None,
        "parameters": each.parameters or None,
        "can_run": plan is not None,
        "fits": each.fits,
        "reason": each.reason,
        "need_bytes": plan.need_bytes if plan else None,
        "predicted_tok_s": plan.speed.decode if plan and plan.fits else None,
    }


def known_table(found: Sequence[Surveyed]) -> str:
    """Returns the models of the catalogue, with as many columns as the terminal has room for."""
    columns = _columns(3, 6, 7)
    speed = "TOKENS/S" if columns > 3 else "T/S"
    head = ("MODEL", "MEMORY", speed, "PARAMETERS", "DOWNLOAD", "LICENCE", "FAMILY")
    rows = []
    for each in found:
        profile, plan = each.profile, each.plan
        rows.append(
            (
                profile.name,
                gib(_need_bytes(each)) if plan else "-",
                predicted(plan.speed.decode) if plan and each.fits else "-",
                billions(profile.parameters) if profile.parameters else "",
                "built in" if profile.builtin else each.here or gib(profile.download_bytes or 0),
                profile.license,
                str(profile.config.get("model_type", "")),
            )[:columns]
        )
    table_of_it = _marked(rows, head[:columns], [each.fits for each in found], right=(1, 2, 3, 4))
    return "\n".join([table_of_it, *origins(found)])


def _need_bytes(each: Surveyed) -> int:
    """The memory of the machine and of the GPU, where it is used."""
    plan = each.plan
    return 0 if plan is None else plan.need_bytes + (plan.device.need.total if plan.device else 0)


def published_table(published: Sequence[Published]) -> str:
    """Returns the repositories that are known by name only."""
    rows = [(f"kt plan {each.reference}", each.model_type) for each in published]
    return out.table(rows, ("NOT IN THE CATALOGUE, BUT THE FAMILY IS SUPPORTED", "FAMILY"))


def hub_table(judged: Sequence[Judged]) -> str:
    """Returns a table of the hubs' results; the last column has the reason why kt cannot run a model."""
    columns = _columns(2, 5, 5)
    head = ("REPOSITORY", "HERE", "PARAMETERS", "DOWNLOADS", "FAMILY")
    rows = []
    for each in judged:
        downloads = "" if each.hit.downloads is None else f"{each.hit.downloads:,}"
        parameters = billions(each.parameters) if each.parameters else ""
        row = (each.hit.reference, _verdict(each), parameters, downloads, each.model_type)
        rows.append(row[:columns])
    return _marked(rows, head[:columns], [each.fits for each in judged], right=(2, 3))


def _verdict(each: Judged) -> str:
    plan = each.plan
    if plan is None:
        short = each.reason
        return short if len(short) <= _MOST_REASON else f"{short[: _MOST_REASON - 1]}\u2026"
    if plan.fits:
        return f"{predicted(plan.speed.decode)} tokens/s"
    return f"needs {gib(plan.need_bytes)}"


def _columns(narrow: int, middle: int, wide: int) -> int:
    width = out.width or _WIDE
    return narrow if width < _NARROW else middle if width < _MIDDLE else wide


def _marked(
    rows: Sequence[Sequence[str]], head: Sequence[str], good: Sequence[bool], right: Sequence[int]
) -> str:
    """A table whose lines begin with whether the model runs here."""
    kept = [i for i in right if i < len(head)]
    first, *lines = table(rows, head, right=kept).splitlines()
    yes, no = ("\u2713", "\u2717") if can_draw() else ("+", "-")
    marks = (out.style(yes, "green") if each else no for each in good)
    return "\n".join([f"  {safe(first)}", *map("{} {}".format, marks, lines)])
