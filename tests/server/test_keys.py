"""A server can have several API keys with names, which it reads again at SIGHUP; nothing of one shows to another."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from chat.fake_engine import END
from server.running import Running, running, scripted, served_by_command
from waits import until

from ktcli.commands.cli.api_key import given_key, given_keys
from ktcli.commands.serve.access import reload_of
from ktcli.commands.serve.lines import log_request
from ktcli.errors import UsageError
from ktcli.main import main
from ktcli.server.http.keys import KEYS_MOST, ApiKeys, NamedKey, keys_in
from ktcli.server.http.state import Rules
from ktcli.server.process.discovery import running_servers

ALICE, BOB = {"Authorization": "Bearer sk-a"}, {"x-api-key": "sk-b"}
LOGGED: list[dict[str, Any]] = []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    backend = scripted(
        tmp_path_factory.mktemp("model"), lambda asked: "<think>\nhm\n</think>\n\nyes", end=END
    )
    keys = ApiKeys([NamedKey("alice", "sk-a"), NamedKey("bob", "sk-b")])
    with running(backend, Rules(keys), log=LOGGED.append) as found:
        yield found


def ask(server: Running, headers: dict[str, str], **body: Any) -> Any:
    body = {"input": "hello", **body}
    return requests.post(f"{server.url}/v1/responses", json=body, headers=headers, timeout=60)


def test_what_one_key_asked_for_another_does_not_find(server: Running) -> None:
    include = ["reasoning.encrypted_content"]
    made = ask(server, ALICE, include=include).json()
    path = f"{server.url}/v1/responses/{made['id']}"
    for way in (path, f"{path}/input_items"):
        assert requests.get(way, headers=ALICE, timeout=60).status_code == 200
        assert requests.get(way, headers=BOB, timeout=60).status_code == 404
    assert requests.delete(path, headers=BOB, timeout=60).status_code == 404
    reference = [{"type": "item_reference", "id": made["output"][0]["id"]}]
    for more in ({"previous_response_id": made["id"]}, {"input": reference}):
        assert ask(server, BOB, **more).status_code == 404
        assert ask(server, ALICE, **more).status_code == 200
    state = server.serving.state  # type: ignore[union-attr]
    sealed = made["output"][0]["encrypted_content"]
    assert state is not None and state.seal.open(sealed, "alice") == "hm"
    assert state.seal.open(sealed, "bob") is None


def test_logs_and_counters_go_by_the_names_of_keys(server: Running) -> None:
    LOGGED.clear()  # an answer's line may come after the answer: another test's may still come
    assert ask(server, BOB).status_code == 200
    until(lambda: "bob" in [entry.get("key") for entry in LOGGED])
    assert requests.get(f"{server.url}/v1/models?nobody", timeout=60).status_code == 401
    until(lambda: 401 in [entry["status"] for entry in LOGGED])
    assert all("key" not in entry for entry in LOGGED if entry["status"] == 401)
    text = requests.get(f"{server.url}/metrics", headers=ALICE, timeout=60).text
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("kt_key"))
    assert float(counts['kt_key_requests_total{key="bob"}']) >= 1
    for name in ("prompt", "generation"):
        assert float(counts[f'kt_key_{name}_tokens_total{{key="bob"}}']) > 0
    assert "sk-" not in text and "sk-" not in str(LOGGED)


def test_the_line_of_a_request_has_the_name_of_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"client": "::1", "method": "GET", "path": "/x", "status": 200, "seconds": 0.1}
    log_request({**entry, "key": "alice"})
    log_request(entry)
    said = capsys.readouterr().err
    assert " ::1 (alice) GET /x 200 in" in said and " ::1 GET /x 200 in" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("secret\n", [("default", "secret")]),
        ("# keys\n\n c2VjcmV0+/== \r\n", [("default", "c2VjcmV0+/==")]),
        ("alice:sk-1", [("alice", "sk-1")]),
        ("alice sk-1\nbob:  sk:2\n", [("alice", "sk-1"), ("bob", "sk:2")]),
        ("alice:old\nalice:new", [("alice", "old"), ("alice", "new")]),
    ],
)
def test_a_file_has_a_key_or_several_with_names(text: str, expected: list[tuple[str, str]]) -> None:
    assert [(each.name, each.key) for each in keys_in(text, "FILE")] == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "FILE has no key"),
        ("# nothing\n", "FILE has no key"),
        ("a:x\nsecret", "line 2 of FILE has a key without a name"),
        ("a:x\nb:x", "lines 1 and 2 of FILE have the same key"),
        ("an:odd key", "line 1 of FILE is not a valid key"),
        (":x", "line 1 of FILE is not a valid key"),
        ("a:", "line 1 of FILE is not a valid key"),
        ("ä:x", "line 1 of FILE is not a valid key"),
        ("a:é", "line 1 of FILE is not a valid key"),
        ("a" * 65 + ":x", "line 1 of FILE is not a valid key"),
        ("a:" + "x" * 5000, "line 1 of FILE is not a valid key"),
        ("\n".join(f"a:{at}" for at in range(KEYS_MOST + 1)), "FILE has 1,001 keys"),
    ],
)
def test_a_malformed_file_is_refused_without_its_keys(text: str, said: str) -> None:
    with pytest.raises(UsageError) as found:
        keys_in(text, "FILE")
    assert said in str(found.value) and "odd key" not in str(found.value)
    assert found.value.hint is None or len(str(found.value)) < 200


def test_a_file_that_cannot_be_used_changes_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:one\n")
    file.chmod(0o600)
    keys = ApiKeys(given_keys(None, file))
    reload = reload_of(keys, file)
    assert reload is not None and reload_of(keys, None) is None
    file.write_text("alice:two\nbob:three\n")
    reload()
    assert (keys.name_of("one"), keys.name_of("three")) == (None, "bob")
    file.chmod(0o644)
    reload()
    file.unlink()
    reload()
    assert keys.name_of("two") == "alice"
    said = capsys.readouterr().err
    assert "alice, bob" in said and f"chmod 600 {file}" in said and "No such file" in said
    assert "three" not in said


def test_the_keys_of_a_server_are_read_again_at_sighup(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:one\n")
    file.chmod(0o600)
    with served_by_command("--api-key-file", str(file)) as url:

        def status(key: str) -> int:
            headers = {"x-api-key": key}
            return requests.get(f"{url}/v1/models", headers=headers, timeout=60).status_code

        assert (status("one"), status("two")) == (200, 401)
        file.write_text("bob:two\n")
        (found,) = running_servers()
        os.kill(found.pid, signal.SIGHUP)
        until(lambda: status("two") == 200)
        assert status("one") == 401


CHILD = """
import signal, sys
from ktcli.server.process.endsignals import StartingTerminal
terminal = StartingTerminal()
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # one that comes early waits
print("ready", file=open(sys.argv[1], "a"), flush=True)
for _ in range(2):
    signal.sigwait([signal.SIGHUP])
    print(terminal.is_closed, file=open(sys.argv[1], "a"), flush=True)
"""


def test_a_terminal_that_is_closed_is_told_from_a_wish(tmp_path: Path) -> None:
    file = tmp_path / "said"
    file.touch()
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", CHILD, str(file)])
    until(lambda: file.read_text() == "ready\n")
    os.kill(pid, signal.SIGHUP)
    until(lambda: file.read_text() == "ready\nFalse\n")
    os.close(terminal)
    until(lambda: file.read_text() == "ready\nFalse\nTrue\n")
    assert os.waitpid(pid, 0)[0] == pid
    code = "from ktcli.server.process.endsignals import *; print(StartingTerminal().is_closed)"
    plain = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert plain.stdout == "False\n"  # there was none


def test_a_unit_reloads_what_has_a_file_of_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:one\nbob:two")
    file.chmod(0o600)
    assert given_key(None, file) == "one"
    assert main(["serve", "kt-mini", "--api-key-file", str(file), "--print-unit"]) == 0
    assert "\nExecReload=/bin/kill -HUP $MAINPID\n" in capsys.readouterr().out
    assert main(["serve", "kt-mini", "--print-unit"]) == 0
    assert "ExecReload" not in capsys.readouterr().out
