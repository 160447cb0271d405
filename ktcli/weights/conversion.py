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
    """What a text says of the columns of a model's matrices.

    Attributes:
        identity: names the text and the method; equal ones give equal importance.
        importance: finds the importance, by tensor, [count, k] f32; asked once, and only if something is to be
            written.
    """

    identity: str
    importance: Callable[[], Mapping[str, NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What will be written.

    Attributes:
        manifest: that of the pack, without its files.
        recipe: what its formats are named after.
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
    """What a conversion did.

    Attributes:
        source_bytes: bytes of the tensors the pack was made from.
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
