"""Uses the model of a server of this library through its Unix socket, like an engine in the same process.

A request is a connection, and closing it ends the answer within a step. HTTP/1.0 gives the lines of the answer as they
are, without chunks.
"""

from __future__ import annotations

import contextlib
import select
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec

from ktcli.errors import Busy, KtError, NotFound
from ktcli.server.attached.wire import PATH, EngineFacts, LoadableEngine
from ktcli.server.process.discovery import connected

T = TypeVar("T")

WAIT_S = 0.05  # that `Exchange.lines` waits for something to come
FACTS_S = 1.0  # in which a server says what it is; one that loads its model does not
_CONNECT_S = 10.0
_MOST_BYTES = 16 << 20  # of a head, a line or an error


class ServerPlace(NamedTuple):
    """The address of a server of this library.

    Attributes:
        socket: its path.
        model: what it serves, for people.
    """

    socket: Path
    model: str

    @property
    def port(self) -> str:
        """The server's TCP port in decimal, after which its socket file is named."""
        return self.socket.stem

    def gone(self) -> NotFound:
        """Returns the error for a server that has stopped, with a hint on how to continue the conversation."""
        return NotFound(
            f"the server of {self.model} on port {self.port} has stopped",
            hint=f"the conversation is saved; start another server with kt serve {self.model} --background,"
            " or continue without one: kt chat --continue --no-attach",
        )


class _Error(msgspec.Struct):
    message: str = ""


class _Envelope(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


class Exchange:
    """A request to a server, and the lines of its response.

    Args:
        body: of a POST; None: a GET.
    Raises:
        NotFound: nobody listens there any more.
    """

    def __init__(self, served: ServerPlace, path: str, body: bytes | None = None) -> None:
        self._served, self._data, self._head = served, b"", False
        self._held = contextlib.ExitStack()
        try:
            self._connection = self._held.enter_context(connected(served.socket))
            self._connection.settimeout(_CONNECT_S)
            method = "GET" if body is None else "POST"
            head = f"{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(body or b'')}\r\n\r\n"
            self._connection.sendall(head.encode() + (body or b""))
            self._connection.setblocking(False)
        except OSError as error:
            self._held.close()
            raise served.gone() from error
        self.close = weakref.finalize(self, self._held.close)
        self.ended = False

    def lines(self, wait_s: float = WAIT_S) -> list[bytes]:
        """Returns the lines of the response's body that arrive within `wait_s` seconds, without empty ones; `ended` is
        true after the last.

        Raises:
            KtError: the server refuses the request, with its reason, or stops before it answers.
        """
        self._read(wait_s)
        if not self._head and not self._take_head():
            return []
        *lines, self._data = self._data.split(b"\n")
        return [line for line in lines if line]

    def whole(self, seconds: float = float("inf")) -> bytes:
        """Returns the whole body of the response, waiting at most `seconds` for its end.

        Raises:
            TimeoutError: the body is not complete by then. KtError: the server refuses the request, or has stopped.
        """
        until = time.monotonic() + seconds
        while not self.ended:
            if time.monotonic() >= until:
                raise TimeoutError
            self._read(WAIT_S)
        self._take_head()
        return self._data

    def _read(self, wait_s: float) -> None:
        """Reads the bytes that are there; sets `ended` at the end of the connection."""
        if self.ended or not select.select([self._connection], [], [], wait_s)[0]:
            return
        try:
            came = self._connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            came = b""
        self.ended = not came
        self._data += came
        if len(self._data) > _MOST_BYTES:
            raise KtError(f"the server at {self._served.socket} sent an invalid response")

    def _take_head(self) -> bool:
        """Parses the head of the response; returns whether it was there."""
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            if self.ended:
                raise self._served.gone()
            return False
        status = head.split(b" ", 2)[1:2]
        if status == [b"200"]:
            self._head, self._data = True, rest
            return True
        while not self.ended:
            self._read(_CONNECT_S)
            rest = self._data.partition(b"\r\n\r\n")[2]
        raise _refused(status, rest)


def _refused(status: Sequence[bytes], body: bytes) -> KtError:
    """Returns the error of a response."""
    try:
        said = msgspec.json.decode(body, type=_Envelope).error.message
    except msgspec.DecodeError:
        said = ""
    kind = Busy if status in ([b"429"], [b"503"]) else KtError
    return kind(
        said or f"the server refused the request: HTTP {b''.join(status).decode('latin-1')[:20]}"
    )


def facts_of(served: ServerPlace, pack: str) -> EngineFacts | LoadableEngine | None:
    """Returns what a server knows of the model whose pack has the identity `pack`: the facts of its engine if it is in
    memory there, or a `LoadableEngine` if it can be loaded; None: it gives no such answer within FACTS_S seconds."""
    try:
        return _asked(Exchange(served, _path("", pack)), _EITHER, FACTS_S)
    except (TimeoutError, KtError, OSError):
        return None


def load(served: ServerPlace, pack: str) -> EngineFacts:
    """Has a server load the model whose pack has the identity `pack`, and waits for that; returns the facts of its
    engine.

    Raises:
        KtError: the server cannot load it, or runs another version of kt.
    """
    return _asked(Exchange(served, _path("/load", pack), b""), _FACTS)


_FACTS = msgspec.json.Decoder(EngineFacts)
_EITHER: msgspec.json.Decoder[EngineFacts | LoadableEngine] = msgspec.json.Decoder(
    EngineFacts | LoadableEngine
)


def _path(way: str, pack: str) -> str:
    return f"{PATH}{way}?{urlencode({'pack': pack})}"


def _asked(
    exchange: Exchange, decoder: msgspec.json.Decoder[T], seconds: float = float("inf")
) -> T:
    try:
        return decoder.decode(exchange.whole(seconds))
    except msgspec.DecodeError as error:
        raise KtError(f"the server runs another version of kt ({error})") from error
    finally:
        exchange.close()
