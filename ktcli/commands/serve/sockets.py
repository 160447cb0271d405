"""Opens the sockets of `kt serve`, and reports which program uses a port that is not free."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator

from ktcli.errors import Busy, KtError
from ktcli.output import out

OLLAMA_PORT = 11434


@contextlib.contextmanager
def sockets_at(host: str, ports: Iterable[int]) -> Iterator[list[socket.socket]]:
    """Yields a listening TCP socket for each of the ports at the address `host`; closes them when the context ends.
    Raises: Busy, UsageError: see `tcp_socket`.
    """
    with contextlib.ExitStack() as held:
        made = (contextlib.closing(_at_port(host, port)) for port in dict.fromkeys(ports))
        yield [held.enter_context(each) for each in made]


def _at_port(host: str, port: int) -> socket.socket:
    """The socket at an address; another server of this library that has it is named.

    Raises:
        Busy, UsageError: see `tcp_socket`.
    """
    from ktcli.server.process.discovery import running_servers, socket_path
    from ktcli.server.process.listening import tcp_socket

    try:
        return tcp_socket(host, port)
    except Busy as error:
        for other in running_servers():
            if other.socket == socket_path(port):
                raise Busy(
                    f"a server of {other.name} already uses port {port} (process {other.pid})",
                    hint=f"stop it with: kt stop {port}; {error.hint}",
                ) from error
        if port == OLLAMA_PORT:
            hint = "stop Ollama if it is running, or leave out --ollama"
            raise Busy(str(error), hint=hint) from error
        raise


@contextlib.contextmanager
def owners_socket(port: int) -> Iterator[list[socket.socket]]:
    """Yields a list of the Unix socket by which `kt ps` and `kt stop` find this server, and removes it when the context
    ends; yields an empty list, with a warning, in a library that cannot be written. Raises: Busy: another server of
    this library uses the port.
    """
    from ktcli.server.process.discovery import socket_path
    from ktcli.server.process.listening import unix_socket

    path = socket_path(port)
    try:
        made = unix_socket(path)
    except Busy:
        raise
    except KtError as error:
        out.warn(f"{error}; kt ps and kt stop will not find this server")
        yield []
        return
    try:
        yield [made]
    finally:
        made.close()
        path.unlink(missing_ok=True)
