"""The real smg in front of two servers of kt-mini: what is routed, what is retried, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
from certificates import made_certificate
from ports import free_port
from server.routed import kt_server, scripted_server
from server.wheels import wheels_of
from waits import until

from ktcli.server.process import discovery
from ktcli.store import engines

pytestmark = pytest.mark.thorough
ROW = engines.row_of("smg")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A library with smg, and kt-mini converted."""
    found = wheels_of(ROW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("KT_CACHE", "0")  # servers of one library would share their pages on disk
        kt("engine", "install", "smg", "--from", str(found))
        yield Path(os.environ["KT_HOME"])


def kt(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ktcli", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass
class Child:
    """A command of kt that runs until it is told to end."""

    process: subprocess.Popen[str]
    url: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def started(*words: str, port: int) -> Iterator[Child]:
    """A server or a router, ready, while the context lasts."""
    command = [sys.executable, "-m", "ktcli", *words, "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("press Ctrl-C to stop" in line for line in process.stderr)
        reader = threading.Thread(target=process.stderr.read)
        reader.start()
        try:
            yield Child(process, f"http://127.0.0.1:{port}")
        finally:
            process.send_signal(signal.SIGINT)
            reader.join()
            process.wait(60)


def server(port: int, *more: str) -> AbstractContextManager[Child]:
    return started("serve", "kt-mini", "--threads", "1", *more, port=port)


def ask(url: str, text: str, **more: object) -> requests.Response:
    body = {"model": "kt-mini", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return requests.post(f"{url}/v1/chat/completions", json={**body, **more}, timeout=60)


@pytest.mark.parametrize("count", [2, 3])
def test_servers_share_the_work_and_one_may_die(home: Path, count: int) -> None:
    ports = [free_port() for _ in range(count)]
    with ExitStack() as held:
        servers = [held.enter_context(server(port)) for port in ports]
        urls, two = [each.url for each in servers], servers[1]
        router = held.enter_context(
            started("route", *urls, "--metrics-port", str(free_port()), port=free_port())
        )
        port = router.url.rpartition(":")[2]
        replies = [ask(router.url, f"{i} question") for i in range(16)]
        names = Counter(each.headers["x-smg-routed-worker-id"] for each in replies)
        assert set(names) == set(urls)
        usage = [each.json()["usage"] for each in replies]
        assert all(each["completion_tokens"] <= 8 for each in usage)
        two.kill()
        assert all(ask(router.url, f"{i} more").status_code == 200 for i in range(8))

        def state() -> str:
            status = json.loads(kt("route", "status", "--port", port, "--json"))
            return str(status["servers"][1]["state"])

        until(lambda: state() != "ready")
        held.enter_context(server(ports[1]))
        until(lambda: state() == "ready")
        assert all(ask(router.url, f"{i} again").status_code == 200 for i in range(8))


def test_a_stream_ends_whole_where_the_router_is_stopped(home: Path) -> None:
    port, metrics_port = free_port(), free_port()
    with server(free_port()) as one:
        words = ("route", one.url, "--metrics-port", str(metrics_port))
        with started(*words, port=port) as router:
            more = {"stream": True, "max_tokens": 1500, "ignore_eos": True}
            reply = ask(router.url, "a long answer", **more)
            (found,) = [each for each in discovery.running_servers() if each.status.servers]  # type: ignore[union-attr]
            listening = subprocess.run(["ss", "-ltn"], capture_output=True, text=True).stdout
            router.process.send_signal(signal.SIGINT)
            text = reply.text
        assert '"finish_reason":"length"' in text and text.rstrip().endswith("data: [DONE]")
        assert found.status is not None and found.status.servers == [one.url]
        mine = [line for line in listening.splitlines() if f":{port} " in line]
        mine += [line for line in listening.splitlines() if f":{metrics_port} " in line]
        assert all("127.0.0.1:" in line for line in mine) and (not listening or len(mine) == 2)


def test_no_stream_is_cut_where_a_server_drains_under_load(home: Path) -> None:
    found: list[tuple[int, str]] = []

    def stream(url: str, number: int) -> None:
        more = {"stream": True, "max_tokens": 60, "ignore_eos": True}
        reply = ask(url, f"{number} question", **more)
        found.append((reply.status_code, reply.text))

    with ExitStack() as held:
        one, two = (
            held.enter_context(server(free_port(), "--drain", "60", "--strict-model"))
            for _ in range(2)
        )
        words = ("route", one.url, two.url, "--metrics-port", str(free_port()))
        router = held.enter_context(started(*words, port=free_port()))
        clients = [threading.Thread(target=stream, args=(router.url, i)) for i in range(200)]
        for each in clients:
            each.start()
        until(lambda: len(found) > 10)
        two.process.send_signal(signal.SIGTERM)
        assert len(found) < len(clients)
        for each in clients:
            each.join()
        assert two.process.wait(60) == 0
    whole = [
        status == 200 and '"finish_reason":"length"' in text and "data: [DONE]" in text
        for status, text in found
    ]
    assert len(whole) == 200 and all(whole)


def test_a_server_with_an_authority_of_ones_own_is_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, context = made_certificate(tmp_path, monkeypatch)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(cert))
    port = free_port()
    with scripted_server(kt_server(), context) as one:
        with started("route", one.url, "--metrics-port", str(free_port()), port=port):
            status = json.loads(kt("route", "status", "--port", str(port), "--json"))
        assert [each["state"] for each in status["servers"]] == ["ready"]


def test_keys_guard_users_and_servers(home: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:USER-A\nbob:USER-B\n")
    keys.chmod(0o600)
    with server(free_port(), "--api-key-file", str(keys)) as one:
        ports = ("--metrics-port", str(free_port()))
        with started(
            "route", one.url, *ports, "--api-key-file", str(keys), port=free_port()
        ) as router:

            def status(path: str, key: str, **body: object) -> int:
                headers = {"Authorization": f"Bearer {key}"}
                where = f"{router.url}{path}"
                if not body:
                    return requests.get(where, headers=headers, timeout=60).status_code
                return requests.post(where, json=body, headers=headers, timeout=60).status_code

            asked = {"model": "kt-mini", "messages": [{"role": "user", "content": "hello"}]}
            chat = [
                status("/v1/chat/completions", key, **asked) for key in ("USER-A", "USER-B", "x")
            ]
            assert chat == [200, 200, 401]
            for key in ("USER-A", "USER-B", ""):
                assert status("/workers", key) == 401
                assert status("/workers", key, url="http://127.0.0.1:9") == 401
            for pid in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    assert b"USER-A" not in pid.read_bytes()
                except OSError:
                    continue


def test_one_server_reads_and_the_other_answers(home: Path, tmp_path: Path) -> None:
    """smg asks a server of kt for one token, and then the other one for the answer."""
    store, port = ("--kv-store", str(tmp_path / "store")), free_port()
    text = "Please count: " + ", ".join(map(str, range(150)))
    python = engines.folder() / f"{ROW.name}@{ROW.version}" / "bin" / "python"
    with server(free_port(), *store) as prefill, server(free_port(), *store) as decode:
        command = [str(python), "-m", "smg.cli", "launch", "--pd-disaggregation"]
        command += ["--prefill", prefill.url, "--decode", decode.url, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--prometheus-host", "127.0.0.1"]
        command += ["--prometheus-port", str(free_port())]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as router:
            try:
                url = f"http://127.0.0.1:{port}"
                until(lambda: is_ready(url))
                usage = ask(url, text, temperature=0).json()["usage"]
            finally:
                router.kill()
        details = usage["prompt_tokens_details"]
        assert usage["prompt_tokens"] - details["cached_tokens"] <= 65
        assert details["cached_tokens_details"]["store"] == details["cached_tokens"]


def is_ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/readiness", timeout=60).status_code == 200
    except requests.ConnectionError:
        return False
