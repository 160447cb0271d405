"""A hub on this machine: serves repositories over HTTP as Hugging Face and ModelScope do, with faults.

Only what their clients ask for when kt pulls a model. Faults that last are attributes that a test sets: files that
arrive cut off, with other bytes, an answer with an error status, a server that falls silent. `script` gives a file
faults that happen once each, in order.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from waits import until

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one answer to GET.

    Attributes:
        cut_after: bytes sent before the connection breaks.
        status, headers: an error that is sent instead, and what else the answer has.
        longer_by: bytes that Content-Length claims too many (or too few).
        corrupt: whether a byte in the middle of what is sent is another one.
        etag: sent instead of the file's own.
        pause_s: seconds between pieces of 1000 bytes.
        no_ranges: whether the whole file is sent, whatever part was asked for.
        later_by: bytes by which the part that is sent begins too late; its Content-Range says so.
        before: called first.
    """

    cut_after: int | None = None
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    longer_by: int = 0
    corrupt: bool = False
    etag: str = ""
    pause_s: float = 0
    no_ranges: bool = False
    later_by: int = 0
    before: Callable[[], None] = lambda: None


class Hub:
    """Repositories by id, each a dict of file name to bytes; and what goes wrong."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.url = ""
        self.requests: list[str] = []
        self.cut_after: dict[str, int] = {}  # file: bytes sent before the connection breaks, once
        self.corrupt: set[str] = set()  # files sent with their first byte changed
        self.status: int = 0  # answer everything with this status
        self.troubles: list[
            tuple[int, dict[str, str]]
        ] = []  # statuses, headers of the next; 0: none
        self.error_code = ""  # Hugging Face's X-Error-Code that goes with it
        self.stall_after: dict[str, int] = {}  # file: bytes sent before the hub falls silent
        self.goes_on = threading.Event()  # ends that silence
        self.sent: Counter[str] = Counter()  # bytes of each file that went out
        self.script: dict[str, deque[Fault]] = defaultdict(deque)  # by file
        self.commit = COMMIT
        self.pace_s = 0.0  # between pieces of 8 KiB, of every answer: what was sent has arrived
        self.elsewhere = False  # large files are sent by another host, as by a CDN
        self.facts: dict[str, Any] = {}  # what else the hub says of every repository: gated, tags
        self.secrets: list[str] = []  # of all requests: what their clients prove with who they are
        self.moved_to = ""  # another server's address: everything is redirected there
        self.seen: list[dict[str, str]] = []  # the headers of each request for a file's bytes
        self.answering: set[threading.Thread] = set()  # those that answer a request now

    def rest(self) -> None:
        """Waits until nothing goes out any more to clients that have left: until then it would be counted."""
        until(lambda: not self.answering)

    def fetched(self, name: str) -> int:
        """How often a file's content was asked for."""
        return sum(
            1 for line in self.requests if line.startswith("GET ") and line.endswith(f"/{name}")
        )


