"""The addresses of the servers behind a router."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from ktcli.client.address import ServerAddress
from ktcli.errors import UsageError


def address_of(said: str) -> ServerAddress:
    """Returns the address of a server that a person wrote as `said`. Raises: UsageError: as `ServerAddress.parse`."""
    return ServerAddress.parse(
        said, "the address of a server", versioned=False, key="--api-key-file"
    )


def require_different(addresses: Sequence[ServerAddress]) -> None:
    """Checks that no two addresses reach the same server, not even by other names of its machine.

    Raises:
        UsageError: two do; the error names them.
    """
    seen: dict[tuple[str, int], ServerAddress] = {}
    for address in addresses:
        for place in _places(address):
            if (other := seen.get(place)) is not None and other is not address:
                again = "" if other.url == address.url else f" (also written as {other.url})"
                raise UsageError(f"{address.url} was given twice{again}", hint="leave out one")
            seen[place] = address


def same_as(address: ServerAddress, others: Sequence[ServerAddress]) -> ServerAddress | None:
    """Returns the first of `others` that is the same server as `address`, even by another name of its machine; None:
    none is."""
    places = _places(address)
    return next((each for each in others if _places(each) & places), None)


def _places(address: ServerAddress) -> set[tuple[str, int]]:
    """The numeric addresses of a server; one that cannot be resolved has its name."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError:
        return {(address.host.lower(), address.port)}
    return {(_canonical(str(each[4][0])), address.port) for each in found}


def _canonical(numeric: str) -> str:
    """Returns a numeric address as it is compared: IPv4 in IPv6 as IPv4, and that of any interface as loopback."""
    found = ipaddress.ip_address(numeric)
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_unspecified:
        return "127.0.0.1" if found.version == 4 else "::1"
    return str(found)
