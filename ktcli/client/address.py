"""The addresses of servers as people type them: scheme, host and port, and nothing that would be a mistake."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from ktcli.errors import UsageError
from ktcli.records import dataclass

_SHOWN = 200  # characters of what is wrong
_EXAMPLE = "for example http://127.0.0.1:11435"
_PORTS = {"http": 80, "https": 443}
_HOST_CHARS, _LABEL_CHARS = 253, 63  # of a name in the DNS, and of what is between its dots


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server.

    Attributes:
        scheme: http or https.
        host: a name or a numeric address, without brackets.
        port: also where it is the scheme's own.
    """

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(
        cls, text: str, source: str, *, versioned: bool = True, key: str = "--server-key-file"
    ) -> ServerAddress:
        """Returns the server address (scheme, host, port) in a URL that a user wrote, such as "http://127.0.0.1:11435".

        Args:
            source: the option or setting that has the text, for errors: "--server".
            versioned: whether the URL may end with `/v1`.
            key: the option that names a file with the API key, for errors.
        Raises:
            UsageError: the text is not an address, or has a user, a path or a query.
        """
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        # What follows a user is not shown: it may be a password.
        if "@" in text:
            raise UsageError(
                f"{source} contains a user name or a password, which end up in logs",
                hint=f"leave them out; a key goes into a file that only you can read, passed with {key}",
            )
        plain = text.isascii() and text.isprintable() and " " not in text
        if not _is_host(host) or port == 0 or not plain or parts.scheme not in _PORTS:
            near = f"did you mean: http://{text}" if _lacks_scheme(text) else _EXAMPLE
            raise UsageError(
                f"{source} is {text[:_SHOWN]!r}, which is not the address of a server", hint=near
            )
        found = cls(parts.scheme, host, port or _PORTS[parts.scheme])
        allowed = ("", "/v1") if versioned else ("",)
        if parts.path.rstrip("/") not in allowed or parts.query or parts.fragment:
            behind = text.partition("://")[2][len(parts.netloc) :][:_SHOWN]
            rule = "only /v1 may follow it" if versioned else "nothing may follow it"
            raise UsageError(
                f"{source} has {behind!r} after the host, but {rule}", hint=f"write {found.url}"
            )
        return found

    @property
    def url(self) -> str:
        """The address as a URL without a path, "http://host:port", and without a port that is the scheme's own."""
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{bracketed(self.host)}{port}"

    @property
    def encrypted(self) -> bool:
        """Whether connections to the server use TLS: the scheme is https."""
        return self.scheme == "https"

    @property
    def is_here(self) -> bool:
        """Whether the host is localhost or a loopback address, so that the server runs on this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def bracketed(host: str) -> str:
    """Returns a host as URLs have it before a port: an IPv6 address in brackets, anything else unchanged."""
    return f"[{host}]" if ":" in host else host


def _is_host(name: str) -> bool:
    """Returns whether a name is one that can be looked up."""
    labels = name.removesuffix(".").split(".")
    return len(name) <= _HOST_CHARS and all(0 < len(label) <= _LABEL_CHARS for label in labels)


def _lacks_scheme(text: str) -> bool:
    """Returns whether a text looks like a host and perhaps a port."""
    plain = text.replace(".", "").replace(":", "").replace("-", "")
    return len(text) <= _SHOWN and plain.isascii() and plain.isalnum()
