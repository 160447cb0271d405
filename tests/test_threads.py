"""Threads take no signals: whichever way one is started, and whatever it starts itself."""

import ast
import signal
import threading
from pathlib import Path

import pytest

import ktcli
from ktcli.threadpool import Threads
from ktcli.threads import BackgroundCall, Daemon, in_parallel, signals_blocked

FAULTS = {signal.SIGILL, signal.SIGFPE, signal.SIGSEGV, signal.SIGBUS}


def blocked() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_the_threads_of_kt_and_what_they_start_take_no_signals() -> None:
    found: list[set[int]] = []

    def note() -> None:
        found.append(blocked())
        inner = threading.Thread(target=lambda: found.append(blocked()))  # as a library does
        inner.start()
        inner.join()

    before = blocked()
    thread = Daemon(note, name="kt-test")
    thread.start()
    thread.join()
    with Threads(2, "kt-test") as team:
        team.submit(note).result()
        list(team.map(lambda _: note(), range(2)))
    assert blocked() == before
    assert len(found) == 8
    for each in found:
        assert {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM} <= each
        assert not each & FAULTS


def test_a_signal_waits_for_the_end_of_the_context() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with signals_blocked():
            signal.raise_signal(signal.SIGUSR1)
            assert heard == []
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_calls_use_is_given_back_only_when_all_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after Ctrl-C; and no further call begins."""
    begun, go, ended = threading.Event(), threading.Event(), list[int]()
    wait = BackgroundCall.wait

    def interrupted(self: BackgroundCall[None], wait_s: float) -> bool:
        if not go.is_set():
            begun.wait(60)
            go.set()
            raise KeyboardInterrupt
        return wait(self, wait_s)

    def call(n: int) -> None:
        begun.set()
        go.wait(60)
        ended.append(n)

    monkeypatch.setattr(BackgroundCall, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_parallel(call, range(1000), 2, "kt-test")
    n = len(ended)
    for each in threading.enumerate():
        if each.name == "kt-test":
            each.join(60)
    assert n and len(ended) == n


def test_no_thread_is_started_in_another_way() -> None:
    others, folder = {"Thread", "ThreadPoolExecutor", "Timer"}, Path(ktcli.__file__).parent
    # A helper is a program of its own, for the Python of another environment.
    ours = [path for path in folder.rglob("*.py") if path.name not in ("threads.py", "helper.py")]
    users = [
        str(path.relative_to(folder))
        for path in ours
        if any(name in (text := path.read_text()) for name in others)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in others
    ]
    assert users == []
