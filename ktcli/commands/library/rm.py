"""`kt rm`, `kt prune`, `kt du`: remove models, or what no model needs any more, and show what uses how much space."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

from ktcli import config, smallfiles
from ktcli.commands.cli.declarations import argument, option, require_yes
from ktcli.commands.cli.options import YesOpt
from ktcli.commands.library.alias import called
from ktcli.errors import NotFound, UsageError, gib
from ktcli.output import out, safe
from ktcli.store import library, space
from ktcli.store.disposal import Disposal
from ktcli.store.entry import Entry
from ktcli.store.pagefolder import StoredPages
from ktcli.store.places import EntryKind
from ktcli.store.space import Taken


def rm(
    models: Annotated[
        list[str] | None, argument("MODEL...", "Names, as kt list shows them.")
    ] = None,
    partial: Annotated[
        bool,
        option("--partial", "Also remove everything whose pull or conversion was interrupted."),
    ] = False,
    checkpoint_only: Annotated[
        bool,
        option("--checkpoint-only", "Remove only the files that were pulled; conversions stay."),
    ] = False,
    yes: YesOpt = False,
) -> None:
    """Remove a model and free its space.

    A name means its checkpoint, all its conversions and its record of used experts; NAME@FORMATS
    means one conversion. The KV pages of chats with them are removed, too; the chats stay. Only
    the library folder is touched: local folders and the built-in model stay, but the conversions
    made from them can be removed by name.

    Examples:

      kt rm qwen3-30b-a3b               checkpoint and conversions
      kt rm qwen3-30b-a3b@int4-int8     one conversion
      kt rm qwen3-30b-a3b --checkpoint-only   what its conversions do not need to run
      kt rm ./my-model                  the conversions of a local folder
      kt rm --partial                   what interrupted work left behind
    """
    if not models and not partial:
        raise UsageError(
            "no model was given", hint="kt list shows the names; kt rm --partial removes leftovers"
        )
    chosen = Disposal.of(models or [])
    if partial:
        by_path = {each.path: each for each in (*chosen.entries, *unfinished())}
        chosen = replace(chosen, entries=tuple(by_path.values()))
    if checkpoint_only:
        chosen = Disposal(_checkpoints(chosen.entries))
    named = called(chosen.entries)
    carry_out(chosen)
    left = called(library.entries())
    stay = {alias for of_one in named.values() for alias in of_one} - {
        alias for of_one in left.values() for alias in of_one
    }
    for alias in sorted(stay):
        out.note(f"The alias {alias} stays; kt alias --rm {alias} removes it.")


def carry_out(chosen: Disposal) -> None:
    """Removes the chosen models and KV pages after asking the user, and prints what was removed and the bytes that were
    freed.
    """
    pages = chosen.pages()
    if chosen.entries or pages:
        require_yes(_question(chosen.entries, pages))
    done = chosen.carry_out()
    for label in done.stayed:
        out.note(f"{label} was completed in the meantime, so it is kept")
    document = {
        "removed": list(done.labels),
        "freed_bytes": done.freed_bytes,
        "kv_pages_bytes": done.pages_bytes,
    }
    what = safe(", ".join([*done.labels, *["KV pages"] * bool(pages)])) or "nothing"
    out.result(document, f"Removed {what}, freed {gib(done.freed_bytes)}.")


def _checkpoints(chosen: tuple[Entry, ...]) -> tuple[Entry, ...]:
    found = tuple(entry for entry in chosen if entry.kind is EntryKind.CHECKPOINT)
    if chosen and not found:
        names = ", ".join(entry.label for entry in chosen)
        has = "has" if len(chosen) == 1 else "have"
        raise NotFound(f"{names} {has} no checkpoint in the library, so nothing is removed")
    return found


def _question(chosen: tuple[Entry, ...], pages: tuple[StoredPages, ...]) -> str:
    """Asks whether to remove these, with the bytes of everything."""
    names = [f"{entry.label} ({entry.kind.value})" for entry in chosen]
    stored = sum(each.size_bytes for each in pages)
    if pages:
        conversions = ", ".join(sorted({each.conversion for each in pages}))
        names.append(f"the KV pages of {conversions} ({gib(stored)})")
    size = sum(entry.size_bytes for entry in chosen) + stored
    return f"Remove {', '.join(names)} and free {gib(size)}?"


def unfinished() -> list[Entry]:
    """Returns the library entries whose pull or conversion was interrupted; those that another process is working on
    are left out, with a note.
    """
    found = [entry for entry in library.entries() if entry.managed and not entry.complete]
    for entry in found:
        if entry.running:
            out.note(f"keeping {entry.label}: {entry.problem}")
    return [entry for entry in found if not entry.running]


def prune(
    checkpoints: Annotated[
        bool,
        option(
            "--checkpoints", "Also remove checkpoints of models that have a complete conversion."
        ),
    ] = False,
    yes: YesOpt = False,
) -> None:
    """Remove what interrupted work left behind.

    Removes interrupted pulls and conversions, and files left by killed processes. Work in progress
    and complete models stay. --checkpoints also removes the files that a conversion was made from;
    another conversion or a repair would have to pull them again.

    Examples:

      kt prune                    asks before it removes anything
      kt prune --checkpoints --yes
    """
    done = space.converted() if checkpoints else ()
    carry_out(Disposal((*unfinished(), *done)))


def du() -> None:
    """Show how much disk space each model takes.

    For each model: its checkpoint, its conversions and the KV pages of chats with it, the largest
    first. Then everything else in the library: chats, records, and what kt prune removes.

    Examples:

      kt du
      kt du --json
    """
    models, home = space.by_model(), config.home()
    total, free = space.all_bytes(), smallfiles.free_bytes(home)
    left = space.left_bytes()
    other = total - left - sum(each.total_bytes for each in models)
    document = {
        "home": str(home),
        "models": [asdict(each) | {"total_bytes": each.total_bytes} for each in models],
        "other_bytes": other,
        "left_by_killed_bytes": left,
        "total_bytes": total,
        "free_bytes": free,
    }
    rest = f"{gib(other)} of chats and records" + (
        f", {gib(left)} left by killed processes (kt prune)" if left else ""
    )
    summary = f"{rest}; {gib(total)} in total, {gib(free)} free on the disk of {home}"
    out.result(document, lambda: "\n".join([*_table(models), summary]))


def _table(models: tuple[Taken, ...]) -> list[str]:
    rows = [
        (each.name, *map(_size, (each.checkpoint_bytes, each.packs_bytes, each.pages_bytes)), gib(each.total_bytes))
        for each in models
    ]  # fmt: skip
    head = ("MODEL", "CHECKPOINT", "PACKS", "KV PAGES", "TOTAL")
    return [out.table(rows, head, right=(1, 2, 3, 4)), ""] if rows else []


def _size(size_bytes: int) -> str:
    return gib(size_bytes) if size_bytes else ""
