"""Publishes the KV pages of a server over ZeroMQ, as vLLM does, so that a router sends a prompt where it is cached.

A message is [topic, number in 8 bytes, payload]; the numbers count from 0. Who has lost some asks at the next port for
those from a number on, and gets [topic, number, payload] each, and at the end the number -1. Nobody who listens is ever
waited for: ZeroMQ drops what one does not take in time. Whoever begins to listen, or asks for what is not kept any
more, makes the server tell all that it holds, after the event that clears what was known before.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from ktcli.errors import Busy, UsageError
from ktcli.server.kvevents.address import EventsAddress
from ktcli.server.kvevents.blocks import DEFAULT_SEED, BlockBook
from ktcli.server.kvevents.changes import PageChanges
from ktcli.server.kvevents.wire import Event, packed
from ktcli.threads import Daemon, signals_blocked

if TYPE_CHECKING:
    import zmq

MOST = 10_000
_MOST_BYTES = 64 << 20


class ReplayBuffer:
    """Numbers messages from 0 on, and stores the last ones.

    Args:
        most: the most messages.
        most_bytes: the most bytes of their payloads.
    """

    def __init__(self, most: int = MOST, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self.next = 0

    @property
    def first(self) -> int:
        """The number of the oldest stored message."""
        return self.next - len(self._kept)

    def add(self, payload: bytes) -> int:
        """Stores the payload of a message, and drops the oldest ones beyond the limits; returns the number of the
        message."""
        self._kept.append(payload)
        self._bytes += len(payload)
        while len(self._kept) > self._most or (
            self._bytes > self._most_bytes and len(self._kept) > 1
        ):
            self._bytes -= len(self._kept.popleft())
        self.next += 1
        return self.next - 1

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yields the numbers and payloads of the stored messages, from `number` on."""
        for at, payload in enumerate(self._kept, self.first):
            if at >= number:
                yield at, payload


SEED_VARIABLE = "PYTHONHASHSEED"
INSTALL = "pip install 'ktcli[events]'"
_TOPIC = b""  # vLLM's
_END = (-1).to_bytes(8, "big", signed=True)
# Events of a message: the engine's thread waits at most for that much work of this one.
_AT_ONCE = 32
_GATHER_S = 0.01  # after the first change, for more of them
_AGAIN_S = 1.0  # from telling all until it is told again
_LINGER_MS = 200  # that a server which ends waits for those who listen
_QUEUE = 1000  # messages that wait for one who listens
_MOST_ASKED = 4096  # bytes of a message from who listens or asks
_MOST_TAKEN = 64  # messages, one after the other: changes are sent between them
_END_S = 2.0
_SUBSCRIBES = 1  # the first byte of a message from who begins to listen


