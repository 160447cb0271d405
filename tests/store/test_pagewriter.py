"""The writer of KV pages: each record is written or counted as given up, and whoever computes is left alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from store.page_labels import SPACE, conversation

from ktcli.pagelabel import PageLabel
from ktcli.store import pagewriter
from ktcli.store.pagefile import Image
from ktcli.store.pagewriter import BUSY_SHARE, PageWriter, Target

SIZE = 100


def test_records_that_wait_behind_a_batch_that_cannot_be_written_are_counted_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pagewriter, "_RETRY_S", 0.001)
    tried, before = threading.Event(), threading.enumerate()

    def is_busy(image: Image) -> bool:
        tried.set()
        return False

    writer = PageWriter(Target(SPACE, 2 * SIZE, all_wanted, is_busy, lambda: None))
    for label in conversation("a", 5):
        writer.put(label, SIZE, lambda memory: True)
    assert tried.wait(60)
    writer.close(0.01)
    for thread in set(threading.enumerate()).difference(before):
        thread.join(60)
    assert writer.dropped == 5


@pytest.mark.parametrize("busy", [True, False])
def test_while_the_engine_is_busy_it_works_for_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """By a clock that goes on when it looks whether the engine is busy, and one of its own work."""
    passed, worked, done = [0.0], [0.0], threading.Event()
    clock = SimpleNamespace(monotonic=lambda: passed[0], thread_time=lambda: worked[0])
    monkeypatch.setattr(pagewriter, "time", clock)
    monkeypatch.setattr(pagewriter, "_REST_S", 0.0)

    def is_busy() -> bool:
        passed[0] += 1
        return busy

    def fill(memory: object) -> bool:
        worked[0] += 2
        return True

    writer = PageWriter(Target(SPACE, SIZE, all_wanted, lambda image: True, done.set))
    writer.busy = is_busy
    writer.put(conversation("a", 1)[0], SIZE, fill)
    assert done.wait(60)
    writer.close(30)
    rested = worked[0] / BUSY_SHARE - worked[0]
    assert rested <= passed[0] <= rested + 3 if busy else passed[0] <= 2


def all_wanted(labels: Sequence[PageLabel]) -> list[bool]:
    return [True] * len(labels)
