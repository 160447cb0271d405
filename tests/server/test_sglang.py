"""SGLang's process: started, watched, started again, ended, and the sentence for each way in which it dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from ports import free_port, is_refused
from processes import is_gone
from server.sglanged import FakeSglang, install_fake, settings_at
from server.standins import Log
from waits import until

from ktcli.errors import ExitCode, KtError
from ktcli.server.process import discovery
from ktcli.server.process.listening import unix_socket
from ktcli.server.sglang import process, supervision
from ktcli.server.sglang.failures import KNOWN, why_ended
from ktcli.server.sglang.process import BoundedLog
from ktcli.server.sglang.supervision import (
    EngineSettings,
    EngineSupervisor,
    answer_at,
    engine_status,
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSglang]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(tmp_path_factory.mktemp("home")))
        yield install_fake()


@pytest.fixture
def fake(installed: FakeSglang, monkeypatch: pytest.MonkeyPatch) -> FakeSglang:
    monkeypatch.setattr(supervision, "HEALTH_S", 0.05)
    monkeypatch.setattr(supervision, "BACKOFF_S", 0.02)
    monkeypatch.setattr(process, "_COUNTERS_ANSWER_S", 30.0)
    for name in ("starts", "workers", "words", "seen", "dies"):
        (installed.package / name).unlink(missing_ok=True)
    installed.does("ok")
    return installed


@contextmanager
def supervised(
    settings: EngineSettings, act: Callable[[EngineSupervisor], None], log: Log | None = None
) -> Iterator[tuple[EngineSupervisor, Log]]:
    """Runs an engine on this thread, and acts on another once it is ready; yields what is left."""
    heard, failed = log or Log(), list[BaseException]()

    def run() -> None:
        try:
            act(made)
        except BaseException as error:
            failed.append(error)
        finally:
            made.stop()

    made = EngineSupervisor(settings, heard, lambda: threading.Thread(target=run).start())
    made.run()
    if failed:
        raise failed[0]
    yield made, heard


def nobody_is_left(fake: FakeSglang) -> bool:
    """Whether all processes have ended; the system takes a moment to bury those that were killed."""
    until(lambda: all(map(is_gone, fake.pids)))
    return True


def test_an_engine_runs_until_it_is_stopped_and_leaves_nobody(
    fake: FakeSglang, tmp_path: Path
) -> None:
    port = free_port()

    def act(running: EngineSupervisor) -> None:
        assert requests.get(f"http://127.0.0.1:{port}/v1/models", timeout=60).status_code == 401
        said = engine_status(running)
        assert (said.model, said.running, said.waiting, said.context) == ("qwen", 3, 1, 8192)
        assert said.engine == "sglang-kt 0.7.2" and said.models[0].memory_bytes > 1 << 20
        until(lambda: b"fired up" in (tmp_path / "log").read_bytes())

    with supervised(settings_at(port, tmp_path, "SECRET"), act) as (running, log):
        assert running.restarts == 0 and not log.lines[1:]
    assert fake.words[fake.words.index("--api-key") + 1] == "SECRET"
    assert b"SECRET" not in fake.seen
    assert len(fake.pids) == 2 and nobody_is_left(fake)
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("what", "said", "code"),
    [
        ("oom", "ran out of the GPUs' memory", ExitCode.NO_DEVICE),
        ("missing", "did not find a file of the model", ExitCode.NOT_FOUND),
        ("nccl", r"could not connect its GPUs \(NCCL\)", ExitCode.NO_DEVICE),
        ("port", "taken by another program", ExitCode.BUSY),
        ("driver", "cannot use the GPU or its driver", ExitCode.NO_DEVICE),
        ("flags", "does not take the command line", ExitCode.FAILED),
        (
            "strange",
            r"ended: ValueError: something that nobody .* \(exit code 1\)",
            ExitCode.FAILED,
        ),
    ],
)
def test_an_engine_that_dies_at_its_start_says_why_in_one_sentence(
    fake: FakeSglang, what: str, said: str, code: ExitCode, tmp_path: Path
) -> None:
    fake.does(f"start {what}")
    with (
        pytest.raises(KtError, match=said) as caught,
        supervised(settings_at(free_port(), tmp_path), lambda _: None),
    ):
        pass
    assert caught.value.exit_code is code
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert str(tmp_path / "log") in caught.value.hint
    assert fake.starts == 1 and nobody_is_left(fake)


@pytest.mark.parametrize(("how", "said"), [("killed", "was killed"), ("zombie", "without it")])
def test_an_engine_whose_workers_outlive_it_leaves_none(
    fake: FakeSglang, how: str, said: str, tmp_path: Path
) -> None:
    fake.does(how)
    with (
        pytest.raises(KtError, match=said),
        supervised(settings_at(free_port(), tmp_path), lambda _: None),
    ):
        pass
    assert len(fake.pids) == 2 and nobody_is_left(fake)


@pytest.mark.parametrize(
    ("how", "after_s"),
    [("later oom", 0), pytest.param("later oom", 3, marks=pytest.mark.thorough), ("load oom", 0)],
)
def test_an_engine_that_crashes_later_is_started_again(
    fake: FakeSglang, how: str, after_s: float, tmp_path: Path
) -> None:
    fake.does(how)
    port, log = free_port(), Log()

    def act(running: EngineSupervisor) -> None:
        fake.does("ok")
        time.sleep(after_s)
        fake.dies()
        if how.startswith("load"):
            with pytest.raises(requests.ConnectionError):
                requests.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={}, timeout=60)
        until(lambda: running.restarts == 1)
        until(lambda: "qwen answers again" in log.lines)

    with supervised(settings_at(port, tmp_path), act, log):
        (line,) = [each for each in log.lines if "is started again" in each]
        assert "ran out of the GPUs' memory: torch.OutOfMemoryError" in line
    assert nobody_is_left(fake)


def test_an_engine_that_crashes_again_and_again_is_given_up(
    fake: FakeSglang, tmp_path: Path
) -> None:
    fake.does("later nccl")

    def act(running: EngineSupervisor) -> None:
        fake.dies()
        until(lambda: running._stops > 0)

    with (
        pytest.raises(KtError, match=r"NCCL.*the 5th time in a row"),
        supervised(settings_at(free_port(), tmp_path), act),
    ):
        pass
    assert fake.starts == 5 and nobody_is_left(fake)


def test_an_engine_that_hangs_is_ended_and_started_again(
    fake: FakeSglang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervision, "HANG_S", 0.5)
    monkeypatch.setattr(process, "HEALTH_ANSWER_S", 0.1)
    fake.does("wedge")
    port, log = free_port(), Log()

    def act(running: EngineSupervisor) -> None:
        with pytest.raises(requests.RequestException):
            requests.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={}, timeout=0.1)
        until(lambda: running.restarts == 1)
        fake.does("ok")

    with supervised(settings_at(port, tmp_path), act, log):
        assert any("did not answer for" in line for line in log.lines)
    assert nobody_is_left(fake)


def test_an_engine_that_is_never_ready_is_given_up(
    fake: FakeSglang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervision, "START_S", 0.5)
    fake.does("slow")
    with (
        pytest.raises(KtError, match="was not ready for"),
        supervised(settings_at(free_port(), tmp_path), lambda _: None),
    ):
        pass
    assert nobody_is_left(fake)


def test_an_engine_that_ignores_the_signal_is_killed(
    fake: FakeSglang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervision, "_SPARE_S", 0.3)
    fake.does("stubborn")
    with supervised(settings_at(free_port(), tmp_path), lambda _: None) as (_, log):
        assert log.lines[-1] == "the engine did not end by itself; it was killed"
    assert nobody_is_left(fake)


@pytest.mark.parametrize(
    "size", [8_000_000, pytest.param(1_000_000_000, marks=pytest.mark.thorough)]
)
def test_what_it_prints_is_kept_within_a_bound(fake: FakeSglang, size: int, tmp_path: Path) -> None:
    fake.does(f"log {size}")
    with supervised(settings_at(free_port(), tmp_path), lambda _: None):
        kept = (tmp_path / "log").read_bytes()
    assert process.LOG_BYTES // 2 - 1000 <= len(kept) <= process.LOG_BYTES
    assert kept.endswith(b"ready to roll!\n") and not kept.startswith(b"[2026")


def test_the_log_keeps_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_BYTES", 100)
    log = BoundedLog(tmp_path / "log")
    for number in range(50):
        log.write(b"line %d\n" % number)
    log.close()
    log.write(b"too late\n")  # of a process that nobody waits for any more
    kept = (tmp_path / "log").read_text().splitlines()
    assert kept[-1] == "line 49" and kept == [f"line {n}" for n in range(50 - len(kept), 50)]
    assert log.lines[-2] == "line 49" and len(log.lines) == 51


def test_the_socket_of_an_engine_is_found_and_tells_of_it(
    fake: FakeSglang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    running = EngineSupervisor(settings_at(port, tmp_path), Log(), lambda: None)
    listening = unix_socket(discovery.socket_path(port))
    try:
        answer_at(listening, running)
        (found,) = discovery.running_servers()
        assert found.status is not None and found.status.loading and found.status.engine
        with discovery.connected(found.socket) as connection:
            connection.sendall(
                b'POST /server/drain HTTP/1.0\r\nContent-Length: 13\r\n\r\n{"seconds":7}'
            )
            assert b"200" in connection.recv(4096)
        assert running.drain_s == 7
        for body in (b'{"seconds":-1}', b"[]", b"{"):
            with discovery.connected(found.socket) as connection:
                head = b"POST /server/drain HTTP/1.0\r\nContent-Length: %d\r\n\r\n"
                connection.sendall(head % len(body) + body)
                assert b"409" in connection.recv(4096)
        with discovery.connected(found.socket) as connection:
            connection.sendall(b"GET /engine HTTP/1.0\r\n\r\n")
            assert b"404" in connection.recv(4096)
    finally:
        listening.close()
        discovery.socket_path(port).unlink()


def test_each_known_death_is_told_apart() -> None:
    said = {row.said for row in KNOWN}
    assert len(said) == len(KNOWN)
    harmless = [
        "WARNING: NVIDIA driver 570 is recommended", "loading safetensors 3/62",
        "NCCL version 2.27.5+cuda12.8", "max_total_num_tokens=37000, available_gpu_mem=3.1 GB",
    ]  # fmt: skip
    error = why_ended("sglang-kt 0.7.2", harmless, 3)
    assert "exit code 3" in str(error) and not any(words in str(error) for words in said)
    assert "it printed nothing" in str(why_ended("x", (), 1))
    assert "memory was full" in str(why_ended("x", harmless, -signal.SIGKILL))


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from server.sglanged import settings_at
from server.standins import Log
from ktcli.server.sglang.supervision import EngineSupervisor
EngineSupervisor(settings_at({port}, Path({folder!r})), Log(), lambda: print("ready", flush=True)).run()
"""


def test_an_engine_ends_with_kt_however_that_ends(fake: FakeSglang, tmp_path: Path) -> None:
    port = free_port()
    text = KILLED.format(path=sys.path, port=port, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        child.kill()
    until(lambda: is_gone(fake.pids[0]))
    until(lambda: is_refused(port))  # its last thread closes it
