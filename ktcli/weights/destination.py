"""The output folder of a conversion: its owner, the files that earlier runs completed, and those still to write.

Files are named when they are complete; `kt.json.part` lists them and becomes `kt.json` at the end. So a conversion
that was killed goes on at the first file that is not listed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint, UsageError, hinted
from ktcli.manifest import (
    LOCK,
    MAX_BYTES,
    STREAM,
    FileRecord,
    Manifest,
    encode_record,
    parse_record,
)
from ktcli.manifest import PACK as MANIFEST
from ktcli.records import dataclass
from ktcli.weights.conversion import Conversion
from ktcli.weights.header import is_regular, read_bounded
from ktcli.weights.manifest import is_of_before, parse_pack
from ktcli.weights.pack import Pack, WeightFile, is_pack

PART = "kt.json.part"


@dataclass(frozen=True, slots=True)
class Destination:
    """The output folder of a conversion, which need not exist, and the files to be written."""

    path: Path
    plan: Conversion

    def refuse_foreign(self) -> None:
        """Checks that the output folder is missing, empty, or holds a pack or a started conversion.

        Raises:
            UsageError: it is a file, or holds files but neither a pack nor a started conversion.
        """
        if not self.path.exists():
            return
        hint = "give a new folder with --out"
        if not self.path.is_dir():
            raise UsageError(f"{self.path} is not a folder", hint=hint)
        names = {path.name for path in self.path.iterdir()}
        begun = {name for name in names if smallfiles.meant_name(name) == PART}
        if names - begun - {LOCK, STREAM} and not names & {MANIFEST, PART}:
            raise UsageError(
                f"{self.path} is not empty and is not a conversion made by kt", hint=hint
            )

    @property
    def leftovers(self) -> list[Path]:
        """The paths of the temporary files of an unfinished conversion in the output folder, and of those that a killed
        one left behind; sorted. Complete weight files are not among them."""
        begun = {f"{file.name}{smallfiles.SUFFIX}" for file in self.plan.files} | {PART, LOCK}
        small = {PART, MANIFEST, *(record.name for record in self.plan.manifest.extras)}
        names = os.listdir(self.path) if self.path.is_dir() else ()
        return [
            self.path / name
            for name in sorted(names)
            if name in begun or smallfiles.meant_name(name) in small
        ]

    def complete(self) -> Manifest | None:
        """Returns the manifest of the complete pack in the output folder; None: there is none.

        Raises:
            UsageError: the folder holds a pack of another model, recipe, calibration or adapter.
            BadPack: the pack is damaged.
        """
        if not is_pack(self.path):
            return None
        manifest = Pack.open(self.path).manifest
        found, wanted = manifest.identity, self.plan.manifest.formats
        # Of a kt that rounded all it kept.
        if found.formats and wanted and not found.formats.in_f32:
            found = replace(found, formats=replace(found.formats, in_f32=wanted.in_f32))
        if found.formats and wanted and is_of_before(found.formats):
            found = replace(found, formats=replace(found.formats, rows=wanted.rows))
        self._refuse_other(found)
        return manifest

    @property
    def missing(self) -> list[WeightFile]:
        """The weight files of the pack that are not in the output folder yet."""
        return [file for file in self.plan.files if not is_regular(self.path / file.name)]

    def remaining_bytes(self) -> int:
        """Returns the bytes that are still to be written: those of the missing weight files and of all small files."""
        return sum(file.size_bytes for file in self.missing) + self.plan.extra_bytes

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Opens a context that holds the lock of the output folder for one conversion, which errors call `what`. At its
        end temporary files are removed if the pack is complete or has no weight file yet; otherwise they stay, so that
        a later run can continue. A folder that is empty then is removed, too.

        Raises:
            Busy: another process holds the lock.
        """
        with smallfiles.lock(self.path / LOCK, what):
            try:
                yield
            finally:
                if is_pack(self.path) or not list(self.path.glob("*.safetensors")):
                    for left in self.leftovers:
                        left.unlink(missing_ok=True)
                if not list(self.path.iterdir()):
                    self.path.rmdir()

    def resume(self, keeps: Callable[[WeightFile], bool] | None = None) -> list[FileRecord]:
        """Returns the records (name, size, hash …) of the weight files that an earlier run completed, in the order of
        conversion up to the first that is missing or not kept. Rewrites the list of complete files to hold just these.

        Args:
            keeps: tells whether a file may be kept; None: all may.
        Raises:
            UsageError: the earlier run completed files of another model or recipe.
            BadPack: it completed files, but their list is damaged.
        """
        part, records = self.path / PART, list[FileRecord]()
        if part.exists() and list(self.path.glob("*.safetensors")):
            first, *lines = read_bounded(part, MAX_BYTES).split(b"\n")
            with hinted(f"remove the folder {self.path} and convert again"):
                self._refuse_other(parse_pack(first, PART)[0])
            for file, line in zip(self.plan.ordered, lines[:-1], strict=False):
                record = _parse_line(line)
                if record is None or not self._has(record, file) or (keeps and not keeps(file)):
                    break
                records.append(record)
        text = self.plan.manifest.encode(indent=None) + b"".join(map(_line, records))
        smallfiles.write(part, text)
        return records

    def add(self, record: FileRecord) -> None:
        """Appends the record of one more complete weight file to the list of complete files in the output folder."""
        smallfiles.append_line(self.path / PART, _line(record))

    def _has(self, record: FileRecord, file: WeightFile) -> bool:
        path = self.path / file.name
        is_that = record.name == file.name and record.size_bytes == file.size_bytes
        return is_that and is_regular(path) and path.stat().st_size == file.size_bytes

    def _refuse_other(self, found: Manifest) -> None:
        """Refuses a pack or a started conversion of another model or recipe.

        Raises:
            UsageError: what was found is not what is to be written.
        """
        wanted, theirs = self.plan.manifest, found.formats
        if found == wanted:
            return
        hint = "choose another folder with --out, or remove this one"
        alike = replace(found, calibration=wanted.calibration)  # which may differ with the formats
        if alike != wanted and theirs and replace(alike, formats=wanted.formats) == wanted:
            what = f"this model as --experts {theirs.experts} --dense {theirs.dense}"
            if wanted.formats and wanted.formats.recipe == theirs.recipe:
                what = "a conversion that an earlier kt began with a different int8 format"
                hint = f"remove the folder {self.path} and convert again"
        elif alike == wanted:
            what = f"this model with another calibration: {found.calibration}"
        elif replace(found, adapter=wanted.adapter) == wanted:
            merged = "merged with another adapter" if wanted.adapter else "merged with an adapter"
            what = f"this model {merged if found.adapter else 'without an adapter'}"
        else:
            what = f"a conversion of another checkpoint ({found.repository or found.family})"
        raise UsageError(f"{self.path} already holds {what}", hint=hint)


def is_begun(pack: Path) -> bool:
    """Returns whether the folder `pack` holds a conversion, finished or not."""
    return is_pack(pack) or (pack / PART).exists()


def calibration_in(pack: Path) -> str:
    """Returns the text about the calibration in the manifest of the finished or unfinished conversion in the folder
    `pack`; "": it was not calibrated, or there is no conversion."""
    for name, goes_on in ((MANIFEST, False), (PART, True)):
        try:
            data = read_bounded(pack / name, MAX_BYTES)
            return parse_pack(data.split(b"\n")[0] if goes_on else data)[0].calibration
        except BadCheckpoint:
            continue
    return ""


def _line(record: FileRecord) -> bytes:
    return json.dumps(encode_record(record)).encode() + b"\n"


def _parse_line(line: bytes) -> FileRecord | None:
    try:
        return parse_record(smallfiles.json_object(line))
    except ValueError:
        return None
