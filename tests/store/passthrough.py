"""A file system over a folder, by the kernel's FUSE protocol, that fails as network file systems do.

    python tests/store/passthrough.py FOLDER MOUNT CONTROL

mounts FOLDER at MOUNT and prints "mounted"; at the end of its input it unmounts it. It needs root's rights in a user
and a mount namespace of its own (`unshare -rm`), and /dev/fuse. The file CONTROL says what is wrong, word by word, and
may change at any moment:

    late      a file that is renamed is missing for 3 s
    stale     each open file, and each new one, is a stale handle (ESTALE)
    broken    reading gives EIO
    quota     each write beyond 64 KiB of a file gives EDQUOT; full gives ENOSPC
    readonly  nothing can be changed (EROFS)
    slow      each call takes 50 ms

SIGSTOP lets it hang: whoever waits for it can be killed, as with NFS. Nothing is cached: each call of a program comes
here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import stat
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

LATE_S, SLOW_S, QUOTA_BYTES = 3.0, 0.05, 64 << 10
_READ_BYTES, _WRITE_BYTES = 1 << 18, 1 << 17
_HEADER = struct.Struct("<IIQQIIIHH")  # length, opcode, number, node, user, group, process, more
_ANSWER = struct.Struct("<IiQ")  # length, error, number
_NOATIME, _DETACH = 1024, 2
_NO_ANSWER = (2, 36, 42)  # forget, interrupt, several to forget
_CHANGES = (4, 9, 10, 11, 12, 16, 35, 45)


class Passthrough:
    """The file system.

    Args:
        device: the open /dev/fuse.
    """

    def __init__(self, folder: Path, device: int, control: Path) -> None:
        self._device, self._control = device, control
        self._paths: dict[int, str] = {1: str(folder)}  # by node
        self._nodes: dict[str, int] = {str(folder): 1}
        self._hidden: dict[str, float] = {}  # until when, by path
        self._listings: dict[int, list[tuple[str, int]]] = {}
        self._next = 2
        self._calls: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup,
            3: lambda node, _: self._attributes(self._paths[node]),
            4: self._set,
            9: self._mkdir,
            10: lambda node, data: self._remove(os.unlink, node, data),
            11: lambda node, data: self._remove(os.rmdir, node, data),
            12: lambda node, data: self._rename(node, data, 8),
            14: self._open,
            15: self._read,
            16: self._write,
            17: self._statfs,
            18: self._release,
            20: self._sync,
            25: lambda *_: b"",
            26: self._init,
            27: self._opendir,
            28: self._readdir,
            29: self._releasedir,
            30: lambda *_: b"",
            35: self._create,
            45: lambda node, data: self._rename(node, data, 16),
        }

    def serve(self, ends: int) -> None:
        """Answers the kernel until a descriptor is at its end, or the file system is unmounted."""
        poll = select.poll()
        poll.register(self._device, select.POLLIN)
        poll.register(ends, select.POLLIN)
        while True:
            events = dict(poll.poll())
            if ends in events or events.get(self._device, 0) & select.POLLERR:
                return
            try:
                request = os.read(self._device, _READ_BYTES)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        _, call, number, node, *_ = _HEADER.unpack_from(request)
        if call in _NO_ANSWER:
            return
        data, failed = b"", 0
        try:
            self._fail(call, request)
            if call not in self._calls or node not in (*self._paths, 0):
                raise OSError(errno.ENOSYS if call not in self._calls else errno.ESTALE, "")
            data = self._calls[call](node, request[_HEADER.size :])
        except OSError as error:
            failed = error.errno or errno.EIO
        with contextlib.suppress(FileNotFoundError):  # who asked was killed
            os.write(self._device, _ANSWER.pack(16 + len(data), -failed, number) + data)

    def _fail(self, call: int, request: bytes) -> None:
        """Raises what is wrong now, as the control file says."""
        words = self._words()
        if "slow" in words:
            time.sleep(SLOW_S)
        if "stale" in words and call in (14, 15, 16, 35):
            raise OSError(errno.ESTALE, "")
        if "broken" in words and call == 15:
            raise OSError(errno.EIO, "")
        if "readonly" in words and call in _CHANGES:
            raise OSError(errno.EROFS, "")
        if call == 16:
            offset, size = struct.unpack_from("<QI", request, _HEADER.size + 8)
            if offset + size > QUOTA_BYTES and ("quota" in words or "full" in words):
                raise OSError(errno.EDQUOT if "quota" in words else errno.ENOSPC, "")

    def _words(self) -> list[str]:
        try:
            return self._control.read_text().split()
        except FileNotFoundError:
            return []

    # --- names ----------------------------------------------------------------------------------------

    def _hides(self, path: str) -> bool:
        return time.monotonic() < self._hidden.get(path, 0.0)

    def _path(self, node: int, name: bytes) -> str:
        return f"{self._paths[node]}/{os.fsdecode(name)}"

    def _lookup(self, node: int, data: bytes) -> bytes:
        path = self._path(node, data[:-1])
        if self._hides(path):
            raise OSError(errno.ENOENT, "")
        return self._entry(path)

    def _entry(self, path: str) -> bytes:
        attributes = _attributes(os.lstat(path))
        if path not in self._nodes:
            self._nodes[path], self._paths[self._next] = self._next, path
            self._next += 1
        return struct.pack("<QQQQII", self._nodes[path], 0, 0, 0, 0, 0) + attributes

    def _attributes(self, path: str) -> bytes:
        return bytes(16) + _attributes(os.lstat(path))

    def _set(self, node: int, data: bytes) -> bytes:
        path = self._paths[node]
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode = struct.unpack_from(
            "<IIQQQQQQIIII", data
        )
        if valid & 1:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & 8:
            os.truncate(path, size)
        if valid & (16 | 32):
            now, known = time.time_ns(), os.lstat(path)
            times = [known.st_atime_ns, known.st_mtime_ns]
            for at, given in ((0, atime * 10**9 + atime_ns), (1, mtime * 10**9 + mtime_ns)):
                if valid & 16 << at:
                    times[at] = now if valid & 128 << at else given
            os.utime(path, ns=(times[0], times[1]), follow_symlinks=False)
        return self._attributes(path)

    def _mkdir(self, node: int, data: bytes) -> bytes:
        (mode,) = struct.unpack_from("<I", data)
        path = self._path(node, data[8:-1])
        os.mkdir(path, mode & 0o7777)
        return self._entry(path)

    def _remove(self, remove: Callable[[str], None], node: int, data: bytes) -> bytes:
        path = self._path(node, data[:-1])
        remove(path)
        self._hidden.pop(path, None)
        if (known := self._nodes.pop(path, None)) is not None:
            del self._paths[known]
        return b""

    def _rename(self, node: int, data: bytes, start: int) -> bytes:
        (folder,) = struct.unpack_from("<Q", data)
        names = data[start:].split(b"\0")
        before, after = self._path(node, names[0]), self._path(folder, names[1])
        os.rename(before, after)
        if "late" in self._words():
            self._hidden[after] = time.monotonic() + LATE_S
        if (replaced := self._nodes.pop(after, None)) is not None:
            self._paths.pop(replaced, None)
        if (known := self._nodes.pop(before, None)) is not None:
            self._nodes[after], self._paths[known] = known, after
        return b""

    # --- files ----------------------------------------------------------------------------------------

    def _open(self, node: int, data: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", data)
        kept = flags & (os.O_ACCMODE | os.O_TRUNC)
        return struct.pack("<QII", os.open(self._paths[node], kept), 0, 0)

    def _create(self, node: int, data: bytes) -> bytes:
        flags, mode, umask, _ = struct.unpack_from("<IIII", data)
        path = self._path(node, data[16:-1])
        kept = flags & (os.O_ACCMODE | os.O_TRUNC | os.O_EXCL)
        opened = os.open(path, kept | os.O_CREAT, mode & ~umask & 0o7777)
        return self._entry(path) + struct.pack("<QII", opened, 0, 0)

    def _read(self, node: int, data: bytes) -> bytes:
        opened, offset, size = struct.unpack_from("<QQI", data)
        return os.pread(opened, size, offset)

    def _write(self, node: int, data: bytes) -> bytes:
        opened, offset, size = struct.unpack_from("<QQI", data)
        return struct.pack("<II", os.pwrite(opened, data[40 : 40 + size], offset), 0)

    def _sync(self, node: int, data: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", data)[0])
        return b""

    def _release(self, node: int, data: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", data)[0])
        return b""

    # --- folders and all ------------------------------------------------------------------------------

    def _opendir(self, node: int, data: bytes) -> bytes:
        path = self._paths[node]
        with os.scandir(path) as items:
            kinds = [(item.name, 4 if item.is_dir(follow_symlinks=False) else 8) for item in items]
        number = self._next
        self._next += 1
        self._listings[number] = [each for each in kinds if not self._hides(f"{path}/{each[0]}")]
        return struct.pack("<QII", number, 0, 0)

    def _readdir(self, node: int, data: bytes) -> bytes:
        number, offset, size = struct.unpack_from("<QQI", data)
        out = b""
        for at, (name, kind) in enumerate(self._listings[number][offset:], offset + 1):
            raw = os.fsencode(name)
            each = struct.pack("<QQII", at + 1, at, len(raw), kind) + raw
            each += bytes(-len(each) % 8)
            if len(out) + len(each) > size:
                break
            out += each
        return out

    def _releasedir(self, node: int, data: bytes) -> bytes:
        self._listings.pop(struct.unpack_from("<Q", data)[0], None)
        return b""

    def _statfs(self, node: int, data: bytes) -> bytes:
        found = os.statvfs(self._paths[1])
        counts = found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree
        return struct.pack("<QQQQQIII28x", *counts, found.f_bsize, 255, found.f_frsize)

    def _init(self, node: int, data: bytes) -> bytes:
        _, _, ahead, _ = struct.unpack_from("<IIII", data)
        return struct.pack("<IIIIHHII", 7, 31, ahead, 0, 16, 12, _WRITE_BYTES, 1) + bytes(36)


def _attributes(found: os.stat_result) -> bytes:
    times = found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns
    whole, parts = [each // 10**9 for each in times], [each % 10**9 for each in times]
    sizes = struct.pack("<QQQ", found.st_ino, found.st_size, found.st_blocks)
    rest = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)
    return sizes + struct.pack("<3Q3I7I", *whole, *parts, *rest)


def main() -> None:
    folder, mount, control = (Path(each).resolve() for each in sys.argv[1:4])
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"kt", os.fsencode(mount), b"fuse", _NOATIME, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    try:
        Passthrough(folder, device, control).serve(sys.stdin.fileno())
    finally:
        libc.umount2(os.fsencode(mount), _DETACH)


if __name__ == "__main__":
    main()
