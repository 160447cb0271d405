"""The events of KV pages on their way: numbered, sent again on request, told from the beginning to who comes late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest
from ports import free_port
from server.test_kv_events import ROOT, hashes, line
from waits import until

from ktcli.errors import Busy
from ktcli.pagelabel import PageLabel
from ktcli.server.kvevents import publisher
from ktcli.server.kvevents.address import EventsAddress
from ktcli.server.kvevents.publisher import EventPublisher, ReplayBuffer, publishing

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
WAIT_MS = 20_000
END = b"\xff" * 8


def named(pages: Iterable[PageLabel]) -> list[int]:
    """What events call the pages of one sequence: the last 64 bits of their hashes, as vLLM does."""
    return [int.from_bytes(each[24:], "big") for each in hashes(pages)]


def address() -> EventsAddress:
    """Two ports, one after the other, at which nobody listens."""
    return EventsAddress("127.0.0.1", free_port(together=2))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventPublisher]:
    monkeypatch.setattr(publisher, "_AGAIN_S", 0.0)
    made = EventPublisher(address(), "0")
    made.changes.begins(ROOT, "CPU")
    yield made
    made.close()


class Listener:
    """Somebody who listens, and may ask for what was lost."""

    def __init__(self, to: EventPublisher, queue: int = 1000) -> None:
        self._zmq = zmq.Context()
        self._sub = self._zmq.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, queue)
        self._sub.connect(to.address.endpoint)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._ask = self._zmq.socket(zmq.DEALER)
        self._ask.connect(to.address.replay.endpoint)
        self.numbers: list[int] = []

    def next(self) -> list[dict[str, Any]]:
        """The events of the next message."""
        assert self._sub.poll(WAIT_MS), "nothing came"
        topic, number, payload = self._sub.recv_multipart()
        assert topic == b"" and len(number) == 8
        self.numbers.append(int.from_bytes(number, "big"))
        return events(payload)

    def hears(self) -> bool:
        """Whether a message is there, or comes soon."""
        return bool(self._sub.poll(200))

    def until(self, count: int) -> list[dict[str, Any]]:
        """The first `count` blocks that are stored after the last time that all was cleared."""
        found = list[dict[str, Any]]()
        while len(found) < count:
            for event in self.next():
                found = [] if event["type"] == "AllBlocksCleared" else [*found, event]
        return found

    def again(self, first: int) -> dict[int, bytes]:
        """The messages that are sent again, by their numbers."""
        self._ask.send_multipart((b"", first.to_bytes(8, "big")))
        found = dict[int, bytes]()
        while True:
            assert self._ask.poll(WAIT_MS), "nothing came"
            empty, topic, number, payload = self._ask.recv_multipart()
            assert empty == topic == b""
            if number == END:
                return found
            found[int.from_bytes(number, "big")] = payload

    def ask(self, *frames: bytes) -> None:
        self._ask.send_multipart(frames)

    def close(self) -> None:
        self._zmq.destroy(linger=0)


@pytest.fixture
def listener(made: EventPublisher) -> Iterator[Listener]:
    until(lambda: made._sent.next == 1)  # that nothing is there
    found = Listener(made)
    assert found.next()[0]["type"] == "AllBlocksCleared"
    yield found
    found.close()


def events(payload: bytes) -> list[dict[str, Any]]:
    when, found, rank = msgspec.msgpack.decode(payload)
    assert isinstance(when, float) and rank == 0
    return list(found)


def test_events_are_maps_with_every_key(made: EventPublisher, listener: Listener) -> None:
    pages = line((1, 2), 2)
    for page in pages:
        made.changes.came(page)
    first, second = named(pages)
    ids = pages[0].ids.tolist()
    facts = {
        "block_size": 64,
        "lora_id": None,
        "lora_name": None,
        "medium": "CPU",
        "token_ids": ids,
    }
    stored = {"type": "BlockStored", **facts}
    assert listener.until(2) == [
        {**stored, "block_hashes": [first], "parent_block_hash": None},
        {**stored, "block_hashes": [second], "parent_block_hash": first},
    ]
    made.changes.went(pages[1].key)
    removed = {"type": "BlockRemoved", "block_hashes": [second], "medium": "CPU"}
    assert listener.next() == [removed]
    made.changes.ends()
    assert listener.next() == [{"type": "AllBlocksCleared"}]
    assert listener.numbers == list(
        range(listener.numbers[0], listener.numbers[0] + len(listener.numbers))
    )


def test_who_comes_late_is_told_all_from_the_beginning(
    made: EventPublisher, listener: Listener
) -> None:
    pages = line((1,), 40)  # of more than one message
    for page in pages:
        made.changes.came(page)
    listener.until(len(pages))
    late = Listener(made)
    try:
        told = [each["block_hashes"][0] for each in late.until(len(pages))]
        assert told == named(pages) and late.numbers[0] > 0
        listener.until(len(pages))  # heard it again
    finally:
        late.close()


def test_what_was_lost_is_sent_again(made: EventPublisher, listener: Listener) -> None:
    pages = line((1,), 3)
    for page in pages:
        made.changes.came(page)
        listener.until(1)
    last = listener.numbers[-1]
    again = listener.again(last - 1)
    assert list(again) == [last - 1, last]
    assert [events(again[n])[0]["block_hashes"] for n in again] == [[h] for h in named(pages)[1:]]
    assert listener.again(last + 1) == {}
    assert list(listener.again(0)) == list(range(last + 1))


def test_who_asks_for_what_is_not_kept_any_more_is_told_all(
    made: EventPublisher, listener: Listener
) -> None:
    (page,) = line((1,), 1)
    made.changes.came(page)
    listener.until(1)
    made._sent._most = 1
    (other,) = line((2,), 1)
    made.changes.came(other)
    assert [each["type"] for each in listener.next()] == ["BlockStored"]
    assert len(listener.again(0)) == 1
    assert [each["type"] for each in listener.next()] == [
        "AllBlocksCleared",
        "BlockStored",
        "BlockStored",
    ]


def test_nonsense_of_who_asks_is_not_answered(made: EventPublisher, listener: Listener) -> None:
    for frames in ((b"",), (b"", b"1"), (b"x",) * 5, (b"", b"\0" * 9)):
        listener.ask(*frames)
    assert listener.again(0)
    other = Listener(made)
    other.ask(b"", b"a" * 100_000)
    other.close()
    assert listener.again(0)


@pytest.mark.thorough
def test_who_does_not_listen_keeps_nobody_waiting_and_gets_what_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is sent far more than its queue, the server's and the system's hold."""
    monkeypatch.setattr(publisher, "_QUEUE", 10)
    made = EventPublisher(address(), "0")
    made.changes.begins(ROOT, "CPU")
    until(lambda: made._sent.next == 1)
    slow = Listener(made, queue=1)
    try:
        until(lambda: made._sent.next == 2)  # that nothing is there
        for n in range(64):
            for page in line((n,), 400):
                made.changes.came(page)
        until(lambda: len(made._book) == 64 * 400)
        made.changes.came(line((64,), 1)[0])
        until(lambda: len(made._book) == 64 * 400 + 1)  # so all that came before it is sent
        later = iter(range(100, 200))
        while not gaps(slow.numbers):
            if not slow.hears():  # what was sent last is missed: that shows with the next one
                made.changes.came(line((next(later),), 1)[0])
            slow.next()
        missed = slow.again(slow.numbers[-2] + 1)
        assert list(missed) == list(range(slow.numbers[-2] + 1, slow.numbers[-1] + 1))
    finally:
        slow.close()
        made.close()


