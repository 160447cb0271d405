"""Shows the results of a search: as a document, and as tables of the catalogue and of the hubs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ktcli.assembly.search import Judged
from ktcli.assembly.survey import Surveyed
from ktcli.commands.view import survey
from ktcli.commands.view.counts import billions
from ktcli.errors import gib, predicted
from ktcli.output import out
from ktcli.store.catalog import Published

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
        **survey.surveyed_document(each),
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
    columns = survey.columns_for(3, 6, 7)
    speed = "TOKENS/S" if columns > 3 else "T/S"
    head = ("MODEL", "MEMORY", speed, "PARAMETERS", "DOWNLOAD", "LICENCE", "FAMILY")
    rows = []
    for each in found:
        profile, plan = each.profile, each.plan
        rows.append(
            (
                profile.name,
                survey.memory_words(plan) if plan else "-",
                predicted(plan.speed.decode) if plan and each.fits else "-",
                billions(profile.parameters) if profile.parameters else "",
                survey.download_words(each),
                profile.license,
                str(profile.config.get("model_type", "")),
            )[:columns]
        )
    good = [each.fits for each in found]
    table = survey.marked_table(rows, head[:columns], good, right=(1, 2, 3, 4))
    return "\n".join([table, *survey.origins(found)])


def published_table(published: Sequence[Published]) -> str:
    """Returns the repositories that are known by name only."""
    rows = [(f"kt plan {each.reference}", each.model_type) for each in published]
    return out.table(rows, ("NOT IN THE CATALOGUE, BUT THE FAMILY IS SUPPORTED", "FAMILY"))


def hub_table(judged: Sequence[Judged]) -> str:
    """Returns a table of the hubs' results; the last column has the reason why kt cannot run a model."""
    columns = survey.columns_for(2, 5, 5)
    head = ("REPOSITORY", "HERE", "PARAMETERS", "DOWNLOADS", "FAMILY")
    rows = []
    for each in judged:
        downloads = "" if each.hit.downloads is None else f"{each.hit.downloads:,}"
        parameters = billions(each.parameters) if each.parameters else ""
        row = (each.hit.reference, _verdict(each), parameters, downloads, each.model_type)
        rows.append(row[:columns])
    return survey.marked_table(rows, head[:columns], [each.fits for each in judged], right=(2, 3))


def _verdict(each: Judged) -> str:
    plan = each.plan
    if plan is None:
        short = each.reason
        return short if len(short) <= _MOST_REASON else f"{short[: _MOST_REASON - 1]}\u2026"
    if plan.fits:
        return f"{predicted(plan.speed.decode)} tokens/s"
    return f"needs {gib(plan.need_bytes)}"
