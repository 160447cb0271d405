"""Downloads files over HTTP: through several connections, resumed inside a file, hashed as they arrive.

Why not the hubs' own clients: `huggingface_hub` writes each attempt to a file of a random name and removes it when
the attempt fails, because on file systems without locks two processes would append to one file (its change 4228);
so a shard of 5 GB that is cut at 4.9 GB begins anew. Here a library lock keeps other processes out, chunks of a file
are asked for as ranges, and `partial` keeps what came. The clients still say what there is, where, and who we are.

Each worker takes the next chunk in the order of the files. Trouble of the network is waited out, longer each time, as
is what the server asks for in `Retry-After`; a chunk that gets nothing for some attempts ends the transfer. A thread
follows the bytes that are there without a gap and hashes them, so that no second pass is needed.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ktcli.errors import HubError
from ktcli.records import dataclass
from ktcli.store import tokens
from ktcli.store.partial import CHUNK_BYTES, Located, PartialFile
from ktcli.store.retrying import retry_after
from ktcli.threads import Daemon

CONNECTIONS = 8
ATTEMPTS = 7  # of a chunk, in a row and without a byte: half a minute
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LONGEST_ASKED_S = 600.0  # a server that asks to wait longer is told of to the user
CONNECT_S, READ_S = 15.0, 30.0
# A connection that gives less than LEAST_BYTES in SLOW_S seconds is dropped for another one.
LEAST_BYTES, SLOW_S = 16 << 10, 30.0
_BLOCK = 1 << 20
_POLL_S = 0.1
_TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524))


class Stalled(OSError):
    """Raised when the server sends almost no data, closes the connection early, or sends something else than was
    requested.
    """


@dataclass(frozen=True, slots=True)
class Arrived:
    """A complete file with the hash that the hub lists."""

    located: Located
    sha256: str


class Throttle:
    """Limits the rate of several connections together, bytes per second; None: no limit."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def block_bytes(self) -> int:
        """The number of bytes to read at once from a connection: about a tenth of a second of a limited rate, at most 1
        MiB.
        """
        return _BLOCK if not self._rate else max(1 << 10, min(_BLOCK, self._rate // 10))

    def wait(self, n_bytes: int, stop: threading.Event) -> float:
        """Waits until `n_bytes` more are within the rate limit, or until `stop` is set; returns the seconds to wait
        that the limit demanded.
        """
        if not self._rate:
            return 0.0
        with self._lock:
            now = time.monotonic()
            begins = max(now, self._free_at)
            self._free_at = begins + n_bytes / self._rate
        stop.wait(begins - now)
        return begins - now


class Transfer:
    """One transfer of several files into a folder.

    Args:
        folder: where the complete files go; partial ones lie in `scratch`.
        finished: called for each complete file, after it got its name, by one thread.
        limit_bps: the most bytes per second; None: no limit.
    Attributes:
        new_bytes: the bytes that have arrived since it was made.
    """

    def __init__(
        self,
        files: Sequence[Located],
        folder: Path,
        scratch: Path,
        finished: Callable[[Arrived], None] = lambda arrived: None,
        limit_bps: int | None = None,
    ) -> None:
        self._folder, self._finished = folder, finished
        self._files = [PartialFile(file, scratch, CHUNK_BYTES) for file in files]
        self._queue = deque(pair for file in self._files for pair in open_chunks(file))
        self._throttle = Throttle(limit_bps)
        self._stop = threading.Event()
        self._moved = threading.Condition()  # told when bytes have arrived
        self._failed: list[BaseException] = []
        self._damaged: list[str] = []
        self._asking_again_at = 0.0  # before it nobody asks again: the server said so
        self.present_bytes = sum(file.arrived_bytes for file in self._files)
        self.new_bytes = 0

    def run(self, advance: Callable[[int], None]) -> None:
        """Downloads the missing parts of all files; returns when every file is complete and verified.

        Args:
            advance: called with the bytes that arrived since its last call.
        Raises:
            HubError: files arrived damaged; they were removed, the others are kept.
            OSError: the network, the server or the disk failed (`requests.RequestException` is one).
        """
        # Daemons: Ctrl-C ends the program without waiting for a server that is silent.
        bodies = [self._verify, *[self._work] * min(CONNECTIONS, max(1, len(self._queue)))]
        threads = [Daemon(self._guard, body, name="kt-pull") for body in bodies]
        verifier = threads[0]
        for thread in threads:
            thread.start()
        told = 0
        try:
            while verifier.is_alive():
                verifier.join(_POLL_S)
                now = self.new_bytes
                advance(now - told)
                told = now
        finally:
            self._stop.set()
        deadline = time.monotonic() + 1.0
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # A descriptor that somebody still writes to must not become that of another file.
        if not any(thread.is_alive() for thread in threads):
            for file in self._files:
                file.close()
        if self._failed:
            raise self._failed[0]
        if self._damaged:
            raise _damage(self._damaged)

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # raised again in the thread that asked
            self._failed.append(error)
            self._stop.set()
        finally:
            with self._moved:
                self._moved.notify_all()

    # --- fetching -----------------------------------------------------------------------------

    def _work(self) -> None:
        import requests

        tokens.hold()
        with requests.Session() as session:
            while (found := self._next()) is not None:
                self._fetch(session, *found)

    def _next(self) -> tuple[PartialFile, int] | None:
        """A file and the number of a chunk of it that a worker should bring; None: there is nothing more to do."""
        try:
            return None if self._stop.is_set() else self._queue.popleft()
        except IndexError:
            return None

    def _fetch(self, session: Any, file: PartialFile, chunk: int) -> None:
        """Brings a chunk, whatever it takes."""
        attempts = 0
        while not self._stop.is_set():
            start, end = file.missing(chunk)
            if start >= end:
                return
            self._stop.wait(self._asking_again_at - time.monotonic())
            url = file.url
            try:
                self._stream(session, url, file, chunk)
                continue
            except OSError as error:  # every error of requests is one
                if not _is_transient(error):
                    if url == file.located.url or _status(error) not in (401, 403, 404, 410):
                        raise
                    file.url = file.located.url  # the place we were sent to is closed by now
                    continue
                attempts = 1 if file.missing(chunk)[0] > start else attempts + 1
                if attempts >= ATTEMPTS:
                    raise
                self._wait_as_asked(error, attempts)

    def _wait_as_asked(self, error: OSError, attempts: int) -> None:
        """Waits before the next attempt; where the server says how long, every connection does."""
        asked = retry_after(error)
        if asked is not None and asked > LONGEST_ASKED_S:
            raise error
        if asked is not None:
            self._asking_again_at = max(self._asking_again_at, time.monotonic() + asked)
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempts - 1))
        self._stop.wait(pause * random.uniform(0.75, 1.25))

    def _stream(self, session: Any, url: str, file: PartialFile, chunk: int) -> None:
        start, end = file.missing(chunk)
        with self._ask(session, url, file, (start, end)) as answer:
            if answer.status_code == 206:
                _require_range(answer, start, file)
                self._read(answer, file, start, end)
                return
        # The server knows no ranges: one connection takes the file from its beginning, the others wait for it.
        with file.single:
            start, end = file.missing(chunk)
            if start < end:
                with self._ask(session, url, file, None) as answer:
                    self._read(answer, file, 0, file.located.size_bytes)

    def _ask(
        self, session: Any, url: str, file: PartialFile, range_: tuple[int, int] | None
    ) -> Any:
        """The answer to a request for a range of a file, or for all of it; the address is kept for the next one."""
        headers = {"Accept-Encoding": "identity"}
        if tokens.is_same_server(url, file.located.url):  # a token goes to nobody else
            headers |= dict(file.located.headers)
        if range_ is not None:
            headers["Range"] = f"bytes={range_[0]}-{range_[1] - 1}"
        answer = session.get(url, headers=headers, stream=True, timeout=(CONNECT_S, READ_S))
        if answer.status_code >= 400:
            with answer:
                answer.raise_for_status()
        file.url = answer.url
        return answer

    def _read(self, answer: Any, file: PartialFile, start: int, end: int) -> None:
        """Writes the body of an answer, which begins at `start`, until `end`."""
        block = self._throttle.block_bytes
        since, before = time.monotonic(), start
        while start < end and not self._stop.is_set():
            data = _receive(answer, min(block, end - start))
            if not data:
                raise Stalled(f"{_host(file.url)} closed the connection early")
            new = file.write(start, data)
            start += len(data)
            with self._moved:
                self.new_bytes += new
                self._moved.notify_all()
            since += self._throttle.wait(len(data), self._stop)
            now = time.monotonic()
            if now - since > SLOW_S:
                if start - before < LEAST_BYTES:
                    raise Stalled(f"{_host(file.url)} is sending almost no data")
                since, before = now, start

    # --- verifying ----------------------------------------------------------------------------

    def _verify(self) -> None:
        for file in self._files:
            while (found := self._hashes(file)) is not None and not self._settle(file, *found):
                if not self._again(file):
                    self._damaged.append(file.located.name)
                    break

    def _hashes(self, file: PartialFile) -> tuple[str, str] | None:
        """The SHA-256 of a file as soon as all of it is there, and its hash as a git blob if that is asked for; None:
        the transfer was given up."""
        state, blob = hashlib.sha256(), None
        located = file.located
        if located.blob and not located.sha256:
            blob = hashlib.sha1(b"blob %d\0" % located.size_bytes, usedforsecurity=False)
        offset = 0
        while offset < located.size_bytes:
            there = self._wait_beyond(file, offset)
            if there is None:
                return None
            while offset < there:
                data = os.pread(file.open(), min(_BLOCK, there - offset), offset)
                if not data:
                    raise Stalled(f"{located.name} was truncated during the download")
                state.update(data)
                if blob:
                    blob.update(data)
                offset += len(data)
        return state.hexdigest(), blob.hexdigest() if blob else ""

    def _wait_beyond(self, file: PartialFile, offset: int) -> int | None:
        """The frontier of a file as soon as it is beyond `offset`; None: the transfer was given up."""
        with self._moved:
            while (there := file.frontier()) <= offset:
                if self._stop.is_set():
                    return None
                self._moved.wait(_POLL_S)
        return there

    def _settle(self, file: PartialFile, sha256: str, blob: str) -> bool:
        """Gives a complete file its name; returns whether it is what the hub says, else it is removed."""
        located = file.located
        if (located.sha256 and sha256 != located.sha256.lower()) or blob not in ("", located.blob):
            file.remove()
            return False
        file.finish(self._folder / located.name)
        self._finished(Arrived(located, sha256))
        return True

    def _again(self, file: PartialFile) -> bool:
        """Returns whether a file that arrived damaged is fetched once more by this transfer; if so, it is asked for."""
        return False


