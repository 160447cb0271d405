"""Asks one server for its list of models, and for chat completions as streams.

In a stream of events each line with data is a JSON object, and `[DONE]` ends it. It is foreign input, without end if
its sender likes: lines, and all of it, are bounded. One that ends without `[DONE]` was cut off; one with an error in it
failed, whatever follows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ktcli.client.address import ServerAddress
from ktcli.client.http import HttpClient
from ktcli.client.refused import failure, refusal
from ktcli.errors import ServerFailed, gib, hinted
from ktcli.records import dataclass
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
        """Returns the models that the server lists at /v1/models; None: it has no such list.

        Raises:
            ServerFailed: the server cannot be reached, refuses, or sends too much. UsageError: the key is missing or
                wrong.
        """
        return with_retries(self._models, self.tell)

    def stream(self, body: Document) -> Generator[Document]:
        """Yields the chunks of a chat completion, each a JSON object, as the server streams them; closing the generator
        ends the answer on the server.

        Args:
            body: the JSON body of the request, without the fields that ask for a stream.
        Raises:
            ContextFull: the server says that the conversation does not fit. NotFound: it has no such model.
            UsageError: the key is missing or wrong. ServerFailed: it fails, refuses, or the stream breaks off.
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


LINE_BYTES = 1 << 20
STREAM_BYTES = 256 << 20  # millions of tokens, whatever is around them
_SHOWN = 100  # bytes of a line that is not an event
Document = dict[str, Any]


def documents(chunks: Iterable[bytes], who: str) -> Iterator[Document]:
    """Yields the JSON objects in the `data` lines of an HTTP event stream, up to `[DONE]`; one that reports an error
    has the key `error`.

    Args:
        chunks: the bytes of the stream, divided anywhere.
        who: the server, for errors.
    Raises:
        ServerFailed: the stream ends before `[DONE]`, is too long, or is not such a stream.
    """
    failed = False  # whether the next data are those of an event that is called an error
    for line in _lines(chunks, who):
        field, _, value = line.partition(b":")
        value = value.strip()
        if field == b"event":
            failed = value == b"error"
        if field != b"data":
            continue
        if value == b"[DONE]":
            return
        try:
            found = json_object(value)
        except ValueError as error:
            said = f"{who} sent a line that is not an event: {line[:_SHOWN]!r} {error}"
            raise ServerFailed(said) from error
        # vLLM once sent errors as objects of this kind, others name the event.
        if found.get("object") == "error" or (failed and not found.get("error")):
            found = {"error": found}
        failed = False
        yield found
    raise ServerFailed(
        f"the stream of {who} ended before the answer did", hint=CUT_HINT, again_s=0.0
    )


CUT_HINT = "ask again; a saved chat keeps what came of the answer"


def _lines(chunks: Iterable[bytes], who: str) -> Iterator[bytes]:
    """Yields the lines of a stream as soon as they are whole; the beginning of one at the end is none."""
    rest, total = b"", 0
    for chunk in chunks:
        total += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        longest = max(map(len, (*lines, rest)))
        if longest > LINE_BYTES or total > STREAM_BYTES:
            what = f"a line of more than {gib(LINE_BYTES)}" if longest > LINE_BYTES else gib(total)
            raise ServerFailed(f"{who} sent {what} in one answer, which is no answer to read")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest.rstrip().endswith(b"[DONE]"):  # some servers forget the end of the last line
        yield rest


_NAME_CHARS = 1000
_MOST_MODELS = 10_000
_MOST_CONTEXT = 1 << 31
_READ_PROGRESS = ("kt", "llamacpp")  # owners whose servers say how far a prompt is read


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in a server's list of models.

    Attributes:
        name: what it is asked for by.
        context: the positions that a conversation can have; None: the server does not say.
        says_progress: whether its server can say how far a prompt is read.
    """

    name: str
    context: int | None = None
    says_progress: bool = False


def listed_models(document: Any) -> list[ListedModel] | None:
    """Returns the models in the JSON body of a server's response to /v1/models, each name once; None: the document is
    no such list.
    """
    rows = document.get("data") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        return None
    found: dict[str, ListedModel] = {}
    for row in rows[:_MOST_MODELS]:
        name = row.get("id") if isinstance(row, dict) else None
        if isinstance(name, str) and 0 < len(name) <= _NAME_CHARS and name not in found:
            said = ListedModel(name, _context(row), row.get("owned_by") in _READ_PROGRESS)
            found[name] = said
    return list(found.values())


def _context(row: dict[str, Any]) -> int | None:
    """Returns the context in a row: vLLM, SGLang and kt have the first name, gateways the second, llama-server the
    third."""
    meta = row.get("meta")
    said: Sequence[Any] = (
        row.get("max_model_len"),
        row.get("context_length"),
        meta.get("n_ctx") if isinstance(meta, dict) else None,
    )
    return next((each for each in said if type(each) is int and 0 < each < _MOST_CONTEXT), None)
