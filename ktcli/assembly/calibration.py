"""Finds the importance by which a conversion is calibrated: in a file, or by running the model on a text.

What was found is kept in the library, so that no other conversion of the model has to find it again.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from ktcli import smallfiles
from ktcli.assembly.convert import name_of_packs, pack_folder
from ktcli.assembly.host import host_here, machine_here, team_to_convert
from ktcli.assembly.listener import SILENT, Listener
from ktcli.errors import KtError, NotEnoughMemory, UsageError, counted, hinted
from ktcli.hardware.numa import OFF
from ktcli.models import Model, build
from ktcli.resources import data_path
from ktcli.store import importances
from ktcli.store.entry import Entry
from ktcli.store.removal import calibrating_folder
from ktcli.text.passage import Passage, read_passage, read_with
from ktcli.weights.check import check
from ktcli.weights.conversion import Calibration
from ktcli.weights.destination import calibration_in
from ktcli.weights.gguf.header import MAGIC, is_gguf
from ktcli.weights.gguf.imatrix import METHOD as IMATRIX_METHOD
from ktcli.weights.gguf.imatrix import read_imatrix
from ktcli.weights.header import is_regular
from ktcli.weights.importance import UNKNOWN, Importance, measured, missing
from ktcli.weights.importance_file import SUFFIX, ImportanceFile, origin_in, read_importance
from ktcli.weights.pack import is_pack
from ktcli.weights.reader import open_checkpoint, small_files_of
from ktcli.weights.recipe import Recipe
from ktcli.weights.storage import Reader
from ktcli.weights.writer import explained

AUTO, BUILT_IN, NEVER = "auto", "built-in", "off"  # what --calibrate takes beside a file
TOKENS = 16_384  # of the text that are read: 512 for each of 256 experts at top-8
LEAST = 256  # fewer say nothing of a model's columns
METHOD = "3"  # of `ktcli.measure.calibrate` and its formats; another one gives other bytes
_SNIFFED = 16  # bytes of a file that tell what it is
_BLOCK = 1 << 20
_KEY_DIGITS = 16  # of the name of a folder


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model that is calibrated.

    Attributes:
        target: the folder of the conversion, which need not exist.
    """

    entry: Entry
    model: Model
    checkpoint: Reader
    target: Path
    listener: Listener

    @property
    def shown(self) -> str:
        """The name of the model for people."""
        return self.entry.shown

    @property
    def name(self) -> str:
        """The name in the library that all conversions of the model share."""
        return name_of_packs(self.entry)

    def keep(self, importance: Importance, source: str) -> ImportanceFile:
        """Writes what was found into the library and returns it."""
        family = self.model.spec.family
        return self.kept(ImportanceFile(importance, family, self.checkpoint.digest, source))

    def kept(self, found: ImportanceFile) -> ImportanceFile:
        """Writes a file's contents into the library, unless they are there; says where they cannot be written."""
        found, data = found.encoded()
        path = importances.path_of(self.name, found.identity)
        if path is not None and importances.path_for(self.name, found.identity) is None:
            what = "keeping the importance in the library"
            try:
                with explained(what, path.parent, lambda: len(data)):
                    smallfiles.make_folder(path.parent)
                    smallfiles.write(path, data)
            except KtError as error:
                self.listener.warn(f"the importance is not kept: {error}")
        return found

    def calibration(self, found: ImportanceFile) -> Calibration:
        """Returns the calibration by an importance; says what is missing from it."""
        if found.checkpoint != self.checkpoint.digest:
            self.listener.note(
                f"The importance was found for another checkpoint of the shape of {self.shown}"
            )
        if lacking := missing(self.model, found.importance.steps):
            self.listener.note(
                f"Nothing is known of {len(lacking)} of {counted(len(measured(self.model)), 'tensor')}, for example "
                f"{lacking[0]}: their columns count as 1"
            )
        return Calibration(found.identity, found.importance)


def calibration(
    entry: Entry, said: str, target: Path, threads: int | None, listener: Listener = SILENT
) -> Calibration | None:
    """Returns the calibration of a checkpoint's model; None: it is not calibrated.

    Args:
        said: "auto": by an importance that the library has, if any; "built-in": by the text that comes with kt; "off";
            else a file: a text, on which the model is run, an importance, or an imatrix.
        target: the folder of the conversion.
    Raises:
        UsageError: the text is too short or none, or the file is of another model.
        BadCheckpoint: the file is damaged.
        NotFound: the file cannot be read.
        NotEnoughMemory: no layer fits in 8 bits, the format in which the model reads the text.
    """
    if said == NEVER or (said == AUTO and not importances.every(name_of_packs(entry))):
        return None
    with closing(open_checkpoint(entry.path)) as checkpoint:
        subject = _Subject(entry, build(checkpoint.config), checkpoint, target, listener)
        if said == AUTO:
            return _known(subject)
        path = data_path("profiles", "text", "calibration.txt") if said == BUILT_IN else Path(said)
        match _kind_of(path):
            case "imatrix":
                return _of_imatrix(subject, path)
            case "importance":
                found = read_importance(path, subject.model, subject.shown)
                return subject.calibration(subject.kept(found))
            case _:
                return _of_text(subject, path, threads)


def calibrated(
    entry: Entry,
    recipe: Recipe,
    said: str,
    threads: int | None,
    listener: Listener = SILENT,
    target: Path | None = None,
) -> tuple[Recipe, Calibration | None]:
    """Returns a recipe with what a calibration makes of it, and the calibration; None: there is none. Raises as
    `calibration`.

    Args:
        said: as `calibration` takes it.
        target: the folder of the conversion; None: in the library.
    """
    if not recipe.searches:
        if recipe.calibrated or said not in (AUTO, NEVER):
            recipe = replace(recipe, calibrated=False)
            listener.warn(
                f"--calibrate has no effect on {recipe.name}: only 4-bit formats choose their scales"
            )
        return recipe, None
    changed = replace(recipe, calibrated=True)
    found = calibration(entry, said, target or pack_folder(entry, changed), threads, listener)
    return (recipe, None) if found is None else (changed, found)


