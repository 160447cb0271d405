"""Reads small files within a size limit, writes them completely or not at all, locks them for changes, and measures
free space.

Nothing here knows what a file means. Every failure is an `OSError` whose `strerror` completes a sentence
("cannot read FILE: it has more than 16 MiB"), so that each caller turns it into an error of its own. Files
that are too large for memory are read and written by `weights`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ktcli.errors import Busy, KtError, NotEnoughDisk, gib, refusals
from ktcli.records import dataclass

# Levels of a JSON file; a configuration has 4, and nothing may recurse without end.
MAX_NESTING = 64
MAX_LISTS = 2_000_000  # lists and objects of a JSON file, which take 80 to 230 bytes each in memory
SUFFIX = ".tmp"  # ends the name of a file that is being written
_UNFINISHED = re.compile(rf"(.+)\.([0-9]{{1,10}}){re.escape(SUFFIX)}", re.ASCII)
_RETRY_S = 0.05
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_BLOCK = 1 << 20
_MOST_LOCK_BYTES, _MOST_DIGITS = 1000, 20  # that are read of a lock, and of a size in it


class NotSmall(OSError):
    """Raised for a file that is larger than allowed, or not a regular file: a pipe would block, a device never end."""


# --- reading ----------------------------------------------------------------------------------------


def read_bounded(path: Path, most: int) -> bytes:
    """Returns the bytes of a regular file, at most `most`.

    Raises:
        NotSmall: the file has more, or is no regular file. OSError: the file cannot be read.
    """
    data = _read(path, most + 1, os.O_NONBLOCK)
    if len(data) > most:
        raise NotSmall(errno.EFBIG, f"it is larger than {gib(most)}, the most that kt reads")
    return data


def read_start(path: Path, most: int) -> bytes:
    """Returns the first `most` bytes of a file that the user named, or of a pipe, read until it is closed or has given
    them.

    Raises:
        OSError: it is missing or cannot be read.
    """
    return _read(path, most, 0)


def _read(path: Path, most: int, flags: int) -> bytes:
    """The first bytes of a file; with O_NONBLOCK only of a plain one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except ValueError:  # a zero byte or a lone surrogate in the name
        raise OSError(errno.EINVAL, "invalid file name") from None
    try:
        if flags and not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotSmall(errno.EINVAL, "it is not a plain file")
        parts, left = [], most
        while left > 0 and (part := os.read(descriptor, min(left, _BLOCK))):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)


def json_object(data: bytes | str, **hooks: Any) -> dict[str, Any]:
    """Returns the object in a JSON text as a dict, nested at most MAX_NESTING levels deep.

    Args:
        hooks: further arguments of `json.loads`, such as `parse_float`.
    Raises:
        ValueError: the text is no such object; the message completes a sentence about the file ("is not JSON: …").
    """
    if isinstance(data, str):
        lists = data.count("[") + data.count("{")
    else:
        lists = data.count(b"[") + data.count(b"{")
    if lists > MAX_LISTS:
        raise ValueError(f"has more than {MAX_LISTS:,} lists and objects")
    try:
        value = json.loads(data, **hooks)
    except RecursionError:
        raise ValueError("is not readable JSON: it is nested too deeply") from None
    except ValueError as error:  # what follows a semicolon advises programmers
        said = " ".join(str(error).partition(";")[0].split())
        raise ValueError(f"is not JSON: {said[:100]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, not an object")
    if nests_beyond(value, MAX_NESTING):
        raise ValueError(f"is nested more than {MAX_NESTING} levels deep")
    return value


def known_object(path: Path, most: int) -> dict[str, Any]:
    """Returns the object in a JSON file of at most `most` bytes as a dict; {} if it is missing, cannot be read, or
    holds no object.
    """
    try:
        return json_object(read_bounded(path, most))
    except (OSError, ValueError):
        return {}


