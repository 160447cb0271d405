"""`kt convert`: convert a published checkpoint into the files that kt runs."""

from __future__ import annotations

import time
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from ktcli.assembly.convert import convert_entry, recipe_for, require_known_tokenizer
from ktcli.commands.cli.declarations import option
from ktcli.commands.cli.options import DenseOpt, ExpertsOpt, ModelArg, ThreadsOpt
from ktcli.commands.view.fidelity import calibrated_by
from ktcli.errors import NotFound, UsageError, counted, gib
from ktcli.output import out, safe
from ktcli.planner.choice import BY_MEMORY
from ktcli.store import library
from ktcli.store.entry import Entry
from ktcli.store.places import EntryKind
from ktcli.store.reference import parse
from ktcli.weights.formats import FORMATS
from ktcli.weights.recipe import Recipe, TensorKind, dominated, format_of_kind, split_pair

if TYPE_CHECKING:
    from ktcli.assembly.merging import MergedBase
    from ktcli.weights.conversion import Report
    from ktcli.weights.stages import Stages

OutOpt = Annotated[Path | None, option("--out -o DIR", "Output folder. Default: in the library.")]
_AUTO, _NEVER = "auto", "off"  # of --calibrate, beside a file
TELLING = 1.0  # seconds of a conversion before its speed says anything
MixedOpt = Annotated[
    bool, option("--mixed", "Use the next more precise format for the experts' down projections.")
]
CalibrateOpt = Annotated[
    str,
    option(
        "--calibrate auto|built-in|off|FILE",
        "Make formats of 4 and 6 bits most precise where activations are large, as a text (a file or the built-in one),"
        " an importance file or an imatrix in GGUF tells. Default: auto, what an earlier calibration found, else the"
        " built-in text where that is quick.",
    ),
]
AdapterOpt = Annotated[
    str | None,
    option(
        "--adapter ADAPTER",
        "Merge this adapter into the weights: a name of kt adapter list, or a folder.",
    ),
]
NameOpt = Annotated[
    str | None, option("--as NAME", "Name of the merged model. Default: MODEL-ADAPTER.")
]


def convert(
    model: ModelArg,
    target: OutOpt = None,
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    mixed: MixedOpt = False,
    calibrate: CalibrateOpt = _AUTO,
    adapter: AdapterOpt = None,
    name: NameOpt = None,
    threads: ThreadsOpt = None,
) -> None:
    """Convert a checkpoint into the files that kt runs.

    Needs little memory, whatever the size of the model. After an interruption, the same command
    continues where it stopped.

    --calibrate with a text runs the model on it, once, one layer in memory at a time: which columns of its
    matrices matter is kept in the library, for all formats. auto uses what is kept there, else the built-in
    text if that takes less time than two conversions, as with most models of experts; but neither for a
    model named with its formats. off does not. For a text called auto, built-in or off, write ./auto.

    --adapter merges a LoRA adapter: its update is added to the checkpoint's weights in f32, before they
    are rounded. The result is a model of its own.

    Number formats: {formats}; for experts also auto: the most precise that fits this machine's memory.
    On uneven weights, these take no fewer bytes than another and lose more: {dominated}. int4 is the
    default; int4-s8 is as large and loses less, most of all with --calibrate.

    Examples:

      kt convert qwen3-30b-a3b

      kt convert deepseek-v3 --experts int4-g32 --dense bf16

      kt convert qwen3-30b-a3b@nl4-int8

      kt convert ./my-checkpoint --out ./my-pack

      kt convert model-Q4_K_M.gguf --experts int4-g32

      kt convert qwen3-30b-a3b --calibrate built-in

      kt convert kimi-k2 --calibrate imatrix.gguf

      kt convert qwen3-30b-a3b --adapter poet
    """
    reference = parse(model)
    if reference.formats:
        if experts or dense or mixed:
            raise UsageError(
                f"{model} names its formats and cannot be used together with --experts, --dense or --mixed",
                hint=f"leave out one of them: kt convert {reference.model}",
            )
        model, (experts, dense) = reference.model, split_pair(reference.formats)
    entry = _checkpoint(model, merging=adapter is not None)
    if experts == BY_MEMORY:
        from ktcli.assembly.auto import chosen_here

        experts = chosen_here(entry, dense, threads, out)
    recipe = recipe_for(entry, experts, dense or None)
    recipe = recipe.mixed() if mixed and recipe.down is None else recipe
    require_known_tokenizer(entry.path)
    started = time.monotonic()
    merged = _merged(entry, adapter, name, target, calibrate)
    if calibrate == _AUTO and (merged or (reference.formats and not recipe.calibrated)):
        calibrate = _NEVER  # the library knows the model without the adapter; formats by name are those and no others
    from ktcli.assembly.calibration import calibrated

    recipe, found = calibrated(
        entry, recipe, calibrate, threads, out, target, starts=merged is None
    )
    report = convert_entry(
        entry, recipe, target, threads=threads, calibration=found, merged=merged, listener=out
    )
    named = f"{merged.name}@{recipe.name}" if merged and target is None else ""
    words = document(entry, recipe, report)
    words["talk"] = f"kt {_command(report.path)} {named or _named(entry, recipe, target)}"
    could = recipe.searches and found is None and calibrate == _AUTO and target is None
    words["calibrate"] = _calibrating(entry, recipe) if could else None
    words["seconds"] = round(time.monotonic() - started, 3)
    out.result(words, lambda: render(words))


