"""`kt convert`: from a checkpoint as published to the files that kt runs."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktcli import config
from ktcli.commands.options import DenseOpt, ExpertsOpt, JsonOpt, ModelArg, QuietOpt, ThreadsOpt
from ktcli.errors import UsageError, gib
from ktcli.output import out, safe
from ktcli.store import catalog, library, manifest
from ktcli.store.library import Entry, Kind
from ktcli.weights.recipe import Recipe

if TYPE_CHECKING:
    from ktcli.weights.convert import Report

OutOpt = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", help="Folder to write. Default: in the library."),
]


def convert(
    model: ModelArg,
    target: OutOpt = None,
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    threads: ThreadsOpt = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Convert a checkpoint into the files that kt runs.

    Needs little memory whatever the size of the model. What was interrupted goes on where it stopped
    when the same command runs again. Formats: int4, int4-g32, int4-g128,
    nl4, nl4-g32, mxfp4, int8, fp8, bf16, f32.

    Examples:

      kt convert qwen3-30b-a3b

      kt convert deepseek-v3 --experts int4-g32 --dense bf16

      kt convert ./my-checkpoint --out ./my-pack
    """
    entry = library.resolve(model, Kind.CHECKPOINT)
    recipe = recipe_for(entry, experts, dense)
    if target is None and not entry.managed and entry.name != library.BUILTIN:
        raise UsageError(
            f"{entry.path} is not in the library, so its conversion needs a folder of its own",
            hint=f"name one: kt convert {model} --out DIR",
        )
    started = time.monotonic()
    report = convert_entry(entry, recipe, target, threads=threads)
    words = document(entry, recipe, report)
    words["seconds"] = round(time.monotonic() - started, 3)
    out.result(words, lambda: render(words))


def recipe_for(entry: Entry, experts: str | None = None, dense: str | None = None) -> Recipe:
    """The formats asked for, else those the catalogue recommends, else the defaults."""
    profile = catalog.find(entry.name)
    if profile is not None:
        experts, dense = experts or profile.experts, dense or profile.dense
    return Recipe.named(experts, dense)


def convert_entry(
    entry: Entry, recipe: Recipe, target: Path | None = None, *, threads: int | None = None
) -> Report:
    """Convert a model of the library, with a progress bar; `target` None: into the library."""
    from ktcli.hardware.cpu import read_cpu
    from ktcli.hardware.probe import SYSTEM_ROOT
    from ktcli.hardware.team import make_team
    from ktcli.weights import convert as weights

    managed = target is None
    target = target or library.pack_path(entry.name, recipe.experts.name, recipe.dense.name)
    source = manifest.read(entry.path / manifest.CHECKPOINT)
    origin = weights.Provenance()
    if source is not None:
        parts = (source.hub, source.repository, source.revision)
        origin = weights.Provenance(*(part or None for part in parts))
    what = f"converting {entry.name}"
    held = config.lock(library.lock_path(entry.name), what) if managed else contextlib.nullcontext()
    with held, out.progress(f"Converting {entry.name}") as bar:
        try:
            return weights.convert(
                entry.path,
                target,
                recipe,
                make_team(read_cpu(SYSTEM_ROOT, ()), threads),
                progress=lambda done, total: bar.update(done=done, total=total),
                provenance=origin,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "what is complete is kept; the same command goes on from there"
            ) from None


def document(entry: Entry, recipe: Recipe, report: Report) -> dict[str, Any]:
    """The report for --json."""
    return {
        "model": entry.name,
        "path": str(report.path),
        "experts": recipe.experts.name,
        "dense": recipe.dense.name,
        "source_bytes": report.source_bytes,
        "size_bytes": report.size_bytes,
        "files": len(report.manifest.files),
        "kept_files": report.kept_files,
        "already_complete": report.already_complete,
        "error": {
            kind: report.error[kind] for kind in ("experts", "dense") if kind in report.error
        },
    }


def render(words: dict[str, Any]) -> str:
    """The report for people."""
    name, path = safe(words["model"]), safe(words["path"])
    if words["already_complete"]:
        return f"{name} is already converted: {path} ({gib(words['size_bytes'])})"
    sizes = f"{gib(words['source_bytes'])} became {gib(words['size_bytes'])} in {path}"
    lines = [f"{name}: {sizes}"]
    for kind, error in words["error"].items():
        lines.append(
            f"  {kind:<8}{words[kind]:<10}error {error:.2%} of the weights' own size (rms)"
        )
    if words["kept_files"]:
        lines.append(f"  {words['kept_files']} of {words['files']} files were there already")
    return "\n".join(lines)