def nests_beyond(value: object, limit: int) -> bool:
    """Returns whether lists and objects in parsed JSON are nested more than `limit` levels deep."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [each for part in parts for each in part if isinstance(each, dict | list)]
        if not level:
            return False
    return True


# --- writing ----------------------------------------------------------------------------------------


def write(
    path: Path, data: bytes | str | memoryview, mode: int = 0o644, *, tidies: bool = True
) -> None:
    """Writes a file atomically: to a temporary file beside it, flushed to the disk, then renamed to `path`.

    Args:
        mode: the permissions of a new file, less those that the umask takes away.
        tidies: whether to remove temporary files of `path` that killed processes left, for which the folder is listed.
    Raises:
        OSError: the file cannot be written; what `path` held before is still there.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}{SUFFIX}")
    try:
        if tidies:
            _tidy(path)
        _put(beside, data, os.O_CREAT | os.O_TRUNC, mode)
        os.rename(beside, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def write_named(path: Path, data: bytes | str) -> None:
    """Writes a file that the user named: as `write` does, through a link; a device, such as /dev/stdout, is written to
    directly.

    Raises:
        KtError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    with refusals(f"cannot write {str(path)[:300]}"):
        if path.exists() and not path.is_file():
            path.write_bytes(data.encode() if isinstance(data, str) else data)
        else:
            write(target, data)


def meant_name(name: str) -> str:
    """Returns the name of the file that a temporary file of `write` is to become, by the name of the temporary file;
    empty: it is no such name.
    """
    found = _UNFINISHED.fullmatch(name)
    return found[1] if found else ""


def is_running(process: str) -> bool:
    """Returns whether the process with this id (decimal digits) runs on this machine."""
    return Path("/proc", process).exists()


def is_abandoned(name: str) -> bool:
    """Returns whether a file, by its name, is a temporary one of `write`, left by a process of this machine that no
    longer runs.
    """
    found = _UNFINISHED.fullmatch(name)
    return found is not None and not is_running(found[2])


def _tidy(path: Path) -> None:
    """Removes what processes left that were killed while they wrote a file."""
    # A folder that cannot be read may be one that can be written.
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):
            if meant_name(name) == path.name and is_abandoned(name):
                path.with_name(name).unlink(missing_ok=True)


def make_folder(path: Path, variable: str = "KT_HOME", example: str = "~/kt") -> Path:
    """Creates the folder `path` with its parents; returns `path`. The hint of an error says to set `variable` to
    another path, such as `example`.

    Raises:
        KtError: the folder cannot be created.
    """
    hint = f"set {variable} to a writable folder, for example: export {variable}={example}"
    with refusals(f"cannot create the folder {path}", hint=hint):
        path.mkdir(parents=True, exist_ok=True)
    return path


def append_line(path: Path, line: bytes) -> None:
    """Appends a line to an existing file and flushes it to the disk; one cut by a power failure lacks its newline."""
    _put(path, line, os.O_APPEND)


def free_bytes(folder: Path) -> int:
    """Returns the number of bytes that may still be written to the disk of `folder`, which need not exist yet."""
    here = folder.absolute()
    while True:
        try:
            found = os.statvfs(here)
        except OSError:
            if here == here.parent:
                raise
            here = here.parent
        else:
            return found.f_bavail * found.f_frsize


def require_room(folder: Path, need_bytes: int, what: str, where: Path | None = None) -> None:
    """Raises an error if `need_bytes` are more than the disk of `folder` has free.

    Args:
        what: what is being done, for the error's sentence: "pulling qwen3-30b-a3b".
        where: the folder that the error names; None: `folder`.
    Raises:
        NotEnoughDisk: the disk has less free.
    """
    if need_bytes > (free := free_bytes(folder)):
        raise NotEnoughDisk(what, need_bytes, free, str(where or folder))


def sync_folder(folder: Path) -> None:
    """Flushes a folder to the disk, so that created and removed names in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(path: Path, data: bytes | str | memoryview, flags: int, mode: int = 0o644) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, mode)
    try:
        view = memoryview(data.encode() if isinstance(data, str) else data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the lock ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        doing: what it does: "pulling qwen3-30b-a3b".
        total_bytes: the bytes that will lie in the folder it works on when it is done; None: it did not say.
    """

    process: int
    doing: str
    total_bytes: int | None = None


@contextlib.contextmanager
def lock(
    path: Path, what: str, *, wait_s: float = 0.0, mode: int = 0o644, frees: bool = False
) -> Iterator[None]:
    """Opens a context that holds `path` as an exclusive lock; the kernel drops it if this process dies.

    Args:
        path: the lock file, there as long as somebody holds it or died holding it.
        what: what is being done, for the sentence of `Busy`: "pulling qwen3-30b-a3b".
        wait_s: the seconds to try before giving up.
        mode: the permissions of the lock file.
        frees: whether it is held to free space; then it is no error if a full disk cannot take the holder's name.
    Raises:
        Busy: another process holds it; the sentence says which.
        KtError: the lock file cannot be made or written.
    """
    make_folder(path.parent)
    descriptor = _acquire(path, what, time.monotonic() + max(wait_s, _RETRY_S), mode)
    try:
        _sign(descriptor, path, what, frees)
        yield
    finally:
        try:
            # Removed while it is held: whoever waits for it finds that its file has lost the name.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _sign(descriptor: int, path: Path, what: str, frees: bool) -> None:
    """Writes into a lock who holds it, and for what."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {what}\n".encode("utf-8", "replace"), 0)
    except OSError as error:
        if not (frees and error.errno in _NO_ROOM):
            raise KtError(
                f"cannot write the lock file {path}: {error.strerror}",
                hint="free some space there; kt list shows what models take",
            ) from error


