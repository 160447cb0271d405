"""Finds the running servers of this library by the sockets in its folder, and stops them.

What a server says of itself is asked through its socket. Whose process it is, the kernel knows: who listens at a
socket is told to whoever connects, so no file with a process id can be wrong, and nothing is said to a process of
another user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from ktcli.errors import Busy, KtError
from ktcli.hardware.memory import resident_bytes
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.records import dataclass
from ktcli.server.process.draintime import DRAIN_MOST_S
from ktcli.store.places import run_folder, server_sockets

ANSWER_S = 2.0  # in which a server answers; one that still pulls its model does not
END_S = 20.0  # in which a server that was told to stop has ended, once its answers have finished
_MOST_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("iII")  # process, user, group
# What a server says may be wrong in any way; beyond these bounds it counts as not said.
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Second = Annotated[int, msgspec.Meta(ge=0, le=253_000_000_000)]  # until the year 9987


class LoadedStatus(msgspec.Struct):
    """A server's report on a model that it has in memory.

    Attributes:
        memory_bytes: what it takes of memory with whole contexts.
        since: when it was loaded, seconds since 1970.
        expires: when it is closed if nobody uses it; None: never.
    """

    name: _Text = ""
    context: _Count = 0
    memory_bytes: _Count = 0
    running: _Count = 0
    waiting: _Count = 0
    since: _Second = 0
    expires: _Second | None = None


class Status(msgspec.Struct):
    """A server's report on itself.

    Attributes:
        model: the one that it was started with.
        context: of that model; 0: it is not in memory.
        running, waiting: requests of all models.
        since: when it began, seconds since 1970.
        models: those in memory.
        loading: whether it loads that model, at first or after its GPU failed.
        drain_s: the seconds that answers may take to finish once it is told to end.
        servers: the addresses of those that it routes requests to; []: it is not a router.
        engine: the program by others that computes; empty: kt itself.
    """

    model: _Text = ""
    aliases: list[_Text] = []
    address: _Text = ""
    context: _Count = 0
    running: _Count = 0
    waiting: _Count = 0
    since: _Second = 0
    models: list[LoadedStatus] = []
    loading: bool = False
    drain_s: _Count = 0
    servers: list[_Text] = []
    engine: _Text = ""


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A server of this library that runs.

    Attributes:
        socket: the path of its socket.
        pid: its process; 0: it is none that this one may see.
        memory_bytes: what of its memory is resident; None: unknown.
        status: what it says of itself; None: it does not answer, because it pulls its model or hangs.
    """

    socket: Path
    pid: int
    memory_bytes: int | None
    status: Status | None

    @property
    def name(self) -> str:
        """The name of the server in messages: its model, or its port if it does not answer."""
        return self.status.model if self.status else self.socket.stem

    def is_meant_by(self, word: str) -> bool:
        """Returns whether a word names this server: its model, an alias of that, or its port."""
        names = (self.status.model, *self.status.aliases) if self.status else ()
        return word == self.socket.stem or word in names


def socket_path(port: int) -> Path:
    """Returns the path of the Unix socket of the server on a port."""
    return run_folder() / f"{port}.sock"


def running_servers() -> list[FoundServer]:
    """Returns the running servers of this library, in the order of their sockets, each with its process id, memory and
    report.

    Raises:
        KtError: other users may write to the folder of the sockets.
    """
    found = []
    for path in server_sockets():
        with contextlib.suppress(OSError), connected(path) as connection:
            pid, _ = _listener(connection)
            found.append(
                FoundServer(path, pid, resident_bytes(SYSTEM_ROOT, pid), status_of(connection))
            )
    return found


def status_of(connection: socket.socket) -> Status | None:
    """Returns the report of a server on itself, asked through a connection to its socket; None: it does not answer
    in time, or not with a report."""
    try:
        return msgspec.json.decode(_body_of(connection, b"/server"), type=Status)
    except (OSError, msgspec.DecodeError):
        return None


def _body_of(connection: socket.socket, path: bytes, body: bytes | None = None) -> bytes:
    """Returns the body of the response to a GET, or to a POST of `body`; HTTP/1.0 ends it with the connection.

    Raises:
        OSError: it is not whole within `ANSWER_S`, or too long.
    """
    until = time.monotonic() + ANSWER_S
    method, length = (b"GET", 0) if body is None else (b"POST", len(body))
    head = b"%s %s HTTP/1.0\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % (method, path, length) + (body or b""))
    data = b""
    while came := connection.recv(1 << 16):
        data += came
        if len(data) > _MOST_BYTES or time.monotonic() > until:
            raise TimeoutError
    return data.partition(b"\r\n\r\n")[2]


def stop(server: FoundServer, drain_s: float | None = None) -> None:
    """Stops a server and waits until it has ended; answers may finish within its drain time, as with Ctrl-C.

    Args:
        drain_s: the seconds that they may take; None: as many as the server was started with.
    Raises:
        Busy: the server has not ended 20 seconds after that time.
        KtError: this user may not end the server or set its drain time, or its process is not visible from here.
    """
    if server.pid <= 0:
        raise KtError(
            f"the server of {server.name} runs where this process cannot see it, such as in another container",
            hint="run kt stop there",
        )
    try:
        process = os.pidfd_open(server.pid)
    except ProcessLookupError:
        return
    try:
        if drain_s is not None:
            _set_drain(server, drain_s)
        elif server.status is not None:
            drain_s = min(DRAIN_MOST_S, server.status.drain_s)
        signal.pidfd_send_signal(process, signal.SIGTERM)
        timeout_s = END_S + (drain_s or 0)
        if not select.select([process], [], [], timeout_s)[0]:
            raise Busy(
                f"the server of {server.name} (process {server.pid}) did not stop within {timeout_s:.0f} s",
                hint=f"kill -9 {server.pid} stops it now; its latest cached pages are lost",
            )
    except ProcessLookupError:
        return
    except OSError as error:
        raise KtError(f"cannot stop process {server.pid}: {error.strerror}") from error
    finally:
        os.close(process)


def _set_drain(server: FoundServer, seconds: float) -> None:
    """Tells a server how long answers may take to finish.

    Raises:
        KtError: it does not take that, because it hangs, pulls its model, or is of an earlier version.
    """
    said = b'{"seconds": %g}' % seconds
    try:
        with connected(server.socket) as connection:
            found = msgspec.json.decode(_body_of(connection, b"/server/drain", said))
    except (OSError, msgspec.DecodeError):
        found = None
    if not isinstance(found, dict) or "drain_s" not in found:
        raise KtError(
            f"the server of {server.name} cannot be told how long answers may take to finish",
            hint="kt stop without --drain uses the time that it was started with",
        )


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    """Yields a connection to the socket at `path`, however long the path is: the system's limit is 107 bytes.

    Raises:
        OSError: nobody listens there, or a process of another user does.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as made:
        made.settimeout(ANSWER_S)
        with short_name(path) as name:
            made.connect(name)
        _, user = _listener(made)
        if user not in (os.geteuid(), 0):
            raise PermissionError(errno.EPERM, f"a process of user {user} listens there", str(path))
        yield made


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Yields a short path (through /proc) of the file at `path`, which is valid within the context.

    Raises:
        OSError: the folder of `path` does not exist.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _listener(connection: socket.socket) -> tuple[int, int]:
    """Returns the process that listens at the other end of a connection, and its user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user
