"""Servers that follow a script, and a program in the place of smg, so that routers are tested without either."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from server.standins import StandIn, make_environment

from ktcli.store import engines

Reply = bytes | tuple[int, bytes] | Callable[[BaseHTTPRequestHandler], None]


def models(*names: str, context: int | None = 2048) -> bytes:
    """The list of models of a server."""
    rows = [{"id": name, "max_model_len": context} for name in names]
    return json.dumps({"object": "list", "data": rows}).encode()


def props(model: str, streams: int = 4, context: int = 2048) -> bytes:
    """What kt serve and llama-server say at /props."""
    settings = {"n_ctx": context}
    said = {"model_alias": model, "total_slots": streams, "default_generation_settings": settings}
    return json.dumps({**said, "build_info": "kt 0.1.0"}).encode()


def kt_server(model: str = "kt-mini", **more: int) -> dict[str, Reply]:
    """What a server of kt says."""
    return {
        "/v1/models": models(model, context=more.get("context", 2048)),
        "/props": props(model, **more),
        "/health": b'{"status":"ok"}',
    }


@dataclass
class ScriptedServer:
    """A server that says what it is told to.

    Attributes:
        replies: by path; 404 where there is none.
        seen: the paths that were asked, each with the key that was shown.
    """

    port: int
    replies: Mapping[str, Reply]
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"


@contextmanager
def scripted_server(
    replies: Mapping[str, Reply], context: ssl.SSLContext | None = None
) -> Iterator[ScriptedServer]:
    """A server in a thread, while the context lasts.

    Args:
        context: its certificate; None: it speaks HTTP.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.seen.append((self.path, self.headers.get("Authorization")))
            reply = made.replies.get(self.path, (404, b"{}"))
            if callable(reply):
                reply(self)
                return
            status, body = reply if isinstance(reply, tuple) else (200, reply)
            send(self, status, body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made = ScriptedServer(server.server_address[1], replies)
    if context is not None:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.socket = context.wrap_socket(server.socket, server_side=True)
        made.scheme = "https"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    """Sends a response."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def endless(handler: BaseHTTPRequestHandler) -> None:
    """A response that goes on slowly until the client leaves, but for half a minute at most."""
    handler.send_response(200)
    handler.end_headers()
    until = time.monotonic() + 30
    try:
        while time.monotonic() < until:
            handler.wfile.write(b" ")
            time.sleep(0.01)
    except OSError:
        return


def silent(handler: BaseHTTPRequestHandler) -> None:
    """No response until the client leaves."""
    with contextlib.suppress(OSError):
        handler.rfile.read(1)


# It does what it is told by the file `behaviour` beside it: "ok", or how it fails. It writes down its command line, as
# it got it and as others see it.
FAKE = """
import json, os, pathlib, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
here = pathlib.Path(__file__).parent
how = (here / "behaviour").read_text().split()
starts = here / "starts"
starts.write_text(f"{starts.read_text() if starts.exists() else ''}{os.getpid()}\\n")
(here / "words").write_text(json.dumps(sys.argv[1:]))
(here / "seen").write_bytes(pathlib.Path("/proc/self/cmdline").read_bytes())
def option(name):
    return sys.argv[sys.argv.index(name) + 1]
def say(level, message):
    print(json.dumps({"level": level, "message": message}), flush=True)
def urls():
    words = sys.argv[sys.argv.index("--worker-urls") + 1:]
    ends = [at for at, word in enumerate(words) if word.startswith("--")]
    return words[:ends[0]]
if how[0] == "crash":
    print("⠀⠀a banner", flush=True)
    say("ERROR", "the port is taken")
    sys.exit(3)
if how[0] == "traceback":
    raise RuntimeError("no such option")
workers = {url: str(at) for at, url in enumerate(urls())}
well = {url: True for url in workers}
key = option("--control-plane-api-keys").split(":")[-1]
class Handler(BaseHTTPRequestHandler):
    def reply(self, status, said):
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def allowed(self):
        if self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.reply(401, {})
    def do_GET(self):
        if self.path == "/readiness":
            n = 0 if how[0] == "unready" else len(workers)
            self.reply(200, {"healthy_workers": n, "total_workers": n})
        elif self.path == "/workers" and self.allowed():
            said = {"status": "ready", "is_healthy": not (here / "ill").exists()}
            self.reply(200, {"workers": [{"id": i, "url": u, **said} for u, i in workers.items()]})
        elif self.path == "/metrics":
            self.reply(200, (here / "metrics").read_bytes() if (here / "metrics").exists() else b"")
    def do_POST(self):
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.allowed():
            workers[said["url"]] = str(len(workers) + 10)
            self.reply(202, {})
    def do_DELETE(self):
        if self.allowed():
            for url, i in list(workers.items()):
                if self.path.endswith(f"/{i}"):
                    del workers[url]
            self.reply(202, {})
    def log_message(self, *_): ...
if how[0] == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("WARN", "SECURITY POSTURE: none")
say("WARN", "a warning of smg")
for port in (option("--prometheus-port"), option("--port")):
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
while how[0] != "later" or not (here / "dies").exists():
    time.sleep(0.02 if how[0] == "later" else 1)
say("ERROR", "out of file descriptors")
os._exit(4)
"""


class FakeSmg(StandIn):
    """An environment with a program in the place of smg."""


def install_fake(version: str | None = None) -> FakeSmg:
    """Puts a program in the place of smg into the library."""
    row = engines.row_of("smg")
    packages = make_environment(row, engines.folder() / f"smg@{version or row.version}")
    (packages / "smg").mkdir()
    (packages / "smg" / "__init__.py").touch()
    (packages / "smg" / "cli.py").write_text(FAKE, encoding="utf-8")
    fake = FakeSmg(packages / "smg")
    fake.does("ok")
    return fake
