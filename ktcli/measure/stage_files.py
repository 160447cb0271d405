"""Files from which a calibration that was stopped goes on: the sums of each stage, and the residuals behind the last.

A file is complete when it has its name. What cannot be written is left out, and then less can be continued. Nothing is
flushed to the disk: the system keeps what a killed process wrote, and a file that a power failure damages is not taken.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktcli import smallfiles
from ktcli.errors import KtError
from ktcli.threads import Daemon

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
_CHECK_BYTES = 4


class StageFiles:
    """The files of one calibration in a folder of its own, which need not exist.

    They are written by a thread of their own, one stage at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writing: Daemon | None = None

    def done(self) -> int:
        """Returns how many stages of the calibration, counted from the first, need not be run again, because all their
        files are there and undamaged."""
        stems = [path.stem for path in self._folder.glob("*.residuals")]
        behind = [int(stem) for stem in stems if stem.isdecimal()]
        for stage in sorted(behind, reverse=True):
            # One by one: the number is that of a file's name, and may be any.
            needed = chain([self._residuals(stage)], map(self._sums, range(stage + 1)))
            if all(_content(path) is not None for path in needed):
                return stage + 1
        return 0

    def read_sums(self, stage: int) -> Doubles:
        """Returns the sums that `add` wrote for a finished stage, f64 [n], all arrays concatenated; an empty array:
        there are none."""
        return np.frombuffer(_content(self._sums(stage)) or b"", np.float64)

    def read_residuals(self, stage: int) -> Floats:
        """Returns the residuals that `add` wrote for stage `stage`, the last finished one, f32 [n], all arrays
        concatenated; an empty array: there are none."""
        return np.frombuffer(_content(self._residuals(stage)) or b"", np.float32)

    def add(self, stage: int, sums: Iterable[Doubles], residuals: Sequence[Floats]) -> None:
        """Begins to write the sums and the residuals of a finished stage to files, after which those of the stage
        before are removed; errors in writing are ignored. The arrays must not change any more."""
        self.wait()
        writing = Daemon(self._write, stage, list(sums), residuals, name="kt-stage")
        writing.start()
        self._writing = writing

    def wait(self) -> None:
        """Waits until all that was added is written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(self, stage: int, sums: Sequence[Doubles], residuals: Sequence[Floats]) -> None:
        with contextlib.suppress(OSError, KtError):
            smallfiles.make_folder(self._folder)
            _write(self._sums(stage), sums)
            _write(self._residuals(stage), residuals)
            self._residuals(stage - 1).unlink(missing_ok=True)

    def _sums(self, stage: int) -> Path:
        return self._folder / f"{stage:05}.sums"

    def _residuals(self, stage: int) -> Path:
        return self._folder / f"{stage:05}.residuals"


def _write(path: Path, arrays: Iterable[NDArray[np.generic]]) -> None:
    parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    check = 0
    for part in parts:
        check = zlib.crc32(part, check)
    beside = path.with_name(f"{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(beside, flags, 0o644), "wb") as file:
            file.write(check.to_bytes(_CHECK_BYTES, "little"))
            file.writelines(parts)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def _content(path: Path) -> memoryview | None:
    """What was written; None: it is not there, damaged, or no plain file: a pipe would block."""
    try:
        if not path.is_file():
            return None
        data = memoryview(path.read_bytes())
    except OSError:
        return None
    check, content = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
    return content if check == zlib.crc32(content).to_bytes(_CHECK_BYTES, "little") else None
