"""A conversion as data: where a checkpoint comes from, what will be written, and what was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktcli.manifest import Manifest
from ktcli.weights.pack import WeightFile
from ktcli.weights.recipe import Recipe
from ktcli.weights.stages import Stages


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a checkpoint was published; None: nobody recorded it."""

    hub: str | None = None
    repository: str | None = None
    revision: str | None = None


UNRECORDED = Provenance()


@dataclass(frozen=True, slots=True)
class Calibration:
    """The importance of the columns of a model's matrices, measured on a text.

    Attributes:
        identity: names the text and the method; equal ones give equal importance.
        importance: returns the importance by tensor, [count, k] f32; called once, and only if something is to be
            written.
    """

    identity: str
    importance: Callable[[], Mapping[str, NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The plan of a conversion: the pack that will be written.

    Attributes:
        manifest: the pack's manifest, without its files.
        recipe: the number formats of the pack.
        source_bytes: bytes of the tensors the pack is made from.
    """

    manifest: Manifest
    recipe: Recipe
    files: tuple[WeightFile, ...]
    source_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def extra_bytes(self) -> int:
        """Bytes of the small files that the pack takes over."""
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
        return self.kept_files == len(self.manifest.files)
