"""Dynamo's real index of KV blocks, which follows the events of a server of kt-mini."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from mini_library import NEEDS_KT_MINI
from ports import free_port
from server.test_vllm_router import PROMPT, Process, Server, servers
from server.wheels import packages_of

pytestmark = [pytest.mark.thorough, NEEDS_KT_MINI]
VERSION = "1.6.1"
HEARD_S = 60


class Index(Process):
    """The index of the blocks of servers, which it knows by numbers from 1 on."""

    def tokens(self, ids: list[int]) -> dict[str, dict[str, Any]]:
        """The tokens of a prompt that each server has, in all and by tier."""
        body = {"token_ids": ids, "model_name": "kt-mini"}
        answer = requests.post(f"{self.url}/query", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, dict[str, Any]] = answer.json()["instances"]
        return found

    def hears(self, ids: list[int], tokens: dict[str, int]) -> None:
        """Waits until it knows of so many tokens of a prompt at each server."""
        end = time.monotonic() + HEARD_S
        while {n: each["longest_matched"] for n, each in self.tokens(ids).items()} != tokens:
            assert time.monotonic() < end, (self.tokens(ids), self.said[-20:])
            time.sleep(0.05)


@contextmanager
def index(*of: Server) -> Iterator[Index]:
    port = free_port()
    workers = [f"{n}=tcp://127.0.0.1:{each.events}" for n, each in enumerate(of, 1)]
    words = ["--block-size", "64", "--port", str(port), "--model-name", "kt-mini"]
    words += ["--workers", ",".join(workers)]
    command = [sys.executable, "-m", "dynamo.indexer", *words]
    path = str(packages_of("ai-dynamo-runtime", VERSION))
    made = Index(command, port, PYTHONPATH=path)
    try:
        made.until("HTTP server listening")
        yield made
    finally:
        made.close()


def test_it_knows_which_server_has_what(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    packages_of("ai-dynamo-runtime", VERSION)
    with servers(tmp_path) as (first, second):
        first.ask(PROMPT, kt_persist=True)
        with index(first, second) as knows:  # it begins when some is there
            knows.hears(PROMPT, {"1": 640})
            assert knows.tokens(PROMPT)["1"]["cpu"] == 640
            second.ask(PROMPT[:130])
            knows.hears(PROMPT, {"1": 640, "2": 128})
            knows.hears([5, *PROMPT], {})
            first.fill(0)  # it is on disk only
            end = time.monotonic() + HEARD_S
            while knows.tokens(PROMPT)["1"]["cpu"]:
                assert time.monotonic() < end, knows.said[-20:]
                time.sleep(0.05)
            assert knows.tokens(PROMPT)["1"]["disk"] == 640
