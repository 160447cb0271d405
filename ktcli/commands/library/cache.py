"""`kt cache`: manage the KV pages of conversations on disk, so that a prompt is not computed twice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ktcli import config
from ktcli.commands.cli.declarations import argument, option, require_yes
from ktcli.commands.cli.options import CommandFamily, YesOpt
from ktcli.errors import ExitCode, NotFound, gib
from ktcli.output import out, safe
from ktcli.pagelabel import PageKind
from ktcli.records import dataclass
from ktcli.store import experience
from ktcli.store.pagefile import Damaged, read_table
from ktcli.store.pagefolder import PageFolder, StoredPages
from ktcli.store.sharedfolder import SharedFolder, writer_of

app = CommandFamily()

StoreOpt = Annotated[
    Path | None,
    option("--store DIR", "The shared folder DIR (--kv-store of kt serve) instead of the library."),
]
NamesArg = Annotated[
    list[str] | None,
    argument("MODEL...", "Models or ids, as kt cache ls shows them. Default: all."),
]


@dataclass(frozen=True, slots=True)
class _Held:
    """What a space holds: full pages' positions, and states."""

    tokens: int = 0
    pages: int = 0
    states: int = 0


@app.command()
def du(store: StoreOpt = None) -> None:
    """Show how much disk space KV pages use, per model, and how much they may use.

    KT_CACHE sets the maximum size, such as 20G; 0 turns KV pages on disk off. By default they may
    use a tenth of the free disk space. In a shared folder, each library has a limit of its own
    (KT_KV_STORE_SIZE), and its writer is a row.

    Examples:

      kt cache du

      KT_CACHE=20G kt cache du --json

      kt cache du --store /mnt/kv
    """
    folder = _folder(store)
    folder.check()
    most_bytes = config.cache_bytes() if store is None else config.value("kv-store-size")
    quota = folder.quota(most_bytes)
    stored = folder.stored()
    size, files = sum(s.size_bytes for s in stored), sum(len(s.files) for s in stored)
    document = {
        "folder": str(folder.path),
        "size_bytes": size,
        "quota_bytes": quota,
        "files": files,
        "models": [{**_named(each), "size_bytes": each.size_bytes} for each in stored],
    }
    if writers := _writers(stored) if folder.is_shared else {}:
        document["writers"] = [{"writer": w, "size_bytes": n} for w, n in writers.items()]
    limit = "the limit of each writer is" if folder.is_shared else "the limit is"
    most = f"({limit} {gib(quota)})" if quota else "(no new ones are written)"
    summary = f"{gib(size)} in {files:,} files {most}, in {safe(folder.path)}"
    tables = [*_table("MODEL", _shares(stored)), *_table("WRITER", writers)]
    out.result(document, lambda: "\n".join([summary, *tables]))


@app.command()
def ls(store: StoreOpt = None) -> None:
    """List the models that have KV pages, most recently used first.

    A model has one row for each configuration whose pages differ: number formats, context,
    kernels, layout. READ is the number of tokens that this library's chats and servers have read
    from here so far instead of computing them.

    Examples:

      kt cache ls

      kt cache ls --json

      kt cache ls --store /mnt/kv
    """
    folder = _folder(store)
    folder.check()
    tier = "disk" if store is None else "store"
    rows = [
        (each, _held(each), experience.recall_restored(each.name).get(tier, 0))
        for each in folder.stored()
    ]
    document = {"folder": str(folder.path), "models": [_document(*row) for row in rows]}
    out.result(document, lambda: _render(rows))


@app.command()
def verify(store: StoreOpt = None) -> None:
    """Check every KV page against its checksum, and remove damaged files.

    Removed pages are computed again when needed. Files that cannot be read stay. Exit code 5:
    something was damaged or could not be read.

    Examples:

      kt cache verify

      kt cache verify --json

      kt cache verify --store /mnt/kv
    """
    folder = _folder(store)
    folder.check()
    stored = folder.stored()
    bad: dict[str, str] = {}
    files = 0
    with out.progress("Checking KV pages", sum(each.size_bytes for each in stored)) as bar:
        for each in stored:
            for file, problem, was_read in folder.verify(each, bar.advance):
                files += 1
                if problem:
                    result = f": {_removed(file.path)}" if was_read else ""
                    bad[str(file.path)] = problem + result
    lines = [f"{safe(path)} {problem}" for path, problem in bad.items()]
    summary = f"{files - len(bad):,} of {files:,} files are intact"
    out.result({"ok": not bad, "files": files, "bad": bad}, "\n".join([*lines, summary]))
    if bad:
        raise typer.Exit(ExitCode.DAMAGED)


