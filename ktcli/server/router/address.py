"""The addresses of servers, as people write them and as a router takes them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from ktcli.errors import UsageError

_EXAMPLE = "for example http://10.0.0.2:11435"
_SHOWN = 200
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server.

    Attributes:
        host: a name or an address, without brackets.
    """

    scheme: str
    host: str
    port: int

    @property
    def url(self) -> str:
        """The address as a URL without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def address_of(said: str) -> ServerAddress:
    """Returns the address that a person wrote.

    Raises:
        UsageError: it is not a URL, or has a path, credentials or a query.
    """
    shown = said[:_SHOWN]
    try:
        parts = urlsplit(said)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise UsageError(f"{shown!r} is not the address of a server", hint=_EXAMPLE) from None
    if parts.scheme not in _PORTS or not host or not said.isascii() or not said.isprintable():
        near = f"did you mean: http://{shown}" if _lacks_scheme(said) else _EXAMPLE
        raise UsageError(f"{shown!r} is not the address of a server", hint=near)
    if "@" in parts.netloc:
        raise UsageError(
            f"the address of {host} contains a user name or a password, which end up in logs",
            hint="leave them out; a key goes into a file, passed with --api-key-file",
        )
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise UsageError(
            f"{shown!r} has a path, and a router takes the address alone",
            hint=f"write {ServerAddress(parts.scheme, host, port or _PORTS[parts.scheme]).url}",
        )
    return ServerAddress(parts.scheme, host, port or _PORTS[parts.scheme])


def _lacks_scheme(said: str) -> bool:
    return "://" not in said and said.replace(".", "").replace(":", "").replace("-", "").isalnum()


def require_different(addresses: Sequence[ServerAddress]) -> None:
    """Checks that no server is there twice, under another name of its machine either.

    Raises:
        UsageError: one is; the sentence names it.
    """
    seen: dict[tuple[str, int], ServerAddress] = {}
    for address in addresses:
        for place in _places(address):
            if (other := seen.get(place)) is not None and other is not address:
                again = "" if other.url == address.url else f" (also written as {other.url})"
                raise UsageError(f"{address.url} was given twice{again}", hint="leave out one")
            seen[place] = address


def _places(address: ServerAddress) -> set[tuple[str, int]]:
    """The numeric addresses of a server; one that cannot be resolved has its name."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError:
        return {(address.host.lower(), address.port)}
    return {(str(each[4][0]), address.port) for each in found}
