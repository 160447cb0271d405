"""Sends requests to a server that speaks OpenAI's API, and records when each piece of an answer arrives.

It has a client of its own, since `client` is above the parts that measure, and its library would take its time between
a piece's arrival and the clock.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from ktcli import certificates
from ktcli.errors import KtError, ServerFailed, UsageError, gib
from ktcli.records import dataclass

ROUTED_TO = "x-smg-routed-worker-id"  # by which a router says which server answered
SILENCE_S = 600.0  # after which a server is given up
_DOCUMENT_BYTES = 64 << 20
_LINE_BYTES = 1 << 20
_STREAM_BYTES = 256 << 20  # millions of tokens, whatever is around them
_SHOWN = 300  # characters of what a server says


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt for a server, and the most tokens of its answer."""

    text: str
    output_tokens: int


@dataclass(slots=True)
class StreamedAnswer:
    """The pieces of one answer and their arrival times, those of `time.perf_counter`.

    Attributes:
        sent_s: when it was sent.
        pieces_s: when each piece of the answer came.
        prompt_tokens, output_tokens: as the server counts them; 0: it does not say.
        cached_tokens: of those of the prompt, as the server counts them.
        error: why there is no answer; empty: there is one.
        server: the one that a router sent the request to; empty: it does not say, or there is no router.
    """

    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    server: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that speaks OpenAI's API.

    Attributes:
        url: its address, without `/v1`.
        key: what it wants to be shown; empty: nothing.
        model: the model that is asked for.
        trusted: the authorities by which it is verified; None: it has no certificate.
    """

    url: str
    key: str = ""
    model: str = ""
    trusted: ssl.SSLContext | None = None

    @classmethod
    def at(cls, url: str, key: str = "", model: str = "") -> Endpoint:
        """Returns the server at the address `url`, for requests to `model`; if that is "", the server is asked, and the
        first model that it lists is used.

        Raises:
            UsageError: `url` is not an address or contains a user, or the server is asked and refuses the key.
            KtError: no server that is asked answers, or it does not have OpenAI's API.
        """
        if "@" in url:
            raise UsageError(
                "--url contains a user name or a password, which are not sent",
                hint="leave them out; a key goes into a file that only you can read: --api-key-file",
            )
        base = url.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(base)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port
        except ValueError:
            sound = False
        if not sound:
            raise UsageError(
                f"--url is {url[:_SHOWN]!r}, which is not a server address",
                hint="for example http://127.0.0.1:11435",
            )
        trusted = certificates.context() if parts.scheme == "https" else None
        found = cls(base, key, model, trusted)
        return found if model else replace(found, model=found._first_model())

    def count(self, text: str) -> int | None:
        """Returns the number of tokens of `text` by the server's tokenizer; None: the server does not tell."""
        said = {"model": self.model, "content": text, "prompt": text}
        try:
            status, document = self._document("POST", "/tokenize", said)
            tokens = document["tokens"] if status == 200 else None
        except (KtError, KeyError, TypeError):
            return None
        return len(tokens) if isinstance(tokens, list) else None

    def ask(self, prompt: Prompted) -> StreamedAnswer:
        """Sends a prompt to the server and waits for the whole answer; returns it with the arrival time of each piece,
        or with the message of a failure in `error`."""
        found = StreamedAnswer(time.perf_counter())
        try:
            with _Exchange(self, "POST", "/v1/chat/completions", self._body(prompt)) as reply:
                found.server = reply.headers.get(ROUTED_TO, "")[:_SHOWN]
                _check_stream(reply)
                if not _read_stream(reply, found):
                    found.error = "the stream ended before the answer did"
        except (OSError, HTTPException, KtError) as error:
            found.error = str(error) or type(error).__name__
        return found

    def _body(self, prompt: Prompted) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": prompt.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _first_model(self) -> str:
        status, document = self._document("GET", "/v1/models")
        if status == 401:
            raise UsageError(
                f"{self.url} rejected the API key" if self.key else f"{self.url} needs an API key",
                hint="give one with --api-key-file or --api-key",
            )
        name = _first_of(_object(document), "data").get("id")
        if status != 200 or not isinstance(name, str):
            raise KtError(
                f"{self.url} does not say which models it has: {_said(status, document)}",
                hint="give one with --model if it speaks OpenAI's API",
            )
        return name

    def _document(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """The status and the document of an answer; None: it is no JSON.

        Raises:
            KtError: nobody is there.
        """
        try:
            with _Exchange(self, method, path, body) as reply:
                return reply.status, _json(reply.read(_DOCUMENT_BYTES))
        except ssl.SSLCertVerificationError as error:
            raise certificates.unverified(self.url, error) from error
        except (OSError, HTTPException) as error:
            why = str(error) or type(error).__name__
            raise ServerFailed(
                f"no response from {self.url}: {why}", hint="start a server with: kt serve NAME"
            ) from error


class _Exchange:
    """One request and its reply, on a connection of its own."""

    def __init__(self, endpoint: Endpoint, method: str, path: str, body: Any) -> None:
        parts = urlsplit(endpoint.url)
        host, port, trusted = parts.hostname or "", parts.port, endpoint.trusted
        self._connection = (
            HTTPSConnection(host, port, timeout=SILENCE_S, context=trusted)
            if trusted is not None
            else HTTPConnection(host, port, timeout=SILENCE_S)
        )
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if endpoint.key:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        self._request = (method, parts.path + path, data, headers)

    def __enter__(self) -> HTTPResponse:
        try:
            self._connection.request(*self._request)
            return self._connection.getresponse()
        except BaseException:
            self._connection.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _check_stream(reply: HTTPResponse) -> None:
    """Raises: KtError: the reply is no stream."""
    kind = reply.headers.get_content_type()
    if reply.status != 200:
        raise KtError(_said(reply.status, _json(reply.read(_DOCUMENT_BYTES))))
    if kind != "text/event-stream":
        raise KtError(f"the server responded with {kind}, not with an event stream")


def _read_stream(reply: HTTPResponse, found: StreamedAnswer) -> bool:
    """Reads the events of an answer; returns whether its end was among them.

    Raises:
        KtError: the server tells of an error.
    """
    for line in _lines(reply):
        now_s = time.perf_counter()
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return True
        event = _json(data)
        if not _is_object(event):
            raise KtError(f"the stream contains a line that is not an event: {line[:_SHOWN]!r}")
        if event.get("error"):
            raise KtError(_said(reply.status, event))
        if text := _text(event):
            found.pieces_s.append(now_s)
            found.text += text
        if _is_object(usage := event.get("usage")):
            found.prompt_tokens = _count(usage, "prompt_tokens")
            found.output_tokens = _count(usage, "completion_tokens")
            details = _object(usage.get("prompt_tokens_details"))
            found.cached_tokens = _count(details, "cached_tokens")
    return False


def _lines(reply: HTTPResponse) -> Iterator[bytes]:
    """The lines of a stream that have data. Raises: KtError: it has no end."""
    total = 0
    while line := reply.readline(_LINE_BYTES):
        if (total := total + len(line)) > _STREAM_BYTES:
            raise KtError(f"the server sent more than {gib(_STREAM_BYTES)} in one answer")
        if line.startswith(b"data:"):
            yield line


def _text(event: dict[str, Any]) -> str:
    """What an event adds to the answer: its text or its thoughts."""
    delta = _object(_first_of(event, "choices").get("delta"))
    thoughts = delta.get("reasoning_content") or delta.get("reasoning")
    return "".join(each for each in (thoughts, delta.get("content")) if isinstance(each, str))


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and value >= 0 else 0


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _object(value: Any) -> dict[str, Any]:
    """The value, if it is an object, else an empty one."""
    return value if _is_object(value) else {}


def _first_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The first object of a list in a field; empty: there is none."""
    rows = found.get(name)
    return _object(rows[0]) if isinstance(rows, list) and rows else {}


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _said(status: int, document: Any) -> str:
    """What a server says of an error."""
    error = _object(document).get("error")
    words = error.get("message") if _is_object(error) else error
    return (
        words[:_SHOWN] if isinstance(words, str) and words else f"it responded with status {status}"
    )
