"""The contents of folders: plain files, including numbered sets, their bytes, their removal; links are not followed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

from ktcli.errors import KtError
from ktcli.numbered import numbered_set

_SECTOR = 512  # bytes, in which st_blocks counts
# Of each file that are looked at: a quarter of a second for 160 files of a new disk.
_PIECES, _PIECE_BYTES = 8, 4096


def parts(file: Path) -> list[Path]:
    """Returns the paths of the existing files of the numbered set that a GGUF file belongs to (NAME-00001-of-00003.gguf
    …), or of the file alone; [] if there are none.
    """
    try:
        there = set(os.listdir(file.parent))  # a name may claim a set of 99,999 files
    except OSError:
        return []
    return [
        path
        for name in numbered_set(file.name)
        if name in there and (path := file.parent / name).is_file()
    ]


def names(folder: Path) -> list[str]:
    """Returns the names of the files and folders in a folder, sorted; [] if there is no such folder.

    Raises:
        KtError: the folder cannot be read.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KtError(f"cannot read {folder}: {error.strerror}") from error


def weights(folder: Path) -> list[Path]:
    """Returns the paths of the safetensors files in a folder, sorted by name."""
    return sorted(each for each in folder.glob("*.safetensors") if each.is_file())


def sample(files: Iterable[Path]) -> str:
    """Returns one SHA-256, hexadecimal, of the names and sizes of files and of eight pieces of 4 KiB of each, to detect
    a replaced file even if its times are unchanged.

    Raises:
        OSError: a file cannot be read.
    """
    found = sha256()
    for path in sorted(files):
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            found.update(f"{path.name} {size}\n".encode("utf-8", "replace"))
            for n in range(_PIECES):  # the first and the last bytes, and some between
                start = max(0, size - _PIECE_BYTES) * n // (_PIECES - 1)
                found.update(os.pread(file.fileno(), _PIECE_BYTES, start))
    return found.hexdigest()


def walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields the path and the stat result of every regular file below `folder`; links are neither followed nor
    returned, and a folder that cannot be read counts as empty.
    """
    try:
        items = sorted(os.scandir(folder), key=lambda item: item.name)
    except OSError:
        return
    for item in items:
        if item.is_dir(follow_symlinks=False):
            yield from walk(Path(item.path))
        elif item.is_file(follow_symlinks=False):
            try:
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:  # renamed or removed meanwhile
                continue
            yield Path(item.path), status


def written_bytes(folder: Path, *, below: bool = True) -> int:
    """Returns the number of bytes that the files of a folder, and of its subfolders if `below`, have on disk; gaps in
    partial files do not count.
    """
    found = (each for path, each in walk(folder) if below or path.parent == folder)
    return sum(min(each.st_size, _SECTOR * each.st_blocks) for each in found)


def bytes_below(folder: str | Path) -> int:
    """Returns the total size in bytes of all regular files below a folder; links are not followed, and a folder that
    cannot be read counts as empty.
    """
    total = 0
    try:
        with os.scandir(folder) as items:
            for item in items:
                if item.is_file(follow_symlinks=False):
                    with contextlib.suppress(OSError):  # renamed or removed meanwhile
                        total += item.stat(follow_symlinks=False).st_size
                elif item.is_dir(follow_symlinks=False):
                    total += bytes_below(item.path)
    except OSError:  # the folder itself
        return total
    return total


@contextlib.contextmanager
def removing(path: Path, hint: str = "") -> Iterator[None]:
    """Opens a context in which an OSError becomes a KtError that says that `path` cannot be removed, with this hint.

    Raises:
        KtError: the system refuses.
    """
    try:
        yield
    except OSError as error:
        what = f"cannot remove {error.filename or path}: {error.strerror}"
        raise KtError(what, hint=hint) from error


def put_aside(folder: Path) -> Path:
    """Renames a folder that is to be deleted to a hidden name, so that nothing incomplete keeps its name; returns its
    new path.
    """
    trash = folder.with_name(f".{folder.name}.removed.{os.getpid()}")
    folder.rename(trash)
    return trash


def discard(folder: Path) -> None:
    """Deletes a folder and everything in it. The folder is renamed first, so that nothing incomplete keeps its name."""
    shutil.rmtree(put_aside(folder))
