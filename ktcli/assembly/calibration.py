"""Finds the importance by which a conversion is calibrated: in a file, or by running the model on a text.

What was found is kept in the library, so that no other conversion of the model has to find it again.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from ktcli import smallfiles
from ktcli.assembly.calibration_text import (
    BUILT_IN_MARK,
    BUILT_IN_TEXT,
    TOKENS,
    TextImportance,
    read_text,
)
from ktcli.assembly.convert import name_of_packs, pack_folder
from ktcli.assembly.host import host_here, machine_here, team_to_convert
from ktcli.assembly.listener import SILENT, Listener
from ktcli.errors import KtError, NotEnoughMemory, UsageError, counted, duration, hinted
from ktcli.hardware.numa import OFF
from ktcli.measure.calibrate import need_bytes
from ktcli.measure.calibration_time import ConversionTime, estimate
from ktcli.models import Model, build
from ktcli.records import dataclass
from ktcli.store import importances
from ktcli.store.entry import Entry
from ktcli.weights.check import check
from ktcli.weights.conversion import Calibration
from ktcli.weights.destination import calibration_in, is_begun
from ktcli.weights.gguf.header import MAGIC, is_gguf
from ktcli.weights.gguf.imatrix import METHOD as IMATRIX_METHOD
from ktcli.weights.gguf.imatrix import read_imatrix
from ktcli.weights.header import is_regular
from ktcli.weights.importance import UNKNOWN, Importance, measured, missing
from ktcli.weights.importance_file import SUFFIX, ImportanceFile, origin_in, read_importance
from ktcli.weights.pack import is_pack
from ktcli.weights.reader import open_checkpoint
from ktcli.weights.recipe import Recipe
from ktcli.weights.storage import Reader
from ktcli.weights.writer import explained

AUTO, BUILT_IN, NEVER = "auto", "built-in", "off"  # what --calibrate takes beside a file
_SNIFFED = 16  # bytes of a file that tell what it is
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model that is calibrated.

    Attributes:
        target: the folder of the conversion, which need not exist.
        recipe: its formats.
    """

    entry: Entry
    model: Model
    checkpoint: Reader
    target: Path
    recipe: Recipe
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


def _calibration(
    entry: Entry,
    recipe: Recipe,
    said: str,
    threads: int | None,
    listener: Listener,
    target: Path,
    starts: bool,
) -> Calibration | None:
    """Returns the calibration to convert a checkpoint with; None: it is converted without.

    Args:
        said: "auto": by an importance that the library has, if any; "built-in": by the text that comes with kt; "off";
            else a file: a text, on which the model is run, an importance, or an imatrix.
        target: the folder of the conversion.
        starts: whether "auto" calibrates by the built-in text where that does not take long.
    Raises:
        UsageError: the text is too short or none, or the file is of another model.
        BadCheckpoint: the file is damaged.
        NotFound: the file cannot be read.
        NotEnoughMemory: no layer fits in 8 bits, the format in which the model reads the text.
    """
    if said == AUTO:
        said = _begun(entry, target)
    is_known = said == AUTO and importances.every(name_of_packs(entry))
    if said == NEVER or (said == AUTO and not is_known and not starts):
        return None
    with closing(open_checkpoint(entry.path)) as checkpoint:
        subject = _Subject(entry, build(checkpoint.config), checkpoint, target, recipe, listener)
        if is_known:
            return _known(subject)
        if said == AUTO:
            if not _time(subject, TOKENS, threads).is_short or _lacking(subject, TOKENS, threads):
                return None
            said = BUILT_IN
        path = BUILT_IN_TEXT if said == BUILT_IN else Path(said)
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
    *,
    starts: bool = False,
) -> tuple[Recipe, Calibration | None]:
    """Returns a conversion's recipe and the calibration to convert with: (recipe marked as calibrated, calibration), or
    (recipe, None) if it is converted without one. Raises UsageError, NotFound or BadCheckpoint if the file that `said`
    names cannot be used, and NotEnoughMemory if no layer fits.

    Args:
        said: what --calibrate says: "auto", "built-in", "off", or the path of a file.
        target: the folder of the conversion; None: in the library.
        starts: whether "auto" may calibrate by the built-in text if that takes less than twice as long as the
            conversion.
    """
    if not recipe.searches:
        if recipe.calibrated or said not in (AUTO, NEVER):
            recipe = replace(recipe, calibrated=False)
            listener.warn(
                f"--calibrate has no effect on {recipe.name}: only formats of 4 and 6 bits choose their scales"
            )
        return recipe, None
    changed = replace(recipe, calibrated=True)
    plain = target or pack_folder(entry, replace(recipe, calibrated=False))
    target = target or pack_folder(entry, changed)
    # What was made or begun without a calibration stays so.
    starts = starts and not (is_begun(plain) and not calibration_in(plain))
    found = _calibration(entry, changed, said, threads, listener, target, starts)
    return (recipe, None) if found is None else (changed, found)


