"""The real Mooncake master and its client: what one server reads, another finds, and the store may die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from engine.test_mooncake_tier import LONGER, Server
from engine.test_shared_store import QUOTA
from engine.test_store_faults import CONTEXT, TEXT, answer
from engine.test_tier import leave
from hybrid import Made
from loading import load_engine
from ports import free_port
from server.running import served_by_command
from server.test_kv_store import answered_through
from server.wheels import wheels_of
from store.page_labels import SPACE, conversation, data_of, put, read
from store.test_network_folder import require_namespaces

from ktcli.engine.restoring import ReadingWorth
from ktcli.main import main
from ktcli.store import engines
from ktcli.store.mooncake.address import MooncakeAddress
from ktcli.store.mooncake.client import MooncakeStore, StoreConnection
from ktcli.store.mooncake.process import command_of

pytestmark = pytest.mark.thorough
ROW = engines.row_of("mooncake")
PAGE_BYTES = 4_500_000


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A library with Mooncake."""
    if missing := ROW.missing_libraries():
        pytest.skip(f"Mooncake needs {missing}; {ROW.remedy}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(tmp_path_factory.mktemp("home")))
        assert main(["engine", "install", "mooncake", "--from", str(wheels_of(ROW))]) == 0
        yield Path(os.environ["KT_HOME"])


class RunningStore:
    """A store that `kt store serve` runs."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.address = process, f"mooncake://127.0.0.1:{port}"

    def signal_master(self, number: int) -> None:
        """Sends a signal to the master alone."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        (master,) = [
            int(each)
            for each in children.split()
            if b"mooncake_master" in Path(f"/proc/{each}/cmdline").read_bytes()
        ]
        os.kill(master, number)


@contextmanager
def running(memory: str = "300M") -> Iterator[RunningStore]:
    """A store that takes pages, while the context lasts."""
    port = free_port()
    words = ["store", "serve", "--port", str(port), "--memory", memory]
    command = [sys.executable, "-m", "ktcli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "mooncake://" in process.stdout.readline()
            yield RunningStore(process, port)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.fixture(scope="module")
def store(home: Path) -> Iterator[RunningStore]:
    with running() as made:
        yield made


def opened(store: RunningStore, said: list[str]) -> MooncakeStore:
    command = command_of(engines.require("mooncake"))
    connection = StoreConnection(command, MooncakeAddress.parse(store.address))
    return MooncakeStore(connection, SPACE, PAGE_BYTES, said.append)


def test_pages_go_through_the_real_store(store: RunningStore) -> None:
    said: list[str] = []
    one, other = opened(store, said), opened(store, said)
    parts = conversation("one", 20)
    put(one, parts, PAGE_BYTES)  # type: ignore[arg-type]
    assert one.flush(60)
    other.refresh()
    other.seek([*parts, *conversation("two", 5)])
    assert [other.has(part.kind, part.key) for part in parts] == [True] * 20
    assert read(other, parts, PAGE_BYTES) == 20  # type: ignore[arg-type]
    assert other.states() == [] and not said
    # A key that is there already keeps its bytes.
    image = np.zeros(PAGE_BYTES, np.uint8)
    assert other.read(conversation("two", 1), [image]) == 0 and not other.rests
    assert data_of(parts[0], PAGE_BYTES).any()
    for each in (one, other):
        each.close()


def test_a_full_store_gives_up_old_pages(home: Path) -> None:
    said: list[str] = []
    with running("100M") as small:
        one = opened(small, said)
        for n in range(8):
            put(one, conversation(f"{n}", 8), PAGE_BYTES)  # type: ignore[arg-type]
            one.flush(60)
        last = conversation("7", 8)
        one.refresh()
        one.seek(last)
        read(one, [part for part in last if one.has(part.kind, part.key)], PAGE_BYTES)  # type: ignore[arg-type]
        one.close()
    assert all("has no free memory" in each for each in said)


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
def test_another_server_goes_on_bit_for_bit(
    store: RunningStore, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    engine = load_engine(Made.convert(family, tmp_path / "made").path, context=CONTEXT, threads=1)
    leave(engine)
    wanted = answer(engine, LONGER)[1]
    monkeypatch.setattr(ReadingWorth, "pays", lambda *_: True)
    installed = engines.require("mooncake")
    monkeypatch.setattr("ktcli.assembly.kvshared.engines.require", lambda name: installed)
    one, two = (
        Server(engine, tmp_path / name, store.address, monkeypatch) for name in ("one", "two")
    )
    one.answer(TEXT)
    came, rows = two.answer(quota=QUOTA)
    assert rows == wanted and came["store"] >= 256
    assert not one.listener.said and not two.listener.said


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_goes_on_when_the_master_is_gone(
    home: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setenv("KT_CACHE", "0")

    def ask(url: str, n: int) -> dict[str, Any]:
        text = f"{n} " + "Please count the words of this sentence. " * 20
        body = {"model": "kt-mini", "messages": [{"role": "user", "content": text}]}
        more = {"max_tokens": 4, "kt_persist": True, "temperature": 0}
        answered = requests.post(f"{url}/v1/chat/completions", json={**body, **more}, timeout=60)
        assert answered.status_code == 200
        return dict(answered.json()["usage"]["prompt_tokens_details"])

    with running() as made:
        options = ("--threads", "1", "--kv-store", made.address)
        with served_by_command(*options) as one, served_by_command(*options) as two:
            ask(one, 1)
            assert ask(two, 1)["cached_tokens_details"].get("store", 0) > 0
            made.signal_master(how)
            for n in range(2, 5):
                ask(two, n)
        if how == signal.SIGSTOP:
            made.signal_master(signal.SIGCONT)


def test_a_server_goes_on_when_the_cable_is_pulled(home: Path) -> None:
    """Between two network namespaces; what waits for the master gets neither an answer nor an error."""
    require_namespaces("--net")
    answered_through("cable_pulled")
