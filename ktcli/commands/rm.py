"""`kt rm`: remove models and free their space."""

from __future__ import annotations

from typing import Annotated

import typer

from ktcli import smallfiles
from ktcli.commands.alias import called
from ktcli.commands.options import JsonOpt, QuietOpt, YesOpt
from ktcli.errors import ExitCode, NotFound, UsageError, gib
from ktcli.output import out, safe
from ktcli.store import catalog, heat, library, places, removal
from ktcli.store.entry import Entry
from ktcli.store.pagefolder import PageFolder, StoredPages
from ktcli.store.places import EntryKind
from ktcli.store.reference import parse


def rm(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Names as kt list shows them.")
    ] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Also everything whose pull or conversion was interrupted."),
    ] = False,
    checkpoint_only: Annotated[
        bool,
        typer.Option(
            "--checkpoint-only", help="Only the files as they were pulled; conversions stay."
        ),
    ] = False,
    yes: YesOpt = False,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Remove a model and free its space.

    A name means its checkpoint, all its conversions and which experts chats used; NAME@FORMATS means one
    conversion. The KV pages that chats with them left go, too; the chats stay. Only the library folder is
    touched: local folders and the built-in model stay, but the conversions made from them can be removed by
    naming them.

    Examples:

      kt rm qwen3-30b-a3b               checkpoint and conversions
      kt rm qwen3-30b-a3b@int4-int8     one conversion
      kt rm qwen3-30b-a3b --checkpoint-only   what its conversions do not need to run
      kt rm ./my-model                  the conversions of a local folder
      kt rm --partial                   what interrupted work left behind
    """
    if not models and not partial:
        raise UsageError(
            "no model is named", hint="kt list shows the names; kt rm --partial removes leftovers"
        )
    chosen, whole = _chosen(models or [], partial)
    if checkpoint_only:
        chosen, whole = _checkpoints(chosen), set()
    named = called(chosen)
    carry_out(chosen, whole, yes)
    left = called(library.entries())
    stay = {alias for of_one in named.values() for alias in of_one} - {
        alias for of_one in left.values() for alias in of_one
    }
    for alias in sorted(stay):
        out.note(f"The alias {alias} stays; kt alias --rm {alias} removes it.")


def carry_out(chosen: list[Entry], whole: set[str], yes: bool) -> None:
    """Removes entries, what killed processes left, and the KV pages and heat maps that go with them, and reports it.

    Args:
        whole: names of models that are removed as a whole.
        yes: whether nobody is asked.
    """
    pages = removal.pages_of([entry for entry in chosen if entry.complete], whole)
    if (chosen or pages) and not yes and not out.confirm(_question(chosen, pages)):
        out.note("Nothing was removed.")
        raise typer.Exit(ExitCode.FAILED)
    # First, so that whoever writes pages at this moment is met before anything is gone.
    pages_freed = sum(PageFolder.of_library().remove(each.name) for each in pages)
    freed, removed = pages_freed, []
    for entry in chosen:
        with smallfiles.lock(places.lock_path(entry.name), f"removing {entry.label}"):
            if not entry.complete and _was_completed(entry):
                out.note(f"{entry.label} was completed meanwhile and stays")
                continue
            freed += removal.remove(entry)
            removed.append(entry.label)
    for name in whole - {entry.name for entry in library.entries() if entry.in_library}:
        removal.forget(name)
    freed += removal.remove_leftovers()
    document = {"removed": removed, "freed_bytes": freed, "kv_pages_bytes": pages_freed}
    what = safe(", ".join([*removed, *["KV pages"] * bool(pages)])) or "nothing"
    out.result(document, f"Removed {what}, freed {gib(freed)}.")


def _checkpoints(chosen: list[Entry]) -> list[Entry]:
    found = [entry for entry in chosen if entry.kind is EntryKind.CHECKPOINT]
    if chosen and not found:
        names = ", ".join(entry.label for entry in chosen)
        raise NotFound(
            f"{names}: there is no checkpoint of it in the library, so nothing is removed"
        )
    return found


def _question(chosen: list[Entry], pages: tuple[StoredPages, ...]) -> str:
    """Asks whether to remove these, with the bytes of everything."""
    names = [f"{entry.label} ({entry.kind.value})" for entry in chosen]
    stored = sum(each.size_bytes for each in pages)
    if pages:
        conversions = ", ".join(sorted({each.conversion for each in pages}))
        names.append(f"the KV pages of {conversions} ({gib(stored)})")
    size = sum(entry.size_bytes for entry in chosen) + stored
    return f"Remove {', '.join(names)} and free {gib(size)}?"


def _was_completed(entry: Entry) -> bool:
    return any(each.path == entry.path and each.complete for each in library.entries())


def _chosen(models: list[str], partial: bool) -> tuple[list[Entry], set[str]]:
    """The entries to remove, and the names of the models that were named as a whole."""
    chosen: dict[str, Entry] = {}
    whole: set[str] = set()
    for model in models:
        found = library.matching(model)
        managed = [entry for entry in found if entry.managed]
        reference = parse(model)
        if not reference.formats:
            whole |= {entry.name for entry in managed} or {reference.name}
        recorded = reference.name and (
            heat.path_of(reference.name).is_file() or removal.pages_of((), {reference.name})
        )
        shared = next((each.shared for each in found if each.shared), None)
        if not managed and not reference.formats and recorded and shared is None:
            continue
        if found and not managed:
            where = f"in {shared}, which kt only reads" if shared else "not in the library folder"
            raise UsageError(
                f"{found[0].label} is {where}, so kt does not remove it",
                hint="kt list shows what can be removed",
            )
        if not managed:
            near = catalog.nearest(
                reference.name, tuple(e.label for e in library.entries() if e.managed)
            )
            hint = (
                f"did you mean: {', '.join(near)}" if near else "kt list shows what can be removed"
            )
            raise NotFound(f"{model} is not in the library", hint=hint)
        chosen |= {str(entry.path): entry for entry in managed}
    if partial:
        unfinished = [e for e in library.entries() if e.managed and not e.complete]
        for entry in unfinished:
            if entry.running:
                out.note(f"{entry.label} stays: {entry.problem}")
        chosen |= {str(e.path): e for e in unfinished if not e.running}
    return list(chosen.values()), whole - {""}
