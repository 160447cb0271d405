"""Conversion: a checkpoint and a recipe in, a pack out. A pure map: two runs give the same bytes.

What an earlier run completed is neither read nor written again: see `destination`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint, hinted
from ktcli.manifest import LOCK, FileRecord, Manifest
from ktcli.manifest import PACK as MANIFEST
from ktcli.models import build
from ktcli.native import Pool
from ktcli.weights.check import check, kept_in_f32
from ktcli.weights.conversion import UNRECORDED, Calibration, Conversion, Provenance, Report
from ktcli.weights.destination import Destination
from ktcli.weights.encode import Encoder
from ktcli.weights.losses import losses, overall
from ktcli.weights.manifest import format_names
from ktcli.weights.pack import weight_files
from ktcli.weights.reader import open_checkpoint
from ktcli.weights.recipe import Recipe
from ktcli.weights.stages import Stopwatch
from ktcli.weights.storage import Reader
from ktcli.weights.tables import check_tables
from ktcli.weights.tied import remark
from ktcli.weights.writer import FileWriter, explained

Progress = Callable[[int, int], None]  # bytes written, bytes of the whole pack


def convert(
    source: Path,
    out: Path,
    recipe: Recipe,
    pool: Pool,
    *,
    progress: Progress | None = None,
    provenance: Provenance = UNRECORDED,
    calibration: Calibration | None = None,
) -> Report:
    """Convert the checkpoint in `source` into a pack in the folder `out`, or finish it there.

    Raises:
        BadCheckpoint: the checkpoint is damaged, hostile or of an unknown kind.
        UsageError: `out` holds something else; it is left as it is.
        Busy: another process is converting into `out`.
        NotEnoughDisk, KtError: the disk is full or cannot be written; complete files are kept.
    """
    with closing(open_checkpoint(source)) as checkpoint:
        recipe = replace(recipe, calibrated=calibration is not None)
        plan = planned(checkpoint, recipe, provenance, calibration)
        target = Destination(out, plan)
        target.refuse_foreign()
        if not target.leftovers and (done := target.complete()) is not None:
            return _report(target, done, len(done.files))
        what = f"converting {source.name} into {out}"
        with explained(what, out, target.remaining_bytes):
            target.check_space(what)
            with target.held(what):
                done = target.complete()
                if done is not None:
                    return _report(target, done, len(done.files))
                smallfiles.expect(out / LOCK, plan.weight_bytes + plan.extra_bytes)
                left = [tensor for file in target.missing for tensor in file.tensors]
                check_tables(left, checkpoint, pool)
                importance = calibration.importance() if calibration else {}
                encoder = Encoder(checkpoint, plan.recipe, pool, importance)
                told = remark(left, checkpoint, pool)
                report = _convert(checkpoint, target, encoder, progress)
                return replace(report, remarks=(told,) if told else ())


def planned(
    checkpoint: Reader, recipe: Recipe, provenance: Provenance, calibration: Calibration | None
) -> Conversion:
    """Plans the pack that a checkpoint and a recipe give; no weight is read.

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
        extras=tuple(_extras(checkpoint)),
    )
    return Conversion(manifest, recipe, weight_files(model.tensors, recipe), source_bytes)


def _extras(checkpoint: Reader) -> Iterator[FileRecord]:
    """The small files the pack takes over, by name."""
    for name in checkpoint.small_files:
        data = checkpoint.small_file(name)
        yield FileRecord(name, len(data), sha256(data).hexdigest())


def _convert(
    checkpoint: Reader, target: Destination, encoder: Encoder, progress: Progress | None
) -> Report:
    """Write the weight files that are missing, then what makes them a pack."""
    records = target.resume()
    kept, begun, writing = len(records), time.perf_counter(), Stopwatch()
    written = sum(record.size_bytes for record in records)
    for file in target.plan.files[kept:]:
        hint = f"{file.name} was not written; {checkpoint.path} is unchanged"
        with hinted(hint), FileWriter(target.path / file.name, writing) as writer:
            writer.write(file.header)
            for part in encoder.encode(file.tensors):
                writer.write(part.data)
                if progress:
                    progress(written + writer.size_bytes, target.plan.weight_bytes)
            assert writer.size_bytes == file.size_bytes, f"{file.name} is not as planned"
            digest = writer.finish()
        written += file.size_bytes
        records.append(FileRecord(file.name, file.size_bytes, digest, *losses(encoder.sums)))
        encoder.sums.clear()
        target.add(records[-1])
    manifest = replace(target.plan.manifest, files=tuple(records))
    _finish(checkpoint, target.path, manifest)
    stages = encoder.stages(time.perf_counter() - begun, writing.seconds)
    return replace(_report(target, manifest, kept), stages=stages)


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
