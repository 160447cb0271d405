"""`kt search`: find models by words, in the catalogue and on the hubs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from ktcli.assembly.plan import host_described
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.search import Judged, judge
from ktcli.assembly.survey import Formats, Surveyed, ranked, survey
from ktcli.commands.cli.declarations import argument, option
from ktcli.commands.cli.faults import warn_of_faults
from ktcli.commands.cli.options import FromOpt
from ktcli.commands.view import survey as view
from ktcli.commands.view.amounts import billions
from ktcli.errors import HubError, NotFound, UsageError, gib, predicted
from ktcli.hardware.gpu import AUTO
from ktcli.output import out, safe
from ktcli.planner.host import Host
from ktcli.store import catalog
from ktcli.store.catalog import Published
from ktcli.store.hubsearch import Hit, search_hub
from ktcli.store.profile import HUBS

_LONGEST = 200  # characters of what is searched for


def search(
    words: Annotated[
        list[str], argument("WORD...", "Word in the name, title, family or repository.")
    ],
    hub: Annotated[bool, option("--hub", "Also ask Hugging Face and ModelScope.")] = False,
    source: FromOpt = None,
    limit: Annotated[
        int, option("--limit N", "Maximum number of results per hub.", min=1, max=100)
    ] = 10,
) -> None:
    """Find models by name, in the catalogue and on the hubs.

    Lists the models kt knows and whether each runs here. The hubs are searched only with --hub or
    --from; the config.json of each result tells whether kt supports its architecture.

    Examples:

      kt search qwen3                     in the catalogue
      kt search qwen3 coder               every word must be there
      kt search kimi --hub                on both hubs, too
      kt search olmoe --from hf --json    on one, for scripts
    """
    said = " ".join(words)
    if not said.strip() or len(said) > _LONGEST or not said.isprintable():
        raise UsageError(
            f"cannot search for {said[:100]!r}", hint=f"use words, at most {_LONGEST} characters"
        )
    hubs = [source] if source else list(HUBS) if hub else []
    wanted = Wanted(device=DeviceWords(AUTO))
    host = host_described(wanted)
    found = ranked(survey(host, wanted, Formats(), catalog.matching(said)))
    hits = _hits(hubs, said, limit)
    published = catalog.published_matching(said)
    if not found and not published and not hits:
        near = ", ".join(catalog.nearest(said, catalog.names()))
        asked = " and ".join(HUBS[each] for each in hubs)
        where = f"neither the catalogue nor {asked} has" if hubs else "the catalogue does not have"
        hint = [*([f"similar: {near}"] if near else []), *([] if hubs else [_ask_hubs(said)])]
        raise NotFound(f"{where} a model that matches {said!r}", hint="; ".join(hint))
    warn_of_faults()
    judged = _judged(hits, host)
    out.result(found_document(found, published, judged), lambda: _render(found, published, judged))
    if not hubs:
        out.note(f"\nOn the hubs: {_ask_hubs(said)}")


def _ask_hubs(said: str) -> str:
    return f"kt search {safe(said)} --hub"


def _hits(hubs: list[str], said: str, limit: int) -> list[Hit]:
    """What the hubs find; one that does not answer is told of, unless none does.

    Raises:
        HubError: none of them answers.
    """
    hits: list[Hit] = []
    failed: list[HubError] = []
    for hub in hubs:
        out.note(f"Searching {HUBS[hub]} …")
        try:
            hits += search_hub(hub, said, limit, out.note)
        except HubError as error:
            failed.append(error)
    if failed and len(failed) == len(hubs):
        raise failed[0]
    for silent in failed:
        out.warn(str(silent))
    return hits


def _judged(hits: list[Hit], host: Host) -> list[Judged]:
    found: list[Judged] = []
    if not hits:
        return found
    with out.progress("Reading configs", len(hits), unit="models") as bar:
        for each in judge(hits, host, out.note):
            found.append(each)
            bar.advance()
    return found


def _render(
    found: tuple[Surveyed, ...], published: tuple[Published, ...], judged: list[Judged]
) -> str:
    tables = [known_table(found)] if found else []
    if published:
        tables.append(published_table(published))
    if judged:
        tables.append(hub_table(judged))
    return "\n\n".join(tables)


_MOST_REASON = 60


def found_document(
    found: Sequence[Surveyed], published: Sequence[Published], judged: Sequence[Judged]
) -> dict[str, Any]:
    """Returns the results of a search as the document for --json: "models" of the catalogue, "published", the supported
    repositories outside it, and "hubs", the repositories found on hubs.
    """
    return {
        "models": [_known_document(each) for each in found],
        "published": [
            {"family": each.model_type, "repositories": dict(each.repositories)}
            for each in published
        ],
        "hubs": [_judged_document(each) for each in judged],
    }


def _known_document(each: Surveyed) -> dict[str, Any]:
    profile = each.profile
    return {
        **view.surveyed_document(each),
        "family": profile.config.get("model_type"),
        "repositories": dict(profile.repositories),
    }


def _judged_document(each: Judged) -> dict[str, Any]:
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
    """Returns a table of models of the catalogue (memory, speed, parameters, download, licence), with as many columns
    as the terminal has room for.
    """
    columns = view.columns_for(3, 6, 7)
    speed = "TOKENS/S" if columns > 3 else "T/S"
    head = ("MODEL", "MEMORY", speed, "PARAMETERS", "DOWNLOAD", "LICENCE", "FAMILY")
    rows = []
    for each in found:
        profile, plan = each.profile, each.plan
        rows.append(
            (
                profile.name,
                view.memory_words(plan) if plan else "-",
                predicted(plan.speed.decode) if plan and each.fits else "-",
                billions(profile.parameters) if profile.parameters else "",
                view.download_words(each),
                profile.license,
                str(profile.config.get("model_type", "")),
            )[:columns]
        )
    good = [each.fits for each in found]
    table = view.marked_table(rows, head[:columns], good, right=(1, 2, 3, 4))
    return "\n".join([table, *view.origins(found)])


def published_table(published: Sequence[Published]) -> str:
    """Returns a table of supported repositories that are not in the catalogue: the command that plans each, and its
    family.
    """
    rows = [(f"kt plan {each.reference}", each.model_type) for each in published]
    return out.table(rows, ("NOT IN THE CATALOGUE, BUT THE FAMILY IS SUPPORTED", "FAMILY"))


def hub_table(judged: Sequence[Judged]) -> str:
    """Returns a table of the repositories found on hubs: whether each runs here or why kt cannot run it, parameters,
    downloads and family.
    """
    columns = view.columns_for(2, 5, 5)
    head = ("REPOSITORY", "HERE", "PARAMETERS", "DOWNLOADS", "FAMILY")
    rows = []
    for each in judged:
        downloads = "" if each.hit.downloads is None else f"{each.hit.downloads:,}"
        parameters = billions(each.parameters) if each.parameters else ""
        row = (each.hit.reference, _verdict(each), parameters, downloads, each.model_type)
        rows.append(row[:columns])
    return view.marked_table(rows, head[:columns], [each.fits for each in judged], right=(2, 3))


def _verdict(each: Judged) -> str:
    plan = each.plan
    if plan is None:
        short = each.reason
        return short if len(short) <= _MOST_REASON else f"{short[: _MOST_REASON - 1]}\u2026"
    if plan.fits:
        return f"{predicted(plan.speed.decode)} tokens/s"
    return f"needs {gib(plan.need_bytes)}"