def open_chunks(file: PartialFile) -> Iterator[tuple[PartialFile, int]]:
    """Yields (file, number of the chunk) for each chunk of the file that has not arrived completely."""
    for chunk in range(file.n_chunks):
        start, end = file.missing(chunk)
        if start < end:
            yield file, chunk


def _damage(names: list[str]) -> HubError:
    what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    each = "it was" if len(names) == 1 else "they were"
    fetched = "this file" if len(names) == 1 else "these files"
    return HubError(
        f"{what} arrived damaged: the SHA-256 is not the hub's, and {each} removed",
        hint=f"run the same command again; it fetches only {fetched}",
    )


def _receive(answer: Any, most: int) -> bytes:
    """At most `most` bytes of a body, as soon as there are some; b"" at its end."""
    from urllib3.exceptions import HTTPError

    try:
        data: bytes = answer.raw.read1(most, decode_content=False)
    except HTTPError as error:  # of urllib3, which is no OSError
        raise Stalled(str(error)) from error
    return data


def _require_range(answer: Any, start: int, file: PartialFile) -> None:
    said = answer.headers.get("Content-Range", "")
    range_, _, total = said.removeprefix("bytes ").partition("/")
    if range_.partition("-")[0] != str(start):
        raise Stalled(f"{_host(file.url)} sent the range {said[:60]!r} of {file.located.name}")
    size = file.located.of_bytes or file.located.size_bytes
    if total not in ("", "*", str(size)):
        raise HubError(
            f"{file.located.name} has {total[:20]} bytes on {_host(file.url)}, not {size}: "
            "the repository has changed in the meantime",
            hint="run the same command again",
        )


def _is_transient(error: OSError) -> bool:
    """Returns whether trying again may help."""
    import requests

    if isinstance(error, requests.HTTPError):
        return _status(error) in _TRANSIENT
    if isinstance(error, requests.exceptions.SSLError | requests.exceptions.ProxyError):
        return False
    network = requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError
    return isinstance(error, (*network, Stalled, ConnectionError, TimeoutError))


def _status(error: OSError) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]