class EventPublisher:
    """Publishes changes of KV pages, on a thread of its own.

    Args:
        address: where, as a number.
        seed: the text from which the first block's hash is made.
        warn: called with a sentence about what went wrong.
    Attributes:
        address: where.
        changes: observes the pages of the engine.
    """

    def __init__(
        self,
        address: EventsAddress,
        seed: str = DEFAULT_SEED,
        warn: Callable[[str], object] = lambda said: None,
    ) -> None:
        import zmq

        self.address, self._warn = address, warn
        self._book, self._sent = BlockBook(seed), ReplayBuffer()
        self._tells_at: float | None = None  # `time.monotonic`, when all is told
        self._told_at = -_AGAIN_S
        self._stopping = False
        with signals_blocked():  # ZeroMQ starts threads
            self._zmq = zmq.Context(io_threads=1)
            self._pub = self._socket(zmq.XPUB, address, _QUEUE)
            self._replay = self._socket(zmq.ROUTER, address.replay, MOST + 1)
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.changes = PageChanges(self._wake)
        self._thread = Daemon(self._run, name="kt-events")
        self._thread.start()

    def close(self) -> None:
        """Ends the publisher's thread, which drops most queued events if there are many; waits at most 2 s for it."""
        self._stopping = True
        self._wake()
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._zmq.destroy(linger=_LINGER_MS)
            wakes, self._wakes = self._wakes, -1
            os.close(wakes)

    def _socket(self, kind: int, address: EventsAddress, queue: int) -> zmq.Socket[bytes]:
        """A socket at an address. Raises: Busy, UsageError: it cannot be opened."""
        import zmq

        made = self._zmq.socket(kind)
        made.setsockopt(zmq.LINGER, _LINGER_MS)
        made.setsockopt(zmq.SNDHWM, queue)
        made.setsockopt(zmq.MAXMSGSIZE, _MOST_ASKED)  # of what comes
        made.setsockopt(zmq.IPV6, int(":" in address.host))
        if kind == zmq.XPUB:
            made.setsockopt(zmq.XPUB_VERBOSE, 1)  # it hears of each who begins to listen
        try:
            made.bind(address.endpoint)
        except zmq.ZMQError as error:
            self._zmq.destroy(linger=0)
            if error.errno == zmq.EADDRINUSE:
                raise Busy(
                    f"{address.source}: port {address.port} on {address.host} is already in use by another program",
                    hint="choose another one: events take two ports, one after the other",
                ) from error
            raise UsageError(
                f"{address.source}: cannot listen at {address.endpoint}: {zmq.strerror(error.errno or 0)}"
            ) from error
        return made

    def _wake(self) -> None:
        with suppress(OSError):
            os.eventfd_write(self._wakes, 1)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wait()
                self._send(self._book.apply(self.changes.take()))
                if self._tells_at is not None and time.monotonic() >= self._tells_at:
                    self._tell_all()
            self._send(self._book.apply(self.changes.take()))
        except Exception as error:  # routers then know less; answers go on
            self._warn(f"KV events are no longer published: {error}")
            self.changes.ends()

    def _wait(self) -> None:
        """Waits until something is to be done, and serves those who ask."""
        import zmq

        left_s = None if self._tells_at is None else max(0.0, self._tells_at - time.monotonic())
        poller = zmq.Poller()
        for each in (self._pub, self._replay, self._wakes):
            poller.register(each, zmq.POLLIN)
        found = dict(poller.poll(None if left_s is None else int(left_s * 1e3) + 1))
        if self._pub in found:
            self._hear()
        if self._replay in found:
            self._answer()
        if self._wakes in found:
            os.eventfd_read(self._wakes)
            if not self._stopping:
                time.sleep(_GATHER_S)

    def _hear(self) -> None:
        """Takes the messages of those who begin and end to listen."""
        for message in self._received(self._pub):
            if message[0][:1] == bytes((_SUBSCRIBES,)):
                self._tell_soon()

    def _answer(self) -> None:
        """Sends those who ask what they have lost."""
        for message in self._received(self._replay):
            *who, number = message
            if len(who) not in (1, 2) or len(number) != len(_END):
                continue
            first = int.from_bytes(number, "big")
            for at, payload in self._sent.since(first):
                self._replay.send_multipart((who[0], b"", _TOPIC, at.to_bytes(8, "big"), payload))
            self._replay.send_multipart((who[0], b"", b"", _END, b""))
            if first < self._sent.first:
                self._tell_soon()

    def _received(self, socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
        import zmq

        with suppress(zmq.Again):
            for _ in range(_MOST_TAKEN):
                yield socket.recv_multipart(zmq.DONTWAIT)

    def _tell_soon(self) -> None:
        if self._tells_at is None:
            self._tells_at = max(time.monotonic(), self._told_at + _AGAIN_S)

    def _tell_all(self) -> None:
        self._tells_at, self._told_at = None, time.monotonic()
        self._send(self._book.all())

    def _send(self, events: Iterable[Event]) -> None:
        """Sends events, some in each message."""
        left = iter(events)
        while some := list(islice(left, _AT_ONCE)):
            payload = packed(some, time.time())
            number = self._sent.add(payload)
            self._pub.send_multipart((_TOPIC, number.to_bytes(8, "big"), payload))
            if len(some) == _AT_ONCE:
                if self._stopping:
                    return
                time.sleep(1e-3)  # the engine's thread comes first


@contextmanager
def publishing(
    asked: EventsAddress | None, warn: Callable[[str], Any]
) -> Iterator[EventPublisher | None]:
    """Opens a context in which events of KV pages are published at an address; yields their publisher, or None if
    `asked` is None.

    Raises:
        UsageError: pyzmq is not installed, or there is no such address. Busy: another program listens there.
    """
    if asked is None:
        yield None
        return
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{asked.source} needs pyzmq, which is not installed",
            hint=f"install it with: {INSTALL}",
        ) from error
    if not asked.is_private:
        warn(
            f"KV events at {asked.endpoint} contain the token ids of all prompts and answers, for whoever reaches it"
        )
    made = EventPublisher(asked.resolved(), hash_seed(), warn)
    try:
        yield made
    finally:
        made.close()


def hash_seed() -> str:
    """Returns the text from which the first block's hash is made: the value of PYTHONHASHSEED, as in vLLM, or "0"."""
    return os.environ.get(SEED_VARIABLE) or DEFAULT_SEED
