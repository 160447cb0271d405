"""What a router in front of two servers brings, and what it costs: kt route with the real smg, two servers of kt-mini.

    python benchmarks/route.py [--only PART ...] [--out FILE.json]        smg has to be installed: kt engine install smg

Each server has one thread and four streams; the one server beside which they are measured has one thread and eight, so
that its cache is as large as both. KV pages on disk are off: two servers of one library would find each other's. The
servers, the router and the clients share one machine, with others: look at shares and counts, not at times.

    cached   24 conversations of 6 turns, 4, 8 and 16 clients, with and without a system text in common: share of tokens
             found in a cache, requests per server, tokens per second, beside one server
    faults   requests that fail while a server is killed, started again, answers 500 and 503, and is drained; when a
             killed one is used again
    latency  what the router adds to a request, 16 clients: a server that answers at once, asked directly and through it
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from statistics import quantiles
from typing import Any

from naming import result_path

from ktcli.hardware.probe import probe

CONVERSATIONS, TURNS, CLIENTS = 24, 6, (4, 8, 16)
QUESTION_WORDS, ANSWER_TOKENS, COMMON_WORDS = 30, 24, (0, 100)
SEEDS = (1, 2, 3)
STREAMS = 4  # of each of two servers
ROUTED = "x-smg-routed-worker-id"
FAULT_S, HEALTH_S = 12.0, 60.0
GOALS = {
    "cached_of_one": 0.95,
    "most_requests_of_a_server": 0.65,
    "speedup": 1.6,
    "failed": 0,
    "used_again_s": 5.0,
    "added_p50_ms": 5.0,
    "added_p99_ms": 20.0,
}
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand"
    " part place case week company system program question work government number night point home water room"
).split()


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


@contextmanager
def kt(*words: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """A server or a router that is ready."""
    run = "import sys; from ktcli.start import run; sys.exit(run())"
    command = [sys.executable, "-c", run, *words, "--port", str(port)]
    environment = {**os.environ, "KT_CACHE": "0"}
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
            child.send_signal(signal.SIGINT)
            reader.join()
            child.wait()


def server(port: int, streams: int = STREAMS) -> Any:
    """`kt serve` of kt-mini on one thread."""
    return kt("serve", "kt-mini", "--threads", "1", "--parallel", str(streams), port=port)


def router(*ports: int, port: int) -> Any:
    """`kt route` in front of servers."""
    urls = [f"http://127.0.0.1:{each}" for each in ports]
    return kt("route", *urls, "--metrics-port", str(free_port()), "--drain", "1", port=port)


# --- conversations ------------------------------------------------------------------------------------


@dataclass
class Asked:
    """One request and what came of it."""

    seconds: float
    status: int
    server: str = ""
    prompt: int = 0
    cached: int = 0
    answer: int = 0


@dataclass
class Conversation:
    """A conversation that goes on with each answer."""

    questions: list[str]
    messages: list[dict[str, str]] = field(default_factory=list)


def conversations(seed: int, common_words: int) -> list[Conversation]:
    """The same ones for the same seed."""
    draw, common = random.Random(seed), random.Random(0)
    text = "You say " + " ".join(common.choices(_WORDS, k=common_words))
    first = [{"role": "system", "content": text}] if common_words else []
    return [
        Conversation(
            [" ".join(draw.choices(_WORDS, k=QUESTION_WORDS)) for _ in range(TURNS)], [*first]
        )
        for _ in range(CONVERSATIONS)
    ]


def ask(
    port: int, messages: list[dict[str, str]], tokens: int = ANSWER_TOKENS
) -> tuple[Asked, str]:
    """Asks a question; returns what came of it, and the answer."""
    body = {"model": "kt-mini", "messages": messages, "max_tokens": tokens, "ignore_eos": True}
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


def converse(port: int, clients: int, talks: list[Conversation]) -> tuple[list[Asked], float]:
    """Lets clients go on with whichever conversation waits longest; returns the requests and the seconds of all."""
    waiting: SimpleQueue[tuple[Conversation, int] | None] = SimpleQueue()
    done: SimpleQueue[Asked] = SimpleQueue()
    for talk in talks:
        waiting.put((talk, 0))

    def client() -> None:
        while (item := waiting.get()) is not None:
            talk, turn = item
            talk.messages.append({"role": "user", "content": talk.questions[turn]})
            asked, answer = ask(port, talk.messages)
            talk.messages.append({"role": "assistant", "content": answer})
            if turn + 1 < len(talk.questions):
                waiting.put((talk, turn + 1))
            done.put(asked)

    began = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    for each in threads:
        each.start()
    found = [done.get() for _ in range(sum(len(talk.questions) for talk in talks))]
    seconds = time.perf_counter() - began
    for _ in threads:
        waiting.put(None)
    for each in threads:
        each.join()
    return found, seconds


def figures(found: list[Asked], seconds: float) -> dict[str, Any]:
    """The figures of a run."""
    by = Counter(each.server for each in found)
    prompts = sum(each.prompt for each in found)
    return {
        "cached": sum(each.cached for each in found) / prompts,
        "prompt_tokens": prompts / len(found),
        "output_tok_s": sum(each.answer for each in found) / seconds,
        "p50_s": quantiles([each.seconds for each in found], n=20)[9],
        "p95_s": quantiles([each.seconds for each in found], n=20)[18],
        "requests": sorted(by.values()),
        "most": max(by.values()) / len(found),
        "failed": sum(each.status != 200 for each in found),
        "seconds": seconds,
    }


def measure_cached() -> list[dict[str, Any]]:
    """Two servers behind a router beside one with a cache as large as both, in turns."""
    rows = []
    for common in COMMON_WORDS:
        for clients in CLIENTS:
            pairs = [_pair(seed, common, clients) for seed in SEEDS]
            two, one = zip(*pairs, strict=True)
            row = {
                "common_words": common,
                "clients": clients,
                "one": one,
                "two": two,
                "cached_of_one": _mean(two, "cached") / _mean(one, "cached"),
                "speedup": _mean(two, "output_tok_s") / _mean(one, "output_tok_s"),
                "most": max(each["most"] for each in two),
                "failed": sum(each["failed"] for each in two),
            }
            rows.append(row)
            print(
                f"{common:>4} words in common, {clients:>2} clients: cached {_mean(two, 'cached'):.1%} of"
                f" {_mean(one, 'cached'):.1%} = {row['cached_of_one']:.1%}; most {row['most']:.0%};"
                f" speed {row['speedup']:.2f}; p50 {_mean(two, 'p50_s'):.3f} of {_mean(one, 'p50_s'):.3f} s;"
                f" {row['failed']} failed",
                flush=True,
            )
    return rows


def _mean(rows: Any, name: str) -> float:
    return float(sum(each[name] for each in rows) / len(rows))


def _pair(seed: int, common: int, clients: int) -> tuple[dict[str, Any], dict[str, Any]]:
    ports = [free_port() for _ in range(4)]
    with server(ports[0]), server(ports[1]), router(ports[0], ports[1], port=ports[2]):
        two = figures(*converse(ports[2], clients, conversations(seed, common)))
    with server(ports[3], 2 * STREAMS):
        one = figures(*converse(ports[3], clients, conversations(seed, common)))
    return two, one


# --- faults -------------------------------------------------------------------------------------------


class Load:
    """Requests of four clients without pause, until it is told to end."""

    def __init__(self, port: int) -> None:
        self.found: list[tuple[float, Asked]] = []
        self._port, self._ends, self._number = port, threading.Event(), count()
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for each in self._threads:
            each.join()

    def _ask(self) -> None:
        while not self._ends.is_set():
            words = [{"role": "user", "content": f"{next(self._number)} is a number"}]
            asked, _ = ask(self._port, words, 8)
            self.found.append((time.monotonic(), asked))

    def failed(self) -> int:
        """The requests that got no answer."""
        return sum(each.status != 200 for _, each in self.found)

    def first_of(self, url: str, after: float) -> float | None:
        """When a server first answered after a moment."""
        return next((at for at, each in self.found if at > after and each.server == url), None)


class Sick(BaseHTTPRequestHandler):
    """A server that answers chats with whatever status it is told to, and everything else as kt serve does."""

    status = 500

    def do_GET(self) -> None:
        rows = [{"id": "kt-mini", "object": "model", "max_model_len": 2048}]
        said = {"data": rows} if self.path == "/v1/models" else {"status": "ok"}
        self._send(200 if self.path in ("/v1/models", "/health") else 404, said)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.status == 0:  # a reset
            linger = b"\x01\0\0\0\0\0\0\0"
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            return
        self._send(self.status, {"error": {"message": "no"}})

    def _send(self, status: int, said: Any) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """The port of a server in a thread."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        made.daemon_threads = True
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield made.server_port
        finally:
            made.shutdown()
            thread.join()


