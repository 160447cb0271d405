"""Sends access tokens only to their own server, with the same scheme, host and port, wherever it redirects to.

`requests` drops an `Authorization` header in time, but cookies know no ports, and ModelScope's clients send the token
as one; so every session of this process is held to the rule.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
_SECRET = ("Authorization", "Cookie")
# Set on a request of a chain of redirects that has left the first server.
_LEFT = "_kt_left_its_server"


def is_same_server(url: str, other: str) -> bool:
    """Returns whether two URLs have the same scheme, host and port; False where one of them is invalid."""
    server = _server(url)
    return server is not None and server == _server(other)


def hold() -> None:
    """Changes `requests` so that from now on every session drops access tokens and cookies when a redirect leads to
    another server.
    """
    import requests

    usual = requests.Session.rebuild_auth
    if getattr(usual, _LEFT, False):
        return

    def rebuild_auth(self: Any, prepared_request: Any, response: Any) -> None:
        usual(self, prepared_request, response)
        before = response.request
        # A chain that has left may not come by its cookies again: the session still has them.
        if getattr(before, _LEFT, False) or not is_same_server(before.url, prepared_request.url):
            setattr(prepared_request, _LEFT, True)
            for name in _SECRET:
                prepared_request.headers.pop(name, None)

    setattr(rebuild_auth, _LEFT, True)
    requests.Session.rebuild_auth = rebuild_auth  # type: ignore[method-assign]


def _server(url: str) -> tuple[str, str, int | None] | None:
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # a port that is none
        return None
