"""`kt engine`: programs by others that kt starts, each in an environment of its own: install, list, remove."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from ktcli.commands.cli.declarations import argument, option, require_yes
from ktcli.commands.cli.options import CommandFamily, YesOpt
from ktcli.errors import NotFound, gib
from ktcli.output import out, safe
from ktcli.store import engines
from ktcli.store.engines import ExternalEngine, InstalledEngine

app = CommandFamily()

EngineArg = Annotated[str, argument("ENGINE", "Name: smg, mooncake or sglang-kt.")]


@app.command()
def install(
    engine: EngineArg,
    from_: Annotated[
        Path | None, option("--from FOLDER", "Take the packages from this folder, not the network.")
    ] = None,
) -> None:
    """Install a program into an environment of its own.

    The environment lies below the library (engines/), never in kt's own. Versions are fixed, and
    packages are compared with the SHA-256 of those that were tested. An interrupted installation
    leaves nothing that counts. pip's settings, such as the address of an index, hold.

    Examples:

      kt engine install smg
      kt engine install smg --from ./wheels      without a network
      kt engine install mooncake
    """
    from ktcli.assembly.engines import install as install_engine

    row = engines.row_of(engine)
    before = engines.find(row)
    found = install_engine(row, from_, out)
    is_new = before is None or bool(before.problem)
    words = {**_document(row, found), "installed_now": is_new}
    said = "Installed" if is_new else "Already installed:"
    out.result(words, lambda: f"{said} {found.label}, {gib(found.size_bytes())} in {found.path}")


@app.command("list")
def list_() -> None:
    """List the programs that kt can install, and those that are here.

    Examples:

      kt engine list
      kt engine list --json
    """
    installed = engines.every()
    documents = [_document(row, engines.find(row)) for row in engines.TABLE]
    others = [each for each in installed if not each.is_current]
    documents += [_of_other(each) for each in others]
    rows = [_row(document) for document in documents]
    head = ("ENGINE", "VERSION", "SIZE", "STATE", "FOR")
    out.result({"engines": documents}, lambda: out.table(rows, head, right=(2,)))


@app.command()
def rm(engine: EngineArg, yes: YesOpt = False) -> None:
    """Remove a program with its environment.

    All installed versions of it are removed.

    Examples:

      kt engine rm smg
      kt engine rm smg --yes
    """
    known = {row.name for row in engines.TABLE}
    found = [each for each in engines.every() if each.name == engine]
    if not found and engine not in known:
        engines.row_of(engine)  # raises
    if not found:
        raise NotFound(f"{engine} is not installed", hint="kt engine list shows what is")
    labels = ", ".join(each.label for each in found)
    size = sum(each.size_bytes() for each in found)
    require_yes(f"Remove {labels} and free {gib(size)}?")
    freed = sum(engines.remove(each) for each in found)
    words = {"removed": [each.label for each in found], "freed_bytes": freed}
    out.result(words, f"Removed {labels}, freed {gib(freed)}.")


def _document(row: ExternalEngine, found: InstalledEngine | None) -> dict[str, Any]:
    return {
        "engine": row.name,
        "version": row.version,
        "summary": row.summary,
        "licence": row.licence,
        "packages": {each.name: each.version for each in row.packages},
        "installed": found is not None and not found.problem,
        "problem": (found.problem or None) if found else None,
        "path": str(found.path) if found else None,
        "size_bytes": found.size_bytes() if found else row.installed_bytes,
    }


def _of_other(found: InstalledEngine) -> dict[str, Any]:
    """The document of an environment that this version of kt does not use."""
    return {
        "engine": found.name,
        "version": found.version,
        "summary": "",
        "licence": None,
        "packages": {},
        "installed": False,
        "problem": "another version of kt uses it",
        "path": str(found.path),
        "size_bytes": found.size_bytes(),
    }


def _row(document: dict[str, Any]) -> tuple[str, ...]:
    problem = document["problem"]
    state = problem or ("installed" if document["installed"] else "not installed")
    size = gib(document["size_bytes"])
    name, version = safe(document["engine"]), safe(document["version"])
    return (name, version, size, safe(state), document["summary"])
