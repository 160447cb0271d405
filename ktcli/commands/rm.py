"""`kt rm`: remove models and free their space."""

from __future__ import annotations

from typing import Annotated

import typer

from ktcli import smallfiles
from ktcli.commands.options import JsonOpt, QuietOpt, YesOpt
from ktcli.errors import NotFound, UsageError, gib
from ktcli.output import out, safe
from ktcli.store import catalog, library, removal
from ktcli.store.library import Entry
from ktcli.store.reference import parse


def rm(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Names as kt list shows them.")
    ] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Also everything whose pull or conversion was interrupted."),
    ] = False,
    yes: YesOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Remove a model and free its space.

    A name means its checkpoint and all its conversions; NAME@FORMATS means one conversion. Only the
    library folder is touched: local folders and the built-in model stay.

    Examples:

      kt rm qwen3-30b-a3b               checkpoint and conversions
      kt rm qwen3-30b-a3b@int4-int8     one conversion
      kt rm --partial                   what interrupted work left behind
    """
    if not models and not partial:
        raise UsageError(
            "no model is named", hint="kt list shows the names; kt rm --partial removes leftovers"
        )
    chosen = _chosen(models or [], partial)
    size = sum(entry.size_bytes for entry in chosen)
    if chosen and not yes:
        names = ", ".join(f"{entry.label} ({entry.kind.value})" for entry in chosen)
        if not out.confirm(f"Remove {names} and free {gib(size)}?"):
            out.note("Nothing was removed.")
            raise typer.Exit(1)
    freed, removed = 0, []
    for entry in chosen:
        with smallfiles.lock(library.lock_path(entry.name), f"removing {entry.label}"):
            if not entry.complete and _was_completed(entry):
                out.note(f"{entry.label} was completed meanwhile and stays")
                continue
            freed += removal.remove(entry)
            removed.append(entry.label)
    freed += removal.remove_leftovers()
    document = {"removed": removed, "freed_bytes": freed}
    out.result(document, f"Removed {safe(', '.join(removed)) or 'nothing'}, freed {gib(freed)}.")


def _was_completed(entry: Entry) -> bool:
    return any(each.path == entry.path and each.complete for each in library.entries())


def _chosen(models: list[str], partial: bool) -> list[Entry]:
    chosen: dict[str, Entry] = {}
    for model in models:
        found = library.matching(model)
        managed = [entry for entry in found if entry.managed]
        if found and not managed:
            raise UsageError(
                f"{found[0].label} is not in the library folder, so kt does not remove it",
                hint="kt list shows what can be removed",
            )
        if not managed:
            near = catalog.nearest(
                parse(model).name, tuple(e.label for e in library.entries() if e.managed)
            )
            hint = (
                f"did you mean: {', '.join(near)}" if near else "kt list shows what can be removed"
            )
            raise NotFound(f"{model} is not in the library", hint=hint)
        chosen |= {str(entry.path): entry for entry in managed}
    if partial:
        chosen |= {str(e.path): e for e in library.entries() if e.managed and not e.complete}
    return list(chosen.values())
