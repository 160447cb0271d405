"""Whatever the network does, a file is complete and its hash is right, or an error says what is missing and the next
run goes on; and little is fetched twice."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st
from store.fake_hub import COMMIT, Fault, Hub, serve

from ktcli.errors import HubError, KtError
from ktcli.store import contents, download, library, partial, places, transfer
from ktcli.store.partial import Located, PartialFile
from ktcli.store.reference import parse
from ktcli.store.transfer import Stalled, Throttle, Transfer

CHUNK = 256 << 10
NAME = "model.safetensors"
DATA = random.Random(1).randbytes(2_100_000)  # a last chunk that is not whole
SIZE = len(DATA)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        running.repositories["org/tiny"] = {NAME: DATA, "config.json": b"{}"}
        yield running


def located(hub: Hub, name: str = NAME, data: bytes = DATA) -> Located:
    url = f"{hub.url}/org/tiny/resolve/{COMMIT}/{name}"
    headers = (("authorization", "Bearer secret"),)
    return Located(name, len(data), url, headers, hashlib.sha256(data).hexdigest())


def fetch(hub: Hub, folder: Path, limit: int | None = None) -> None:
    Transfer([located(hub)], folder, folder, limit_bps=limit).run(lambda n: None)


FAULTS = {
    "cut at once": Fault(cut_after=0),
    "cut": Fault(cut_after=100_001),
    "too long": Fault(longer_by=1000),
    "too short": Fault(longer_by=-1000),
    "busy": Fault(status=503),
    "asked to wait": Fault(status=429, headers={"Retry-After": "0"}),
    "timeout": Fault(status=408),
    "another etag": Fault(etag="other"),
    "another range": Fault(headers={"Content-Range": f"bytes 7-9/{SIZE}"}),
    "a later range": Fault(later_by=1000),
    "an odd date": Fault(status=503, headers={"Retry-After": "Foo, 99 Bar 2000"}),
}


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_trouble_is_waited_out_and_little_is_fetched_twice(
    hub: Hub, tmp_path: Path, fault: str, elsewhere: bool
) -> None:
    hub.elsewhere = elsewhere
    hub.script[NAME].extend([FAULTS[fault], Fault(), FAULTS[fault]])
    fetch(hub, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert list(tmp_path.glob(f"{NAME}*")) == [tmp_path / NAME]
    # An answer to another range is thrown away with its connection.
    assert hub.sent[NAME] <= SIZE + (2 * CHUNK if fault.endswith("range") else SIZE // 20)


def test_a_connection_that_always_breaks_and_always_brings_something_is_enough(
    hub: Hub, tmp_path: Path
) -> None:
    """A chunk may take more attempts than are made in a row without a byte."""
    piece = CHUNK // (2 * transfer.ATTEMPTS)
    hub.script[NAME].extend([Fault(cut_after=piece)] * (SIZE // piece))
    fetch(hub, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert hub.sent[NAME] <= SIZE + SIZE // 20


def test_a_server_without_ranges_is_read_in_one_go(hub: Hub, tmp_path: Path) -> None:
    hub.script[NAME].extend([Fault(no_ranges=True)] * 40)
    fetch(hub, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA


def test_a_server_that_hardly_sends_is_asked_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SLOW_S", 0.2)
    monkeypatch.setattr(transfer, "LEAST_BYTES", 10_000)  # less than a piece
    hub.script[NAME].append(Fault(pause_s=0.05))
    fetch(hub, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert hub.fetched(NAME) > -(-SIZE // CHUNK)  # the slow answer was not waited for


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_is_not_repeated(hub: Hub, tmp_path: Path, status: int) -> None:
    hub.script[NAME].extend([Fault(status=status)] * 40)
    with pytest.raises(requests.HTTPError):
        fetch(hub, tmp_path)
    assert hub.fetched(NAME) <= transfer.CONNECTIONS


def test_a_place_that_closes_is_asked_for_anew(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The addresses of a CDN hold for an hour."""
    monkeypatch.setattr(transfer, "CONNECTIONS", 1)
    hub.elsewhere = True
    hub.script[NAME].extend([Fault()] * 6 + [Fault(status=403)])
    fetch(hub, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA


def test_a_token_goes_to_the_hub_alone(hub: Hub, tmp_path: Path) -> None:
    hub.elsewhere = True
    fetch(hub, tmp_path)
    assert hub.seen
    for headers in hub.seen:
        assert headers["Host"].startswith("localhost")
        assert "secret" not in str(headers)


def test_a_server_is_waited_for_as_it_asks_up_to_a_bound(hub: Hub, tmp_path: Path) -> None:
    hub.script[NAME].append(Fault(status=429, headers={"Retry-After": "1"}))
    began = time.monotonic()
    fetch(hub, tmp_path)
    assert time.monotonic() - began >= 1
    hub.script[NAME].extend([Fault(status=429, headers={"Retry-After": "86400"})] * 40)
    with pytest.raises(requests.HTTPError):
        fetch(hub, tmp_path / "..")


def test_a_chunk_that_gets_nothing_ends_the_transfer_and_the_next_goes_on(
    hub: Hub, tmp_path: Path
) -> None:
    hub.script[NAME].extend([Fault()] * 4 + [Fault(cut_after=0)] * 100)
    with pytest.raises(OSError, match=r".") as caught:
        fetch(hub, tmp_path)
    assert isinstance(caught.value, Stalled | requests.RequestException)
    assert not (tmp_path / NAME).exists()
    hub.script.clear()
    fetch(hub, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert hub.sent[NAME] <= 1.05 * SIZE


class Waits(threading.Event):
    """Notes how long it was waited for, and does not wait."""

    def wait(self, timeout: float | None = None) -> bool:
        self.total = getattr(self, "total", 0.0) + (timeout or 0)
        return False


def test_connections_share_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    throttle, waits = Throttle(1000), Waits()
    assert [throttle.wait(500, waits) for _ in range(4)] == [0, 0.5, 1.0, 1.5]
    assert waits.total == 3
    assert Throttle(None).wait(1 << 40, waits) == 0


@pytest.mark.parametrize(
    "left",
    [b"", b"kt-part2", bytes(220), b"kt-part2" + b"\xff" * 212, None],
    ids=["empty", "short", "zeros", "another", "counts too much"],
)
def test_counters_that_are_no_counters_begin_anew(
    hub: Hub, tmp_path: Path, left: bytes | None
) -> None:
    file = PartialFile(located(hub), tmp_path, CHUNK)
    file.write(0, DATA[:1000])
    file.close()
    if left is None:
        left = file.counters_path.read_bytes()[:76] + b"\xff" * (16 * file.n_chunks)
    file.counters_path.write_bytes(left)
    assert PartialFile(located(hub), tmp_path, CHUNK).arrived_bytes == 0
    fetch(hub, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA


def test_after_another_start_of_the_machine_only_flushed_bytes_are_trusted(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may lose written bytes and keep their counters."""
    flushed: list[int] = []
    start = tmp_path / "boot_id"
    start.write_text("a" * 36 + "\n")
    monkeypatch.setattr(partial, "_START", start)
    monkeypatch.setattr(partial, "FLUSH_BYTES", CHUNK)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: flushed.append(file.arrived_bytes))
    file = PartialFile(located(hub), tmp_path, CHUNK)
    for offset in range(0, 3 * CHUNK + 5000, 5000):
        file.write(offset, DATA[offset : offset + 5000])
    file.close()
    assert len(flushed) == 3
    again = PartialFile(located(hub), tmp_path, CHUNK)
    assert again.arrived_bytes == file.arrived_bytes  # killed, but the machine ran on
    again.open()
    again.close()
    for _ in range(2):  # also where the power goes again before anything else is written
        start.write_text(f"{_}" * 36 + "\n")
        after = PartialFile(located(hub), tmp_path, CHUNK)
        assert after.arrived_bytes == flushed[-1] < file.arrived_bytes
        after.open()
        after.close()
    kept = flushed[-1]
    after.bytes_path.write_bytes(DATA[:kept] + bytes(SIZE - kept))
    fetch(hub, tmp_path)
    assert (tmp_path / NAME).read_bytes() == DATA
    assert hub.sent[NAME] <= SIZE - kept


@pytest.mark.parametrize("flushed", [0, 2 * CHUNK])
def test_where_no_start_of_the_machine_is_known_only_flushed_bytes_are_trusted(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: int
) -> None:
    """As on a system without a boot id: the machine may have been started since."""
    monkeypatch.setattr(partial, "_START", tmp_path / "missing")
    monkeypatch.setattr(partial, "FLUSH_BYTES", flushed or SIZE)
    file = PartialFile(located(hub), tmp_path, CHUNK)
    file.write(0, DATA[: 3 * CHUNK])
    file.close()
    assert file.arrived_bytes == 3 * CHUNK
    assert PartialFile(located(hub), tmp_path, CHUNK).arrived_bytes == flushed


def test_bytes_that_arrive_during_a_flush_are_not_counted_as_flushed(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "boot_id"
    start.write_text("a" * 36)
    monkeypatch.setattr(partial, "_START", start)
    monkeypatch.setattr(partial, "FLUSH_BYTES", CHUNK)
    monkeypatch.setattr(os, "fdatasync", lambda _: file.write(2 * CHUNK, DATA[2 * CHUNK :][:1000]))
    file = PartialFile(located(hub), tmp_path, CHUNK)
    file.write(0, DATA[:CHUNK])
    file.close()
    assert file.arrived_bytes == CHUNK + 1000
    start.write_text("b" * 36)
    assert PartialFile(located(hub), tmp_path, CHUNK).arrived_bytes == CHUNK


def test_a_file_is_flushed_before_it_gets_its_name(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("flushed"))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("named"), replace(a, b)))
    fetch(hub, tmp_path)
    assert done == ["flushed", "named"]


def test_a_file_without_a_hash_is_never_continued(tmp_path: Path) -> None:
    """The half of an old file and that of a new one may have one size."""
    about = Located(NAME, SIZE, "")
    file = PartialFile(about, tmp_path, CHUNK)
    file.write(0, DATA[:1000])
    file.close()
    assert PartialFile(about, tmp_path, CHUNK).arrived_bytes == 0


def test_bytes_behind_a_gap_are_not_counted(tmp_path: Path) -> None:
    file = PartialFile(Located(NAME, SIZE, "", sha256="0" * 64), tmp_path, CHUNK)
    assert file.write(0, DATA[:1000]) == 1000
    assert file.write(1001, DATA[1001:2000]) == 0
    assert file.write(500, DATA[500:2000]) == 1000
    assert file.arrived_bytes == file.frontier() == 2000
    file.close()
    assert file.bytes_path.read_bytes() == DATA[:2000]


def test_bytes_that_two_connections_bring_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one, in the middle of a write, and one whose bytes are damaged."""
    file = PartialFile(Located(NAME, SIZE, "", sha256="0" * 64), tmp_path, CHUNK)
    descriptor, pwrite = file.open(), os.pwrite
    begun, goes_on = threading.Event(), threading.Event()

    def slow(to: int, data: bytes, offset: int) -> int:
        if to == descriptor and not begun.is_set():
            begun.set()
            assert goes_on.wait(60)
        return pwrite(to, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(file.write, 0, DATA[:1000])
        assert begun.wait(60)
        second = pool.submit(file.write, 0, bytes(1000))
        with contextlib.suppress(TimeoutError):
            second.result(0.1)  # it would be done by now if it did not wait
        goes_on.set()
        assert (first.result(), second.result()) == (1000, 0)
    assert file.arrived_bytes == 1000 and file.bytes_path.read_bytes() == DATA[:1000]


def test_a_link_in_place_of_a_partial_file_is_not_followed(hub: Hub, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / f"{NAME}.part").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        fetch(hub, tmp_path)
    assert victim.read_bytes() == b"precious"


TROUBLE = st.sampled_from(
    [
        Fault(),
        Fault(cut_after=70_000),
        Fault(cut_after=0),
        Fault(longer_by=99),
        Fault(status=503),
        Fault(status=429, headers={"Retry-After": "0"}),
        Fault(corrupt=True),
        Fault(no_ranges=True),
        Fault(status=404),
        Fault(status=403),
    ]
)


@pytest.mark.thorough
@settings(max_examples=40)
@given(st.lists(TROUBLE, max_size=40), st.lists(st.integers(0, SIZE), max_size=4))
def test_after_any_trouble_the_file_is_whole_or_the_next_run_makes_it_so(
    trouble: list[Fault], kills: list[int]
) -> None:
    from tempfile import TemporaryDirectory

    with serve() as hub, TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "CHUNK_BYTES", CHUNK)
        patch.setattr(transfer, "FIRST_PAUSE_S", 0.001)
        received: list[int] = []
        patch.setattr(transfer, "_receive", functools.partial(_note, transfer._receive, received))
        folder = Path(name)
        hub.repositories["org/tiny"] = {NAME: DATA}
        hub.script[NAME].extend(trouble)
        for at in [*kills, None, *[None] * len(trouble)]:
            run = Transfer([located(hub)], folder, folder)
            try:
                run.run(functools.partial(_give_up, run, at))
            except (KeyboardInterrupt, OSError, HubError):
                for thread in threading.enumerate():  # a killed process leaves none
                    if thread.name == "kt-pull":
                        thread.join()
            if (folder / NAME).exists():
                break
        assert (folder / NAME).read_bytes() == DATA
        if not any(each.corrupt or each.no_ranges for each in trouble):
            assert sum(received) == SIZE  # no byte that arrived was asked for again


def _note(receive: Callable[[Any, int], bytes], sizes: list[int], answer: Any, most: int) -> bytes:
    data = receive(answer, most)
    sizes.append(len(data))
    return data


def _give_up(run: Transfer, at: int | None, n: int) -> None:
    if at is not None and run.new_bytes >= at:
        raise KeyboardInterrupt


PULL = """
from ktcli.store import download, transfer
from ktcli.store.reference import parse

class Unwatched:
    def begin(self, *_): pass
    def advance(self, *_): pass
    def end(self): pass

transfer.CHUNK_BYTES = 256 << 10
download.pull(parse("org/tiny"), Unwatched())
"""


@pytest.mark.parametrize("times", [1, pytest.param(12, marks=pytest.mark.thorough)])
def test_a_pull_that_is_killed_goes_on_inside_the_file(hub: Hub, times: int) -> None:
    """What a killed process wrote is not asked for again, however often it is killed."""
    hub.pace_s = 0.002
    chance = random.Random(times)
    folder = places.checkpoint_path("org--tiny")
    before = 0
    for _ in range(times):
        hub.sent.clear()
        process = subprocess.Popen([sys.executable, "-c", PULL])
        target = chance.randrange((SIZE - before) // (2 if times == 1 else 6))
        while hub.sent[NAME] <= target:
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        hub.rest()
        assert library.find("org/tiny") is None
        assert hub.sent[NAME] <= SIZE - before
        arrived = PartialFile(located(hub), folder / ".kt-pull", CHUNK).arrived_bytes
        assert arrived >= before
        before = arrived
    hub.sent.clear()
    entry = download.pull(parse("org/tiny"), _Unwatched())
    assert (entry.path / NAME).read_bytes() == DATA
    assert hub.sent[NAME] == SIZE - before


class _Unwatched:
    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None: ...
    def advance(self, n_bytes: int) -> None: ...
    def end(self) -> None: ...


def test_a_revision_that_moves_meanwhile_changes_nothing(hub: Hub) -> None:
    def move() -> None:
        hub.commit = "f" * 40

    hub.script[NAME].append(Fault(before=move))
    entry = download.pull(parse("org/tiny@main"), _Unwatched())
    assert entry.source.endswith(COMMIT)
    assert all(COMMIT in line for line in hub.requests if "resolve" in line)


def test_a_file_that_changes_on_the_hub_is_an_error_that_the_next_pull_heals(hub: Hub) -> None:
    other = DATA[::-1]

    def change() -> None:
        hub.repositories["org/tiny"][NAME] = other

    hub.script[NAME].extend([Fault(), Fault(before=change)])
    with pytest.raises(HubError, match="arrived damaged"):
        download.pull(parse("org/tiny"), _Unwatched())
    entry = download.pull(parse("org/tiny"), _Unwatched())
    assert (entry.path / NAME).read_bytes() == other


def test_a_listing_of_ten_thousand_files_with_hostile_names(hub: Hub, tmp_path: Path) -> None:
    files = hub.repositories["org/tiny"]
    hostile = ("../../up.json", "/abs.json", "x" * 300 + ".json", "a\x1b[2J.json", "n\n.json", ".")
    files |= dict.fromkeys(hostile, b"{}")
    files |= {f"data/{i}.bin": b"" for i in range(10_000)}
    entry = download.pull(parse("org/tiny"), _Unwatched())
    names = {path.name for path, _ in contents.walk(tmp_path)}
    assert names == {NAME, "config.json", "kt-source.json"}
    assert entry.complete


def test_a_full_disk_is_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "_put", full)
        with pytest.raises(KtError, match="the disk is full"):
            download.pull(parse("org/tiny"), _Unwatched())
    assert download.pull(parse("org/tiny"), _Unwatched()).complete
