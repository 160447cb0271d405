"""Repairs a pack: recreates only its damaged files from the checkpoint, with the same bytes as before.

A file that is there keeps its name until the new one is complete and has the SHA-256 of the manifest. So a repair
that is stopped at any moment leaves each file as it was or as it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

from ktcli import smallfiles
from ktcli.errors import BadPack, UsageError
from ktcli.manifest import MAX_BYTES, FileRecord, Manifest, Seal
from ktcli.manifest import PACK as MANIFEST
from ktcli.models import Model, build
from ktcli.native import Pool
from ktcli.records import dataclass
from ktcli.weights.check import check_tables
from ktcli.weights.conversion import UNRECORDED, Calibration, Provenance, Source
from ktcli.weights.convert import planned
from ktcli.weights.destination import Destination
from ktcli.weights.encode import Encoder
from ktcli.weights.header import read_bounded
from ktcli.weights.importance import UNKNOWN, Importance
from ktcli.weights.manifest import parse_pack
from ktcli.weights.pack import WeightFile
from ktcli.weights.recipe import Recipe, format_of
from ktcli.weights.storage import Reader
from ktcli.weights.writer import FileWriter, explained

Kept = Callable[[Model], Importance | None]


@dataclass(frozen=True, slots=True)
class Damage:
    """The damaged files of a pack.

    Attributes:
        pack: its folder.
        names: the files, weights or small ones.
    """

    pack: Path
    names: Collection[str]


def repair(
    source: Source,
    damage: Damage,
    pool: Pool,
    *,
    provenance: Provenance = UNRECORDED,
    importance: Kept = lambda model: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Converts the damaged files of a pack again, with the same bytes as before, from the open checkpoint that it was
    made from.

    Args:
        provenance: where the checkpoint was published.
        importance: returns the importance of columns that the pack was calibrated with; it may return None: it is not
            stored here.
        progress: called with the bytes written so far and the total bytes to write.
    Raises:
        BadPack: the pack's manifest is damaged, the pack was made from another checkpoint, or a file came out different
            from what the manifest says; that file is left as it was.
        UsageError: a damaged file needs the importance of the calibration, which is not stored here; or the pack was
            merged with an adapter.
        Busy: another process works on the pack.
        BadCheckpoint, NotEnoughDisk, KtError: as for a conversion.
    """
    found, recipe = _described(damage.pack)
    records = {each.name: each for each in found.records if each.name in damage.names}
    checkpoint, supply = source.checkpoint, source.supply
    kept = importance(build(checkpoint.config)) if recipe.calibrated else None
    known = Calibration(found.calibration, kept or UNKNOWN) if recipe.calibrated else None
    plan = planned(checkpoint, recipe, provenance, known)
    if found.identity != plan.manifest:
        raise BadPack(f"{damage.pack.name} was made from a checkpoint other than {source.name}")
    files = [file for file in plan.ordered if file.name in records]
    if known is not None and kept is None:
        _refuse_searched(files, plan.recipe, damage.pack.name, known)
    sizes = [file.size_bytes for file in files]
    total, largest = sum(sizes), max(sizes, default=0)
    what = f"repairing {damage.pack.name}"
    target = Destination(damage.pack, plan)
    with explained(what, damage.pack, lambda: largest), target.held(what):
        smallfiles.require_room(damage.pack, largest, what)
        if supply:
            supply.begin(plan, {file.name for file in plan.files} - records.keys())
        encoder, done = Encoder(checkpoint, plan.recipe, pool, kept or UNKNOWN), 0
        for file in files:
            with supply.at_hand(file) if supply else nullcontext():
                check_tables(file.tensors, checkpoint, pool)
                for part in _made(encoder, file, damage.pack, records[file.name]):
                    done += part
                    progress(done, total)
        for record in plan.manifest.extras:
            if record.name in records:
                _take_over(checkpoint, damage.pack, record)


def _described(pack: Path) -> tuple[Manifest, Recipe]:
    """The manifest and the recipe of a pack that can be made again from its checkpoint."""
    found, recipe = parse_pack(read_bounded(pack / MANIFEST, MAX_BYTES))
    if found.seal is Seal.BROKEN:
        raise BadPack(f"{MANIFEST} of {pack.name} is damaged, so the right contents are unknown")
    if found.adapter:
        raise UsageError(
            f"{pack.name} was merged with an adapter, which kt does not store with it",
            hint="remove it, and convert the model with --adapter again: the same adapter gives the same bytes",
        )
    return found, recipe


def _refuse_searched(
    files: Collection[WeightFile], recipe: Recipe, name: str, calibration: Calibration
) -> None:
    """Refuses files that cannot be made without the importance of the calibration.

    Raises:
        UsageError: a file has a tensor whose scales were searched.
    """
    for file in files:
        formats = (format_of(tensor, recipe) for tensor in file.tensors)
        if any(fmt is not None and fmt.searched for fmt in formats):
            raise UsageError(
                f"{file.name} of {name} was calibrated ({calibration.identity}), and the library does not have the "
                "importance that was found",
                hint="remove it, and convert the model with --calibrate FILE: the same text gives the same bytes",
            )


def _made(encoder: Encoder, file: WeightFile, folder: Path, record: FileRecord) -> Iterator[int]:
    """Writes a weight file again; yields the bytes of each part."""
    with FileWriter(folder / file.name) as writer:
        writer.write(file.header)
        for part in encoder.encode(file.tensors):
            writer.write(part.data)
            yield part.nbytes
        writer.finish(record.sha256)
    encoder.sums.clear()


def _take_over(checkpoint: Reader, folder: Path, record: FileRecord) -> None:
    """Writes a small file again."""
    data = checkpoint.small_file(record.name)
    if sha256(data).hexdigest() != record.sha256:
        raise BadPack(
            f"{record.name} of the checkpoint is not the file that the pack was made from"
        )
    smallfiles.write(folder / record.name, data)
