"""Whatever stops a pull, a stream or a repair, at whatever moment: the next run finishes it, what was done stays."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from assembly.streamed import (
    CHUNK,
    HEADER,
    NAME,
    Case,
    contents_of,
    make_case,
    streaming_hub,
    weights,
)
from store.fake_hub import Hub
from waits import until

from ktcli import manifest
from ktcli.errors import Busy
from ktcli.main import main
from ktcli.store import contents, library
from ktcli.weights.checkpoint import INDEX
from ktcli.weights.pack import file_name

# Forks a process for each line of input: library, hub, and the words that kt runs with; says its number, then its end.
FORKS = f"""
import os, sys
from ktcli.assembly import preview, repair, stream
from ktcli.commands import pull
from ktcli.commands.library import list, verify
from ktcli.main import main
from ktcli.store import transfer
from ktcli.weights import convert, repair
transfer.CHUNK_BYTES, preview._FIRST_BYTES = {CHUNK}, {HEADER}
import requests, huggingface_hub
from huggingface_hub import HfApi
for line in sys.stdin:
    if not (process := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ["KT_HOME"], os.environ["HF_ENDPOINT"], *words = line.split()
        try:
            os._exit(main(words))
        finally:
            os._exit(99)
    print(process, flush=True)
    print(os.waitpid(process, 0)[1], flush=True)
"""


class Runner:
    """Runs kt in processes that are there in a moment."""

    def __init__(self) -> None:
        self._forks = subprocess.Popen(
            [sys.executable, "-c", FORKS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start(self, *words: str) -> int:
        """Begins to run kt; returns the number of the process."""
        assert self._forks.stdin is not None and self._forks.stdout is not None
        where = os.environ["KT_HOME"], os.environ["HF_ENDPOINT"]
        self._forks.stdin.write(" ".join((*where, *words)) + "\n")
        self._forks.stdin.flush()
        return int(self._forks.stdout.readline())

    def end(self) -> int:
        """Waits for its end; returns its exit code, negative for a signal."""
        assert self._forks.stdout is not None
        return os.waitstatus_to_exitcode(int(self._forks.stdout.readline()))

    def killed(self, process: int, after_s: float) -> bool:
        """Kills a process; returns whether it had done its work before."""
        time.sleep(after_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        return self.end() == 0

    def close(self) -> None:
        self._forks.communicate()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture
def hub(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with streaming_hub(case, monkeypatch, tmp_path / "home") as running:
        yield running


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


def arrived(folder: Path) -> dict[str, int]:
    """The bytes that are there of each weight file, complete or not; headers that the offer asked for are none."""
    found = {}
    for path, status in contents.walk(folder):
        name = path.name.removesuffix(".done")
        if path.name.endswith(".safetensors.done"):
            counters = path.read_bytes()[76:]
            found[name] = sum(
                int.from_bytes(counters[at : at + 8], "little")
                for at in range(0, len(counters), 16)
            )
        elif path.suffix == ".safetensors" and path.parent.name != manifest.STREAM:
            found[name] = status.st_size
    return {name: size for name, size in found.items() if size > HEADER}


def made(folder: Path) -> str:
    """What names the files of a pack that are there."""
    return "".join(path.read_text() for path in folder.rglob("kt.json*"))


def made_of(case: Case) -> dict[str, set[str]]:
    """The files of a pack that are made of each weight file."""
    found: dict[str, set[str]] = {}
    for tensor, file in json.loads(case[0][INDEX])["weight_map"].items():
        layer = re.search(r"layers\.(\d+)\.", tensor)
        found.setdefault(file, set()).add(file_name(int(layer[1]) if layer else None))
    return found


# Headers are asked for by the offer, too; and what was on the wire to a killed process goes out a moment later.
LATE = 2 * HEADER + 8 * (8 << 10)
STREAM, PULL = ("pull", NAME, "--stream", "--yes"), ("pull", NAME, "--no-stream", "--yes")


@pytest.mark.parametrize(
    ("words", "times"),
    [
        (STREAM, 2),
        pytest.param(STREAM, 20, marks=pytest.mark.thorough),
        pytest.param(PULL, 20, marks=pytest.mark.thorough),
    ],
)
def test_kills_lose_nothing_that_was_done(
    hub: Hub, runner: Runner, case: Case, words: tuple[str, ...], times: int
) -> None:
    hub.pace_s = 0.0003
    chance, home = random.Random(times), Path(os.environ["KT_HOME"])
    sizes, before = weights(case[0]), arrived(home)
    for last in [False] * times + [True]:
        hub.rest()
        hub.sent.clear()
        process = runner.start(*words)
        done = runner.end() == 0 if last else runner.killed(process, chance.uniform(0.0, 0.2))
        for name, size in sizes.items():  # headers are asked for by the offer, too
            assert hub.sent[name] <= size - before.get(name, 0) + LATE
        after = arrived(home)
        if not done:
            for name, size in before.items():  # unless all that is made of it is there
                of_it = made_of(case).get(name)  # None: it is a file of the pack
                needed = of_it is None or any(each not in made(home) for each in of_it)
                assert after.get(name, 0 if needed else size) >= size
        before = after
        if done:
            (entry,) = library.matching(NAME)
            assert entry.complete
            files = case[1] if words == STREAM else case[0]
            assert contents_of(entry.path).items() >= files.items()
            shutil.rmtree(home)
            before = {}
    assert done


@pytest.mark.parametrize("times", [pytest.param(20, marks=pytest.mark.thorough)])
def test_kills_of_a_repair_leave_each_file_as_it_was_or_as_it_must_be(
    hub: Hub, runner: Runner, case: Case, times: int
) -> None:
    runner.start(*STREAM)
    assert runner.end() == 0
    chance, entry = random.Random(times), library.resolve(NAME)
    hub.pace_s = 0.0002
    for i in range(times):
        name = chance.choice([each for each in case[1] if each.endswith(".safetensors")])
        (entry.path / name).write_bytes(b"damaged")
        runner.killed(runner.start("verify", NAME, "--repair"), chance.uniform(0.0, 0.2))
        for path in entry.path.glob("*.safetensors"):
            assert path.read_bytes() in (case[1][path.name], b"damaged"), i
    runner.start("verify", NAME, "--repair")
    assert runner.end() == 0
    assert contents_of(entry.path) == case[1]


@pytest.mark.parametrize("words", [STREAM, ("verify", NAME, "--repair")])
def test_what_a_kill_at_the_very_end_left_is_removed_by_the_next_run(
    hub: Hub, case: Case, words: tuple[str, ...]
) -> None:
    assert main([*STREAM]) == 0
    (entry,) = library.matching(NAME)
    (entry.path / manifest.STREAM / "shards").mkdir(parents=True)
    assert main([*words]) == 0
    assert contents_of(entry.path) == case[1]


def take(write: Callable[..., int], left: list[int]) -> Callable[..., int]:
    """A call of the system that writes while there is room."""

    def limited(descriptor: int, data: bytes, *where: int) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, *where)

    return limited


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (STREAM, 0.3),
        *(pytest.param(STREAM, i / 4, marks=pytest.mark.thorough) for i in range(4)),
        *(pytest.param(PULL, i / 2, marks=pytest.mark.thorough) for i in range(2)),
    ],
)
def test_a_disk_that_is_full_at_any_byte_is_one_sentence(
    hub: Hub,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    share: float,
) -> None:
    written = case if words == STREAM else case[:1]
    room = int(share * sum(len(data) for files in written for data in files.values()))
    with monkeypatch.context() as patch:
        left = [room]
        patch.setattr(os, "write", take(os.write, left))
        patch.setattr(os, "pwrite", take(os.pwrite, left))
        assert main([*words]) != 0
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "full" in said or "free" in said
    assert main([*words]) == 0
    (entry,) = library.matching(NAME)
    assert contents_of(entry.path).items() >= written[-1].items()


def test_a_library_that_cannot_be_written_is_one_sentence(
    hub: Hub, case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KT_HOME", "/proc/self/kt")
    assert main([*STREAM]) != 0
    said = capsys.readouterr().err
    assert "cannot create the folder" in said
    assert "Traceback" not in said
    assert all(hub.sent[name] <= HEADER for name in weights(case[0]))


def test_a_second_process_is_told_of_the_first(
    hub: Hub, runner: Runner, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.stall_after[max(weights(case[0]))] = CHUNK  # so that it is never done
    process = runner.start(*STREAM)
    until(lambda: any(each.running for each in library.matching(NAME)))
    assert main([*STREAM]) == Busy.exit_code
    assert f"process {process}" in capsys.readouterr().err
    until(lambda: made(Path(os.environ["KT_HOME"])))
    assert main(["list"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"process {process} is" in shown
    assert "% done" in shown
    os.kill(process, signal.SIGKILL)
    runner.end()
