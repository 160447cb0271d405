"""Asks one server over HTTP or HTTPS, for whoever knows what it should say: a chat, or a router that asks what it is.

Nothing is followed elsewhere, certificates are verified, and nothing that a server sends is read without a bound. A
connection serves one request: closing it is what tells the server to stop.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ktcli import certificates
from ktcli.client.address import ServerAddress
from ktcli.errors import ServerFailed

if TYPE_CHECKING:
    from requests import Response

CONNECT_S = 10.0
_BLOCK = 1 << 16
_START = "start a server with: kt serve NAME"
_START_THERE = "start a server there with: kt serve NAME --host ADDRESS --api-key-file FILE"


class NoResponse(ServerFailed):
    """Raised when a server did not respond: it is not there, hangs, or speaks another protocol; it may respond
    later.
    """


class HttpClient:
    """A client of one server.

    Args:
        key: what it wants to be shown; empty: nothing.
        through_proxy: whether the proxies of the environment stand before it; never before this machine itself.
    Attributes:
        url: its address, for people as well.
    """

    def __init__(
        self, address: ServerAddress, key: str = "", *, through_proxy: bool = False
    ) -> None:
        self.url, self._key, self._is_here = address.url, key, address.is_here
        self._through_proxy = through_proxy and not address.is_here
        self._trusted = str(certificates.authorities()) if address.encrypted else True

    @contextlib.contextmanager
    def asked(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        silence_s: float,
        connect_s: float = CONNECT_S,
    ) -> Iterator[Response]:
        """Sends an HTTP request to the server; yields its response, whose body is not read yet, and closes the response
        at the end of the context.

        Args:
            path: the path of the URL, beginning with a slash.
            body: sent as JSON; None: no body.
            silence_s: the seconds without a byte after which the request is given up.
            connect_s: the seconds in which the connection must be made.
        Raises:
            ServerFailed: TLS failed. NoResponse: no response came.
        """
        import requests  # most commands ask no server
        from urllib3.exceptions import HTTPError

        with requests.Session() as session:
            session.trust_env = False  # or it would send a password of ~/.netrc
            if self._through_proxy:
                session.proxies = requests.utils.get_environ_proxies(self.url)
            try:
                reply = session.request(
                    method,
                    f"{self.url}{path}",
                    data=None if body is None else json.dumps(body).encode(),
                    headers=self._headers(),
                    stream=True,
                    allow_redirects=False,
                    timeout=(connect_s, silence_s),
                    verify=self._trusted,
                )
            except (OSError, ValueError, HTTPError) as error:
                raise self._absent(error) from error
            with contextlib.closing(reply):
                yield reply

    def _headers(self) -> dict[str, str]:
        found = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        return {**found, "Authorization": f"Bearer {self._key}"} if self._key else found

    def chunks(self, reply: Response, silence_s: float) -> Iterator[bytes]:
        """Yields the body of a response, in pieces as the bytes arrive.

        Args:
            silence_s: the seconds without a byte that the request allowed, for errors.
        Raises:
            ServerFailed: the connection breaks, or no byte comes for so long.
        """
        from urllib3.exceptions import HTTPError, ReadTimeoutError

        try:
            while chunk := reply.raw.read1(_BLOCK, decode_content=False):
                yield chunk
        except ReadTimeoutError as error:
            raise NoResponse(f"{self.url} sent nothing for {silence_s:.0f} s") from error
        except HTTPError as error:
            said = f"the connection to {self.url} broke off: {_why(error)}"
            raise NoResponse(said, again_s=0.0) from error

    def body(self, reply: Response, most: int, within_s: float) -> bytes | None:
        """Returns the whole body of a short response; None: it is longer than `most` bytes.

        Raises:
            ServerFailed: the connection breaks, or the body does not come within `within_s` seconds.
        """
        data, until_s = b"", time.monotonic() + within_s
        for chunk in self.chunks(reply, within_s):
            data += chunk
            if len(data) > most:
                return None
            if time.monotonic() > until_s:
                raise NoResponse(f"{self.url} did not finish its response in {within_s:.0f} s")
        return data

    def _absent(self, error: Exception) -> ServerFailed:
        """Returns the error of a request that got no response."""
        for cause in _causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                return certificates.unverified(self.url, cause)
            if isinstance(cause, ssl.SSLError) and cause.reason:
                said = cause.reason.replace("_", " ").lower()
                return ServerFailed(f"{self.url} does not speak TLS as https needs it: {said}")
        said = f"no response from {self.url}: {_why(error)}"
        hint = _START if self._is_here else _START_THERE
        # A name that nobody knows will not be known in a second either.
        known = not any(isinstance(cause, socket.gaierror) for cause in _causes(error))
        return NoResponse(said, hint=hint, again_s=0.0 if known else None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception of requests and those that it came from, however they are put into each other."""
    waiting, seen = [error], set[int]()
    while waiting:
        found = waiting.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        more = (*found.args, getattr(found, "reason", None), found.__cause__, found.__context__)
        waiting += [each for each in more if isinstance(each, BaseException)]


def _why(error: BaseException) -> str:
    """Returns the reason of an exception of requests in a few words."""
    from http.client import BadStatusLine, IncompleteRead, RemoteDisconnected

    from urllib3.exceptions import TimeoutError

    causes = list(_causes(error))
    last = causes[-1]
    found = [each for each in causes if isinstance(each, OSError) and each.strerror]
    if found:
        return str(found[-1].strerror)[:200]
    if any(isinstance(each, TimeoutError) for each in causes):
        return "timed out"
    if isinstance(last, RemoteDisconnected):
        return "it closed the connection"
    if isinstance(last, IncompleteRead):
        return "it sent less than it announced"
    if isinstance(last, (BadStatusLine, ValueError)):
        return "what it sent is not HTTP"
    return (" ".join(str(last).split()) or type(last).__name__)[:200]