def health(port: int) -> bool:
    """Whether a server says that it is well."""
    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False


def measure_faults() -> list[dict[str, Any]]:
    """What fails under load while something happens to one of two servers."""
    rows = []
    for name, number in (
        ("SIGKILL, start again", signal.SIGKILL),
        ("drain, start again", signal.SIGTERM),
    ):
        rows.append({"fault": name, **_ended(number)})
        print(rows[-1], flush=True)
    for name, status in (("500", 500), ("503", 503), ("resets", 0)):
        rows.append({"fault": name, **_sick(status)})
        print(rows[-1], flush=True)
    return rows


def _ended(number: signal.Signals) -> dict[str, Any]:
    one, two, port = (free_port() for _ in range(3))
    url = f"http://127.0.0.1:{two}"
    with ExitStack() as held:
        held.enter_context(server(one))
        with server(two) as child:
            held.enter_context(router(one, two, port=port))
            load = held.enter_context(Load(port))
            time.sleep(FAULT_S / 4)
            child.send_signal(number)
            child.wait()
        gone = time.monotonic()
        time.sleep(FAULT_S / 2)
        held.enter_context(server(two))
        while not health(two):
            time.sleep(0.02)
        well = time.monotonic()
        until = well + HEALTH_S
        while load.first_of(url, well) is None and time.monotonic() < until:
            time.sleep(0.05)
        again = load.first_of(url, gone)
        time.sleep(1.0)
        count_all = len(load.found)
        return {
            "requests": count_all,
            "failed": load.failed(),
            "used_again_s": None if again is None else max(0.0, again - well),
        }


def _sick(status: int) -> dict[str, Any]:
    one, port = free_port(), free_port()
    handler = type("SickServer", (Sick,), {"status": status})
    with server(one), serving(handler) as two, router(one, two, port=port), Load(port) as load:
        time.sleep(FAULT_S / 2)
        return {"requests": len(load.found), "failed": load.failed(), "used_again_s": None}


# --- latency ------------------------------------------------------------------------------------------

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


PARTS: dict[str, Callable[[], Any]] = {
    "cached": measure_cached,
    "faults": measure_faults,
    "latency": measure_latency,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = probe()
    found = {name: PARTS[name]() for name in options.only}
    document = {
        "cpu": machine.cpu.model,
        "cores": machine.cpu.physical_cores,
        "goals": GOALS,
        **found,
    }
    path = options.out or result_path(machine.cpu.model, machine.cpu.physical_cores, "route")
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
