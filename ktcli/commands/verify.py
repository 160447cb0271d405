"""`kt verify`: check that the files of a model are what they were."""

from __future__ import annotations

from typing import Any

import typer

from ktcli import manifest
from ktcli.commands.options import JsonOpt, ModelArg, QuietOpt
from ktcli.errors import ExitCode, NotFound, gib
from ktcli.manifest import Seal
from ktcli.output import out, safe
from ktcli.store import integrity, library
from ktcli.store.library import Entry, EntryKind


def verify(model: ModelArg, json: JsonOpt = False, quiet: QuietOpt = False) -> None:
    """Check a model's files against their hashes.

    Reads every byte of the checkpoint and of each conversion and compares size and SHA-256 with what was
    recorded when they were written; the record of a conversion carries a hash of itself. Exit code 5:
    something differs.

    Examples:

      kt verify qwen3-30b-a3b
      kt verify qwen3-30b-a3b@int4-int8 --json
    """
    entries = library.matching(model) or (library.resolve(model),)
    # The built-in model and a folder of one's own have no manifest; their conversions have.
    entries = tuple(entry for entry in entries if entry.managed) or entries
    reports = [_check(entry) for entry in entries]
    bad = [report for report in reports if report["bad"]]
    out.result({"ok": not bad, "models": reports}, lambda: "\n".join(map(_render, reports)))
    if bad:
        raise typer.Exit(ExitCode.DAMAGED)


def _check(entry: Entry) -> dict[str, Any]:
    kind = manifest.PACK if entry.kind is EntryKind.PACK else manifest.CHECKPOINT
    found = manifest.read(entry.path / kind)
    if found is None:
        if entry.managed:
            raise library.incomplete(entry)
        raise NotFound(
            f"nobody recorded hashes for {entry.label}",
            hint="kt pull and kt convert record them; a folder of your own has none",
        )
    bad: dict[str, str] = {}
    with out.progress(f"Checking {entry.label}", found.size_bytes) as bar:
        for file, problem in integrity.check(entry.path, found.records, bar.advance):
            if problem:
                bad[file.name] = problem
    if found.seal is Seal.BROKEN:
        bad[manifest.PACK] = "has other bytes than its own hash says"
    return {
        "name": entry.label,
        "kind": entry.kind.value,
        "files": len(found.records),
        "size_bytes": found.size_bytes,
        "bad": bad,
        "manifest": found.seal and found.seal.value,
        "again": entry.again,
        "repair": entry.repair,
    }


def _render(report: dict[str, Any]) -> str:
    name = f"{safe(report['name'])} ({report['kind']})"
    if not report["bad"]:
        intact = f"{name}: all {report['files']} files are intact, {gib(report['size_bytes'])}"
        if report["manifest"] != Seal.NONE.value:
            return intact
        return f"{intact}\n  {manifest.PACK} is of an earlier kt: it carries no hash of itself"
    lines = [f"{name}: {len(report['bad'])} of {report['files']} files are damaged"]
    lines += [f"  {safe(file)} {problem}" for file, problem in report["bad"].items()]
    lines.append(f"  make it again with: {safe(report['repair'])}")
    return "\n".join(lines)
