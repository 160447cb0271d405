"""The real vllm-router in front of two servers of kt-mini: one reads what the other answers, and prompts go where their
pages are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from mini_library import NEEDS_KT_MINI
from ports import free_port
from server.wheels import packages_of

pytestmark = [pytest.mark.thorough, NEEDS_KT_MINI]
VERSION = "0.1.17"
READY_S = 60
PROMPT = [300 + 7 * n % 1500 for n in range(700)]
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def installed() -> Path:
    """A folder with the router's packages."""
    return packages_of("vllm-router", VERSION)


class Process:
    """A server or a router that runs, and what it has said."""

    def __init__(self, command: list[str], port: int, **environ: str) -> None:
        self.url, self.said = f"http://127.0.0.1:{port}", list[str]()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(COLOURS.sub("", line))

    def until(self, words: str) -> None:
        """Waits until it has said something."""
        end = time.monotonic() + READY_S
        while not any(words in line for line in list(self.said)):
            assert self._process.poll() is None and time.monotonic() < end, "".join(self.said)
            time.sleep(0.02)

    def close(self) -> None:
        self._process.terminate()
        self._reader.join()
        self._process.wait(READY_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Server(Process):
    """A server of kt-mini with a library of its own.

    Attributes:
        events: where it publishes them.
    """

    def __init__(self, home: Path, *more: str) -> None:
        self.home, self.events, self._port, self._more = (
            home,
            free_port(together=2),
            free_port(),
            more,
        )
        home.mkdir(parents=True, exist_ok=True)
        self.begin()

    def begin(self) -> None:
        """Starts it, or starts it again once it has ended."""
        words = ["serve", "kt-mini", "--threads", "1", "--context", "2048", "--parallel", "1"]
        words += ["--kv-events", f"tcp://127.0.0.1:{self.events}", "--port", str(self._port)]
        command = [sys.executable, "-m", "ktcli", *words, *self._more]
        super().__init__(command, self._port, KT_HOME=str(self.home))

    def ask(self, ids: list[int], **more: Any) -> dict[str, Any]:
        return ask(self.url, ids, **more)

    def fill(self, first: int) -> None:
        """Computes so much that nothing else is left in memory."""
        for at in range(first, first + 4):
            self.ask([300 + (at + 11 * n) % 1500 for n in range(1900)])


@contextmanager
def servers(home: Path, *more: str) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as held:
        found = Server(home / "a", *more), Server(home / "b", *more)
        for each in found:
            held.callback(each.close)
        for each in found:
            each.until("press Ctrl-C to stop")
        yield found


@contextmanager
def router(installed: Path, *words: str) -> Iterator[Process]:
    port, metrics = free_port(), free_port()
    addresses = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    addresses += ["--prometheus-host", "127.0.0.1", "--log-level", "debug"]
    command = [sys.executable, "-m", "vllm_router.launch_router", *words, *addresses]
    made = Process(command, port, PYTHONPATH=str(installed))
    try:
        made.until("Starting server on")
        yield made
    finally:
        made.close()


def ask(url: str, ids: list[int], **more: Any) -> dict[str, Any]:
    """The answer to a prompt, with what was found of it in the cache as `cached`, by tier."""
    body = {"model": "kt-mini", "prompt": ids, "max_tokens": 12, "temperature": 0, **more}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    details = found["usage"]["prompt_tokens_details"]
    return {**found, "cached": details["cached_tokens_details"]}


def chat(url: str, text: str, **more: Any) -> str:
    body = {"model": "kt-mini", "messages": [{"role": "user", "content": text}], "temperature": 0}
    answer = requests.post(f"{url}/v1/chat/completions", json={**body, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_one_server_reads_and_the_other_answers(tmp_path: Path, installed: Path) -> None:
    text = "Please count: " + ", ".join(map(str, range(150)))
    with servers(tmp_path, "--kv-store", str(tmp_path / "store")) as (prefill, decode):
        words = ["--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url]
        with router(installed, *words) as before:
            given = chat(before.url, text, max_tokens=16)
            ids = ask(before.url, PROMPT)["choices"][0]["text"]
        log = [line for line in decode.said if " in, " in line]
        counts = [re.findall(r"([\d,]+) tokens \(([\d,]+) cached\)", line)[0] for line in log]
        computed = [int(n.replace(",", "")) - int(c.replace(",", "")) for n, c in counts]
        assert len(computed) == 2 and max(computed) <= 65
        # As one server that never had a store answers.
        with servers(tmp_path / "alone") as (alone, _):
            assert chat(alone.url, text, max_tokens=16) == given
            assert alone.ask(PROMPT)["choices"][0]["text"] == ids


def test_a_prompt_goes_where_it_is_on_disk_and_after_eviction_does_not(
    tmp_path: Path, installed: Path
) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    with servers(tmp_path) as (first, second):
        first.ask(PROMPT, kt_persist=True)
        first.fill(0)
        second.ask(PROMPT[:130])  # two pages, which count for less than ten on disk
        words = ["--policy", "kv_aware", "--kv-event-model", "kt-mini", "--kv-event-block-size"]
        words += ["64", "--kv-penalty-host", "1", "--worker-urls", first.url, second.url]
        for each in (first, second):
            words += ["--kv-event-source", f"{each.url}=tcp://127.0.0.1:{each.events}"]
        with router(installed, *words) as routes:  # it begins when all is there
            heard_by(routes, first, second)
            answer = ask(routes.url, PROMPT)
            assert answer["cached"] == {"memory": 0, "disk": 640}, routes.said[-20:]
            # It is started again while the router runs: its memory is empty.
            first.close()
            first.begin()
            first.until("press Ctrl-C to stop")
            heard_by(routes, first, second)
            answer = ask(routes.url, PROMPT)
            assert answer["cached"] == {"memory": 0, "disk": 640}, routes.said[-20:]
            first.fill(4)
            command = [sys.executable, "-m", "ktcli", "cache", "rm", "--yes"]
            environ = {**os.environ, "KT_HOME": str(first.home)}
            subprocess.run(command, env=environ, check=True, capture_output=True, timeout=60)
            first.fill(8)  # it looks at the disk, and nothing of the prompt is left in memory
            heard_by(routes, first, second)
            answer = ask(routes.url, PROMPT)
            assert answer["cached"] == {"memory": 128}, routes.said[-20:]


def heard_by(routes: Process, *of: Server) -> None:
    """Waits until a router has heard what servers have said so far."""
    for each in of:
        end, live = time.monotonic() + READY_S, re.compile(rf"live .*source={each.url} .*seq=(\d+)")
        while True:
            heard = [int(found[1]) for line in list(routes.said) if (found := live.search(line))]
            if heard and heard[-1] == last_number(each):
                break
            assert time.monotonic() < end, routes.said[-20:]


def last_number(of: Server) -> int:
    """The number of the last message that a server sent before it was asked."""
    import zmq

    context = zmq.Context()
    asks = context.socket(zmq.DEALER)
    asks.connect(f"tcp://127.0.0.1:{of.events + 1}")
    asks.send_multipart((b"", (0).to_bytes(8, "big")))
    numbers = list[int]()
    try:
        while True:
            assert asks.poll(READY_S * 1000)
            number = int.from_bytes(asks.recv_multipart()[2], "big", signed=True)
            if number < 0:
                return numbers[-1]
            numbers.append(number)
    finally:
        context.destroy(linger=0)
