"""Asks one server for its list of models, and for chat completions as streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from ktcli.client.address import ServerAddress
from ktcli.client.events import CUT_HINT, Document, documents
from ktcli.client.http import HttpClient
from ktcli.client.listing import ListedModel, listed_models
from ktcli.client.refused import failure, refusal
from ktcli.errors import ServerFailed, gib, hinted
from ktcli.smallfiles import json_object
from ktcli.store.retrying import silent, with_retries

if TYPE_CHECKING:
    from requests import Response

# Without a byte of an answer, after which a server is given up: prompts may be long.
SILENCE_S = 600.0
BODY_S = 30.0  # for a list of models or an error
LIST_BYTES, ERROR_BYTES = 4 << 20, 64 << 10


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
        self.url, self.tell, self._has_key = address.url, tell, bool(key)
        self._http = HttpClient(address, key, through_proxy=True)

    def models(self) -> list[ListedModel] | None:
        """Returns the models that the server lists; None: it has no such list.

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
        with self._http.asked("POST", "/v1/chat/completions", body, silence_s=SILENCE_S) as reply:
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
        with self._http.asked("GET", "/v1/models", silence_s=BODY_S) as reply:
            if reply.status_code in (404, 405, 501):
                return None
            if reply.status_code != 200:
                raise self._refusal(reply)
            data = self._http.body(reply, LIST_BYTES, BODY_S)
        if data is None:
            raise ServerFailed(f"{self.url} lists models in more than {gib(LIST_BYTES)}")
        with contextlib.suppress(ValueError):
            return listed_models(json_object(data))
        return None

    def _chunks(self, reply: Response) -> Iterator[bytes]:
        with hinted(CUT_HINT):
            yield from self._http.chunks(reply, SILENCE_S)

    def _refusal(self, reply: Response) -> Exception:
        said: Any = None
        if not 300 <= reply.status_code < 400:
            with contextlib.suppress(ValueError):
                said = json_object(self._http.body(reply, ERROR_BYTES, BODY_S) or b"")
        return refusal(self.url, reply.status_code, said, reply.headers, key=self._has_key)
