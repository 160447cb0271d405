"""`kt verify`: check that the files of a model are unchanged."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ktcli import manifest
from ktcli.commands.cli.declarations import argument, option
from ktcli.errors import BadCheckpoint, ExitCode, KtError, NotFound, UsageError, gib
from ktcli.manifest import FileRecord, Manifest, Seal
from ktcli.output import out, safe
from ktcli.store import integrity, library, removal
from ktcli.store.entry import INTERRUPTED, Entry
from ktcli.store.places import EntryKind


def verify(
    model: Annotated[
        str | None, argument("MODEL", "Model on disk, as kt list shows it, or a folder.")
    ] = None,
    all_models: Annotated[
        bool, option("--all", "Check everything in the library that is complete.")
    ] = False,
    repair: Annotated[bool, option("--repair", "Restore damaged files, and only these.")] = False,
) -> None:
    """Check a model's files against their hashes.

    Reads every byte of the checkpoint and of each conversion, and compares size and SHA-256 with
    those recorded when the files were written; the manifest of a conversion has a checksum of its
    own. Exit code 5: something differs.

    With --repair, damaged files of a checkpoint are downloaded again. Those of a conversion are
    made again, one layer at a time and with the same bytes as before, from its checkpoint or, if
    that is gone, from the files needed on the hub. A damaged file stays until its replacement is
    verified.

    Examples:

      kt verify qwen3-30b-a3b
      kt verify --all --repair
      kt verify qwen3-30b-a3b@int4-int8 --json
    """
    if (model is None) == (not all_models):
        raise UsageError("give a model, or --all", hint="kt list shows the names")
    reports = []
    for entry in _everything() if model is None else _named(model):
        report = _check(entry, tolerant=all_models)
        if repair and report["bad"] and entry.shared:
            out.warn(
                f"{entry.label} is in {entry.shared}, which kt only reads, so it is not repaired",
                hint="its owner can repair it",
            )
        elif repair and report["bad"]:
            _repair(entry, report)
        elif repair:
            removal.drop_stream(entry)
        reports.append(report)
    bad = [report for report in reports if report["bad"]]
    words = "The library contains nothing complete to check." if not reports else ""
    out.result({"ok": not bad, "models": reports}, lambda: words + "\n".join(map(_render, reports)))
    if bad:
        raise typer.Exit(ExitCode.DAMAGED)


def _named(model: str) -> list[Entry]:
    """The entries that a name means, checkpoints first: conversions are repaired from them."""
    entries = library.matching(model) or (library.resolve(model),)
    # The built-in model and a folder of one's own have no manifest; their conversions have.
    managed = [entry for entry in entries if entry.in_library] or entries
    return sorted(managed, key=lambda entry: entry.kind is EntryKind.PACK)


def _everything() -> list[Entry]:
    entries = [entry for entry in library.entries() if entry.managed]
    for entry in entries:
        if entry.running or entry.problem == INTERRUPTED:
            out.note(f"{entry.label} is not complete: {entry.problem}")
    return [e for e in entries if not e.running and e.problem != INTERRUPTED]


def _check(entry: Entry, *, tolerant: bool) -> dict[str, Any]:
    """Checks every file of an entry.

    Args:
        tolerant: whether a manifest that cannot be read is a damaged file and no error.
    """
    kind = entry.kind.manifest
    try:
        found = manifest.read(entry.path / kind)
    except BadCheckpoint as error:
        if not tolerant:
            raise
        return _report(entry, Manifest(()), {kind: str(error)})
    if found is None:
        if entry.in_library:
            raise library.incomplete(entry)
        raise NotFound(
            f"no hashes are recorded for {entry.label}",
            hint="kt pull and kt convert record them; your own folders have none",
        )
    bad = _damaged(entry, found.records)
    if found.seal is Seal.BROKEN:
        bad[manifest.PACK] = "has a checksum mismatch"
    return _report(entry, found, bad)


def _damaged(entry: Entry, files: tuple[FileRecord, ...]) -> dict[str, str]:
    size = sum(file.size_bytes for file in files)
    with out.progress(f"Checking {entry.label}", size) as bar:
        checked = integrity.check(entry.path, files, bar.advance)
        return {file.name: problem for file, problem in checked if problem}


def _repair(entry: Entry, report: dict[str, Any]) -> None:
    """Repairs the files that a report calls bad, and changes it to what then holds."""
    from ktcli.assembly.repair import repair_entry

    names = set(report["bad"])
    try:
        repair_entry(entry, names, out)
    except KtError as error:
        out.warn(f"{entry.label} could not be repaired: {error}", hint=error.hint)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "repaired files are kept; run the same command again to continue"
        ) from None
    found = manifest.read(entry.path / entry.kind.manifest) or Manifest(())
    files = tuple(file for file in found.records if file.name in names)
    known = {file.name for file in files}
    report["bad"] = _damaged(entry, files) | {
        name: problem for name, problem in report["bad"].items() if name not in known
    }
    report["repaired"] = sorted(names - set(report["bad"]))
    report["repair"] = entry.remake  # of what is still bad


def _report(entry: Entry, found: Manifest, bad: dict[str, str]) -> dict[str, Any]:
    return {
        "name": entry.label,
        "kind": entry.kind.value,
        "files": len(found.records),
        "size_bytes": found.size_bytes,
        "bad": bad,
        "repaired": [],
        "manifest": found.seal and found.seal.value,
        "again": entry.again,
        "repair": entry.repair,
    }


def _render(report: dict[str, Any]) -> str:
    name = f"{safe(report['name'])} ({report['kind']})"
    again = "".join(
        f"\n  {safe(file)} was damaged and has been repaired" for file in report["repaired"]
    )
    if not report["bad"]:
        intact = f"{name}: all {report['files']} files are intact, {gib(report['size_bytes'])}"
        if report["manifest"] != Seal.NONE.value:
            return intact + again
        return f"{intact}{again}\n  {manifest.PACK} is from an earlier kt and has no checksum of its own"
    lines = [f"{name}: {len(report['bad'])} of {report['files']} files are damaged"]
    lines[0] += again
    lines += [f"  {safe(file)} {safe(problem)}" for file, problem in report["bad"].items()]
    lines.append(f"  repair it with: {safe(report['repair'])}")
    return "\n".join(lines)
