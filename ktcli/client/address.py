"""Reads the address of a server as a person types it: scheme, host and port, and nothing that would be a mistake."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from ktcli.errors import UsageError

_SHOWN = 200  # characters of what is wrong
_EXAMPLE = "for example http://127.0.0.1:11435"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server that speaks OpenAI's API.

    Attributes:
        url: scheme, host and port, without `/v1` or a slash at the end.
        host: the host alone.
        encrypted: whether it is asked through TLS.
    """

    url: str
    host: str
    encrypted: bool

    @classmethod
    def parse(cls, text: str, source: str) -> ServerAddress:
        """Returns the address that a text means.

        Args:
            source: who says it, for the error: "--server".
        Raises:
            UsageError: it is none, or has a user, a path or a query.
        """
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        # What follows a user is not shown: it may be a password.
        if "@" in text:
            raise UsageError(
                f"{source} has a user or a password in the address",
                hint="put the key into a file that only you can read, and pass it with --server-key-file",
            )
        plain = text.isascii() and text.isprintable() and " " not in text
        if not host or not plain or parts.scheme not in ("http", "https"):
            raise UsageError(
                f"{source} is {text[:_SHOWN]!r}, which is not the address of a server",
                hint=_EXAMPLE,
            )
        if parts.path.rstrip("/") not in ("", "/v1") or parts.query or parts.fragment:
            behind = text.partition("://")[2].partition("/")[2]
            raise UsageError(
                f"{source} has the path /{behind[:_SHOWN]}, but only /v1 may follow the address",
                hint=_EXAMPLE,
            )
        shown = f"[{host}]" if ":" in host else host
        url = f"{parts.scheme}://{shown}" + (f":{port}" if port is not None else "")
        return cls(url, host, parts.scheme == "https")

    @property
    def is_here(self) -> bool:
        """Whether the host is this machine by any network's rules."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
