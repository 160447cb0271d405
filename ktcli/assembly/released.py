"""Records which bytes of a stream's weight files were freed on the disk, even if the process is killed.

The file reads as zeros there, so this is written down, and flushed, before it is done: one line of JSON for each time,
with the file's name and the first byte of each range and the one after its last.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from ktcli import holes, smallfiles
from ktcli.weights.header import read_bounded
from ktcli.weights.ranges import Ranges, touches, union

_GONE = "gone"
_MAX_BYTES = 100_000_000


class ReleasedRanges:
    """The record of the byte ranges of a folder's weight files that were freed on the disk.

    Args:
        head: where it is written down.
        folder: where the weight files lie.
    """

    def __init__(self, head: Path, folder: Path) -> None:
        self._path, self._folder = head / _GONE, folder
        self._gone = self._read()
        self.can_shrink = holes.can_punch(folder)

    def lost(self, name: str) -> Ranges:
        """Returns the byte ranges, (start, stop), of a weight file whose contents are not on the disk any more; empty
        if all are.
        """
        return self._gone.get(name, ())

    def keep(self, needs: Mapping[str, Ranges]) -> None:
        """Deletes the weight files that have lost bytes which are still needed, and rewrites the record for the files
        that are left.

        Args:
            needs: the byte ranges that are needed, by file name.
        """
        for name, gone in self._gone.items():
            if any(touches(gone, *each) for each in needs.get(name, ())):
                (self._folder / name).unlink(missing_ok=True)
        there = {name: each for name, each in self._gone.items() if (self._folder / name).is_file()}
        self._gone = there
        smallfiles.write(self._path, b"".join(_line(*each) for each in there.items()))

    def shrink(self, name: str, ranges: Ranges) -> None:
        """Records byte ranges of a weight file as freed, then frees their disk space by punching holes in the file.

        Raises:
            OSError: the disk failed.
        """
        if ranges := tuple(each for each in ranges if each not in self.lost(name)):
            smallfiles.append_line(self._path, _line(name, ranges))
            self._gone[name] = union((*self.lost(name), *ranges))
            holes.punch(self._folder / name, ranges)

    def _read(self) -> dict[str, Ranges]:
        found = defaultdict[str, list[tuple[int, int]]](list)
        if self._path.exists():
            lines = read_bounded(self._path, _MAX_BYTES).split(b"\n")
            # The last one is empty, or was cut off before anything was given back.
            for line in lines[:-1]:
                with suppress(ValueError):
                    name, pairs = json.loads(line)
                    found[name].extend((start, stop) for start, stop in pairs)
        return {name: union(pairs) for name, pairs in found.items()}


def _line(name: str, ranges: Collection[tuple[int, int]]) -> bytes:
    return json.dumps([name, ranges]).encode() + b"\n"