def kept_calibration(
    entry: Entry, checkpoint: Reader, target: Path, listener: Listener = SILENT
) -> Calibration:
    """Returns the calibration of an open checkpoint by an importance that the library has.

    Raises:
        BadCheckpoint, UsageError: the file is damaged, or of another model.
    """
    return _known(_Subject(entry, build(checkpoint.config), checkpoint, target, listener))


def kept_for(pack: Entry, model: Model) -> Importance | None:
    """Returns the importance by which a conversion was calibrated; None: it was not, or the library does not have it.

    Raises:
        BadCheckpoint: the file is damaged.
    """
    identity = calibration_in(pack.path)
    path = importances.path_for(pack.name, identity)
    if path is None:
        return None
    found = read_importance(path, model, pack.shown)
    return found.importance if found.identity == identity else None


def _kind_of(path: Path) -> str:
    """What a file that --calibrate names is, by its first bytes and its name; of a pipe nothing can be looked at."""
    try:
        start = smallfiles.read_start(path, _SNIFFED) if is_regular(path) else b""
    except OSError:  # whoever reads the text says it
        return "text"
    if start.startswith(MAGIC) or (start and is_gguf(path)):
        return "imatrix"
    is_header = start[8:9] == b"{" and start[5:8] == bytes(3)
    return "importance" if is_header or (start and path.suffix == SUFFIX) else "text"


def _known(subject: _Subject) -> Calibration:
    """The calibration by an importance of the library: that of the conversion that is there or was begun, else the
    newest."""
    there = importances.every(subject.name)
    wanted = calibration_in(subject.target)
    path = next((each for each in there if wanted and origin_in(each) == wanted), there[0])
    with hinted(f"remove {path}, or convert without it: --calibrate off"):
        found = read_importance(path, subject.model, subject.shown)
    subject.listener.note(f"Calibrating with {path.name} of the library")
    return subject.calibration(found)


def _of_imatrix(subject: _Subject, path: Path) -> Calibration:
    read = read_imatrix(path, subject.model, subject.checkpoint, subject.shown)
    if read.unchosen:
        subject.listener.note(
            f"{path.name} has no inputs of {read.unchosen} of the experts' matrices: they get the mean of their layer"
        )
    digest = sha256()
    with path.open("rb") as file:
        while part := file.read(_BLOCK):
            digest.update(part)
    source = f"the imatrix with SHA-256 {digest.hexdigest()}, method {IMATRIX_METHOD}"
    return subject.calibration(subject.keep(read.importance, source))


def _of_text(subject: _Subject, path: Path, threads: int | None) -> Calibration:
    """The calibration by a text; the model is only run if neither the conversion nor the result is there."""
    passage = read_passage(path)
    if "\0" in passage.text:
        raise UsageError(
            f"{passage.name[:300]} is not text: it has zero bytes", hint="give a plain text file"
        )
    digest = sha256(passage.text.encode()).hexdigest()
    source = f"the text with SHA-256 {digest}, up to {TOKENS} tokens, method {METHOD}"
    made = calibration_in(subject.target) if is_pack(subject.target) else ""
    if made.startswith(f"{source};"):  # nothing is left to be written
        return Calibration(made, UNKNOWN)
    for kept in importances.every(subject.name):
        if origin_in(kept).startswith(f"{source};"):
            found = read_importance(kept, subject.model, subject.shown)
            if found.checkpoint == subject.checkpoint.digest:
                return subject.calibration(found)
    return subject.calibration(subject.keep(_run(subject, passage, source, threads), source))


def _run(subject: _Subject, passage: Passage, source: str, threads: int | None) -> Importance:
    """What the model finds while it reads a text; a run that was stopped is continued.

    Raises:
        UsageError: the text is too short.
        NotEnoughMemory: not even one layer fits.
    """
    from ktcli.measure.calibrate import calibrate, need_bytes
    from ktcli.measure.stage_files import StageFiles

    entry, listener = subject.entry, subject.listener
    with small_files_of(entry.path) as folder:
        reading = read_with(folder, passage, TOKENS)
    if len(reading.ids) < LEAST:
        raise UsageError(
            f"{passage.name} has {counted(len(reading.ids), 'token')}, but --calibrate needs at least {LEAST}",
            hint=f"use a longer text; up to {TOKENS:,} tokens of it are read",
        )
    check(subject.model, subject.checkpoint)
    need = need_bytes(subject.model, len(reading.ids))
    room = host_here(machine_here(gpus=False), threads, OFF, torch=False).room_bytes
    if need > room:
        raise NotEnoughMemory(
            f"{subject.shown} (--calibrate keeps one layer in memory)", need, room,
            hint="calibrate on a machine with more memory, or convert without --calibrate",
        )  # fmt: skip
    pool = team_to_convert(threads)
    key = sha256(f"{subject.checkpoint.digest} {source} {pool.isa}".encode()).hexdigest()
    folder = calibrating_folder(key[:_KEY_DIGITS])
    with listener.progress(f"Reading {passage.name}", unit="layers") as bar:
        found = calibrate(
            subject.checkpoint, subject.model, pool, reading.ids, reading.begin,
            lambda done, total: bar.update(done=done, total=total), StageFiles(folder),
        )  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    return found
