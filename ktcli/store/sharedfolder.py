"""The folder of KV pages that several servers share: on a network file system, or a disk that they all see.

    DIR/kt-kv.json                            the version of all that is here, which says that this is a store
    DIR/NAMESPACE-CODEC/WRITER.NAME.pages     a file of pages, see `pagefile`

A writer is a library on a machine. Each writes and removes files of its own only, so that no lock is needed, which such
file systems often lack; what two of them write is there twice, and harms nobody. Everybody reads all. The time of a
file's last use is set by whoever may do so, by any clock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

from ktcli import config, smallfiles
from ktcli.errors import KtError
from ktcli.pagelabel import U8Array
from ktcli.store.pagefile import Space, opened
from ktcli.store.pagefolder import (
    MARK,
    MAX_MARK_BYTES,
    SMALL_BYTES,
    VERSION,
    PageFile,
    PageFolder,
    folder_name,
    page_items,
)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MORE = 2  # images for which room is made where the disk is full
_MODES, _GROUP = 0o770, 0o070  # the folder's own without others; what of them is the group's
_LOST = "lost+found"  # of a new file system
_SHARED = "shared"  # in the mark of a shared folder, and not in that of a library's
_COUNTS = 8  # of its own files, while it writes as much as the quota: other processes of its library write as well
_HOST_CHARS, _DIGITS = 20, 8


def writer_name() -> str:
    """Returns the name that identifies this library on this machine in the names of the files of KV pages that it
    shares: `node7-1a2b3c4d`.
    """
    host = os.uname().nodename
    plain = re.sub(r"[^A-Za-z0-9-]", "-", host.partition(".")[0])[:_HOST_CHARS]
    return f"{plain}-{sha256(f'{host}:{config.home()}'.encode()).hexdigest()[:_DIGITS]}"


def writer_of(name: str) -> str:
    """Returns the writer, see `writer_name`, of the page file with this name in a shared folder; empty: it is not
    recorded.
    """
    return name.partition(".")[0] if name.count(".") > 1 else ""


class SharedFolder(PageFolder):
    """A folder of KV pages that several servers write to; see `open`."""

    where = "the KV store"
    is_shared = True
    _mark: Mapping[str, Any] = {**PageFolder._mark, _SHARED: True}
    _remedy = "kt cache rm --store removes them; or name another folder"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.owner = f"{writer_name()}."
        self._taken: tuple[int, int] | None = None  # by own files, as counted; see `usage`
        self._uncounted_bytes = 0  # written since
        self._listed: dict[Path, dict[str, Path]] = {}  # by folder and name

    @classmethod
    def open(cls, path: Path) -> SharedFolder:
        """Returns the shared store of KV pages in a folder; a missing folder is created, and an empty one becomes a
        store.

        Raises:
            KtError: the folder cannot be a store, or is one of another version; the message is one sentence.
        """
        made = cls(path)
        try:
            if not path.exists():
                path.mkdir(mode=cls.folder_mode, exist_ok=True)  # another server may be as far
            made._require_folder()
            if made._is_marked():
                made.check()
            elif _is_empty(path):
                made.mark()
            else:
                raise KtError(
                    f"{path} has files but is not a KV store of kt",
                    hint="name an empty folder, or one that does not exist yet",
                )
        except FileNotFoundError:
            raise KtError(
                f"there is no folder {path.parent} for the KV store {path.name}",
                hint="mount its disk, or create the folder",
            ) from None
        except OSError as error:
            raise KtError(f"the KV store {path} cannot be used: {error.strerror}") from error
        return made

    @classmethod
    def existing(cls, path: Path) -> SharedFolder:
        """Returns the shared store of KV pages in a folder that is one already, of any version.

        Raises:
            KtError: the folder is no such store.
        """
        made = cls(path)
        try:
            made._require_folder()
            if not made._is_marked():
                raise KtError(
                    f"there is no KV store in {path}", hint="kt serve --kv-store DIR makes one"
                )
        except OSError as error:
            raise KtError(f"cannot read the KV store {path}: {error.strerror}") from error
        return made

    def has_only_others(self, space: Space, model: str) -> bool:
        """Returns whether the store has pages of the conversion `model`, but none in this space: they were computed
        with other settings.
        """
        models = {each.name: each.conversion for each in self.spaces()}
        return model in models.values() and folder_name(space) not in models

    @property
    def is_writable(self) -> bool:
        """Whether this process may create files in the store's folder."""
        return os.access(self.path, os.W_OK | os.X_OK)

    def _require_folder(self) -> None:
        """Raises an error unless it is a folder, and none of a library; its mode is that of all that is made there."""
        mode = self.path.stat().st_mode
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")
        self.folder_mode = mode & _MODES
        own = PageFolder.of_library().path
        if own.is_dir() and own.samefile(self.path):
            raise KtError(
                f"{self.path} is the folder where this library keeps its own KV pages",
                hint="name another folder",
            )
        if _is_of_library(self.path / MARK):
            raise KtError(
                f"{self.path} is a folder where a library keeps its own KV pages",
                hint="name another folder",
            )

    def _is_marked(self) -> bool:
        return (self.path / MARK).exists()

    def _unmarked(self) -> int | None:
        raise KtError("it is not there any more")

    def make(self) -> None:
        """Does nothing: if the folder is missing, its disk is not mounted, and no other disk is to be filled."""

    def prepare(self, space: Space, about: dict[str, Any]) -> Path:
        """Creates the subfolder for the pages of a space, with a note of the facts `about` it, for all who may write to
        the store; returns its path.
        """
        is_new = not self.folder_of(space).exists()
        folder = super().prepare(space, about)
        if is_new:
            self._open_to_group(folder, self.folder_mode)
        return folder

    def _note(self, path: Path, document: Mapping[str, Any], *, tidies: bool = False) -> None:
        """Writes a note that servers of other machines may write at the same time, whose processes are not known here:
        nothing of theirs is removed, and where one has the same number, one note is enough."""
        try:
            super()._note(path, document, tidies=tidies)
        except FileNotFoundError:
            if not path.exists():
                raise

    def write_file(self, path: Path, data: str | memoryview, *, tidies: bool = False) -> None:
        """Writes `data` to a file of the store, atomically, with permissions for all who may use the store, whatever
        the umask.
        """
        super().write_file(path, data, tidies=tidies)
        self._open_to_group(path, self._file_mode)

    def _open_to_group(self, path: Path, mode: int) -> None:
        if mode & _GROUP:
            with contextlib.suppress(OSError):  # another's, who was first
                _set_mode(path, mode)

    def lock(self, wait_s: float = 0.0, *, frees: bool = False) -> AbstractContextManager[None]:
        """Returns a context manager that locks nothing: a writer changes only files of its own."""
        return nullcontext()

    def paths(self, folder: Path) -> set[Path]:
        """Returns the paths of the page files in one of the store's subfolders; those that the last listing had, too,
        are the same objects.
        """
        known = self._listed.get(folder, {})
        found = {item.name: known.get(item.name) or Path(item.path) for item in page_items(folder)}
        self._listed = {folder: found}
        return set(found.values())

    def files(self, folder: Path, owner: str = "") -> Iterator[PageFile]:
        """Yields the files of KV pages (path, size, time of last use) in one of the store's subfolders, see
        `PageFolder.files`; none of a subfolder that this user may not read.
        """
        with contextlib.suppress(PermissionError):
            yield from super().files(folder, owner)

    def write(self, folder: Path, name: str, image: U8Array) -> Path:
        """Writes the bytes `image` as a page file into a subfolder, atomically; returns its path. On a full disk, this
        writer's least recently used files are removed once to make room.

        Raises:
            OSError: the system refuses; nothing is left of it.
        """
        try:
            path = super().write(folder, name, image)
        except OSError as error:
            if error.errno not in _NO_ROOM or not self._give_way(_MORE * image.size):
                raise
            path = super().write(folder, name, image)
        if self._taken is not None:
            size, small = self._taken
            self._taken = size + image.size, small + (image.size < SMALL_BYTES)
        self._uncounted_bytes += image.size
        return path

    def _give_way(self, size_bytes: int) -> int:
        """Removes some of its own files that were used least recently; returns the bytes freed."""
        used = sum(file.size_bytes for file in self.own_files())
        return self.make_room(used - size_bytes)

    def make_room(self, most_bytes: int, most_small: int | None = None) -> int:
        """Removes this writer's least recently used page files, see `PageFolder.make_room`; returns the number of bytes
        freed.
        """
        self._taken = None
        return super().make_room(most_bytes, most_small)

    def keep_within(self, most_bytes: int, more_bytes: int) -> None:
        """Removes this writer's least recently used page files where they are too many or too large, see
        `PageFolder.keep_within`.
        """
        if self._uncounted_bytes > most_bytes // _COUNTS:
            self._taken = None
        super().keep_within(most_bytes, more_bytes)

    def usage(self) -> tuple[int, int]:
        """Returns the total bytes of this writer's files of KV pages, and the number of those smaller than SMALL_BYTES:
        from the last count and what this process has written since.
        """
        if self._taken is None:
            self._uncounted_bytes = 0
            sizes = [file.size_bytes for file in self.own_files()]
            self._taken = sum(sizes), sum(size < SMALL_BYTES for size in sizes)
        return self._taken

    def remove_unfinished(self) -> None:
        """Removes temporary files from the folder: those that killed processes of this library on this machine left."""
        for path in self.path.glob(f"*/{self.owner}*{smallfiles.SUFFIX}"):
            if smallfiles.is_abandoned(path.name):
                with contextlib.suppress(OSError):
                    path.unlink()

    def remove(self, name: str | None = None) -> int:
        """Removes the stored pages in the subfolder `name`, or all (None), of whatever version and writer; returns the
        number of bytes freed. The folder remains a store.

        Raises:
            KtError: the system refuses.
        """
        freed = super().remove(name)
        if name is None:
            try:
                self.mark()
            except OSError as error:
                raise KtError(f"cannot write the KV store {self.path}: {error.strerror}") from error
        return freed

    def removes(self, name: str) -> bool:
        """Returns whether a file or subfolder of this name is kt's and not the store's mark, so that `remove` would
        remove it.
        """
        return name != MARK and super().removes(name)


def _set_mode(path: Path, mode: int) -> None:
    """Sets the permissions of a file or folder, but not of what a link leads to that somebody put in its place."""
    with opened(path) as descriptor:
        os.fchmod(descriptor, mode | (os.fstat(descriptor).st_mode & stat.S_ISGID))


def _is_of_library(mark: Path) -> bool:
    """Returns whether a mark of this version is that of a library's folder, not of a shared one."""
    said = smallfiles.known_object(mark, MAX_MARK_BYTES)
    return said.get("kt_kv") == VERSION and said.get(_SHARED) is not True


def _is_empty(folder: Path) -> bool:
    """Returns whether nothing is there, but what another server leaves that makes it a store at this moment."""
    with os.scandir(folder) as items:
        return all(
            item.name in (_LOST, MARK) or smallfiles.meant_name(item.name) == MARK for item in items
        )
