"""Decides which host names and which page origins may use a server: this machine's names and what its owner allows,
nothing else.

A browser lets a page read an answer of another origin only if the answer says so (CORS), and asks before it sends
anything but plain requests (a preflight).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping

from ktcli.errors import UsageError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
PORT_MOST = 65535
ANY = "*"
_HOST = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z._-]+))(?::(?P<port>[0-9]{1,5}))?"
)
_ORIGIN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[^/]+)")
_USUAL_PORTS = {"http": ":80", "https": ":443"}  # which browsers leave out
_NUMBERS = re.compile(r"(?:0[xX][0-9A-Fa-f]+|[0-9]+)(?:\.(?:0[xX][0-9A-Fa-f]+|[0-9]+)){0,3}")
_HEADERS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")
_ASCII = "write internationalized names in ASCII, such as xn--bcher-kva.example"
_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
# Headers that pages may read beside those that they always may.
_SHOWN = "X-Request-Id, Request-Id, Retry-After"
_PREFLIGHT_S = 600  # that a browser keeps the answer to a preflight


def host_name(host: str) -> str | None:
    """Returns the host in the value of a Host header, in lower case and without the port; None: the value is
    malformed."""
    found = _HOST.fullmatch(host)
    if found is None or int(found["port"] or 0) > PORT_MOST:
        return None
    return (found["v6"] or found["name"]).lower().removesuffix(".")


def is_loopback(name: str) -> bool:
    """Returns whether a host name, as `host_name` returns it, is localhost or a loopback address, in any spelling.

    Pages from elsewhere cannot have such a name: browsers do not look it up with a name server.
    """
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback
    except ValueError:
        pass
    if _NUMBERS.fullmatch(name) is None:
        return False
    try:  # 127.1 and 0x7f000001, as C reads them
        return ipaddress.ip_address(socket.inet_aton(name)).is_loopback
    except OSError:
        return False


def allowed_host(said: str, *, has_key: bool) -> str:
    """Returns the host name given with `--allow-host`, normalized for comparison; "*" (any host) stays as it is.

    Raises:
        UsageError: `said` is not a host name, or is "*" although the server has no API key.
    """
    if said == ANY:
        _require_key("--allow-host", has_key=has_key)
        return ANY
    name = host_name(f"[{said}]" if said.count(":") > 1 and "]" not in said else said)
    if name is None:
        said = f"--allow-host {said[:100]!r} is not a host name, such as ai.example.com"
        raise UsageError(said, hint=_ASCII)
    return name


def allowed_origin(said: str, *, has_key: bool) -> str:
    """Returns the origin given with `--allow-origin`, normalized for comparison; "*" (any origin) and "null" stay as
    they are.

    Raises:
        UsageError: `said` is not an origin, or is "*" or "null" although the server has no API key.
    """
    if said in (ANY, "null"):  # "null" is any page in a file or a sandbox
        _require_key(f"--allow-origin {said}", has_key=has_key)
        return said
    found = _ORIGIN.fullmatch(said.removesuffix("/").lower())
    if found is None or host_name(found["host"]) is None:
        raise UsageError(
            f"--allow-origin {said[:100]!r} is not an origin, such as https://chat.example.com",
            hint=f"an origin has no path; {_ASCII}",
        )
    return found[0].removesuffix(_USUAL_PORTS.get(found["scheme"], "/"))


def _require_key(option: str, *, has_key: bool) -> None:
    if not has_key:
        raise UsageError(
            f"{option} allows every page and needs an API key",
            hint="put one into a file that only you can read, and pass it with --api-key-file",
        )


def is_allowed(value: str, allowed: frozenset[str]) -> bool:
    """Returns whether a host name or an origin is in a set of allowed ones, ignoring case; "*" in the set allows
    all."""
    return ANY in allowed or value.lower() in allowed


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    """Returns whether a request is a CORS preflight."""
    return method == "OPTIONS" and "access-control-request-method" in headers


def origin_headers(origin: str) -> dict[str, str]:
    """Returns the CORS headers, by lower-case name, that let pages of an allowed origin read a response:
    `access-control-allow-origin`, `access-control-expose-headers` and `vary`."""
    return {
        "access-control-allow-origin": origin,
        "access-control-expose-headers": _SHOWN,
        "vary": "Origin",
    }


def preflight_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the CORS headers, by lower-case name, that the response to a preflight has besides `origin_headers`: the
    allowed methods and request headers, how long they may be cached, and the access to a private network.

    Args:
        headers: those of the preflight request.
    """
    asked = headers.get("access-control-request-headers", "")
    found = {"access-control-allow-methods": _METHODS, "access-control-max-age": str(_PREFLIGHT_S)}
    if _HEADERS.fullmatch(asked):
        found["access-control-allow-headers"] = asked
    if headers.get("access-control-request-private-network") == "true":
        found["access-control-allow-private-network"] = "true"
    return found
