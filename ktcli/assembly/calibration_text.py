"""Reads the text of a calibration, and lets a model read it while the model is converted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from ktcli.errors import UsageError, counted
from ktcli.measure.calibrate import CalibrationRun
from ktcli.measure.stage_files import StageFiles
from ktcli.models import Model
from ktcli.native import Pool
from ktcli.records import dataclass
from ktcli.resources import data_path
from ktcli.store.entry import Entry
from ktcli.store.removal import calibrating_folder
from ktcli.text.dialogues import read_rendered
from ktcli.text.passage import Reading, read_passage, read_with
from ktcli.weights.importance import Importance
from ktcli.weights.importance_file import ImportanceFile
from ktcli.weights.pack import WeightFile
from ktcli.weights.reader import small_files_of
from ktcli.weights.storage import Reader

BUILT_IN_TEXT = data_path("profiles", "text", "calibration.txt")
BUILT_IN_MARK = " (built-in)"  # behind the hash of that text
TOKENS = 16_384  # of the text that are read: 512 for each of 256 experts at top-8
LEAST = 256  # fewer say nothing of a model's columns
METHOD = "3"  # of `ktcli.measure.calibrate` and its formats; another one gives other bytes
_KEY_DIGITS = 16  # of the name of a folder

Keep = Callable[[Importance, str], ImportanceFile]


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A text as the model reads it.

    Attributes:
        name: of its file, for people.
        source: names the text, and how it is read.
    """

    name: str
    source: str
    reading: Reading


def read_text(entry: Entry, path: Path) -> CalibrationText:
    """Returns a calibration text as token ids of the model, with its name and a description that identifies it;
    dialogues of the built-in text are rendered with the model's chat template.

    Raises:
        NotFound: the file cannot be read. UsageError: it is not text, or has fewer than LEAST tokens.
    """
    passage = read_passage(path)
    if "\0" in passage.text:
        raise UsageError(
            f"{passage.name[:300]} is not text: it has zero bytes", hint="give a plain text file"
        )
    with small_files_of(entry.path) as folder:
        if path == BUILT_IN_TEXT:
            rendered = read_rendered(folder, passage.text, TOKENS)
            name, reading, which = (
                "the built-in text",
                rendered.reading,
                f"{rendered.sha256}{BUILT_IN_MARK}",
            )
        else:
            reading = read_with(folder, passage, TOKENS)
            name, which = passage.name, sha256(passage.text.encode()).hexdigest()
    if len(reading.ids) < LEAST:
        raise UsageError(
            f"{name} has {counted(len(reading.ids), 'token')}, but --calibrate needs at least {LEAST}",
            hint=f"use a longer text; up to {TOKENS:,} tokens of it are read",
        )
    return CalibrationText(
        name, f"the text with SHA-256 {which}, up to {TOKENS} tokens, method {METHOD}", reading
    )


class TextImportance:
    """Measures the importance of weight columns (the mean square of their inputs) on a text, each layer just before it
    is converted; a run that was stopped is continued.
    """

    def __init__(self, model: Model, text: CalibrationText, keep: Keep) -> None:
        """Makes a source of importance that `keep` is given, when it is complete, with the text that it is from."""
        self._model, self._text, self._keep = model, text, keep
        self._measurement: CalibrationRun | None = None

    def begin(self, checkpoint: Reader, pool: Pool) -> None:
        """Prepares to measure the importance of a checkpoint's weight columns (the mean square of their inputs),
        continuing from what an interrupted run stored; the checkpoint must stay open until everything is measured.
        """
        key = sha256(f"{checkpoint.digest} {self._text.source} {pool.isa}".encode()).hexdigest()
        self._folder, reading = calibrating_folder(key[:_KEY_DIGITS]), self._text.reading
        self._measurement = CalibrationRun(
            checkpoint, self._model, pool, reading.ids, reading.begin, StageFiles(self._folder)
        )  # fmt: skip

    def knows(self, file: WeightFile) -> bool:
        """Returns whether the importance of all tensors of a pack's file has been measured already, here or by an
        interrupted run.
        """
        return self._begun.stages_of(file.tensors) <= self._begun.done

    def importance_of(self, file: WeightFile) -> Importance:
        """Returns the importance (relative mean square of the inputs) of each column of a pack file's tensors, after
        running the model on the text through the layers that have them.
        """
        wanted = self._begun.stages_of(file.tensors)
        while self._begun.done < wanted:
            self._begun.run_next()
        return self._begun.importance(file.tensors)

    def whole(self) -> Importance:
        """Returns the importance (relative mean square of the inputs) of each column of all the model's tensors, after
        running the remaining layers on the text.
        """
        while self._begun.done < self._begun.total:
            self._begun.run_next()
        return self._begun.importance()

    def finish(self) -> str:
        """Stores the importance of the whole model in the library and removes the temporary files; returns the identity
        of the calibration.
        """
        found = self._keep(self.whole(), self._text.source)
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return found.identity

    def close(self) -> None:
        """Waits until the temporary files are written from which another run continues."""
        if self._measurement:
            self._measurement.close()

    @property
    def _begun(self) -> CalibrationRun:
        assert self._measurement is not None
        return self._measurement
