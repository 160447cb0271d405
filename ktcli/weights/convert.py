"""Conversion: a checkpoint and a recipe in, a pack out. A pure map: two runs give the same bytes.

Files are written one by one and named when complete; `kt.json.part` lists them and becomes `kt.json` at
the end. So a conversion that was killed goes on at the first file that is not listed, and never reads
those that are.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint, BadPack, NotEnoughDisk, UsageError, hinted
from ktcli.manifest import LOCK, MAX_BYTES, FileRecord, Manifest, encode_record, parse_record
from ktcli.manifest import PACK as MANIFEST
from ktcli.models import build
from ktcli.native import PackError, Pool
from ktcli.ops.tensors import Tensor
from ktcli.weights.check import check, kept_in_f32
from ktcli.weights.encode import Encoder
from ktcli.weights.header import is_regular, read_bounded
from ktcli.weights.manifest import format_names, parse_pack
from ktcli.weights.pack import Pack, WeightFile, is_pack, weight_files
from ktcli.weights.reader import open_checkpoint
from ktcli.weights.recipe import Recipe, TensorKind, kind_of
from ktcli.weights.stages import Stages, Stopwatch
from ktcli.weights.storage import Reader
from ktcli.weights.tables import check_tables
from ktcli.weights.tied import remark
from ktcli.weights.writer import FileWriter, explained, free_bytes

PART = "kt.json.part"
ERROR_DIGITS, COSINE_DECIMALS = 4, 7

Progress = Callable[[int, int], None]  # bytes written, bytes of the whole pack


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a checkpoint was published; None: nobody recorded it."""

    hub: str | None = None
    repository: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a text says of the columns of a model's matrices.

    Attributes:
        identity: of text and method; equal ones give equal importance.
        importance: finds it, by tensor, [count, k] f32; asked once, and only if something is to be written.
    """

    identity: str
    importance: Callable[[], Mapping[str, NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did.

    Attributes:
        source_bytes: of the tensors the pack was made from.
        kept_files: weight files that an earlier run had completed; all of them: nothing was left to do.
        error: relative error of the whole model by kind of tensor; see `FileRecord`.
        stages: what took how long; None: there was nothing to do.
        remarks: what a user should know of the checkpoint.
    """

    path: Path
    manifest: Manifest
    source_bytes: int
    size_bytes: int
    kept_files: int
    error: dict[str, float]
    stages: Stages | None = None
    remarks: tuple[str, ...] = ()

    @property
    def already_complete(self) -> bool:
        return self.kept_files == len(self.manifest.files)


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be written: the manifest without files, the files, and the sizes of both sides."""

    manifest: Manifest
    recipe: Recipe
    files: tuple[WeightFile, ...]
    source_bytes: int

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def convert(
    source: Path,
    out: Path,
    recipe: Recipe,
    pool: Pool,
    *,
    progress: Progress | None = None,
    provenance: Provenance = Provenance(),
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
        plan = _plan(checkpoint, recipe, provenance, calibration)
        _refuse_foreign(out)
        if not _leftovers(out) and (done := _complete(out, plan)) is not None:
            return done
        what = f"converting {source.name} into {out}"
        with explained(what, out, lambda: _remaining_bytes(out, plan)):
            _check_space(what, out, plan)
            with smallfiles.lock(out / LOCK, what), _tidy(out):
                done = _complete(out, plan)
                if done is None:
                    left = [file for file in plan.files if not is_regular(out / file.name)]
                    check_tables((t for file in left for t in file.tensors), checkpoint, pool)
                    importance = calibration.importance() if calibration else {}
                    encoder = Encoder(checkpoint, plan.recipe, pool, importance)
                    told = remark((t for file in left for t in file.tensors), checkpoint, pool)
                    done = _convert(checkpoint, plan, out, encoder, progress)
                    done = replace(done, remarks=(told,) if told else ())
        return done


def _plan(
    checkpoint: Reader, recipe: Recipe, provenance: Provenance, calibration: Calibration | None
) -> Plan:
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
    return Plan(manifest, recipe, weight_files(model.tensors, recipe), source_bytes)


def _extras(checkpoint: Reader) -> Iterator[FileRecord]:
    """The small files the pack takes over, by name."""
    for name in checkpoint.small_files:
        data = checkpoint.small_file(name)
        yield FileRecord(name, len(data), sha256(data).hexdigest())


def _refuse_foreign(out: Path) -> None:
    """Never touch a folder that is not ours.

    Raises:
        UsageError: `out` is a file, or holds files but neither a pack nor a started one.
    """
    if not out.exists():
        return
    hint = "name a folder that does not exist yet with --out"
    if not out.is_dir():
        raise UsageError(f"{out} is not a folder", hint=hint)
    names = {path.name for path in out.iterdir()}
    begun = {name for name in names if name.startswith(PART) and name.endswith(smallfiles.SUFFIX)}
    if names - begun - {LOCK} and not names & {MANIFEST, PART}:
        raise UsageError(f"{out} is not empty and is no conversion of kt's", hint=hint)


@contextmanager
def _tidy(out: Path) -> Iterator[None]:
    """Afterwards only complete files are there, and the list of them if there are some but not all."""
    try:
        yield
    finally:
        if is_pack(out) or not list(out.glob("*.safetensors")):
            for left in _leftovers(out):
                left.unlink(missing_ok=True)
        if not list(out.iterdir()):
            out.rmdir()


def _leftovers(out: Path) -> list[Path]:
    """What only an unfinished conversion has; a finished one that was killed while it tidied up, too."""
    return [
        path
        for path in (*out.glob(f"*{smallfiles.SUFFIX}"), out / PART, out / LOCK)
        if path.exists()
    ]


def _complete(out: Path, plan: Plan) -> Report | None:
    """The report of a pack that is already there, None if there is none.

    Raises:
        UsageError: there is another one.
        BadPack: it is damaged.
    """
    if not is_pack(out):
        return None
    pack = Pack.open(out)
    found, wanted = pack.manifest.identity, plan.manifest.formats
    if found.formats and wanted and not found.formats.in_f32:  # of a kt that rounded what it kept
        found = replace(found, formats=replace(found.formats, in_f32=wanted.in_f32))
    _refuse_other(out, found, plan)
    return _report(out, plan, pack.manifest, len(pack.manifest.files))


def _refuse_other(out: Path, found: Manifest, plan: Plan) -> None:
    if found == plan.manifest:
        return
    theirs = found.formats
    if theirs and replace(found, formats=plan.manifest.formats) == plan.manifest:
        what = f"this model as --experts {theirs.experts} --dense {theirs.dense}"
    elif replace(found, calibration=plan.manifest.calibration) == plan.manifest:
        what = "this model calibrated with another text"
    else:
        what = f"a conversion of another checkpoint ({found.repository or found.family})"
    raise UsageError(
        f"{out} already holds {what}", hint="choose another folder with --out, or remove that one"
    )


def _check_space(what: str, out: Path, plan: Plan) -> None:
    """Before anything is written."""
    need, have = _remaining_bytes(out, plan), free_bytes(out.absolute())
    if need > have:
        raise NotEnoughDisk(what, need, have, str(out))


def _remaining_bytes(out: Path, plan: Plan) -> int:
    """What is still to be written: files an earlier run completed count as there."""
    there = sum(file.size_bytes for file in plan.files if is_regular(out / file.name))
    return plan.size_bytes - there + sum(record.size_bytes for record in plan.manifest.extras)


def _convert(
    checkpoint: Reader, plan: Plan, out: Path, encoder: Encoder, progress: Progress | None
) -> Report:
    records = _resume(out, plan)
    kept, begun, writing = len(records), time.perf_counter(), Stopwatch()
    written = sum(record.size_bytes for record in records)
    for file in plan.files[kept:]:
        hint = f"{file.name} was not written; {checkpoint.path} is unchanged"
        with hinted(hint), FileWriter(out / file.name, writing) as target:
            target.write(file.header)
            for part in encoder.encode(file.tensors):
                target.write(part.data)
                if progress:
                    progress(written + target.size_bytes, plan.size_bytes)
            assert target.size_bytes == file.size_bytes, f"{file.name} is not as planned"
            digest = target.finish()
        written += file.size_bytes
        sums = {kind: encoder.sums[kind] for kind in TensorKind if kind in encoder.sums}
        error = {kind.value: _relative(each.error, each.square) for kind, each in sums.items()}
        cosine = {kind.value: _cosine(each) for kind, each in sums.items()}
        encoder.sums.clear()
        records.append(FileRecord(file.name, file.size_bytes, digest, error, cosine))
        smallfiles.append_line(out / PART, json.dumps(encode_record(records[-1])).encode() + b"\n")
    manifest = replace(plan.manifest, files=tuple(records))
    _finish(checkpoint, out, manifest)
    stages = encoder.stages(time.perf_counter() - begun, writing.seconds)
    return replace(_report(out, plan, manifest, kept), stages=stages)


def _resume(out: Path, plan: Plan) -> list[FileRecord]:
    """The complete files of an earlier run, the first ones of the plan; starts a fresh list if there are none.

    Raises:
        UsageError: the earlier run completed files of another model or recipe.
        BadPack: it completed files, but their list is damaged.
    """
    part = out / PART
    records: list[FileRecord] = []
    if part.exists() and list(out.glob("*.safetensors")):
        first, *lines = read_bounded(part, MAX_BYTES).split(b"\n")
        with hinted(f"remove the folder {out} and convert again"):
            _refuse_other(out, parse_pack(first, PART)[0], plan)
        for file, line in zip(plan.files, lines[:-1], strict=False):
            record = _parse_line(line)
            if record is None or record.name != file.name or not _is_there(out, record, file):
                break
            records.append(record)
    text = plan.manifest.encode(indent=None)
    text += b"".join(json.dumps(encode_record(record)).encode() + b"\n" for record in records)
    smallfiles.write(part, text)
    return records


def _parse_line(line: bytes) -> FileRecord | None:
    try:
        return parse_record(smallfiles.json_object(line))
    except ValueError:
        return None


def _is_there(out: Path, record: FileRecord, file: WeightFile) -> bool:
    path = out / record.name
    return is_regular(path) and path.stat().st_size == record.size_bytes == file.size_bytes


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


def _report(out: Path, plan: Plan, manifest: Manifest, kept: int) -> Report:
    extras = sum(record.size_bytes for record in manifest.extras)
    return Report(
        out,
        manifest,
        plan.source_bytes,
        plan.size_bytes + extras,
        kept,
        overall(plan.files, manifest),
    )


def overall(files: Sequence[WeightFile], manifest: Manifest) -> dict[str, float]:
    """Error of the whole model: root mean square over the files, by elements of each kind of tensor.

    Raises:
        BadPack: the manifest lists other files.
    """
    if [file.name for file in files] != [record.name for record in manifest.files]:
        raise BadPack(f"{MANIFEST} lists other weight files than its model has")
    squares: dict[str, list[tuple[float, int]]] = {}
    for file, record in zip(files, manifest.files, strict=True):
        for kind, error in record.error.items():
            weight = sum(t.elements for t in file.tensors if _kind_name(t) == kind)
            squares.setdefault(kind, []).append((error * error, weight))
    return {
        kind: _relative(sum(e * w for e, w in rows), sum(w for _, w in rows))
        for kind, rows in squares.items()
    }


def _kind_name(tensor: Tensor) -> str:
    kind = kind_of(tensor)
    return kind.value if kind else ""


def _cosine(sums: PackError) -> float:
    """Between W x and W' x, from <a, b> = (|a|^2 + |b|^2 - |a - b|^2) / 2; 1 where both are 0."""
    sizes = math.sqrt(sums.out_square * sums.out_stored)
    both = sums.out_square + sums.out_stored - sums.out_error
    return round(both / (2 * sizes), COSINE_DECIMALS) if sizes else 1.0


def _relative(sum_sq_error: float, sum_sq: float) -> float:
    value = math.sqrt(sum_sq_error / sum_sq) if sum_sq > 0 else 0.0
    return float(f"{value:.{ERROR_DIGITS}g}")