def expect(path: Path, total_bytes: int) -> None:
    """Adds to the lock file at `path`, which this process holds, the number of bytes that the folder it works on will
    have when it is done.
    """
    with contextlib.suppress(OSError):  # for people only
        append_line(path, f"{total_bytes}\n".encode())


def holder(path: Path) -> Holder | None:
    """Returns the process that holds the lock file at `path`, what it does, and the bytes that it expects to write;
    None if there is none, or it is unknown.
    """
    try:
        # A pipe in its place would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    except OSError:
        return None
    else:
        return None
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> Holder | None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return None
    text = os.pread(descriptor, _MOST_LOCK_BYTES, 0).decode("utf-8", "replace").strip()
    first, _, last = text.partition("\n")
    process, _, doing = first.partition(" ")
    if not (process.isdecimal() and process.isascii()):
        return None
    size = last.rpartition("\n")[2]
    sound = size.isdecimal() and size.isascii() and len(size) < _MOST_DIGITS
    return Holder(int(process), doing, int(size) if sound else None)


def _acquire(path: Path, what: str, deadline: float, mode: int) -> int:
    """Returns a descriptor of the locked file whose name is still `path`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        with contextlib.ExitStack() as closing:
            try:
                descriptor = os.open(path, flags, mode)
                closing.callback(os.close, descriptor)
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise NotSmall(errno.EINVAL, "it is not a plain file")
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_named(descriptor, path):
                    closing.pop_all()
                    return descriptor
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise _busy(what, _holder(descriptor)) from None
                time.sleep(_RETRY_S)
            except OSError as error:
                raise _no_lock(path, what, error) from error


def _no_lock(path: Path, what: str, error: OSError) -> KtError:
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return KtError(
            f"cannot open the lock file {path}: {error.strerror}",
            hint="check what is there; a lock is a plain file and may be removed while no kt process is running",
        )
    return KtError(
        f"cannot start {what}: {path.parent} cannot be written: {error.strerror}",
        hint="its models can be used; to add your own, set KT_HOME to a writable folder,"
        " and KT_LIBRARIES to this library",
    )


def _busy(what: str, found: Holder | None) -> Busy:
    who = f"process {found.process} ({found.doing})" if found else "another process"
    return Busy(
        f"cannot start {what}: {who} holds the lock",
        hint="wait until it is done, or stop it; finished work is not lost",
    )


def _is_named(descriptor: int, path: Path) -> bool:
    """Returns whether `path` still names this file: its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
