"""A server that speaks OpenAI's API by a script, for tests, and breaks off where they want."""

from __future__ import annotations

import json
import ssl
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"
EVENTS = {"Content-Type": "text/event-stream"}


@dataclass
class Reply:
    """One response.

    Attributes:
        parts: what is sent of its body, each at once.
        cut: whether the connection closes in the middle of it, and not behind it.
        wait: nothing more is sent before this is set; None: nothing is waited for.
    """

    parts: Sequence[bytes] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: dict(EVENTS))
    cut: bool = False
    wait: threading.Event | None = None


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def delta(model: str = "m", finish: str | None = None, **said: Any) -> bytes:
    """A chunk of a chat completion."""
    choice = {"index": 0, "delta": said, "finish_reason": finish}
    return event({"object": "chat.completion.chunk", "model": model, "choices": [choice]})


def said(*texts: str, model: str = "m", finish: str = "stop", usage: Any = None) -> list[bytes]:
    """The parts of a whole answer."""
    last = [] if usage is None else [event({"choices": [], "usage": usage})]
    pieces = [delta(model, content=text) for text in texts]
    return [delta(model, role="assistant", content=""), *pieces, delta(model, finish), *last, DONE]


def refused(status: int, message: str, **more: Any) -> Reply:
    headers = {"Content-Type": "application/json", **more.pop("headers", {})}
    document = {"error": {"message": message, **more}}
    return Reply([json.dumps(document).encode()], status, headers)


class ScriptedOpenAI:
    """A server that gives the next reply of `script` to each chat, or `usual` where there is none.

    Attributes:
        models: the document of `/v1/models`, or its bytes; None: it has no such path.
        requests: those that came: path, headers in lower case, and document.
        left: is set when a client has left in the middle of a reply.
    """

    def __init__(self) -> None:
        self.models: Any = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        self.script: deque[Reply] = deque()
        self.usual = Reply(said("hel", "lo"))
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.left = threading.Event()
        self.url = ""

    @property
    def chats(self) -> list[Any]:
        """The requests for answers."""
        return [document for path, _, document in self.requests if path.endswith("completions")]


def _handler(server: ScriptedOpenAI) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._note(None)
            if self.path != "/v1/models" or server.models is None:
                self._send(refused(404, "Not Found"))
            elif isinstance(server.models, Reply):
                self._send(server.models)
            else:
                made = server.models
                data = made if isinstance(made, bytes) else json.dumps(made).encode()
                self._send(Reply([data], headers={"Content-Type": "application/json"}))

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._note(json.loads(self.rfile.read(length)))
            self._send(server.script.popleft() if server.script else server.usual)

        def _note(self, document: Any) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            server.requests.append((self.path, headers, document))

        def _send(self, reply: Reply) -> None:
            self.close_connection = True
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Transfer-Encoding": "chunked"}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for part in reply.parts:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                if reply.wait is not None:
                    self._wait(reply.wait)
                if not reply.cut:
                    self.wfile.write(b"0\r\n\r\n")
            except OSError:
                server.left.set()

        def _wait(self, until: threading.Event) -> None:
            """Waits, and notes when the client leaves meanwhile."""
            self.connection.settimeout(0.05)
            while not until.is_set():
                try:
                    if not self.connection.recv(1):
                        server.left.set()
                        return
                except TimeoutError:
                    continue

    return Handler


@contextmanager
def openai_server(context: ssl.SSLContext | None = None) -> Iterator[ScriptedOpenAI]:
    """Runs a server while the context lasts."""
    made = ScriptedOpenAI()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(made)) as http:
        http.handle_error = lambda *_: None  # type: ignore[method-assign]
        if context is not None:
            http.socket = context.wrap_socket(http.socket, server_side=True)
        made.url = f"http{'s' if context else ''}://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield made
        finally:
            http.shutdown()
            thread.join(60)
