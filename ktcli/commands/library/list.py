"""`kt list` and `kt path`: list the models in the library, and those that can be pulled; print the folder of one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from ktcli import config, smallfiles
from ktcli.commands.cli.declarations import argument, option
from ktcli.commands.cli.faults import warn_of_faults
from ktcli.commands.library.alias import called
from ktcli.commands.view.amounts import age, billions
from ktcli.errors import gib
from ktcli.output import out
from ktcli.store import catalog, library, places, scan, usage
from ktcli.store.catalog import ModelProfile
from ktcli.store.entry import BUILTIN, INTERRUPTED, Entry
from ktcli.store.places import EntryKind


def list_models(
    all_models: Annotated[
        bool, option("--all -a", "Also list models that kt knows but that are not on disk.")
    ] = False,
) -> None:
    """List the models in the library.

    A checkpoint is a model as it was pulled; a pack is a conversion of it that is ready to run.
    Work in progress is shown with its process and progress, interrupted work with the command that
    continues it.

    Examples:

      kt list --all           names, sizes and licences of everything kt knows
      kt list --json          for scripts
    """
    entries = library.entries()
    known = _absent(entries) if all_models else ()
    if all_models:
        warn_of_faults()
    named = called(entries)
    models = [_document(entry, named.get(entry.path, ())) for entry in entries]
    home, free = config.home(), smallfiles.free_bytes(config.home())
    for library_folder in config.libraries():
        if why := scan.unreadable(library_folder):
            out.warn(why, hint="kt config get libraries shows where it is set")
    document = {
        "home": str(home),
        "libraries": [str(each) for each in config.libraries()],
        "free_bytes": free,
        "models": models,
        "known": [_known(profile) for profile in known],
    }
    out.result(document, lambda: _render(entries, models, known))
    if any(entry.managed for entry in entries):
        total = sum(row["size_bytes"] for row in models if row["managed"])
        out.note(f"\n{gib(total)} in {home}, {gib(free)} free on its disk.")
    elif not all_models:
        state = f"The library {home} is empty"
        if not home.is_dir():
            state = f"The library folder {home} does not exist yet"
        out.note(f"\n{state}. kt list --all shows what can be pulled.")


def _library(entry: Entry) -> str | None:
    """The library that an entry lies in; None: in none."""
    return str(entry.shared or config.home()) if entry.in_library else None


def _absent(entries: tuple[Entry, ...]) -> tuple[ModelProfile, ...]:
    here = {entry.name for entry in entries} | {BUILTIN}
    return tuple(
        profile for name in catalog.names() if name not in here and (profile := catalog.get(name))
    )


def _document(entry: Entry, named: Sequence[str]) -> dict[str, Any]:
    used = None
    if entry.kind is EntryKind.PACK:
        used = usage.last_used_s(places.conversion_name(entry.path))
    return {
        "name": entry.label,
        "aliases": list(named),
        "kind": entry.kind.value,
        "formats": entry.formats,
        "size_bytes": entry.size_bytes,
        "path": str(entry.path),
        "source": entry.source,
        "managed": entry.managed,
        "library": _library(entry),
        "complete": entry.complete,
        "problem": entry.problem,
        "running": entry.running,
        "process": entry.work and entry.work.process,
        "percent": None if entry.done is None else round(100 * entry.done),
        "last_used_s": used,
        "again": "" if entry.complete or entry.running else entry.again,
    }


def _known(profile: ModelProfile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "title": profile.title,
        "license": profile.license,
        "origin": str(profile.origin) if profile.origin else "kt",
        "repositories": dict(profile.repositories),
        "parameters": profile.parameters,
        "download_bytes": profile.download_bytes,
    }


def _render(
    entries: tuple[Entry, ...], models: list[dict[str, Any]], known: tuple[ModelProfile, ...]
) -> str:
    several = any(entry.shared for entry in entries)
    rows: list[tuple[str, ...]] = [
        (
            entry.label,
            entry.kind.value,
            gib(row["size_bytes"]),
            age(time.time() - row["last_used_s"]) if row["last_used_s"] else "",
            *([row["library"] or ""] if several else []),
            _origin(entry) if entry.complete else _sick(entry, row["percent"]),
        )
        for entry, row in zip(entries, models, strict=True)
    ]
    library = ("LIBRARY",) if several else ()
    head: tuple[str, ...] = ("NAME", "KIND", "SIZE", "USED", *library, "FROM")
    named = [", ".join(row["aliases"]) for row in models]
    if any(named):
        rows = [(row[0], alias, *row[1:]) for row, alias in zip(rows, named, strict=True)]
        head = (head[0], "ALIAS", *head[1:])
    words = [out.table(rows, head, right=(head.index("SIZE"),))] if rows else []
    return "\n".join([*words, "", _known_table(known)] if known else words)


def _known_table(known: tuple[ModelProfile, ...]) -> str:
    """The models that can be pulled."""
    rows = [
        (each.name, gib(each.download_bytes or 0), billions(each.parameters or 0), each.license)
        for each in known
    ]
    return out.table(rows, ("KT PULL …", "DOWNLOAD", "PARAMETERS", "LICENCE"), right=(1, 2))


def _sick(entry: Entry, percent: int | None) -> str:
    if entry.running:
        return entry.problem + ("" if percent is None else f", {percent} % done")
    if entry.problem != INTERRUPTED:
        return f"cannot be used; kt verify {entry.label} says why"
    return f"interrupted; continue with: {entry.again}"


def _origin(entry: Entry) -> str:
    """Where it came from; a conversion of which nobody recorded that came from the model of its name."""
    origin = _short(entry.source) or (entry.shown if entry.kind is EntryKind.PACK else "")
    return f"{origin}; process {entry.work.process} is {entry.work.doing}" if entry.work else origin


def _short(source: str) -> str:
    """The source with its commit shortened, for people."""
    origin, at, revision = source.rpartition("@")
    return f"{origin}@{revision[:12]}" if at else source


def path(
    model: Annotated[
        str | None, argument("[MODEL]", "Model on disk. Default: the library folder.")
    ] = None,
    checkpoint: Annotated[
        bool, option("--checkpoint", "The checkpoint, even if the model is converted.")
    ] = False,
) -> None:
    """Print the folder of a model, or of the library.

    For a converted model, prints the folder of the conversion that kt chat would run.

    Examples:

      kt path
      ls -l "$(kt path qwen3-30b-a3b)"
      kt path qwen3-30b-a3b --checkpoint
    """
    kind = EntryKind.CHECKPOINT if checkpoint else None
    found = config.home() if model is None else library.resolve(model, kind).path
    out.result({"path": str(found)}, str(found), exact=True)
