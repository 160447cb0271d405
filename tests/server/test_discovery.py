"""Whoever listens at a socket of the library: other users are told nothing, and nothing that is said ends a command."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ktcli.errors import KtError
from ktcli.main import main
from ktcli.server.attached.client import ServerPlace, facts_of
from ktcli.server.process import discovery
from ktcli.server.process.discovery import connected, socket_path
from ktcli.server.process.listening import unix_socket

HUGE = "9" * 5000
FINE = b'{"model":"m","since":1700000000}'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path


@contextmanager
def saying(body: bytes, times: int = 1) -> Iterator[None]:
    """Somebody who listens at port 7 and says this to all who connect."""
    with unix_socket(socket_path(7)) as listening:

        def answer() -> None:
            while True:
                try:
                    with listening.accept()[0] as connection:
                        connection.recv(1 << 16)
                        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                        for _ in range(times):
                            connection.sendall(body)
                except OSError:
                    if listening.fileno() < 0:
                        return

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            listening.close()
            thread.join()


@pytest.mark.parametrize(
    "said",
    [
        f'{{"since":{HUGE}}}',
        '{"since":99999999999999999}',
        '{"since":-99999999999999999}',
        f'{{"running":{HUGE},"waiting":1e999}}',
        '{"context":-1}',
        '{"context":NaN}',
        '{"running":1.5}',
        '{"models":[{"name":"a","since":1e300}]}',
        f'{{"models":[{{"name":"a","memory_bytes":{HUGE}}}]}}',
        '{"model":["a"]}',
        '{"model":"\\u001b]52;c;AAAA\\u0007","address":"\\ud800"}',
        f'{{"model":"{"m" * 9000}"}}',
        "[" * 60000,
        "[]",
        "null",
        "",
        "\x00\xff",
    ],
)
def test_nothing_that_a_server_says_of_itself_ends_a_command(
    said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with saying(said.encode("latin-1")):
        for command in (["ps"], ["ps", "--json"]):
            assert main(command) == 0
            shown = capsys.readouterr()
            assert "\x1b" not in shown.out and len(shown.out) < 20_000 and shown.err == ""


def test_what_servers_say_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with saying(FINE):
        assert main(["ps"]) == 0
    assert "m (not in memory)" in capsys.readouterr().out


def test_an_answer_without_an_end_is_not_read_to_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with saying(b" " * (1 << 16), times=1000):
        assert main(["ps"]) == 0
    assert "(loading)" in capsys.readouterr().out


def test_a_slow_answer_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "ANSWER_S", 0.0)
    asked, answered = socket.socketpair()
    with asked, answered:
        answered.sendall(b"H")  # and more, which never comes
        assert discovery.status_of(asked) is None


LISTENS = """
import os, signal, socket, sys
os.setuid(12345)
socket.socket(fileno=int(sys.argv[1])).listen()  # says anew who listens
print(flush=True)
signal.pause()
"""


@contextmanager
def of_another_user(path: Path) -> Iterator[None]:
    """A process of another user who listens at a path; where this user cannot make one, we are another than we were."""
    if os.geteuid() != 0:
        with unix_socket(path), pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12345)
            yield
        return
    with unix_socket(path) as listening:
        number = listening.fileno()
        command = [sys.executable, "-I", "-S", "-c", LISTENS, str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[number]) as process:
            try:
                if process.stdout is None or not process.stdout.readline():
                    pytest.skip("no other user can be had here")
                yield
            finally:
                process.kill()


def test_nothing_is_said_to_a_process_of_another_user(home: Path) -> None:
    path = socket_path(7)
    with of_another_user(path):
        with pytest.raises(PermissionError, match="of user"), connected(path):
            pass
        assert facts_of(ServerPlace(path, "kt-mini"), "pack") is None
        if os.geteuid() == 0:
            assert discovery.running_servers() == []


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o722])
def test_the_right_to_write_among_the_sockets_is_taken_from_others(home: Path, mode: int) -> None:
    (home / "run").chmod(mode)
    assert main(["ps"]) == 0
    assert (home / "run").stat().st_mode & 0o777 == mode & 0o755


def test_a_folder_of_sockets_that_others_may_write_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "run").chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # so it is another user's
    with pytest.raises(KtError, match="who could impersonate a server there"):
        unix_socket(socket_path(7))
    for command in (["ps"], ["stop"], ["stop", "--all"]):
        assert main(command) == KtError.exit_code
        said = capsys.readouterr().err
        assert said.startswith(f"error: {home}/run ") and "chmod go-w" in said