@app.command()
def rm(names: NamesArg = None, store: StoreOpt = None, yes: YesOpt = False) -> None:
    """Remove KV pages and free their space; conversations stay, and are read again when continued.

    Examples:

      kt cache rm --yes             everything, other versions' pages too

      kt cache rm qwen3-30b-a3b     the pages of one model

      kt cache rm --store /mnt/kv   everything in a shared folder, of all servers
    """
    folder = _folder(store)
    chosen = _chosen(folder, names or [])
    what = "all KV pages" if chosen is None else f"the KV pages of {', '.join(names or [])}"
    what += "" if store is None else f" in {folder.path}"
    if folder.path.is_dir():
        require_yes(f"Remove {what}?")
    removed = [each.name for each in folder.stored()] if chosen is None else chosen
    freed = sum(folder.remove(name) for name in ([None] if chosen is None else chosen))
    document = {"removed": removed, "freed_bytes": freed}
    out.result(document, f"Removed {safe(what)}, freed {gib(freed)}.")


def _folder(store: Path | None) -> PageFolder:
    """The folder of KV pages that a command is about: of the library, or a shared one."""
    if store is None:
        return PageFolder.of_library()
    return SharedFolder.existing(store.expanduser().absolute())


def _removed(path: Path) -> str:
    """Removes a damaged file; returns the words for what became of it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # of a library that is read only
        return f"cannot be removed: {error.strerror}"
    return "removed"


def _chosen(folder: PageFolder, names: list[str]) -> list[str] | None:
    """The spaces that names mean; None: all there is, of whatever version."""
    if not names:
        return None
    folder.check()
    chosen: dict[str, None] = {}
    for name in names:
        found = [s.name for s in folder.stored() if name in _names(s)]
        if not found:
            raise NotFound(
                f"there are no KV pages of {name}",
                hint="kt cache ls lists the models that have some",
            )
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _shares(stored: tuple[StoredPages, ...]) -> dict[str, int]:
    """The bytes of each conversion."""
    sizes: dict[str, int] = {}
    for each in stored:
        sizes[each.conversion] = sizes.get(each.conversion, 0) + each.size_bytes
    return sizes


def _writers(stored: tuple[StoredPages, ...]) -> dict[str, int]:
    """The bytes of each writer of a shared folder."""
    sizes: dict[str, int] = {}
    for file in (file for each in stored for file in each.files):
        writer = writer_of(file.path.name) or "unknown"
        sizes[writer] = sizes.get(writer, 0) + file.size_bytes
    return dict(sorted(sizes.items()))


def _table(head: str, sizes: Mapping[str, int]) -> list[str]:
    """A table of sizes, the largest first; [] if there are none."""
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    lines = [[name, gib(size)] for name, size in ordered]
    return [out.table(lines, [head, "SIZE"], right=(1,))] if lines else []


def _names(stored: StoredPages) -> set[str]:
    """What one may call it: the conversion, its model, the id."""
    return {stored.name, _named(stored)["id"], stored.conversion, stored.model}


def _named(stored: StoredPages) -> dict[str, Any]:
    identity, _, codec = stored.name.partition("-")
    return {"model": stored.conversion, "id": identity[:8], "layout": codec}


def _held(stored: StoredPages) -> _Held:
    tokens = pages = states = 0
    for file in stored.files:
        with contextlib.suppress(Damaged, OSError):
            for entry in read_table(file.path)[1]:
                is_page, is_state = entry.kind == PageKind.PAGE, entry.kind == PageKind.STATE
                pages, states = pages + is_page, states + is_state
                tokens += entry.n_ids if is_page else 0
    return _Held(tokens, pages, states)


def _document(stored: StoredPages, held: _Held, read_tokens: int) -> dict[str, Any]:
    return {
        **_named(stored),
        "tokens": held.tokens,
        "pages": held.pages,
        "states": held.states,
        "read_tokens": read_tokens,
        "files": len(stored.files),
        "size_bytes": stored.size_bytes,
        "used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stored.used_ns / 1e9)),
    }


def _render(rows: list[tuple[StoredPages, _Held, int]]) -> str:
    if not rows:
        return "There are no KV pages."
    lines = []
    for stored, held, read_tokens in rows:
        name, used = _named(stored), time.localtime(stored.used_ns / 1e9)
        lines.append([name["model"], name["id"], name["layout"], f"{held.tokens:,}", f"{read_tokens:,}",
                      gib(stored.size_bytes), time.strftime("%Y-%m-%d %H:%M", used)])  # fmt: skip
    head = ["MODEL", "ID", "LAYOUT", "TOKENS", "READ", "SIZE", "USED"]
    return out.table(lines, head, right=(3, 4, 5))