def gaps(numbers: list[int]) -> bool:
    return len(numbers) > 1 and numbers[-1] != numbers[-2] + 1


def test_the_buffer_keeps_the_last_ones() -> None:
    buffer = ReplayBuffer(most=3, most_bytes=10)
    assert [buffer.add(b"12") for _ in range(5)] == [0, 1, 2, 3, 4]
    assert [number for number, _ in buffer.since(0)] == [2, 3, 4]
    assert buffer.add(b"1234567") == 5 and [number for number, _ in buffer.since(4)] == [4, 5]
    buffer.add(b"more than there is room for")
    assert [number for number, _ in buffer.since(0)] == [6] and buffer.first == 6


def test_a_port_that_is_taken_is_named(made: EventPublisher) -> None:
    taken = EventsAddress("127.0.0.1", made.address.port + 1, "KT_KV_EVENTS")
    with pytest.raises(
        Busy, match=f"KT_KV_EVENTS: port {taken.port} on 127.0.0.1 is already in use"
    ):
        EventPublisher(taken)


def test_only_other_machines_are_warned_of() -> None:
    said = list[str]()
    free = address()
    with publishing(free, said.append) as made:
        assert made is not None and not said
    everywhere = EventsAddress.parse(f"tcp://*:{free.port}", "--kv-events")
    assert everywhere is not None and not everywhere.is_private
    with publishing(everywhere, said.append):
        assert "contain the token ids of all prompts and answers" in said[0]
    with publishing(EventsAddress.parse("off", "--kv-events"), said.append) as made:
        assert made is None
    six = EventsAddress.parse("tcp://[::1]:5557", "--kv-events")
    assert six is not None and six.is_private and six.replay.endpoint == "tcp://[::1]:5558"
