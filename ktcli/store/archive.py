"""A tar archive, read once from beginning to end as hostile input: it must contain only plain files."""

from __future__ import annotations

import errno
import io
import os
import tarfile

from ktcli.errors import BadCheckpoint

_BLOCK = 4 << 20
FLUSH_BYTES = 64 << 20  # three seconds of a slow USB stick
_MOST_HEADER_BYTES = 1 << 16  # before one member; kt writes 512, or 1,536 for the largest files
_LONGER = (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME)  # headers that a further one follows
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.DIRTYPE: "a folder",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


class Flusher:
    """Writes to a file and flushes it at intervals: so a slow disk shows in the progress, and not at the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unflushed = 0

    def put(self, data: bytes) -> None:
        """Writes all of `data` to the file, and flushes the file to the disk whenever FLUSH_BYTES have been written.

        Raises:
            OSError: the system refuses.
        """
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._unflushed += len(data)
        if self._unflushed >= FLUSH_BYTES:
            self._unflushed = 0
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a pipe has nothing to flush
                    raise


def padding(size_bytes: int) -> int:
    """Returns the number of zero bytes that follow a member of `size_bytes` bytes in a tar archive, to fill its last
    block.
    """
    return -size_bytes % tarfile.BLOCKSIZE


class Archive:
    """A tar archive that is read from its beginning to its end.

    Attributes:
        name: what it is called, for people.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self._descriptor = descriptor
        self._at = 0
        try:
            self._size: int | None = os.fstat(descriptor).st_size
            os.lseek(descriptor, 0, os.SEEK_CUR)
        except OSError:
            self._size = None  # a pipe

    @property
    def is_empty(self) -> bool:
        """Whether no byte of the archive has been read; after an attempt to read, this means that it is empty."""
        return self._at == 0

    def read(self, size: int) -> bytes:
        """Returns the next `size` bytes of the archive, fewer only at its end."""
        parts, left = [], size
        while left and (part := os.read(self._descriptor, min(left, _BLOCK))):
            parts.append(part)
            left -= len(part)
        self._at += size - left
        return b"".join(parts)

    def exactly(self, size: int) -> bytes:
        """Returns the next `size` bytes of the archive.

        Raises:
            BadCheckpoint: the archive ends before.
        """
        data = self.read(size)
        if len(data) < size:
            raise self.cut()
        return data

    def skip(self, size: int) -> None:
        """Skips the next `size` bytes of the archive.

        Raises:
            BadCheckpoint: the archive ends before.
        """
        if self._size is None:
            for begin in range(0, size, _BLOCK):
                self.exactly(min(_BLOCK, size - begin))
        else:
            self._at += size
            if self._at > self._size:
                raise self.cut()
            os.lseek(self._descriptor, size, os.SEEK_CUR)

    def header(self) -> tarfile.TarInfo | None:
        """Returns the tar header of the archive's next member, which must be a regular file; None: the archive ends
        here.

        Raises:
            BadCheckpoint: the member is something else, or what follows is no tar header.
        """
        data = block = self.read(tarfile.BLOCKSIZE)
        if not block.strip(b"\0"):
            return None
        while len(block) == tarfile.BLOCKSIZE and block[156:157] in _LONGER:
            size = self._info(block).size
            if not 0 <= size <= _MOST_HEADER_BYTES - len(data):
                raise self.bad("has a header that is too long")
            data += self.exactly(size + padding(size))
            block = self.exactly(tarfile.BLOCKSIZE)
            data += block
        if len(block) < tarfile.BLOCKSIZE:
            raise self.bad("is not a tar archive") if self._at == len(block) else self.cut()
        kind = self._info(block).type
        if kind not in (tarfile.REGTYPE, tarfile.AREGTYPE) or b"GNU.sparse" in data:
            what = _KINDS.get(
                kind,
                "a sparse file" if b"GNU.sparse" in data else "something other than a plain file",
            )
            raise self.bad(f"contains {what}, but a bundle may contain only plain files")
        info = self._info(data)
        if info.size < 0:
            raise self.bad("has a member of negative size")
        return info

    def _info(self, data: bytes) -> tarfile.TarInfo:
        """What headers that are whole say; they need no more bytes than these."""
        try:
            if len(data) == tarfile.BLOCKSIZE:
                return tarfile.TarInfo.frombuf(data, "utf-8", "surrogateescape")
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8") as found:
                info = found.next()
        except (tarfile.TarError, ValueError, IndexError, OverflowError, EOFError):
            info = None
        if info is None:
            raise self.bad("is not a tar archive, or is damaged")
        return info

    def bad(self, what: str) -> BadCheckpoint:
        """Returns an error about the archive with the message "FILE `what` (byte N)", where N is the position read up
        to.
        """
        return BadCheckpoint(
            f"{self.name} {what} (byte {self._at:,})",
            hint="export the model again, and copy it again",
        )

    def cut(self) -> BadCheckpoint:
        """Returns the error to raise because the archive ends too early; its message has the position."""
        return BadCheckpoint(
            f"{self.name} ends too early, at byte {self._at:,}",
            hint="copy it again; imported files are kept, and the same command continues from there",
        )
