"""A checkpoint whose weight files are downloaded and deleted: its small files and headers exist from the beginning.

What the headers say is believed until a weight file arrives; then the file is compared with them.
"""

from __future__ import annotations

from pathlib import Path

from ktcli.errors import BadCheckpoint
from ktcli.weights.check import LEFT_OVER
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.header import read_header
from ktcli.weights.ranges import Ranges, touches
from ktcli.weights.storage import Part, Raw, Read


class OtherHeader(BadCheckpoint):
    """Raised when a weight file's header differs from the one that was downloaded before."""


class Arriving(Checkpoint):
    """A checkpoint in progress of download; a weight file can be read after `arrived` and until `gone`.

    Args:
        folder: holds the small files, and of each weight file at least its header.
        sizes: the bytes of each weight file.
    """

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        self._presumed: list[Part] = []
        self._sizes = sizes
        self._lost: dict[str, Ranges] = {}  # bytes of open files that are not on the disk any more
        super().__init__(folder, sizes)

    @property
    def presumed(self) -> frozenset[str]:
        """The names of the weight files that are not downloaded yet and hold biases which kt leaves out on the
        assumption that they are all zeros."""
        return frozenset(part.file for part in self._presumed)

    def arrived(self, file: str, path: Path) -> None:
        """Opens a weight file that was downloaded, after comparing its header with the one downloaded earlier.

        Args:
            file: the name of the weight file in the checkpoint.
            path: the path of the downloaded file.
        Raises:
            OtherHeader: the two headers differ.
            BadCheckpoint: the file cannot be read, or a bias that kt leaves out is not zero.
        """
        if read_header(path).raw != read_header(self.path / file, self._sizes[file]).raw:
            raise OtherHeader(
                f"the header of {file} has changed",
                hint="run the same command again to read the headers again",
            )
        self.open(file, path)
        lost = self._lost.get(file, ())  # after they were looked at
        here = [
            part
            for part in self._presumed
            if part.file == file and not touches(lost, part.entry.offset, part.entry.offset + 1)
        ]
        self._presumed = [part for part in self._presumed if part.file != file]
        for part in here:
            if not super()._is_zero(part):
                raise BadCheckpoint(
                    f"{part.name} in {file} is a bias that config.json does not mention",
                    hint=LEFT_OVER,
                )

    def data_start(self, file: str) -> int:
        """Returns the offset in bytes at which the tensor data of a weight file begins: 8 bytes for the length of the
        header, and the header."""
        header = read_header(self.path / file, self._sizes[file])
        return 8 + len(header.raw)

    def gone(self, file: str) -> None:
        """Closes the weight file called `file`, which the caller then removes from the disk; it must not be read any
        more."""
        self.forget(file)
        self._lost.pop(file, None)

    def lost(self, file: str, ranges: Ranges) -> None:
        """Records that `ranges`, all byte ranges of an open weight file that were removed from the disk so far, must
        not be read any more; they replace those recorded before."""
        self._lost[file] = ranges

    def read(self, wanted: Read, into: Raw | None = None) -> Raw:
        """Returns the bytes of the ranges `wanted`, uint8, in the memory `into` or in new memory; none of them may be
        recorded as lost."""
        end = wanted.offset + (wanted.count - 1) * wanted.stride + wanted.size_bytes
        lost = self._lost.get(wanted.file, ())
        assert not touches(lost, wanted.offset, end), f"{wanted.file} is read too late"
        return super().read(wanted, into)

    def _is_zero(self, part: Part) -> bool:
        self._presumed.append(part)
        return True