convert.__doc__ = (
    (convert.__doc__ or "")
    .replace("{formats}", ", ".join(FORMATS))
    .replace("{dominated}", ", ".join(dominated()))
)


def _checkpoint(model: str, *, merging: bool) -> Entry:
    """The checkpoint that a name means; an adapter is merged into nothing else."""
    try:
        return library.resolve(model, EntryKind.CHECKPOINT)
    except NotFound as error:
        if merging and library.find(model, EntryKind.PACK) is not None:
            raise UsageError(
                f"{model} is a conversion: merging an adapter into packed codes loses most of a small update",
                hint="name the checkpoint that it was made from, or get that with kt pull",
            ) from error
        raise


def _merged(
    entry: Entry, adapter: str | None, name: str | None, target: Path | None, calibrate: str
) -> MergedBase | None:
    """What is merged; None: nothing.

    Raises:
        UsageError: options exclude each other.
    """
    if adapter is None:
        if name is not None:
            raise UsageError(
                "--as names a merged model", hint="kt convert MODEL --adapter ADAPTER --as NAME"
            )
        return None
    if calibrate not in (_AUTO, _NEVER):
        raise UsageError(
            "--calibrate is of the model without the adapter and cannot be used together with --adapter",
            hint="leave one of them out",
        )
    if name is not None and target is not None:
        raise UsageError("--as and --out exclude each other", hint="leave one of them out")
    from ktcli.assembly.merging import merged_base

    return merged_base(entry, adapter, "merged" if target is not None else name, out)


def _named(entry: Entry, recipe: Recipe, target: Path | None) -> str:
    """The shortest name of a conversion for the command line."""
    if target is not None:
        return quote(str(target) if "/" in str(target) else f"./{target}")
    usual = recipe == recipe_for(entry)
    return quote(entry.label) if usual else f"{quote(entry.label)}@{recipe.name}"


def document(entry: Entry, recipe: Recipe, report: Report) -> dict[str, Any]:
    """Returns the report of a conversion as the document for --json: model, path, number formats, calibration, sizes in
    bytes, the relative error of each kind of tensor, and the speed in MB/s.
    """
    return {
        "model": entry.name,
        "path": str(report.path),
        "experts": recipe.experts_name,
        "dense": recipe.dense.name,
        "formats": {kind.value: format_of_kind(kind, recipe).name for kind in TensorKind},
        "calibration": report.manifest.calibration or None,
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
        "adapter": report.manifest.adapter or None,
    }


def _speed(stages: Stages) -> dict[str, Any]:
    """The rate that a run reached and the rate that each stage alone would allow, in MB of the source per second."""
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
    """Returns the report of a conversion as text for the terminal; `words` is a `document` with the commands that
    `convert` adds, for using the model and calibrating it.
    """
    name, path = safe(words["model"]), safe(words["path"])
    if words["already_complete"]:
        done = f"{name} is already converted: {path} ({gib(words['size_bytes'])})"
        return f"{done}\n{_use(words)}"
    sizes = f"{gib(words['source_bytes'])} became {gib(words['size_bytes'])} in {path}"
    lines = [f"{name}: {sizes}"]
    names = {kind: words["formats"][kind] for kind in words["error"]}
    wide = max(map(len, names.values()), default=0)
    for kind, error in words["error"].items():
        what = f"{kind:<8}{names[kind]:<{wide}}"
        lines.append(f"  {what}  relative error {error:.2%} (rms)")
    if words["calibration"]:
        lines.append(f"  {calibrated_by(words['calibration'])}")
    speed = words["speed"]
    if speed["seconds"] >= TELLING:
        alone, threads = speed["ceilings_mb_per_s"], speed["threads"]
        lines.append(
            f"  {speed['mb_per_s']:,.0f} MB/s of checkpoint; each stage alone would reach: "
            f"reading {alone['reading']:,.0f}, encoding with {counted(threads, 'thread')} "
            f"{alone['encoding']:,.0f}, writing {alone['writing']:,.0f}"
        )
    if words["kept_files"]:
        lines.append(f"  {words['kept_files']} of {words['files']} files already existed")
    lines.append(_use(words))
    if words["calibrate"]:
        lines.append(f"Scales that a text has chosen usually lose less: {safe(words['calibrate'])}")
    return "\n".join(lines)


def _command(pack: Path) -> str:
    """The command that uses a conversion."""
    from ktcli.models import build
    from ktcli.weights.pack import Pack

    return "serve" if build(Pack.open(pack).config).spec.embeds else "chat"


def _calibrating(entry: Entry, recipe: Recipe) -> str:
    """The command of the same conversion with scales that a text has chosen."""
    usual = recipe_for(entry)
    experts = (
        "" if recipe.experts_name == usual.experts_name else f" --experts {recipe.experts_name}"
    )
    dense = "" if recipe.dense == usual.dense else f" --dense {recipe.dense.name}"
    return f"kt convert {quote(entry.label)}{experts}{dense} --calibrate built-in"


def _use(words: dict[str, Any]) -> str:
    """The line that says what to do next: an embedding model is served."""
    serves = words["talk"].startswith("kt serve ")
    return f"{'Serve' if serves else 'Talk to'} it: {safe(words['talk'])}"