def kept_calibration(
    entry: Entry, recipe: Recipe, checkpoint: Reader, target: Path, listener: Listener = SILENT
) -> Calibration:
    """Returns the calibration of an open checkpoint by an importance matrix that is stored in the library: that of the
    conversion in `target`, else the newest.

    Raises:
        BadCheckpoint, UsageError: the file is damaged, or of another model.
    """
    return _known(_Subject(entry, build(checkpoint.config), checkpoint, target, recipe, listener))


def kept_for(pack: Entry, model: Model) -> Importance | None:
    """Returns the importance of weight columns (relative mean squares of their inputs) that a conversion was calibrated
    with, read from the library; None: it was not calibrated, or the library does not have it.

    Raises:
        BadCheckpoint: the file is damaged.
    """
    identity = calibration_in(pack.path)
    path = importances.path_for(pack.name, identity)
    if path is None:
        return None
    found = read_importance(path, model, pack.shown)
    return found.importance if found.identity == identity else None


def _begun(entry: Entry, target: Path) -> str:
    """What "auto" means where a conversion was begun by a text that the model had not read to its end.

    Raises:
        UsageError: that text is not known.
    """
    found = "" if is_pack(target) else calibration_in(target)
    if not found.startswith("the text") or importances.path_of(entry.name, found) is not None:
        return AUTO
    if BUILT_IN_MARK in found:
        return BUILT_IN
    raise UsageError(
        f"{target} was begun with a calibration by a text",
        hint=f"name the text again: kt convert {entry.label} --calibrate FILE",
    )


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
    """The calibration by a text, found while the model is converted unless the conversion or the result is there.

    Raises:
        UsageError: it is not text, or too short.
        NotEnoughMemory: not even one layer fits.
    """
    text = read_text(subject.entry, path)
    made = calibration_in(subject.target)
    if made.startswith(f"{text.source};") and is_pack(
        subject.target
    ):  # nothing is left to be written
        return Calibration(made, UNKNOWN)
    found = _kept(subject, text.source)
    if found and made != text.source:  # else what was begun would not have its own
        return subject.calibration(found)
    check(subject.model, subject.checkpoint)
    if lacking := _lacking(subject, len(text.reading.ids), threads):
        raise lacking
    taken = _time(subject, len(text.reading.ids), threads)
    subject.listener.note(
        f"Calibrating {subject.shown} by {text.name}: about {duration(taken.calibrate_s)}, and "
        f"{duration(taken.convert_s)} for the conversion"
    )
    measuring = TextImportance(subject.model, text, subject.keep)
    if made.startswith(f"{text.source};"):  # begun with a result that was lost
        measuring.begin(subject.checkpoint, team_to_convert(threads))
        return Calibration(measuring.finish(), measuring.whole())
    return Calibration(text.source, UNKNOWN, measuring)


def _lacking(subject: _Subject, tokens: int, threads: int | None) -> NotEnoughMemory | None:
    """The error of a machine whose memory does not hold one layer; None: it does."""
    need = need_bytes(subject.model, tokens)
    room = host_here(machine_here(gpus=False), threads, OFF, torch=False).room_bytes
    if need <= room:
        return None
    return NotEnoughMemory(
        f"{subject.shown} (--calibrate keeps one layer in memory)", need, room,
        hint="calibrate on a machine with more memory, or convert without --calibrate",
    )  # fmt: skip


def _time(subject: _Subject, tokens: int, threads: int | None) -> ConversionTime:
    working = team_to_convert(threads).threads
    return estimate(subject.model, subject.recipe, tokens, team_to_convert(1), working)


def _kept(subject: _Subject, source: str) -> ImportanceFile | None:
    """What the library has of an earlier calibration of this checkpoint by the same text; None: nothing."""
    for path in importances.every(subject.name):
        if origin_in(path).startswith(f"{source};"):
            found = read_importance(path, subject.model, subject.shown)
            if found.checkpoint == subject.checkpoint.digest:
                return found
    return None
