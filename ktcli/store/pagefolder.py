"""The folder of KV pages in the library: its writer, its maximum size, and the order of removal.

    KT_HOME/kv/kt-kv.json                 the version of all that is here
    KT_HOME/kv/NAMESPACE-CODEC/           the pages of one model in one layout, see `Space`
    KT_HOME/kv/NAMESPACE-CODEC/about.json what a person wants to know of it
    KT_HOME/kv/NAMESPACE-CODEC/*.pages    files of pages, see `pagefile`

The time of a file is when it was used last, made to increase even where the clock does not. Whoever writes or makes
room holds the lock of the folder; readers need none, since a file never changes and its name says what it contains.
What has other names than these is not kt's, and is neither read nor removed. In a folder that several servers share,
some of this is otherwise, see `sharedfolder`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ktcli import config, smallfiles
from ktcli.errors import KtError
from ktcli.pagelabel import U8Array
from ktcli.records import dataclass
from ktcli.store import contents
from ktcli.store.pagefile import CODEC_BYTES, Damaged, Space, check_record, opened, read_table

VERSION = 1
SUFFIX = ".pages"
SMALL_BYTES = 4 << 20  # smaller files come from the ends of short conversations
MAX_SMALL = 1024  # of those; each costs a start some 20 microseconds
SHARE = 0.1  # of the free disk
_SLACK = 0.05  # of the quota, freed beyond what is necessary
MARK, _ABOUT, _LOCK = "kt-kv.json", "about.json", ".lock"
MAX_MARK_BYTES = 1 << 16
_LOCK_WAIT_S = 5.0
_TRIES = 20  # to empty a folder to which others write
_FOLDER_MODE, _FILE_MODES = 0o700, 0o666
_PAGES = re.compile(rf"[A-Za-z0-9._-]{{1,100}}{re.escape(SUFFIX)}", re.ASCII)
_SPACE = re.compile(r"[0-9a-f]{32}-[a-z0-9]{1,16}", re.ASCII)  # of every version
# In the year 2116; beyond it no clock was, and some file systems count no further.
_LATEST_NS = 1 << 62


class OtherVersion(KtError):
    """Raised when the folder was made by a version of kt with another layout of pages."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of stored pages.

    Attributes:
        used_ns: when it was used last, in nanoseconds of a clock that never goes back.
    """

    path: Path
    size_bytes: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class StoredPages:
    """The stored pages of one model in one layout.

    Attributes:
        name: the folder's name.
        about: what was noted of it: "model", "codec", "page_bytes".
    """

    name: str
    about: dict[str, Any]
    files: tuple[PageFile, ...]

    @property
    def conversion(self) -> str:
        """The name of the conversion that computed the pages, see `places.conversion_name`; "unknown" if it was not
        recorded.
        """
        return str(self.about.get("model", "unknown"))

    @property
    def model(self) -> str:
        """The name, shared by all its conversions, of the model that the pages belong to."""
        return self.conversion.partition("@")[0]

    @property
    def size_bytes(self) -> int:
        """The number of bytes of all files with these pages."""
        return sum(file.size_bytes for file in self.files)

    @property
    def used_ns(self) -> int:
        """The time when any file with these pages was used last, in nanoseconds since 1970, see `PageFile`; 0 if there
        are no files.
        """
        return max((file.used_ns for file in self.files), default=0)


class PageFolder:
    """The folder of KV pages at `path`, which need not exist yet.

    Attributes:
        where: what the folder is, for people, after "written to".
        is_shared: whether other servers write there at the same time, each files of its own.
        owner: what the names of the files begin with that this process may remove to make room.
    """

    where = "disk"
    is_shared = False
    owner = ""
    folder_mode = _FOLDER_MODE
    _mark: Mapping[str, Any] = {"kt_kv": VERSION}
    _remedy = (
        "kt cache rm removes them, so that new ones are written; --no-kv-cache runs without any"
    )

    def __init__(self, path: Path) -> None:
        self.path = path
        self._newest = 0
        self._tidied = False  # whether what killed writers left was removed
        # By folder: when it was changed, the bytes of its files, the number of small ones.
        self._sizes: dict[Path, tuple[int, int, int]] = {}

    @classmethod
    def of_library(cls) -> PageFolder:
        """Returns the folder of stored KV pages in the user's own library, which need not exist."""
        return cls(config.home() / "kv")

    # --- whose it is ------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks that the pages in the folder are of the version that this kt reads and writes.

        Raises:
            OtherVersion: they are of another version.
        """
        try:
            mark = smallfiles.read_bounded(self.path / MARK, MAX_MARK_BYTES)
            version: object = smallfiles.json_object(mark).get("kt_kv")
        except FileNotFoundError:
            version = self._unmarked()
        except (OSError, ValueError):
            version = None
        if type(version) is not int:
            version = None
        if version != VERSION:
            raise OtherVersion(
                f"the KV pages in {self.path} have {_words(version)}, not version {VERSION}, and are ignored",
                hint=self._remedy,
            )

    def _unmarked(self) -> int | None:
        """The version of a folder without a mark; None: it is not known."""
        return None if any(self._folders()) else VERSION

    def folder_of(self, space: Space) -> Path:
        """Returns the path of the subfolder for the KV pages of a space (a model in one layout); it need not exist."""
        return self.path / folder_name(space)

    def make(self) -> None:
        """Creates the folder of KV pages, readable by its owner only, if it does not exist.

        Raises:
            OSError: the system refuses.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=_FOLDER_MODE, exist_ok=True)

    def prepare(self, space: Space, about: dict[str, Any]) -> Path:
        """Creates the subfolder for the pages of a space, with a note of the facts `about` it; returns its path; the
        caller holds the lock.

        Raises:
            OSError: the system refuses.
        """
        folder = self.folder_of(space)
        if not (self.path / MARK).exists():
            self.mark()  # first: a folder without is of no version
        folder.mkdir(mode=self.folder_mode, exist_ok=True)
        if folder.is_symlink():  # where a link leads, nothing is counted or removed
            raise NotADirectoryError(errno.ENOTDIR, f"{folder.name} is a link")
        if not (folder / _ABOUT).exists():
            self._note(folder / _ABOUT, about)
        return folder

    def mark(self) -> None:
        """Writes the file that records the version of everything in the folder."""
        self._note(self.path / MARK, self._mark)

    def _note(self, path: Path, document: Mapping[str, Any], *, tidies: bool = True) -> None:
        self.write_file(path, json.dumps(document, indent=1) + "\n", tidies=tidies)

    def write_file(self, path: Path, data: str | memoryview, *, tidies: bool = False) -> None:
        """Writes `data` to a file of the folder, atomically; see `smallfiles.write`.

        Raises:
            OSError: the system refuses; nothing is left of it.
        """
        smallfiles.write(path, data, self._file_mode, tidies=tidies)

    @property
    def _file_mode(self) -> int:
        return self.folder_mode & _FILE_MODES

    def lock(
        self, wait_s: float = _LOCK_WAIT_S, *, frees: bool = False
    ) -> AbstractContextManager[None]:
        """Returns a context manager that holds the folder's lock, which excludes other threads and processes. It raises
        Busy if another still holds it after `wait_s` seconds. `frees`: the lock is held to free space, so that a full
        disk is no error.
        """
        what = "removing KV pages" if frees else "writing KV pages"
        path = self.path / _LOCK
        return smallfiles.lock(path, what, wait_s=wait_s, mode=self._file_mode, frees=frees)

    # --- files --------------------------------------------------------------------------------------

    def stored(self) -> tuple[StoredPages, ...]:
        """Returns the KV pages of every model that are stored in the folder, with their files, the most recently used
        model first.
        """
        found = [StoredPages(f.name, _about(f), tuple(self.files(f))) for f in self._folders()]
        return tuple(sorted(found, key=lambda each: (-each.used_ns, each.name)))

    def spaces(self) -> list[StoredPages]:
        """Returns the KV pages of every model that are stored in the folder, with `files` left empty: only the
        subfolders' names and notes are read.
        """
        return [StoredPages(folder.name, _about(folder), ()) for folder in self._folders()]

    def paths(self, folder: Path) -> set[Path]:
        """Returns the paths of the files of KV pages in one of its subfolders; links are left out."""
        return {file.path for file in self.files(folder)}

    def files(self, folder: Path, owner: str = "") -> Iterator[PageFile]:
        """Yields the files of KV pages (path, size, time of last use) in one of its subfolders; links are left out.

        Args:
            owner: the beginning of the names of the files to yield.
        """
        for item in page_items(folder):
            if item.name.startswith(owner):
                with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                    status = item.stat(follow_symlinks=False)
                    used_ns = status.st_mtime_ns
                    used_ns = used_ns if 0 <= used_ns < _LATEST_NS else 0
                    self._newest = max(self._newest, used_ns)
                    yield PageFile(Path(item.path), status.st_size, used_ns)

    def own_files(self) -> Iterator[PageFile]:
        """Yields the files of KV pages, in all subfolders, that this process may remove to make room."""
        return (file for folder in self._folders() for file in self.files(folder, self.owner))

    def write(self, folder: Path, name: str, image: U8Array) -> Path:
        """Writes the bytes `image` as a page file into a subfolder, atomically; returns its path; the caller holds the
        lock.

        Args:
            name: the file's name without suffix, derived from its contents, see `Image.finish`.
        Raises:
            OSError: the system refuses; nothing is left of it.
        """
        path = folder / f"{self.owner}{name}{SUFFIX}"
        self.write_file(path, image.data)
        return path

    def use(self, paths: list[Path]) -> None:
        """Sets the time of last use of these files of KV pages to now, later for each file of the list than for the one
        before, and later than those of all other files.
        """
        now = max(time.time_ns(), self._newest + 1)
        for n, path in enumerate(paths):
            # Evicted meanwhile, or of a library that is read only.
            with contextlib.suppress(OSError):
                os.utime(path, ns=(now + n, now + n), follow_symlinks=False)
        self._newest = now + len(paths)

    def lacks_room(self, most_bytes: int, more_bytes: int) -> bool:
        """Returns whether `keep_within` would remove page files: with `more_bytes` they would exceed `most_bytes`, or
        MAX_SMALL or more are smaller than SMALL_BYTES.
        """
        size, small = self.usage()
        return size + more_bytes > most_bytes or small >= MAX_SMALL

    def keep_within(self, most_bytes: int, more_bytes: int) -> None:
        """Removes the least recently used page files if they and `more_bytes` exceed `most_bytes`, else the least
        recently used small ones if there are MAX_SMALL or more, to 5 % below the limit. The first call also removes the
        temporary files of killed writers. The caller holds the lock.
        """
        if not self._tidied:
            self._tidied = True
            self.remove_unfinished()
        size, small = self.usage()
        if size + more_bytes > most_bytes:
            self.make_room(int(most_bytes * (1 - _SLACK)) - more_bytes)
        elif small >= MAX_SMALL:
            self.make_room(most_bytes - more_bytes, int(MAX_SMALL * (1 - _SLACK)))

    def usage(self) -> tuple[int, int]:
        """Returns the total bytes of the folder's files of KV pages, and the number of those smaller than SMALL_BYTES.
        A subfolder that did not change is not read again.
        """
        known, self._sizes = self._sizes, {}
        for folder in self._folders():
            with contextlib.suppress(FileNotFoundError):
                changed = folder.stat().st_mtime_ns
                before = known.get(folder)
                if before is None or before[0] != changed:
                    sizes = [file.size_bytes for file in self.files(folder)]
                    before = changed, sum(sizes), sum(size < SMALL_BYTES for size in sizes)
                self._sizes[folder] = before
        found = self._sizes.values()
        return sum(size for _, size, _ in found), sum(small for _, _, small in found)

    def make_room(self, most_bytes: int, most_small: int | None = None) -> int:
        """Removes the least recently used page files until the others have at most `most_bytes`, and of the small ones
        all but `most_small`, by default MAX_SMALL; returns the number of bytes freed. The caller holds the lock.
        """
        most_small = MAX_SMALL if most_small is None else most_small
        freed = 0
        files = sorted(self.own_files(), key=lambda file: file.used_ns)
        size = sum(file.size_bytes for file in files)
        small = sum(file.size_bytes < SMALL_BYTES for file in files)
        for file in files:
            is_small = file.size_bytes < SMALL_BYTES
            if size <= most_bytes and (small <= most_small or not is_small):
                continue
            with contextlib.suppress(FileNotFoundError):
                file.path.unlink()
            freed, size, small = freed + file.size_bytes, size - file.size_bytes, small - is_small
        return freed

    def remove_unfinished(self) -> None:
        """Removes the temporary files of killed writers from the subfolders; the caller holds the lock."""
        for path in self.path.glob(f"*/*{smallfiles.SUFFIX}"):
            if _is_unfinished(path.name):
                with contextlib.suppress(OSError):
                    path.unlink()

    def quota(self, given: int | None) -> int:
        """Returns the most bytes that the folder may hold: `given`; if it is None, the share SHARE (0.1) of the disk
        space that would be free without the page files that this process may remove.
        """
        if given is not None:
            return given
        free = smallfiles.free_bytes(self.path)
        return int(SHARE * (free + sum(file.size_bytes for file in self.own_files())))

    # --- for people ---------------------------------------------------------------------------------

    def verify(
        self, stored: StoredPages, advance: Callable[[int], None]
    ) -> Iterator[tuple[PageFile, str, bool]]:
        """Checks every file of one model's pages; yields (file, problem, was_read): `problem` is a phrase, "" for an
        intact file, and `was_read` is False if this user cannot read the file.
        """
        codec = stored.name.partition("-")[2]
        for file in stored.files:
            was_read = True
            try:
                problem = _problem(file.path, stored.name, codec)
            except Damaged as damage:
                problem = str(damage)
            except FileNotFoundError:  # evicted meanwhile
                continue
            except OSError as error:
                problem, was_read = f"cannot be read: {error.strerror or error}", False
            advance(file.size_bytes)
            yield file, problem, was_read

    def remove(self, name: str | None = None) -> int:
        """Removes the stored pages in the subfolder `name`, or all (None), of whatever version; returns the number of
        bytes freed. Files that kt did not make stay.

        Raises:
            Busy: another process is writing. KtError: the system refuses.
        """
        if not self.path.is_dir():
            return 0
        freed = 0
        with self.lock(frees=True), contents.removing(self.path):
            for item in sorted(self.path.iterdir()):
                if name not in (None, item.name) or not self.removes(item.name):
                    continue
                freed += _size(item)
                if item.is_dir() and not item.is_symlink():
                    _remove_folder(item)
                else:
                    item.unlink(missing_ok=True)
        return freed

    def removes(self, name: str) -> bool:
        """Returns whether a file or subfolder of this name is kt's, so that `remove` would remove it."""
        return name == MARK or _is_unfinished(name) or _SPACE.fullmatch(name) is not None

    def _folders(self) -> Iterator[Path]:
        try:
            with os.scandir(self.path) as items:
                found = [
                    Path(item.path)
                    for item in items
                    if _SPACE.fullmatch(item.name) and item.is_dir(follow_symlinks=False)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from sorted(found)


def folder_name(space: Space) -> str:
    """Returns the name of the subfolder for the KV pages of a space (a model in one layout): "NAMESPACE-CODEC", with
    the first 32 hexadecimal digits of the namespace.
    """
    return f"{space.namespace.hex()[:32]}-{space.codec}"


def page_items(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yields the directory entries of the files of KV pages in a folder; none if there is no such folder."""
    if folder.is_symlink():
        return
    try:
        with os.scandir(folder) as items:
            for item in items:
                if _PAGES.fullmatch(item.name) and item.is_file(follow_symlinks=False):
                    yield item
    except (FileNotFoundError, NotADirectoryError):
        return


def _is_unfinished(name: str) -> bool:
    """Returns whether a writer left this that was killed."""
    meant = smallfiles.meant_name(name)
    return meant in (MARK, _ABOUT) or meant.endswith(SUFFIX)


def _remove_folder(path: Path) -> None:
    """Removes a folder with all in it, where readers may remove what they find damaged meanwhile, and servers
    that share it write."""
    tries = _TRIES
    while path.is_dir():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            tries -= 1
            if error.errno != errno.ENOTEMPTY or not tries:
                raise


def _problem(path: Path, folder: str, codec: str) -> str:
    space, entries = read_table(path)
    if not folder.startswith(space.namespace.hex()[:32]) or space.codec != codec[:CODEC_BYTES]:
        return "contains pages of another model or layout"
    with opened(path) as descriptor:
        for entry in entries:
            check_record(descriptor, entry)
    return ""


def _words(version: object) -> str:
    return "an unknown version" if version is None else f"version {str(version)[:20]}"


def _about(folder: Path) -> dict[str, Any]:
    return smallfiles.known_object(folder / _ABOUT, MAX_MARK_BYTES)


def _size(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    size = 0
    for each in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += 0 if each.is_dir() else each.lstat().st_size
    return size
