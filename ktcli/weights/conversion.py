"""A conversion as data: the source of the checkpoint, the files to write, and the result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ktcli.manifest import Manifest
from ktcli.native import Pool
from ktcli.records import dataclass
from ktcli.weights.importance import Importance
from ktcli.weights.pack import WeightFile
from ktcli.weights.ranges import Ranges
from ktcli.weights.recipe import Recipe
from ktcli.weights.stages import Stages
from ktcli.weights.storage import Reader


@dataclass(frozen=True, slots=True)
class Provenance:
    """The place where a checkpoint was published; None: it was not recorded."""

    hub: str | None = None
    repository: str | None = None
    revision: str | None = None


UNRECORDED = Provenance()


class ImportanceSource(Protocol):
    """The interface of what finds the importance of each layer just before it is converted."""

    def begin(self, checkpoint: Reader, pool: Pool) -> None:
        """Prepares the measurement of the importance of columns; called once, before any file of the pack is
        converted."""

    def knows(self, file: WeightFile) -> bool:
        """Returns whether an earlier run, which was stopped, already found the importance that the tensors of a weight
        file need."""

    def importance_of(self, file: WeightFile) -> Importance:
        """Returns the importance of the columns of a weight file's tensors, measured now if it is not known; called for
        the files in the order of layers."""

    def finish(self) -> str:
        """Stores the importance of all of the model's columns; returns the text that identifies the calibration in the
        pack's manifest."""

    def close(self) -> None:
        """Waits until what was measured is stored for another run; called last, also after an error."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The importance of the columns of a model's matrices.

    Attributes:
        identity: names its origin, and its file's hash; equal ones give equal bytes. Without the hash, if it is found
            while the model is converted.
        importance: of what is known from the beginning.
        measuring: finds it while the model is converted; None: all of it is known.
    """

    identity: str
    importance: Importance
    measuring: ImportanceSource | None = None


class Supply(Protocol):
    """The interface of a supplier that downloads the files of a checkpoint as a conversion needs them, and removes each
    after its last use.
    """

    def begin(self, plan: Conversion, made: Collection[str]) -> None:
        """Prepares the download of the checkpoint files that a conversion needs; called once, before any file is
        converted.

        Args:
            made: the names of the weight files of the pack that are already complete.
        """

    def at_hand(self, file: WeightFile) -> AbstractContextManager[None]:
        """Returns a context manager in whose `with` block the checkpoint files can be read that a weight file of the
        pack is made from. Entering it waits for their download; if the block ends without an error, the weight file
        counts as complete."""


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint that a pack is made from.

    Attributes:
        name: the name of the checkpoint for people.
        checkpoint: open; whoever opened it closes it.
        supply: brings its files; None: they are all there.
    """

    name: str
    checkpoint: Reader
    supply: Supply | None = None


@dataclass(frozen=True, slots=True)
class Conversion:
    """The plan of a conversion: the pack that will be written.

    Attributes:
        manifest: the pack's manifest, without its files.
        recipe: the number formats of the pack.
        files: its weight files, as the manifest lists them.
        needs: by the name of each, the bytes of the checkpoint's files that it is made from.
        source_bytes: bytes of the tensors the pack is made from.
        by_layer: whether the layers are converted in the order in which a model computes them.
    """

    manifest: Manifest
    recipe: Recipe
    files: tuple[WeightFile, ...]
    needs: Mapping[str, Mapping[str, Ranges]]
    source_bytes: int
    by_layer: bool = False

    @property
    def ordered(self) -> tuple[WeightFile, ...]:
        """The pack's weight files in the order of conversion: by layer, if `by_layer`; otherwise by the name of the
        last checkpoint file that each is made from."""
        if self.by_layer:
            return self.files
        return tuple(sorted(self.files, key=lambda file: max(self.needs[file.name], default="")))

    @property
    def weight_bytes(self) -> int:
        """The total bytes of the pack's weight files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def extra_bytes(self) -> int:
        """The total bytes of the small files, such as config and tokenizer, that the pack contains beside its weight
        files."""
        return sum(record.size_bytes for record in self.manifest.extras)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a conversion.

    Attributes:
        source_bytes: bytes of the tensors the pack was made from.
        kept_files: the number of weight files that an earlier run had completed; all of them: nothing was left to do.
        error: relative error of the whole model by kind of tensor; see `FileRecord`.
        stages: how long each stage was busy; None: there was nothing to do.
        remarks: sentences for the user about the checkpoint.
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
        """Whether an earlier run had completed all weight files of the pack, so that this one converted nothing."""
        return self.kept_files == len(self.manifest.files)
