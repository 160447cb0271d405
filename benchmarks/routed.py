"""Servers of a model and routers in front of them, as processes, and a request to either: for route*.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

STREAMS = 4  # of each of two servers
ANSWER_TOKENS = 24
MODEL = "kt-mini"
ROUTED = "x-smg-routed-worker-id"


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


@contextmanager
def kt(
    *words: str, port: int, core: int | None = None, **environ: str
) -> Iterator[subprocess.Popen[str]]:
    """A server or a router that is ready; a server's threads stay on the cores that it may use, the first ones.

    Args:
        environ: what differs from this program's environment and `KT_CACHE=0`.
    """
    run = "import sys; from ktcli.start import run; sys.exit(run())"
    alone = [] if core is None else ["taskset", "--cpu-list", str(core)]
    command = [*alone, sys.executable, "-c", run, *words, "--port", str(port)]
    environment = {**os.environ, "KT_CACHE": "0", **environ}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stderr is not None
        if not any("press Ctrl-C to stop" in line for line in child.stderr):
            raise SystemExit(
                f"kt {words[0]} did not start; is smg installed? kt engine install smg"
            )
        reader = threading.Thread(target=child.stderr.read)
        reader.start()
        try:
            yield child
        finally:
            child.send_signal(signal.SIGTERM)  # SIGINT is ignored by whoever runs behind nohup
            reader.join()
            child.wait()


def server(port: int, streams: int = STREAMS, model: str = MODEL, core: int | None = None) -> Any:
    """`kt serve` on one thread."""
    return kt("serve", model, "--threads", "1", "--parallel", str(streams), port=port, core=core)


def router(*ports: int, port: int) -> Any:
    """`kt route` in front of servers."""
    urls = [f"http://127.0.0.1:{each}" for each in ports]
    return kt("route", *urls, "--metrics-port", str(free_port()), "--drain", "1", port=port)


@dataclass
class Asked:
    """One request and what came of it."""

    seconds: float
    status: int
    server: str = ""
    prompt: int = 0
    cached: int = 0
    answer: int = 0


def ask(
    port: int,
    messages: list[dict[str, str]],
    tokens: int = ANSWER_TOKENS,
    model: str = MODEL,
    **more: Any,
) -> tuple[Asked, str]:
    """Asks a question; returns what came of it, and the answer."""
    body = {"model": model, "messages": messages, "max_tokens": tokens, "ignore_eos": True, **more}
    began = time.perf_counter()
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        said, name = reply.read(), reply.headers.get(ROUTED, "")
    except (OSError, HTTPException):
        return Asked(time.perf_counter() - began, 0), ""
    finally:
        connection.close()
    seconds = time.perf_counter() - began
    if reply.status != 200:
        return Asked(seconds, reply.status, name), ""
    found = json.loads(said)
    usage = found["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    counts = (usage["prompt_tokens"], cached, usage["completion_tokens"])
    return Asked(seconds, 200, name, *counts), found["choices"][0]["message"]["content"]