@contextmanager
def serve() -> Iterator[Hub]:
    """A running hub."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = _Server(("127.0.0.1", 0), Handler)
    # What went out has arrived, nearly: tests count it.
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, *args: Any) -> None:
        pass  # clients that go away are what the tests are about


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def parse_request(self) -> bool:  # once its first line has come
        self.hub.answering.add(threading.current_thread())
        return super().parse_request()

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        finally:
            self.hub.answering.discard(threading.current_thread())

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.secrets += [
            self.headers[name] for name in ("Authorization", "Cookie") if name in self.headers
        ]
        if self.hub.moved_to:
            self._send(302, b"", body, {"Location": self.hub.moved_to + self.path})
            return
        if self.hub.troubles:
            status, headers = self.hub.troubles.pop(0)
            if status:
                self._send(status, b"{}", body, headers)
            else:
                self.close_connection = True  # without an answer
            return
        if self.hub.status:
            headers = {"X-Error-Code": self.hub.error_code} if self.hub.error_code else {}
            self._send(self.hub.status, b'{"error": "as the test wants"}', body, headers)
            return
        parts = path.strip("/").split("/")
        if parts in (["api", "models"], ["openapi", "v1", "models"]):
            self._search(parts[0], query, body)
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._info("/".join(parts[2:4]), parts[4:], body)
        elif parts[:3] == ["api", "v1", "models"] and len(parts) >= 6:
            self._modelscope("/".join(parts[3:5]), parts[5:], query, body)
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), "/".join(parts[4:]), body)
        elif len(parts) >= 4 and parts[0] == "elsewhere":
            name = "/".join(parts[3:])
            self._bytes(name, self.hub.repositories["/".join(parts[1:3])][name], {}, body)
        else:
            self._send(404, b"{}", body)

    def _search(self, kind: str, query: dict[str, list[str]], body: bool) -> None:
        """Lists the repositories whose id has the words, as either hub does."""
        words = query.get("search", [""])[0].lower().split()
        found = [name for name in self.hub.repositories if all(w in name.lower() for w in words)]
        rows = [
            {"id": name, "downloads": 1000 - i} | self.hub.facts for i, name in enumerate(found)
        ]
        if kind == "api":
            self._send(200, json.dumps(rows[: int(query["limit"][0])]).encode(), body)
            return
        rows = rows[: int(query["page_size"][0])]
        answer = {"success": True, "data": {"models": rows, "total_count": len(found)}}
        self._send(200, json.dumps(answer).encode(), body)

    # --- Hugging Face -------------------------------------------------------------------------

    def _info(self, repository: str, rest: list[str], body: bool) -> None:
        files = self.hub.repositories.get(repository)
        if files is None:
            self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
            return
        if len(rest) > 1 and rest[1] not in ("main", self.hub.commit):
            self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            return
        if rest[:1] == ["tree"]:
            rows: Any = [
                {"type": "file", "path": name, "size": len(data), "oid": _sha1(data)}
                | _lfs(name, data)
                for name, data in files.items()
            ]
        else:
            siblings = [
                {"rfilename": name, "size": len(data), "blobId": _sha1(data)} | _lfs(name, data)
                for name, data in files.items()
            ]
            rows = {
                "id": repository,
                "modelId": repository,
                "sha": self.hub.commit,
                "siblings": siblings,
            }
            rows |= self.hub.facts
        self._send(200, json.dumps(rows).encode(), body)

    def _file(self, repository: str, name: str, body: bool) -> None:
        data = self.hub.repositories.get(repository, {}).get(name)
        if data is None:
            self._send(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})
            return
        big = bool(_lfs(name, data))
        etag = _sha256(data) if big else _sha1(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.hub.commit, "Accept-Ranges": "bytes"}
        if big:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        if big and self.hub.elsewhere:
            place = self.hub.url.replace("127.0.0.1", "localhost")
            self._send(
                302, b"", body, headers | {"Location": f"{place}/elsewhere/{repository}/{name}"}
            )
            return
        self._bytes(name, data, headers, body)

    # --- ModelScope ---------------------------------------------------------------------------

    def _modelscope(
        self, repository: str, rest: list[str], query: dict[str, list[str]], body: bool
    ) -> None:
        files = self.hub.repositories.get(repository)
        if files is None:
            self._send(404, b'{"Code": 404, "Message": "no such model"}', body)
        elif rest == ["repo", "files"]:
            rows = [
                {"Path": name, "Name": name, "Size": len(data), "Type": "blob", "Revision": COMMIT,
                 "Sha256": _sha256(data)}
                for name, data in files.items()
            ]  # fmt: skip
            answer = {"Code": 200, "Success": True, "Data": {"Files": rows}}
            self._send(200, json.dumps(answer).encode(), body)
        elif rest == ["repo"] and query.get("FilePath", [""])[0] in files:
            name = query["FilePath"][0]
            self.hub.requests.append(f"GET /{name}")
            self._bytes(name, files[name], {"ETag": f'"{_sha1(files[name])}"'}, body)
        else:
            self._send(404, b"{}", body)

    # --- bytes --------------------------------------------------------------------------------

    def _bytes(self, name: str, data: bytes, headers: dict[str, str], body: bool) -> None:
        script = self.hub.script[name]
        fault = script.popleft() if body and script else Fault()
        if body:
            self.hub.seen.append(dict(self.headers))
        fault.before()
        if fault.status:
            self._send(fault.status, b"{}", body, fault.headers)
            return
        if fault.etag:
            headers |= {"ETag": f'"{fault.etag}"'}
        start, end, wanted = 0, len(data), "" if fault.no_ranges else self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            first, _, last = wanted[6:].partition("-")
            start, end = int(first or 0), min(int(last) + 1 if last else len(data), len(data))
            start += fault.later_by
            if start >= end:
                self._send(416, b"", body, {"Content-Range": f"bytes */{len(data)}"})
                return
            headers |= {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        if name in self.hub.corrupt and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        rest = memoryview(data)[start:end]
        if fault.corrupt and rest:
            changed = bytearray(rest)
            changed[len(rest) // 2] ^= 1
            rest = memoryview(changed)
        self.send_response(206 if wanted else 200)
        for key, value in (headers | fault.headers).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(rest) + fault.longer_by))
        self.end_headers()
        if not body:
            return
        cut = fault.cut_after if fault.cut_after is not None else self.hub.cut_after.pop(name, None)
        try:
            self._trickle(name, rest if cut is None else rest[:cut], fault.pause_s)
        except OSError:
            self.close_connection = True
        if cut is not None or fault.longer_by:
            self.close_connection = True

    def _trickle(self, name: str, data: memoryview, pause_s: float) -> None:
        size = 1000 if pause_s else 8 << 10 if self.hub.pace_s else 64 << 10
        for i in range(0, len(data), size):
            if self.hub.sent[name] >= self.hub.stall_after.get(name, math.inf):
                self.hub.goes_on.wait()
            piece = data[i : i + size]
            self.wfile.write(piece)
            self.hub.sent[name] += len(piece)
            time.sleep(pause_s or self.hub.pace_s)

    def _send(
        self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


def _lfs(name: str, data: bytes) -> dict[str, Any]:
    """Large files carry their SHA-256, as those in LFS do."""
    if not name.endswith(".safetensors"):
        return {}
    digest = _sha256(data)
    return {"lfs": {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 130}}


@lru_cache(maxsize=256)  # a file is asked for in many pieces
def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@lru_cache(maxsize=256)
def _sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
