"""Laws of the tier in a Mooncake store: nothing that it gives is trusted, nobody waits for it longer than a bound, and
it is used when it is back. The client is a fake, in the process in which the real one runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from store.fake_mooncake import FakeMooncake, fake_mooncake
from store.page_labels import PAGE_BYTES, SPACE, conversation, data_of, put, read
from waits import patient, until

from ktcli.pagelabel import PageKind, PageLabel, U8Array
from ktcli.store.mooncake import client
from ktcli.store.mooncake.client import MooncakeStore
from ktcli.store.mooncake.values import key_of, read_value, value_bytes
from ktcli.store.pagefile import Damaged, Image, Space

Patch = pytest.MonkeyPatch
PARTS = conversation("one", 4, states=2)
PAGES = [part for part in PARTS if part.kind == PageKind.PAGE]


def value_of(part: PageLabel, space: Space = SPACE, size: int = PAGE_BYTES) -> bytes:
    """The value of a record."""
    image = Image(space, [size])
    image.place(part, size)[:] = data_of(part, size)
    image.add(part, size)
    head, data = image.alone(image.entries[0])
    return head + data.tobytes()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: Patch) -> Iterator[FakeMooncake]:
    patient(monkeypatch, client)
    with fake_mooncake(tmp_path) as made:
        yield made


@contextmanager
def opened(fake: FakeMooncake, said: list[str] | None = None) -> Iterator[MooncakeStore]:
    """A store as a server opens it."""
    store = MooncakeStore(fake.connection, SPACE, PAGE_BYTES, ([] if said is None else said).append)
    try:
        yield store
    finally:
        store.close()


def found(store: MooncakeStore, parts: list[PageLabel]) -> int:
    """Asks for records, as a request does, and reads those that are there; returns how many came."""
    store.refresh()
    store.seek(parts)
    there = [part for part in parts if store.has(part.kind, part.key)]
    return read(store, there)  # type: ignore[arg-type]


# --- what is not as it should be is a miss -----------------------------------------------------------


def test_a_value_is_what_was_written() -> None:
    for part in PARTS:
        into, value = np.zeros(PAGE_BYTES, np.uint8), value_of(part)
        assert len(value) == value_bytes(part, PAGE_BYTES)
        read_value(np.frombuffer(value, np.uint8), SPACE, part, into)
        assert np.array_equal(into, data_of(part))


def lies(part: PageLabel) -> list[bytes]:
    """Values that are not that of a record, although they are under its key."""
    other = conversation("two", 1)[0]
    ids = np.array(part.ids)
    ids[-1] += 1
    two = Image(SPACE, [PAGE_BYTES] * 2)
    for each in (part, other):
        two.place(each, PAGE_BYTES)[:] = data_of(each)
        two.add(each, PAGE_BYTES)
    whole = value_of(part)
    return [
        b"",
        whole[:100],
        whole[:-1],
        whole + b"\0",
        bytes(len(whole)),
        value_of(other),
        value_of(part, Space(sha256(b"another model").digest(), "cpu")),
        value_of(part, Space(SPACE.namespace, "gpu")),
        value_of(replace(part, ids=ids)),
        value_of(replace(part, depths=part.depths + 1)),
        value_of(replace(part, end=part.end + 64)),
        value_of(replace(part, previous=part.key)),
        value_of(part, size=PAGE_BYTES - 64),
        two.finish()[1].tobytes(),
    ]


def test_every_lie_is_found() -> None:
    for value in lies(PARTS[0]):
        with pytest.raises(Damaged):
            read_value(
                np.frombuffer(value, np.uint8), SPACE, PARTS[0], np.zeros(PAGE_BYTES, np.uint8)
            )


def test_every_flipped_bit_is_found_that_counts() -> None:
    value, part = np.frombuffer(value_of(PAGES[0]), np.uint8).copy(), PAGES[0]
    rng, refused = np.random.default_rng(0), 0
    for at in rng.integers(0, 8 * value.size, 1000):
        value[at // 8] ^= 1 << at % 8
        into = np.zeros(PAGE_BYTES, np.uint8)
        try:
            read_value(value, SPACE, part, into)
        except Damaged:
            refused += 1
        else:  # it fills a gap
            assert np.array_equal(into, data_of(part))
        value[at // 8] ^= 1 << at % 8
    assert refused > 950


def test_a_store_that_lies_gives_nothing(fake: FakeMooncake) -> None:
    said: list[str] = []
    with opened(fake, said) as store:
        for which in range(len(lies(PARTS[0]))):
            pages = conversation(f"lie {which}", 4)
            for n, part in enumerate(pages):
                path = fake.path(key_of(SPACE, part.kind, part.key))
                path.write_bytes(lies(part)[which] if n == 2 else value_of(part))
            assert found(store, pages) == 2
            assert not store.has(pages[2].kind, pages[2].key) and not store.rests
            assert found(store, pages[:2]) == 2 and found(store, pages[3:]) == 1
            assert not store.put(pages[2], PAGE_BYTES, lambda into: True)  # it would stay as it is
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("the KV store mooncake://127.0.0.1:")


def test_a_key_without_a_value_is_a_miss(fake: FakeMooncake) -> None:
    with opened(fake) as store:
        fake.fails("exist", "1")
        assert found(store, PAGES) == 0 and not store.rests


# --- one server writes, another reads ----------------------------------------------------------------


def test_what_one_server_computed_the_other_finds(fake: FakeMooncake) -> None:
    with opened(fake) as one, opened(fake) as other:
        assert found(one, PARTS) == 0
        put(one, PARTS)  # type: ignore[arg-type]
        assert one.flush(30) and fake.count == len(PARTS)
        assert not one.put(PARTS[0], PAGE_BYTES, lambda into: True)  # it is there
        assert found(other, PARTS) == len(PARTS)
        states = [(part.end, part.previous, part.key) for part in PARTS if part not in PAGES]
        assert other.states() == sorted(states, reverse=True)
        assert other.rate.bps
    stranger = Space(sha256(b"another model").digest(), "cpu")
    store = MooncakeStore(fake.connection, stranger, PAGE_BYTES)
    assert found(store, PARTS) == 0
    store.close()


def test_values_larger_than_the_memory_come_in_parts(
    fake: FakeMooncake, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(client, "_LEAST_ROOM", 0)
    monkeypatch.setattr(client, "_BATCH_BYTES", 2000)
    with opened(fake) as store:
        put(store, PAGES)  # type: ignore[arg-type]
        assert store.flush(30) and fake.count == len(PAGES)
        assert found(store, PAGES) == len(PAGES)
        assert not store.put(PAGES[0], 1 << 20, lambda into: True)


# --- it fails ----------------------------------------------------------------------------------------


@contextmanager
def brief(patch: Patch) -> Iterator[None]:
    """Bounds that nothing which hangs keeps to."""
    with patch.context() as patched:
        for name in ("LOOK_S", "READ_S", "STALL_S", "_WRITE_S"):
            patched.setattr(client, name, 0.05)
        yield


@pytest.mark.parametrize("how", ["stall", "die", "-900"])
@pytest.mark.parametrize("call", ["exist", "get", "put"])
def test_nobody_waits_for_a_store_that_fails_and_it_is_used_when_it_is_back(
    fake: FakeMooncake, call: str, how: str, monkeypatch: Patch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(client, "REST_S", 0.0)
    with opened(fake, said) as store:
        put(store, PAGES[:2])  # type: ignore[arg-type]
        assert store.flush(30)
        store._seen.clear()
        first = store._helper
        fake.fails(call, how)
        with brief(monkeypatch):
            for n in range(2):
                if call == "put":
                    put(store, PAGES[2 + n :][:1])  # type: ignore[arg-type]
                    store.flush(10)
                else:
                    assert found(store, PAGES[:2]) == 0
        until(lambda: store._helper is not first)
        fake.recovers()
        until(lambda: not store.rests)
        assert found(store, PAGES[:2]) == 2
    assert len(said) == 1 and "goes on without the KV store mooncake://127.0.0.1" in said[0]
    assert first is not None and first.has_ended


def test_what_a_client_says_is_checked(fake: FakeMooncake) -> None:
    with opened(fake) as store:
        fake.fails("exist", "nonsense")
        assert found(store, PAGES) == 0 and store.rests


def test_a_full_store_is_read_and_said_once(fake: FakeMooncake) -> None:
    said: list[str] = []
    with opened(fake, said) as store:
        put(store, PAGES[:1])  # type: ignore[arg-type]
        assert store.flush(30)
        fake.fails("put", "-200")
        put(store, PAGES[1:2])  # type: ignore[arg-type]
        assert store.flush(30)
        assert not store.put(PAGES[2], PAGE_BYTES, lambda into: True) and not store.rests
        assert found(store, PAGES) == 1
    assert len(said) == 1 and "has no free memory" in said[0]


def test_kt_ends_while_the_store_hangs(fake: FakeMooncake, monkeypatch: Patch) -> None:
    with opened(fake) as store:
        helper = store._helper
        fake.fails("put")
        put(store, PAGES)  # type: ignore[arg-type]
        with monkeypatch.context() as patched:
            for name in ("STALL_S", "CLOSE_S"):
                patched.setattr(client, name, 0.05)
            store.close()
    assert helper is not None and helper.has_ended
    names = {each.name for each in threading.enumerate() if not each.daemon}
    assert not any(name.startswith("kt-") for name in names)


@pytest.mark.parametrize(
    ("how", "words"), [("-1", "refused (code -1)"), ("stall", "does not answer in time")]
)
def test_a_master_that_is_none_is_one_sentence(
    fake: FakeMooncake, how: str, words: str, monkeypatch: Patch
) -> None:
    said: list[str] = []
    fake.fails("setup", how)
    if how == "stall":  # else the process may take its time to begin
        monkeypatch.setattr(client, "OPEN_S", 1.0)
    monkeypatch.setattr(client, "REST_S", 1e9)
    with opened(fake, said) as store:
        assert store.rests and found(store, PAGES) == 0
        assert not store.put(PAGES[0], PAGE_BYTES, lambda into: True) and store.flush(0.0) is False
    assert len(said) == 1 and words in said[0] and "\n" not in said[0]


def test_a_budget_is_for_all_that_a_request_asks(fake: FakeMooncake, monkeypatch: Patch) -> None:
    with opened(fake) as store:
        put(store, PAGES)  # type: ignore[arg-type]
        assert store.flush(30)
        store.refresh()
        store.seek(PAGES)
        store._until = time.monotonic()
        into: list[U8Array] = [np.zeros(PAGE_BYTES, np.uint8) for _ in PAGES]
        assert store.read(PAGES, into) == 0 and not store.rests
        assert found(store, PAGES) == len(PAGES)
