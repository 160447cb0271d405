"""The recipe for HAProxy in docs/outgrown.md: it is read, and does what the page says."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from ports import free_port
from server.routed import ScriptedServer, kt_server, scripted_server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "outgrown.md"
pytestmark = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="haproxy, which reads the recipe, is not installed"
)


def recipe() -> str:
    (found,) = re.findall(r"```\n(global\n.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


@contextmanager
def haproxy(folder: Path, *servers: ScriptedServer) -> Iterator[str]:
    """HAProxy by the recipe in front of two servers, while the context lasts."""
    port, text = free_port(), recipe()
    places = {"127.0.0.1:11436": f"127.0.0.1:{port}"}
    places |= {
        f"10.0.0.{at + 2}:11435": f"127.0.0.1:{each.port}" for at, each in enumerate(servers)
    }
    for written, used in places.items():
        assert text.count(written) == 1
        text = text.replace(written, used)
    file = folder / "haproxy.cfg"
    file.write_text(text)
    with subprocess.Popen(["haproxy", "-db", "-f", str(file)], stderr=subprocess.PIPE) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def until_asked(url: str, server: ScriptedServer) -> None:
    """Waits until the health of a server was asked, and the port is open."""
    end = time.monotonic() + 20
    while not any(path == "/health" for path, _ in server.seen):
        assert time.monotonic() < end
        time.sleep(0.05)
    requests.get(f"{url}/health", timeout=60)


def asked(servers: list[ScriptedServer]) -> list[int]:
    """The questions that each server got, and takes them away."""
    counts = [Counter(path for path, _ in each.seen)["/v1/models"] for each in servers]
    for each in servers:
        each.seen.clear()
    return counts


def test_haproxy_reads_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(recipe())
    done = subprocess.run(["haproxy", "-c", "-f", str(file)], capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr


@pytest.mark.thorough
def test_a_conversation_stays_and_a_server_that_drains_costs_no_request(tmp_path: Path) -> None:
    def ask(url: str, session: str) -> int:
        headers = {"X-Session-Id": session}
        return requests.get(f"{url}/v1/models", headers=headers, timeout=60).status_code

    with scripted_server(kt_server()) as one, scripted_server(kt_server()) as two:
        servers = [one, two]
        with haproxy(tmp_path, one, two) as url:
            until_asked(url, one)
            homes = []
            for session in range(16):
                asked(servers)
                assert [ask(url, f"conversation {session}") for _ in range(3)] == [200] * 3
                homes.append(asked(servers))
            assert {tuple(each) for each in homes} == {(3, 0), (0, 3)}
            draining = (503, b'{"status":"draining"}')
            two.replies = {"/health": draining, "/v1/models": draining}
            assert all(ask(url, f"conversation {session}") == 200 for session in range(16))
            time.sleep(5)  # two checks
            asked(servers)
            assert all(ask(url, f"conversation {session}") == 200 for session in range(16))
            assert asked(servers) == [16, 0]
