"""The address at which events are published, and the one beside it where lost ones are sent again."""

from __future__ import annotations

import re
import socket

from ktcli.client.address import bracketed
from ktcli.errors import UsageError
from ktcli.records import dataclass
from ktcli.server.http.access import PORT_MOST, is_loopback
from ktcli.settings import SHOWN_CHARS

OFF = "off"  # of the setting kv-events
_ALL = "0.0.0.0"  # what vLLM calls *
_FORM = re.compile(
    r"tcp://(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[0-9A-Za-z._-]+|\*)):(?P<port>[0-9]{1,5})"
)


@dataclass(frozen=True, slots=True)
class EventsAddress:
    """The address at which events are published.

    Attributes:
        host: a name or an address of this machine.
        port: for those who listen; those who ask for lost ones use the next.
        source: what names it, for people: "--kv-events".
    """

    host: str
    port: int
    source: str = "--kv-events"

    @classmethod
    def parse(cls, text: str, source: str) -> EventsAddress | None:
        """Returns the address that an option or setting names, such as tcp://127.0.0.1:5557; None: it is "off".

        Args:
            source: what names it, for errors.
        Raises:
            UsageError: it is not an address.
        """
        if text == OFF:
            return None
        found = _FORM.fullmatch(text)
        if found is None or not 0 < int(found["port"]) < PORT_MOST:
            raise UsageError(
                f"{source} is {text[:SHOWN_CHARS]!r}, which is not an address, such as tcp://127.0.0.1:5557, or off",
                hint=f"the port is 1 to {PORT_MOST - 1}: the next one is used, too",
            )
        host = _ALL if found["host"] == "*" else found["v6"] or found["host"].lower()
        return cls(host, int(found["port"]), source)

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)

    @property
    def replay(self) -> EventsAddress:
        """The address at which lost events can be requested: the same host with the next port."""
        return EventsAddress(self.host, self.port + 1, self.source)

    @property
    def endpoint(self) -> str:
        """The address in ZeroMQ's form: "tcp://127.0.0.1:5557"."""
        return f"tcp://{bracketed(self.host)}:{self.port}"

    def resolved(self) -> EventsAddress:
        """Returns the address with a numeric IP address as its host, since ZeroMQ does not listen at names.

        Raises:
            UsageError: the host cannot be resolved.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name has such a part
            why = getattr(error, "strerror", None) or "there is no such host"
            raise UsageError(
                f"{self.source}: cannot resolve {self.host[:SHOWN_CHARS]!r}: {why}"
            ) from error
        return EventsAddress(str(found[0][4][0]), self.port, self.source)
