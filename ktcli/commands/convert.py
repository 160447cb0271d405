"""`kt convert`: from a checkpoint as published to the files that kt runs."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktcli import config
from ktcli.commands.options import DenseOpt, ExpertsOpt, JsonOpt, ModelArg, QuietOpt, ThreadsOpt
from ktcli.errors import UsageError, gib
from ktcli.output import out, safe
from ktcli.planner.choice import BY_MEMORY
from ktcli.store import catalog, library, manifest
from ktcli.store.library import Entry, Kind
from ktcli.store.reference import parse
from ktcli.weights.extras import extra_limit
from ktcli.weights.gguf.header import is_gguf
from ktcli.weights.recipe import Recipe, TensorKind, format_of_kind, split_pair

if TYPE_CHECKING:
    from ktcli.weights.convert import Calibration, Provenance, Report
    from ktcli.weights.stages import Stages

OutOpt = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", help="Folder to write. Default: in the library."),
]
TELLING = 1.0  # seconds of a conversion before its speed says anything
MixedOpt = Annotated[
    bool,
    typer.Option("--mixed", help="Keep the experts' down projections one step more precise."),
]
CalibrateOpt = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="FILE",
        help="Run the model on this text first; scales of 4-bit formats then lose least where its inputs are large.",
    ),
]


def convert(
    model: ModelArg,
    target: OutOpt = None,
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    mixed: MixedOpt = False,
    calibrate: CalibrateOpt = None,
    threads: ThreadsOpt = None,
    json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Convert a checkpoint into the files that kt runs.

    Needs little memory whatever the size of the model. What was interrupted goes on where it stopped
    when the same command runs again.

    Number formats: int4, int4-g32, int4-g128, int4-g32-f32, int4-g128-f32,
    nl4, nl4-g32, int4-row-had, mxfp4, int8, fp8, bf16, f32; for experts also auto: the most precise
    that fits this machine's memory.

    Examples:

      kt convert qwen3-30b-a3b

      kt convert deepseek-v3 --experts int4-g32 --dense bf16

      kt convert qwen3-30b-a3b@nl4-int8

      kt convert ./my-checkpoint --out ./my-pack

      kt convert model-Q4_K_M.gguf --experts int4-g32
    """
    reference = parse(model)
    if reference.formats:
        if experts or dense or mixed:
            raise UsageError(
                f"{model} names its formats, and so do --experts, --dense and --mixed",
                hint=f"leave one of them out: kt convert {reference.name}",
            )
        model, (experts, dense) = reference.name, split_pair(reference.formats)
    entry = library.resolve(model, Kind.CHECKPOINT)
    if experts == BY_MEMORY:
        from ktcli.commands.auto import chosen_here

        experts = chosen_here(entry, dense, threads)
    recipe = recipe_for(entry, experts, dense or None)
    recipe = recipe.mixed() if mixed and recipe.down is None else recipe
    started, found = time.monotonic(), None
    if calibrate is not None:
        if not recipe.searches:
            raise UsageError(
                f"--calibrate changes nothing in {recipe.name}: only formats of 4 bits choose their scales",
                hint="leave it out, or take other formats, for example --experts int4",
            )
        from ktcli.commands.calibration import calibration

        recipe = replace(recipe, calibrated=True)
        found = calibration(entry, calibrate, target or pack_folder(entry, recipe), threads)
    report = convert_entry(entry, recipe, target, threads=threads, calibration=found)
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
    entry: Entry,
    recipe: Recipe,
    target: Path | None = None,
    *,
    threads: int | None = None,
    calibration: Calibration | None = None,
) -> Report:
    """Convert a model of the library, with a progress bar; `target` None: into the library.

    Raises:
        UsageError: the recipe says that it is calibrated, and nothing says how.
    """
    if recipe.calibrated and calibration is None:
        raise UsageError(
            f"{recipe.experts_name} is made with a text",
            hint=f"name one: kt convert {entry.name}@{recipe.name} --calibrate FILE",
        )
    from ktcli.hardware.cpu import read_cpu
    from ktcli.hardware.probe import SYSTEM_ROOT
    from ktcli.hardware.team import make_team
    from ktcli.weights import convert as weights

    managed = target is None
    target = target or pack_folder(entry, recipe)
    what = f"converting {entry.name}"
    held: AbstractContextManager[None] = contextlib.nullcontext()
    if managed:
        held = config.lock(library.lock_path(target.name.partition("@")[0]), what)
    with held, out.progress(f"Converting {entry.name}") as bar:
        try:
            return weights.convert(
                entry.path,
                target,
                recipe,
                make_team(read_cpu(SYSTEM_ROOT, ()), threads),
                progress=lambda done, total: bar.update(done=done, total=total),
                provenance=_provenance(entry.path),
                calibration=calibration,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "what is complete is kept; the same command goes on from there"
            ) from None


