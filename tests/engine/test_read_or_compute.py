"""Laws of reading pages or computing their tokens: what is measured decides, and a slow link costs next to nothing.

Time is counted, not taken: a store says how long its reads would take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from ktcli.engine.pages import PagePool
from ktcli.engine.prefix import Content
from ktcli.engine.tier import Tier
from ktcli.pagelabel import Fill, PageKind, PageLabel, U8Array
from ktcli.store import readrate
from ktcli.store.readrate import ASSUMED_BPS, ReadRate

R1_PAGE = 64 * 70_272  # bytes of 64 tokens of DeepSeek-R1
LENGTHS = (65, 200, 512, 1024, 3000, 8192)


class Clock:
    """A time that passes when somebody waits for a store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(readrate.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Memory:
    """A memory of pages that takes no memory."""

    codec, page_bytes, state_bytes = "toy", R1_PAGE, 0

    def saved_page(self, page: int) -> U8Array:
        return np.zeros(0, np.uint8)

    page_room = saved_page

    def restore_page(self, page: int, room: U8Array) -> None: ...


class Link:
    """A store behind a link, which has everything.

    Attributes:
        asked, read_pages: how often it was asked what it has, and the pages that were read.
    """

    name = "store"

    def __init__(self, clock: Clock, bps: float, fixed_s: float = 0.002) -> None:
        self._clock, self.bps, self._fixed_s = clock, bps, fixed_s
        self.rate, self.asked, self.read_pages = ReadRate(ASSUMED_BPS), 0, 0
        self._there: set[bytes] = set()

    def refresh(self) -> None:
        self._there.clear()

    def seek(self, labels: Iterable[PageLabel]) -> None:
        whole = [label.key for label in labels if label.ids.size == 64]
        self.asked += bool(whole)
        self._there.update(whole)

    def has(self, kind: PageKind, key: bytes) -> bool:
        return key in self._there

    def states(self) -> Sequence[tuple[int, bytes, bytes]]:
        return ()

    def read(self, labels: Sequence[PageLabel], into: Sequence[U8Array]) -> int:
        size = len(labels) * R1_PAGE
        took_s = self._fixed_s + size / self.bps
        self._clock.now += took_s
        self.rate.note(size, took_s)
        self.read_pages += len(labels)
        return len(labels)

    def put(self, label: PageLabel, size_bytes: int, fill: Fill) -> bool:
        return False

    def use(self, keys: Iterable[bytes]) -> None: ...
    def hurry(self) -> None: ...
    def flush(self, wait_s: float) -> bool:
        return True


class Server:
    """A tier over a store, for prompts that this server never saw."""

    def __init__(self, clock: Clock, link: Link, tok_s: float) -> None:
        self._clock, self._link, self._tok_s, self._n = clock, link, tok_s, 0
        self._tier = Tier([link], Memory(), PagePool(256), None)  # type: ignore[arg-type,list-item]
        self._tier.prompt_tok_s = tok_s

    def prompt(self, length: int) -> tuple[float, int]:
        """Begins a prompt; returns its time as a share of that of computing it, and the tokens that were read."""
        self._n += 1
        ids = np.random.default_rng(self._n).integers(0, 99, length).astype(np.int32)
        began = self._clock.now
        came = sum(
            self._tier.bring(Content(ids, np.zeros(ids.size, np.uint8), b"root"), 0).values()
        )
        self._clock.now += (length - came) / self._tok_s
        return (self._clock.now - began) * self._tok_s / length, came


@pytest.mark.parametrize("tok_s", [20, 578, 1500, 2500, 6000, 50_000])
def test_a_link_of_100_mb_s_never_costs_more_than_a_twentieth(clock: Clock, tok_s: float) -> None:
    server = Server(clock, Link(clock, 100e6), tok_s)
    for length in (*LENGTHS, *LENGTHS[::-1]):
        share, _ = server.prompt(length)
        assert share <= 1.05
        clock.now += 50


def test_what_is_faster_is_read(clock: Clock) -> None:
    link = Link(clock, 100e6)
    server = Server(clock, link, 578)
    for length in (512, 1024, 3000):
        share, came = server.prompt(length)
        assert came == (length - 1) // 64 * 64 and share < 0.6


def test_a_store_that_loses_is_not_asked_but_now_and_then(clock: Clock) -> None:
    link = Link(clock, 20e6)  # R1 at 578 tokens/s needs 41 MB/s
    server = Server(clock, link, 578)
    shares = [server.prompt(3000)[0] for _ in range(8)]
    assert shares[0] < 1.05 and max(shares[1:]) < 1.0001
    assert link.asked == 1 and link.read_pages <= 2
    clock.now += 100
    server.prompt(512)  # too short for another try
    assert link.asked == 1
    link.bps = 1e9  # the network is idle again
    for _ in range(3):
        server.prompt(8000)
    share, came = server.prompt(3000)
    assert came == 2944 and share < 0.1


def test_a_rate_is_a_fixed_time_and_bytes_per_second(clock: Clock) -> None:
    rate = ReadRate(ASSUMED_BPS)
    assert rate.bps is None and not rate.is_known and rate.seconds(100_000_000) == 1.0
    assert ReadRate().seconds(1 << 40) == 0.0 and ReadRate().is_known
    rate.note(1000, 0.011)
    assert not rate.is_known and rate.seconds(2000) == pytest.approx(0.022)
    for size in (5000, 20_000, 1000, 50_000):
        rate.note(size, 0.01 + size / 1e6)
    assert rate.is_known and rate.seconds(100_000) == pytest.approx(0.11)
    clock.now += 100
    assert not rate.is_known
    for _ in range(30):
        rate.note(1 << 20, 1.0)
    assert rate.bps == pytest.approx(1 << 20, rel=0.01)
    assert rate.seconds(1 << 21) == pytest.approx(2.0, rel=0.05)
