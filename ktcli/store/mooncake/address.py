"""The address of a Mooncake master, `mooncake://HOST:PORT`, and whether it is one that may be used.

Mooncake has no authentication, and its clients listen on all interfaces: whoever reaches them reads conversations, and
may store others under their keys. So only addresses of this machine and of private networks are used unasked.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import TypeAlias

from ktcli.errors import KtError, UsageError
from ktcli.records import dataclass
from ktcli.settings import MOONCAKE

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})/?", re.ASCII)
_SHOWN = 100
_PRIVATE = tuple(
    ipaddress.ip_network(each)
    for each in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
        *("::1/128", "fc00::/7", "fe80::/10"),
    )
)
IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
WHY = "Mooncake has no authentication, and its clients listen on all interfaces"


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """The address of a master.

    Attributes:
        host: a name or an address, IPv6 without brackets.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> MooncakeAddress:
        """Returns the address of a Mooncake master that an option or setting gives as "mooncake://HOST:PORT" or
        "HOST:PORT".

        Raises:
            UsageError: the text is not such an address.
        """
        found = _ADDRESS.fullmatch(text.removeprefix(MOONCAKE))
        if found is None or not 0 < int(found[2]) < 1 << 16:
            raise UsageError(
                f"{text[:_SHOWN]!r} is not the address of a Mooncake master",
                hint=f"write {MOONCAKE}HOST:PORT, such as {MOONCAKE}10.0.0.1:50051",
            )
        return cls(found[1].strip("[]"), int(found[2]))

    def __str__(self) -> str:
        return f"{MOONCAKE}{self.master}"

    @property
    def master(self) -> str:
        """The address of the master as Mooncake's client takes it: "HOST:PORT", an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def require_private(self, addresses: Iterable[IPAddress]) -> None:
        """Raises KtError unless all of these IP addresses of the host are this machine's or of private networks.

        Raises:
            KtError: an address is public.
        """
        for each in addresses:
            if not any(each in network for network in _PRIVATE if network.version == each.version):
                named = "" if str(each) == self.host else f" ({self.host})"
                raise KtError(
                    f"{each}{named} is not an address of a private network: {WHY}",
                    hint="use a private network, or --insecure if a firewall keeps others out",
                )

    def resolved(self) -> list[IPAddress]:
        """Returns all IP addresses of the host; the name lookup may take long.

        Raises:
            KtError: the host has no address.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise KtError(
                f"there is no host {self.host} for the Mooncake store",
                hint="check the name, or write its address",
            ) from None
        return [_plain(str(each[4][0])) for each in found]

    def require_listener(self, wait_s: float) -> None:
        """Connects to the master and closes the connection, to make sure that it can be reached.

        Raises:
            KtError: nothing accepts connections there within `wait_s` seconds.
        """
        try:
            socket.create_connection((self.host, self.port), wait_s).close()
        except (OSError, UnicodeError) as error:  # UnicodeError: no name has such a part
            why = getattr(error, "strerror", None) or "there is no such host"
            if isinstance(error, TimeoutError):
                why = "it does not answer"
            raise KtError(
                f"the Mooncake master {self.master} cannot be reached: {why}",
                hint="start one with: kt store serve",
            ) from None


def _plain(text: str) -> IPAddress:
    """An address without its zone; an IPv4 address that is written as one of IPv6, as what it is."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
