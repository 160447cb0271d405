"""A shared folder on a file system that fails as network file systems do, mounted in namespaces of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store.page_labels import SPACE, conversation, opened, put, read, shared

from ktcli.store import pages, remote
from ktcli.store.pages import PageStore
from ktcli.store.remote import RemoteStore

SELF = Path(__file__)
ALONE = ("unshare", "--user", "--map-root-user", "--mount")
SIZE = 40_000  # of a page: three of them are more than the quota of a file
MANY = conversation("one", 6)


class Mounted:
    """A folder on a file system whose faults can be chosen."""

    def __init__(self, folder: Path) -> None:
        self.path, self._control = folder / "mount", folder / "control"
        for each in (self.path, folder / "real"):
            each.mkdir()
        program = str(SELF.with_name("passthrough.py"))
        command = [sys.executable, program, str(folder / "real"), str(self.path), self._control]
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1)
        assert self.process.stdout is not None and self.process.stdin is not None
        assert self.process.stdout.readline() == b"mounted\n"

    def has(self, fault: str = "") -> None:
        """From now on there is this fault, and no other."""
        self._control.write_text(fault)

    def store(self, writer: str, said: list[str] | None = None) -> PageStore:
        """A store that has looked once."""
        return opened(shared(self.path / "store", writer), said)

    def files(self) -> list[str]:
        """The names of all files of pages, finished or not."""
        real = self.path.parent / "real" / "store"
        return [path.name for path in real.glob("*/*") if path.name != "about.json"]

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def write(store: PageStore, name: str = "one", n: int = 6) -> None:
    put(store, conversation(name, n), SIZE)
    assert store.flush(20)


# --- what happens in the namespaces -----------------------------------------------------------------------


def a_rename_that_is_seen_late(at: Mounted) -> None:
    """Three seconds a file is missing for the other server, and for its own writer; then it is there."""
    said: list[str] = []
    one, other = at.store("a", said), at.store("b", said)
    at.has("late")
    write(one)
    at.has()
    one.refresh()
    other.refresh()
    assert read(other, MANY, SIZE) == 0
    deadline = time.monotonic() + 20
    while not other.has(MANY[0].kind, MANY[0].key) and time.monotonic() < deadline:
        time.sleep(0.1)
        other.refresh()
    one.refresh()
    assert not said, said
    assert [read(store, MANY, SIZE) for store in (one, other)] == [6, 6]


def stale_handles(at: Mounted) -> None:
    """They are misses that nobody hears of; when the folder is well again, its pages are found again."""
    said: list[str] = []
    write(at.store("a"))
    other = at.store("b", said)
    at.has("stale")
    assert read(other, MANY, SIZE) == 0
    at.has()
    other.refresh()
    assert read(other, MANY, SIZE) == 6 and not said and len(at.files()) == 1


def errors_of_a_disk(at: Mounted) -> None:
    """The same where reading gives errors, of one's own files as well: none is removed."""
    said: list[str] = []
    write(at.store("a"))
    for writer in "ab":
        store = at.store(writer, said)
        at.has("broken")
        assert read(store, MANY, SIZE) == 0
        at.has()
        store.refresh()
        assert read(store, MANY, SIZE) == 6
    assert not said and len(at.files()) == 1


def no_room(at: Mounted, fault: str) -> None:
    """It is said once, no part of a file is left, and what is there is read; later it writes again."""
    said: list[str] = []
    write(at.store("b"))
    one = at.store("a", said)
    for n in range(2):
        at.has(fault)
        write(one, f"more{n}")
        assert len(at.files()) == 1 and read(one, MANY, SIZE) == 6
    assert len(said) == 1 and "cannot be written" in said[0]
    at.has()
    write(one, "more2")
    assert len(at.files()) == 2


def a_full_quota(at: Mounted) -> None:
    no_room(at, "quota")


def a_full_disk(at: Mounted) -> None:
    no_room(at, "full")


def a_folder_that_became_read_only(at: Mounted) -> None:
    no_room(at, "readonly")


def _behind(at: Mounted, said: list[str], writer: str) -> RemoteStore:
    def open_store(warn: Callable[[str], object]) -> PageStore:
        return PageStore(shared(at.path / "store", writer), SPACE, 1 << 30, {}, warn)

    return RemoteStore.open(at.path / "store", open_store, said.append)


def a_server_that_does_not_answer(at: Mounted) -> None:
    """Nobody waits longer than a listing may take, it is said once, and used again when it is back."""
    write(at.store("a"))
    said: list[str] = []
    one = _behind(at, said, "b")
    assert read(one, MANY, SIZE) == 6  # type: ignore[arg-type]
    at.process.send_signal(signal.SIGSTOP)
    before = time.monotonic()
    for n in range(3):
        one.refresh()
        assert read(one, MANY, SIZE) == 0  # type: ignore[arg-type]
        put(one, conversation(f"more{n}", 2), SIZE)  # type: ignore[arg-type]
    assert one.rests and time.monotonic() - before < remote.LOOK_S + remote.READ_S + 5
    at.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while one.rests and time.monotonic() < deadline:
        time.sleep(0.05)
        one.refresh()
    assert read(one, MANY, SIZE) == 6 and len(said) == 1  # type: ignore[arg-type]
    one.close()


def a_server_that_does_not_answer_at_the_end(at: Mounted) -> None:
    """A process ends, and quickly, though its threads hang in the file system."""
    one = _behind(at, [], "b")
    put(one, MANY, SIZE)  # type: ignore[arg-type]
    at.process.send_signal(signal.SIGSTOP)
    one.close()


def a_connection_that_ended(at: Mounted) -> None:
    """A file system whose process is gone gives errors at once: it has nothing, and answers go on."""
    write(at.store("a"))
    said: list[str] = []
    one = _behind(at, said, "b")
    at.process.kill()
    at.process.wait()
    one.refresh()
    assert read(one, MANY, SIZE) == 0 and len(said) == 1  # type: ignore[arg-type]
    put(one, MANY, SIZE)  # type: ignore[arg-type]
    one.close()


SCENARIOS = {
    each.__name__: each
    for each in (
        a_rename_that_is_seen_late,
        stale_handles,
        errors_of_a_disk,
        a_full_quota,
        a_full_disk,
        a_folder_that_became_read_only,
        a_server_that_does_not_answer,
        a_server_that_does_not_answer_at_the_end,
        a_connection_that_ended,
    )
}


@contextmanager
def mounted(folder: Path) -> Iterator[Mounted]:
    made = Mounted(folder)
    try:
        yield made
    finally:
        made.close()


# --- the tests ----------------------------------------------------------------------------------------------


def require_namespaces(*more: str) -> None:
    """Skips where a user may have no namespaces of his own."""
    allowed = subprocess.run([*ALONE, *more, "true"], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip(f"namespaces are not allowed here: {allowed.stderr.decode().strip()}")


def require_mounts() -> None:
    """Skips where a user may mount nothing."""
    require_namespaces()
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be used here")


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_network_file_system_that_fails(name: str, tmp_path: Path) -> None:
    require_mounts()
    path = os.pathsep.join((str(SELF.parents[1]), *sys.path))
    command = [*ALONE, sys.executable, str(SELF), name, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": path, "KT_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    pages._AGAIN_S = 0.0
    remote.REST_S = 0.2
    with mounted(Path(sys.argv[2])) as place:
        SCENARIOS[sys.argv[1]](place)
