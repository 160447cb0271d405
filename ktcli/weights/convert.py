"""Conversion of a checkpoint and a recipe into a pack. A pure map: two runs give the same bytes.

What an earlier run completed is neither read nor written again: see `destination`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import field, replace
from hashlib import sha256
from pathlib import Path

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint, hinted
from ktcli.manifest import LOCK, FileRecord, Manifest
from ktcli.manifest import PACK as MANIFEST
from ktcli.models import build
from ktcli.native import Pool
from ktcli.records import dataclass
from ktcli.weights.check import check, check_tables, head_remark, kept_in_f32, needed
from ktcli.weights.conversion import (
    UNRECORDED,
    Calibration,
    Conversion,
    ImportanceSource,
    Provenance,
    Report,
    Source,
)
from ktcli.weights.destination import Destination
from ktcli.weights.encode import Encoder
from ktcli.weights.importance import UNKNOWN
from ktcli.weights.losses import losses, overall, weighted
from ktcli.weights.manifest import format_names
from ktcli.weights.pack import WeightFile, weight_files
from ktcli.weights.recipe import Recipe
from ktcli.weights.stages import Stopwatch
from ktcli.weights.storage import Reader
from ktcli.weights.writer import FileWriter, explained

Progress = Callable[[int, int], None]  # bytes written, bytes of the whole pack


def convert_source(
    source: Source,
    out: Path,
    recipe: Recipe,
    pool: Pool,
    *,
    progress: Progress | None = None,
    provenance: Provenance = UNRECORDED,
    calibration: Calibration | None = None,
) -> Report:
    """Converts an open checkpoint into a pack in the folder `out`, or finishes a conversion there; returns a report
    with its manifest, bytes, errors and times.

    Raises:
        BadCheckpoint: the checkpoint is damaged, hostile or of an unknown kind; as BadPack: the pack in `out` is.
        UsageError: `out` holds something else; it is left as it is.
        Busy: another process is converting into `out`.
        NotEnoughDisk, KtError: the disk is full or cannot be written; complete files are kept. Also raises what the
            source's `supply`, which downloads its files, raises.
    """
    checkpoint = source.checkpoint
    recipe = replace(recipe, calibrated=calibration is not None)
    plan = planned(checkpoint, recipe, provenance, calibration)
    target = Destination(out, plan)
    target.refuse_foreign()
    if not target.leftovers and (done := target.complete()) is not None:
        return _report(target, done, len(done.files))
    what = f"converting {source.name} into {out}"
    with explained(what, out, target.remaining_bytes):
        smallfiles.require_room(out, target.remaining_bytes(), what)
        with target.held(what):
            done = target.complete()
            if done is not None:
                return _report(target, done, len(done.files))
            smallfiles.expect(out / LOCK, plan.weight_bytes + plan.extra_bytes)
            told = [] if source.supply else _looked_at(target.missing, checkpoint, pool)
            importance = calibration.importance if calibration else UNKNOWN
            encoder = Encoder(checkpoint, plan.recipe, pool, importance)
            measuring = calibration.measuring if calibration else None
            tell = progress or (lambda done, total: None)
            work = _Work(source, target, encoder, pool, tell, measuring)
            with closing(measuring) if measuring else nullcontext():
                report = _convert(work)
            return replace(report, remarks=(*told, *work.told))


def planned(
    checkpoint: Reader, recipe: Recipe, provenance: Provenance, calibration: Calibration | None
) -> Conversion:
    """Returns the plan of the pack for a checkpoint and a recipe: its manifest, the weight files to write, and the
    bytes of the checkpoint that each is made from; no weight is read, but for biases that may be all zeros.

    Raises:
        BadCheckpoint: the checkpoint is damaged, hostile or of an unknown kind.
    """
    model = build(checkpoint.config)
    source_bytes = check(model, checkpoint)
    recipe = replace(recipe, in_f32=kept_in_f32(model, checkpoint))
    manifest = Manifest(
        family=model.spec.family,
        files=(),
        hub=provenance.hub or "",
        repository=provenance.repository or "",
        revision=provenance.revision or "",
        digest=checkpoint.digest,
        formats=format_names(recipe),
        calibration=calibration.identity if calibration else "",
        adapter=checkpoint.change.digest if checkpoint.change else "",
        extras=tuple(_extras(checkpoint)),
    )
    files = weight_files(model.tensors, recipe)
    needs = {file.name: needed(file.tensors, checkpoint) for file in files}
    by_layer = calibration is not None and calibration.measuring is not None
    return Conversion(manifest, recipe, files, needs, source_bytes, by_layer)


def _extras(checkpoint: Reader) -> Iterator[FileRecord]:
    """The small files the pack takes over, by name."""
    for name in checkpoint.small_files:
        data = checkpoint.small_file(name)
        yield FileRecord(name, len(data), sha256(data).hexdigest())


def _looked_at(files: Sequence[WeightFile], checkpoint: Reader, pool: Pool) -> list[str]:
    """Looks at the numbers of what files are made from, where some must be right before any is written; returns
    sentences for the user."""
    tensors = [tensor for file in files for tensor in file.tensors]
    check_tables(tensors, checkpoint, pool)
    told = head_remark(tensors, checkpoint, pool)
    return [told] if told else []


@dataclass(frozen=True, slots=True)
class _Work:
    source: Source
    target: Destination
    encoder: Encoder
    pool: Pool
    progress: Progress
    measuring: ImportanceSource | None = None
    clock: Stopwatch = field(default_factory=Stopwatch)  # of the writing
    told: list[str] = field(default_factory=list)  # sentences for the user


def _convert(work: _Work) -> Report:
    """Write the weight files that are missing, then what makes them a pack."""
    target, supply, measuring = work.target, work.source.supply, work.measuring
    if measuring:
        measuring.begin(work.source.checkpoint, work.pool)
    records = {
        record.name: record for record in target.resume(measuring.knows if measuring else None)
    }
    kept, begun = len(records), time.perf_counter()
    if supply:
        supply.begin(target.plan, records.keys())
    for file in target.plan.ordered[kept:]:
        written = sum(record.size_bytes for record in records.values())
        with supply.at_hand(file) if supply else nullcontext():
            if supply:
                work.told.extend(_looked_at([file], work.source.checkpoint, work.pool))
            if measuring:
                work.encoder.importance = measuring.importance_of(file)
            records[file.name] = _made(work, file, written)
            target.add(records[file.name])
    ordered = tuple(records[file.name] for file in target.plan.files)
    manifest = replace(target.plan.manifest, files=ordered)
    if measuring:
        manifest = replace(manifest, calibration=measuring.finish())
    _finish(work.source.checkpoint, target.path, manifest)
    stages = work.encoder.stages(time.perf_counter() - begun, work.clock.seconds)
    return replace(_report(target, manifest, kept), stages=stages)


def _made(work: _Work, file: WeightFile, written: int) -> FileRecord:
    """Writes one weight file.

    Args:
        written: the bytes of those that are there.
    """
    target, encoder = work.target, work.encoder
    hint = f"{file.name} was not written; {work.source.checkpoint.path} is unchanged"
    with hinted(hint), FileWriter(target.path / file.name, work.clock) as writer:
        writer.write(file.header)
        for part in encoder.encode(file.tensors):
            writer.write(part.data)
            work.progress(written + writer.size_bytes, target.plan.weight_bytes)
        assert writer.size_bytes == file.size_bytes, f"{file.name} differs from the plan"
        digest = writer.finish()
    by_importance = weighted(encoder.sums) if target.plan.recipe.calibrated else {}
    figures = (*losses(encoder.sums), by_importance)
    record = FileRecord(file.name, file.size_bytes, digest, *figures)
    encoder.sums.clear()
    return record


def _finish(checkpoint: Reader, out: Path, manifest: Manifest) -> None:
    """Take over the small files, then name the pack complete."""
    for record in manifest.extras:
        data = checkpoint.small_file(record.name)
        smallfiles.write(out / record.name, data)
        if sha256(data).hexdigest() != record.sha256:
            raise BadCheckpoint(
                f"{record.name} changed while it was converted", hint="run the command again"
            )
    smallfiles.write(out / MANIFEST, manifest.encode())


def _report(target: Destination, manifest: Manifest, kept: int) -> Report:
    plan = target.plan
    size_bytes, error = plan.weight_bytes + plan.extra_bytes, overall(plan.files, manifest)
    return Report(target.path, manifest, plan.source_bytes, size_bytes, kept, error)
