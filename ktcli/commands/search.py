"""`kt search`: find models by words, in the catalogue and on the hubs."""

from __future__ import annotations

from typing import Annotated

from ktcli.assembly.plan import host_described
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.search import Judged, judge
from ktcli.assembly.survey import Formats, Surveyed, ranked, survey
from ktcli.commands.cli.declarations import argument, option
from ktcli.commands.cli.faults import warn_of_faults
from ktcli.commands.cli.options import FromOpt, JsonOpt, QuietOpt
from ktcli.commands.view.search import found_document, hub_table, known_table, published_table
from ktcli.errors import HubError, NotFound, UsageError
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
    json: JsonOpt = False,
    quiet: QuietOpt = False,
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
