"""Servers that somebody else starts and watches: `kt serve --background`, and systemd."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ktcli.errors import Busy, UsageError
from ktcli.main import main
from ktcli.server.process import background
from ktcli.server.process.background import NotStarted, log_path, shorten, start
from ktcli.server.process.supervisor import SupervisedListener, Supervisor, values_of
from ktcli.server.process.unit import quoted, unit

# Its first word is what it tells its supervisor; then it says the others, and ends with a code or goes on.
CHILD = """
import os, socket, sys, time
told, code, *said = sys.argv[1:]
made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
print(*(each.replace("PID", str(os.getpid())) for each in said), sep="\\n", file=sys.stderr, flush=True)
if told:
    made.sendto(told.encode(), os.environ["NOTIFY_SOCKET"])
if code:
    sys.exit(int(code))
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(background, "PROGRAM", (sys.executable, "-S", "-c", CHILD))
    monkeypatch.setenv("KT_HOME", str(tmp_path))


def nothing(said: str, done: int, total: int) -> None: ...


def test_a_server_that_is_ready_goes_on_with_what_it_had_to_say() -> None:
    words = ["READY=1\nSTATUS=serving x", "", "warning: slow", "  so it is", "serving x; Ctrl-C"]
    began = start(words, 7, nothing)
    os.kill(began.pid, 9)
    assert os.waitpid(began.pid, 0)[1] == 9  # it went on, and is a child of this process still
    assert (began.said, began.warnings) == ("serving x", ("warning: slow", "  so it is"))
    assert began.log == log_path(7) and began.log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        ("7", ["a line", "error: the port is taken", "  take another"], "the port is taken"),
        ("1", ["a line", "Segmentation fault"], "Segmentation fault"),
        ("0", [""], "it printed nothing"),
    ],
)
def test_a_server_that_ends_at_once_gives_its_reason(
    code: str, said: list[str], reason: str
) -> None:
    with pytest.raises(NotStarted, match=f"did not start: {reason}") as caught:
        start(["STATUS=Loading", code, *said], 7, nothing)
    assert caught.value.exit_code == max(1, int(code))
    assert str(log_path(7)) in caught.value.hint
    assert ("take another" in caught.value.hint) == (int(code) == Busy.exit_code)


def test_an_interrupted_start_ends_the_server() -> None:
    def interrupt(said: str, done: int, total: int) -> None:
        assert (said, done, total) == ("Loading 50 %", 1, 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(["STATUS=Loading 50 %\nX_KT_DONE=1\nX_KT_TOTAL=2", "", "PID"], 7, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log_path(7).read_text()), 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_start_that_is_told_to_end_ends_the_server(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught:
        start(["STATUS=Loading", "", "PID"], 7, lambda *_: os.kill(os.getpid(), number))
    assert caught.value.code == 128 + number and signal.getsignal(number) is before
    with pytest.raises(ProcessLookupError):
        os.kill(int(log_path(7).read_text()), 0)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with background._ended_by_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_log_keeps_its_newer_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LOG_BYTES", 100)
    path, other = tmp_path / "log", tmp_path / "other"
    lines = [f"line {i:04}\n" for i in range(11)]  # of ten bytes
    for each in (path, other):
        each.write_text("".join(lines))
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    shorten(other, descriptor)  # another process writes it
    shorten(path, descriptor)
    os.write(descriptor, b"the last\n")
    os.close(descriptor)
    assert path.read_text() == "".join([*lines[-4:], "the last\n"])
    assert other.read_text() == "".join(lines)


def test_a_supervisor_is_sent_the_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ktcli.assembly.listener import SILENT

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(tmp_path / "notices"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notices"))
        supervisor = Supervisor()
        assert "NOTIFY_SOCKET" not in os.environ
        with SupervisedListener(SILENT, supervisor).progress("Loading x", 8) as bar:
            bar.update(done=2)
        assert values_of(notices.recv(999))["STATUS"] == "Loading x 25 %"
        supervisor.ready("serving\nX=2")
        assert values_of(notices.recv(999)) == {"READY": "1", "STATUS": "serving X=2"}
    supervisor.ready("")  # nobody is there
    Supervisor().ready("")  # nobody ever was


WORDS = ["plain", "", "a b", 'a"b', "a\\", "100%", "$HOME", "it's", "%h $$ \\x41", "#;"]


def test_words_of_a_unit_are_what_they_were() -> None:
    for word in WORDS:
        (read,) = shlex.split(quoted(word, in_command=True))
        assert read.replace("%%", "%").replace("$$", "$") == word
    assert quoted("\n\udcff") == '"\\x0a\\xff"'


def test_a_unit_is_one_that_systemd_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = tmp_path / "the key"
    key.write_text("secret")
    key.chmod(0o600)
    command = ["serve", "kt-mini", "--api-key-file", str(key), "-p", "8000", "--print-unit"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "secret" not in text
    lines = [line.partition("=") for line in text.splitlines() if "=" in line]
    service = {name: value for name, _, value in lines}
    words = shlex.split(service["ExecStart"])
    expected = ["serve", "--port=8000", f"--api-key-file={key}", "--", "kt-mini"]
    assert words[-len(expected) :] == expected and Path(words[0]).is_absolute()
    assert ("Environment", "=", f"KT_HOME={tmp_path}") in lines and service["Type"] == "notify"
    if (tool := shutil.which("systemd-analyze")) is not None:
        file = tmp_path / "kt.service"
        file.write_text(unit("an odd name\\", ["/bin/true", *WORDS], {"A": "b % $c"}, 10.0))
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        command = [tool, "--user", "verify", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_unit_means_the_same_in_any_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mask", "hot", "kt-mini", "key"):
        (tmp_path / name).touch(0o600)
    (tmp_path / "key").write_text("secret")
    (tmp_path / "my.gguf").touch()
    options = ["--api-key-file", "key", "--strict-model", "--model-alias", "mask"]
    for mask, model in ((str(tmp_path / "mask"), "kt-mini"), ("hot", str(tmp_path / "my.gguf"))):
        given = ["--gpu-experts", Path(mask).name, Path(model).name]
        assert main(["serve", *given, *options, "--print-unit"]) == 0
        lines = capsys.readouterr().out.splitlines()
        words = shlex.split(next(line for line in lines if line.startswith("ExecStart=")))
        assert {f"--gpu-experts={mask}", f"--api-key-file={tmp_path}/key"} < set(words)
        assert {"--strict-model", "--model-alias=mask"} < set(words)
        assert words[-2:] == ["--", model]


def test_no_key_goes_into_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--api-key", "secret", "--print-unit"]) == UsageError.exit_code
    assert "--api-key-file" in capsys.readouterr().err
