"""What a router adds to a request, beside the same requests without it: route.py."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from queue import SimpleQueue
from statistics import quantiles
from typing import Any

from routed import free_port, router

# A server that answers at once, in a process of its own.
INSTANT = """
import asyncio, json, sys
models = {"data": [{"id": "kt-mini", "object": "model", "max_model_len": 2048}]}
answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "kt-mini", "choices": [{"index": 0,
    "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
async def talk(reader, writer):
    try:
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode()
            length = [int(l.split(":")[1]) for l in head.lower().split("\\r\\n") if l.startswith("content-length:")]
            if length:
                await reader.readexactly(length[0])
            path = head.split()[1]
            said = answer if path.startswith("/v1/chat") else models if path == "/v1/models" else {}
            body = json.dumps(said).encode()
            head = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n"
            writer.write(head % len(body) + body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_server(talk, "127.0.0.1", int(sys.argv[1]))
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextmanager
def instant(port: int) -> Iterator[None]:
    """A server that answers at once."""
    command = [sys.executable, "-c", INSTANT, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield
        finally:
            child.terminate()


def measure_latency(clients: int = 16, requests: int = 3000) -> dict[str, Any]:
    """What the router adds: the same requests, directly and through it, in turns."""
    one, two, port = (free_port() for _ in range(3))
    with instant(one), instant(two), router(one, two, port=port):
        runs = [(_times(one, clients, requests), _times(port, clients, requests)) for _ in range(3)]
    direct, routed = ([each for pair in runs for each in pair[at]] for at in (0, 1))
    row: dict[str, Any] = {"clients": clients, "requests": len(routed)}
    for name, at in (("p50", 49), ("p99", 98)):
        low, high = (1e3 * quantiles(each, n=100)[at] for each in (direct, routed))
        row |= {f"direct_{name}_ms": low, f"routed_{name}_ms": high, f"added_{name}_ms": high - low}
    print(row, flush=True)
    return row


def _times(port: int, clients: int, requests: int) -> list[float]:
    """The seconds of requests of clients with a connection each."""
    body = json.dumps({"model": "kt-mini", "messages": [{"role": "user", "content": "hello"}]})
    done: SimpleQueue[list[float]] = SimpleQueue()

    def client() -> None:
        connection, found = HTTPConnection("127.0.0.1", port, timeout=60), []
        for _ in range(requests // clients):
            began = time.perf_counter()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            connection.getresponse().read()
            found.append(time.perf_counter() - began)
            time.sleep(
                0.02
            )  # so that requests meet a router and not a queue of this machine's two cores
        connection.close()
        done.put(found)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [each for _ in threads for each in done.get()]
