"""Asks one server over HTTP or HTTPS: its list of models, and chat completions as streams.

Nothing is followed elsewhere, certificates are verified, and nothing that a server sends is read without a bound. A
connection serves one request: closing it is what tells the server to stop.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from ktcli.client.address import ServerAddress
from ktcli.client.events import CUT_HINT, Document, documents
from ktcli.client.listing import ListedModel, listed_models
from ktcli.client.refused import failure, refusal
from ktcli.errors import ServerFailed, gib
from ktcli.smallfiles import json_object
from ktcli.store.retrying import silent, with_retries

if TYPE_CHECKING:
    from requests import PreparedRequest, Response

CONNECT_S = 10.0
SILENCE_S = (
    600.0  # without a byte of an answer, after which a server is given up: prompts may be long
)
BODY_S = 30.0  # for a list of models or an error
LIST_BYTES, ERROR_BYTES = 4 << 20, 64 << 10
_BLOCK = 1 << 16
_START = "start a server with: kt serve NAME"


class ServerClient:
    """A server that speaks OpenAI's API.

    Args:
        key: what it wants to be shown; empty: nothing.
        tell: is given a sentence before each new attempt.
    Attributes:
        url: its address, for people as well.
    """

    def __init__(
        self, address: ServerAddress, key: str = "", tell: Callable[[str], object] = silent
    ) -> None:
        import requests  # most chats ask no server

        self.url, self.tell, self._key = address.url, tell, key
        self._is_here = address.is_here
        self._session = requests.Session()
        # Without one of its own, requests would send a password of ~/.netrc.
        self._session.auth = self._authorized
        # No proxy stands between this machine and itself, whatever the environment says of others.
        self._proxies = {"no_proxy": address.host} if address.is_here else None

    def models(self) -> list[ListedModel] | None:
        """Returns the models that the server says it has; None: it does not say.

        Raises:
            ServerFailed: it is not there, refuses, or sends something else. UsageError: the key is missing or wrong.
        """
        return with_retries(self._models, self.tell)

    def stream(self, body: Document) -> Generator[Document]:
        """Yields the chunks of a chat completion; closing the generator ends the answer on the server.

        Raises:
            ContextFull: the server says that the conversation does not fit. NotFound: it has no such model.
            ServerFailed: it fails, refuses, or the stream breaks off.
        """
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._asked("POST", "/v1/chat/completions", body) as reply:
            if reply.status_code != 200:
                raise self._refusal(reply)
            kind = reply.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind != "text/event-stream":
                raise ServerFailed(
                    f"{self.url} responded with {kind[:100] or 'no content type'}, not with an event stream"
                )
            for document in documents(self._chunks(reply), self.url):
                if document.get("error"):
                    raise failure(self.url, document)
                yield document

    def _models(self) -> list[ListedModel] | None:
        with self._asked("GET", "/v1/models") as reply:
            if reply.status_code in (404, 405, 501):
                return None
            if reply.status_code != 200:
                raise self._refusal(reply)
            data = self._body(reply, LIST_BYTES)
        if data is None:
            raise ServerFailed(f"{self.url} lists models in more than {gib(LIST_BYTES)}")
        with contextlib.suppress(ValueError):
            return listed_models(json_object(data))
        return None

    @contextlib.contextmanager
    def _asked(self, method: str, path: str, body: Document | None = None) -> Iterator[Response]:
        """Opens a context with the response to a request, which is not read yet.

        Raises:
            ServerFailed: there is none.
        """
        from requests import RequestException

        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        try:
            reply = self._session.request(
                method,
                f"{self.url}{path}",
                data=None if body is None else json.dumps(body).encode(),
                headers=headers,
                stream=True,
                allow_redirects=False,
                timeout=(CONNECT_S, SILENCE_S if method == "POST" else BODY_S),
                proxies=self._proxies,
            )
        except RequestException as error:
            raise self._absent(error) from error
        with contextlib.closing(reply):
            yield reply

    def _authorized(self, request: PreparedRequest) -> PreparedRequest:
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _chunks(self, reply: Response) -> Iterator[bytes]:
        """Yields what arrives, as it arrives.

        Raises:
            ServerFailed: the connection breaks, or nothing comes any more.
        """
        from urllib3.exceptions import HTTPError, ReadTimeoutError

        try:
            while chunk := reply.raw.read1(_BLOCK, decode_content=False):
                yield chunk
        except ReadTimeoutError as error:
            raise ServerFailed(f"{self.url} sent nothing for {SILENCE_S:.0f} s") from error
        except HTTPError as error:
            said = f"the connection to {self.url} broke off: {_why(error)}"
            raise ServerFailed(said, hint=CUT_HINT, again_s=0.0) from error

    def _body(self, reply: Response, most: int) -> bytes | None:
        """Returns the body of a short response; None: it is longer than `most` bytes.

        Raises:
            ServerFailed: the connection breaks, or it does not come in time.
        """
        data, until_s = b"", time.monotonic() + BODY_S
        for chunk in self._chunks(reply):
            data += chunk
            if len(data) > most:
                return None
            if time.monotonic() > until_s:
                raise ServerFailed(f"{self.url} did not finish its response in {BODY_S:.0f} s")
        return data

    def _refusal(self, reply: Response) -> Exception:
        said: Any = None
        if not 300 <= reply.status_code < 400:
            with contextlib.suppress(ValueError):
                said = json_object(self._body(reply, ERROR_BYTES) or b"")
        return refusal(self.url, reply.status_code, said, reply.headers, key=bool(self._key))

    def _absent(self, error: Exception) -> ServerFailed:
        """Returns the error of a request that got no response."""
        import ssl

        for cause in _causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                return ServerFailed(
                    f"the certificate of {self.url} cannot be verified: {cause.verify_message}",
                    hint="REQUESTS_CA_BUNDLE names a file with certificates of your own that you trust",
                )
            if isinstance(cause, ssl.SSLError) and cause.reason:
                said = cause.reason.replace("_", " ").lower()
                return ServerFailed(f"{self.url} does not speak TLS as https needs it: {said}")
            if isinstance(cause, socket.gaierror):  # it will not be known in a second either
                return ServerFailed(f"no response from {self.url}: {_why(error)}")
        hint = _START if self._is_here else ""
        return ServerFailed(f"no response from {self.url}: {_why(error)}", hint=hint, again_s=0.0)


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
    found = [each for each in _causes(error) if isinstance(each, OSError) and each.strerror]
    if found:
        return str(found[-1].strerror)[:200]
    last = list(_causes(error))[-1]
    return (" ".join(str(last).split()) or type(last).__name__)[:200]