def pack_folder(entry: Entry, recipe: Recipe) -> Path:
    """Where its conversion lies: in the library. What lies outside of it is told apart by place and age."""
    return library.pack_path(_pack_name(entry), recipe.experts_name, recipe.dense.name)


def _pack_name(entry: Entry) -> str:
    if entry.managed or entry.name == library.BUILTIN:
        return entry.name
    return library.local_name(entry.path, str(newest_ns(entry.path)))


def conversions_outside(entry: Entry) -> list[Entry]:
    """Those of a checkpoint outside the library, which bear another name than it; of other entries none."""
    if entry.kind is Kind.PACK or (name := _pack_name(entry)) == entry.name:
        return []
    return [each for each in library.entries() if each.name == name]


def newest_ns(path: Path) -> int:
    """When a file that a conversion is made of was last written; 0 if there are none."""
    if is_gguf(path):
        return max((part.stat().st_mtime_ns for part in library.parts(path)), default=0)
    taken = (
        each
        for each in path.iterdir()
        if (each.suffix == ".safetensors" or extra_limit(each.name)) and each.is_file()
    )
    return max((each.stat().st_mtime_ns for each in taken), default=0)


def _provenance(path: Path) -> Provenance:
    """Where a checkpoint was published, as far as it is known: of a GGUF file its name."""
    from ktcli.weights.convert import Provenance

    if is_gguf(path):
        return Provenance("gguf", path.name)
    source = manifest.read(path / manifest.CHECKPOINT)
    if source is None:
        return Provenance()
    parts = (source.hub, source.repository, source.revision)
    return Provenance(*(part or None for part in parts))


def document(entry: Entry, recipe: Recipe, report: Report) -> dict[str, Any]:
    """The report for --json."""
    return {
        "model": entry.name,
        "path": str(report.path),
        "experts": recipe.experts_name,
        "dense": recipe.dense.name,
        "formats": {kind.value: format_of_kind(kind, recipe).name for kind in TensorKind},
        "source_bytes": report.source_bytes,
        "size_bytes": report.size_bytes,
        "files": len(report.manifest.files),
        "kept_files": report.kept_files,
        "already_complete": report.already_complete,
        "error": {  # in one order, whatever the model begins with
            kind.value: report.error[kind.value]
            for kind in TensorKind
            if kind is not TensorKind.KEPT and kind.value in report.error
        },
        "speed": report.stages and _speed(report.stages),
    }


def _speed(stages: Stages) -> dict[str, Any]:
    """What a run reached, and what each stage alone would allow: MB of the checkpoint per second."""
    names = "reading", "encoding", "writing"
    ceilings = {name: round(stages.rate(getattr(stages, name)) / 1e6, 1) for name in names}
    return {
        "seconds": round(stages.seconds, 3),
        "threads": stages.threads,
        "mb_per_s": round(stages.rate(stages.seconds) / 1e6, 1),
        "ceilings_mb_per_s": ceilings,
        "bound_by": stages.bound,
    }


def render(words: dict[str, Any]) -> str:
    """The report for people."""
    name, path = safe(words["model"]), safe(words["path"])
    if words["already_complete"]:
        return f"{name} is already converted: {path} ({gib(words['size_bytes'])})"
    sizes = f"{gib(words['source_bytes'])} became {gib(words['size_bytes'])} in {path}"
    lines = [f"{name}: {sizes}"]
    names = {kind: words["formats"][kind] for kind in words["error"]}
    wide = max(map(len, names.values()), default=0)
    for kind, error in words["error"].items():
        what = f"{kind:<8}{names[kind]:<{wide}}"
        lines.append(f"  {what}  error {error:.2%} of the weights' own size (rms)")
    speed = words["speed"]
    if speed["seconds"] >= TELLING:
        alone, threads = speed["ceilings_mb_per_s"], speed["threads"]
        lines.append(
            f"  {speed['mb_per_s']:,.0f} MB/s of checkpoint; alone, reading allows {alone['reading']:,.0f}, "
            f"encoding with {threads} threads {alone['encoding']:,.0f}, writing {alone['writing']:,.0f}"
        )
    if words["kept_files"]:
        lines.append(f"  {words['kept_files']} of {words['files']} files were there already")
    return "\n".join(lines)
