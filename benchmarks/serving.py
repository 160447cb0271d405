"""What `kt serve` costs beside its engine alone, and how it stands bad company.

    python benchmarks/serving.py [--only PART ...] [--layers N] [--out FILE.json]

The model has random weights, and steps of about 20 ms on two cores. The engine alone is another process with the
same pack, whose scheduler gets the same ids; both are measured in turn, so that each pair had the same machine. The
clients run on that machine, too, and take their share of its cores, which programs elsewhere would not.

    http     time of 128 tokens for 1 and 8 streams, and time to the first token, over the engine's own
    refusals gaps between the tokens of a stream while 20 requests a second of 100 kB are read and refused
    idle     a server that nobody asks; then one with 1,000 connections that say nothing or half a request
    cancel   requests whose clients leave at random moments, and what is left of them
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from naming import result_path
from streaming import write_checkpoint

from ktcli.hardware.probe import probe
from ktcli.native import Pool
from ktcli.weights.convert import convert_source
from ktcli.weights.reader import source_at
from ktcli.weights.recipe import Recipe

MINI = Path(__file__).resolve().parent.parent / "profiles" / "kt-mini"
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 2048,  # of kt-mini's tokenizer
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 32,  # all, for steps as long as those of a large model
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
TOKENS, PAIRS, FIRSTS = 128, 11, 31
STREAMS = (1, 8)
STORMS, STORM_S, STORM_RATE, STORM_BYTES = 3, 10.0, 20, 100_000
CONNECTIONS, HEAD_S, IDLE_S = 1000, 15.0, 75.0  # the deadlines that the server promises
CANCELLED, CLIENTS = 10_000, 16
GOALS = {
    "http_cost_1": 0.03,
    "http_cost_8": 0.05,
    "first_token_more_ms": 10.0,
    "gap_p99_over_median": 1.2,
    "first_token_ratio_1000_connections": 1.2,
    "connections_mb": 60.0,
    "idle_share_of_a_core": 0.005,
    "left_over": 0,
}

# Answers "N TOKENS" with the seconds of N streams, and those to the first token, of the engine alone.
ENGINE = """
import json, sys, threading, time
from ktcli.assembly.request import Wanted
from ktcli.assembly.talking import Opening, open_model, prepared
from ktcli.engine.request import Finished, GenerationRequest, Token
from ktcli.sampling import SamplingSettings
from ktcli.engine.scheduler import Limits
from ktcli.server.models.enginethread import EngineThread
name, ids, ends = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
how = Opening(Wanted(context=2048, streams=8), 0, False)
backend = open_model(prepared(name, how), name, how).backend
thread = EngineThread(backend.engine, Limits(active=8))
sampling = SamplingSettings(greedy=True, logit_bias=tuple((each, -100.0) for each in ends))
print("ready", flush=True)
for line in sys.stdin:
    streams, tokens, length = map(int, line.split())
    prompt = (ids * (length // len(ids) + 1))[: length - 1]
    left, done, first = [streams], threading.Event(), []
    def hear(event):
        if isinstance(event, Token) and not first:
            first.append(time.perf_counter())
        if isinstance(event, Finished):
            left[0] -= 1
            if not left[0]:
                done.set()
    began = time.perf_counter()
    for number in range(streams):
        thread.submit(GenerationRequest([*prompt, 100 + number], sampling, frozenset(), tokens), hear)
    done.wait()
    print(json.dumps([time.perf_counter() - began, first[0] - began]), flush=True)
"""


class Alone:
    """The engine without a server, in a process of its own."""

    def __init__(self, pack: Path, ids: list[int], ends: list[int]) -> None:
        words = [sys.executable, "-c", ENGINE, str(pack), json.dumps(ids), json.dumps(ends)]
        self._child = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None and self._child.stdin is not None
        self._said, self._asked = self._child.stdout, self._child.stdin
        self._said.readline()

    def run(self, streams: int, tokens: int, length: int) -> tuple[float, float]:
        """Seconds of all, and to the first token, for prompts of `length` tokens."""
        print(streams, tokens, length, file=self._asked, flush=True)
        whole, first = json.loads(self._said.readline())
        return whole, first

    def close(self) -> None:
        self._child.communicate()


class Server:
    """`kt serve` of a pack, in a process of its own."""

    def __init__(self, pack: str, port: int) -> None:
        kt = "import sys; from ktcli.start import run; sys.exit(run())"
        words = ["serve", pack, "--port", str(port), "--parallel", "8", "--context", "2048"]
        self._child = subprocess.Popen(
            [sys.executable, "-c", kt, *words, "--quiet"], stderr=subprocess.DEVNULL
        )
        self.port, self.pid = port, self._child.pid
        while True:
            try:
                self.get("/health")
                break
            except OSError:
                if self._child.poll() is not None:
                    raise SystemExit("kt serve ended") from None
                time.sleep(0.1)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            text: str = reply.read().decode()
            return text

    def status(self, name: str) -> int:
        """A number of /proc/PID/status."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]

    @property
    def cpu_s(self) -> float:
        """The processor time that it took."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def held(self) -> dict[str, float]:
        """What requests take and must give back."""
        taken = {  # before it is asked anything
            "threads": self.status("Threads"),
            "descriptors": len(os.listdir(f"/proc/{self.pid}/fd")),
        }
        used = re.search(r"^kt_kv_cache_usage_perc (\S+)", self.get("/metrics"), re.MULTILINE)
        health = json.loads(self.get("/health"))
        return {
            **taken,
            "pages": float(used[1]) if used else -1.0,
            "running": health["running"],
            "waiting": health["waiting"],
        }

    def close(self) -> None:
        self._child.terminate()
        self._child.wait()


def request(text: str, tokens: int, ends: list[int], *, chances: bool = False) -> bytes:
    """A request for a streamed answer that does not end early.

    Args:
        chances: whether each token comes with its chance, and so in an event of its own, even without a letter.
    """
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "stream": True,
        "temperature": 0,
        "logit_bias": {str(each): -100 for each in ends},
        "logprobs": chances,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def streamed(port: int, data: bytes) -> AsyncIterator[float]:
    """The moments at which pieces of an answer's text came, or tokens with their chances."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                break
            if b'"logprobs":{' in line or (b'"content":"' in line and b'"content":""' not in line):
                yield time.perf_counter()
    finally:
        writer.close()


async def answered(port: int, data: list[bytes]) -> tuple[float, float]:
    """Seconds until all requests are answered, and to the first token."""
    first: list[float] = []

    async def one(each: bytes) -> None:
        async for moment in streamed(port, each):
            first.append(moment)

    began = time.perf_counter()
    await asyncio.gather(*map(one, data))
    return time.perf_counter() - began, min(first, default=began) - began


def prompt_tokens(port: int, text: str) -> int:
    """The tokens of a prompt, as the server counts them."""
    body = {"model": "x", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/messages/count_tokens",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=30) as reply:
        count: int = json.load(reply)["input_tokens"]
    return count


def short(port: int, ends: list[int]) -> bytes:
    """A request whose first token is text: not all that random weights say is."""
    asked = (request(f"Tell me {n}", 1, ends) for n in range(1000))
    return next(each for each in asked if asyncio.run(answered(port, [each]))[1])


def measure_http(server: Server, alone: Alone, ends: list[int]) -> dict[str, Any]:
    """The goals of `http`, from pairs in turn."""
    found: dict[str, Any] = {}
    length = prompt_tokens(server.port, "Tell me 1")
    for streams in STREAMS:
        data = [request(f"Tell me {n}", TOKENS, ends) for n in range(streams)]
        ratios, steps = [], []
        for _ in range(PAIRS):
            engine, _ = alone.run(streams, TOKENS, length)
            http, _ = asyncio.run(answered(server.port, data))
            ratios.append(http / engine - 1)
            steps.append(engine / TOKENS)
        found[f"http_cost_{streams}"] = median(ratios)
        found[f"step_ms_{streams}"] = 1000 * median(steps)
    more, data = [], [short(server.port, ends)]
    for _ in range(FIRSTS):
        _, engine = alone.run(1, 2, length)
        _, http = asyncio.run(answered(server.port, data))
        more.append(1000 * (http - engine))
    found["first_token_more_ms"] = median(more)
    return found


# Sends large requests that the server must refuse; prints how many it refused.
STORM = """
import json, sys, threading, time, urllib.error, urllib.request
port, seconds, rate, size = int(sys.argv[1]), *map(float, sys.argv[2:5])
refused = []
def one(number):
    text = json.dumps({"messages": [{"role": "user", "content": "word " * int(size / 5)}], "n": number % 2})
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/chat/completions", text.encode()).read()
    except urllib.error.HTTPError as error:
        refused.append(error.code)
began = time.monotonic()
for number in range(int(seconds * rate)):
    time.sleep(max(0.0, began + number / rate - time.monotonic()))
    threading.Thread(target=one, args=(number,)).start()
while threading.active_count() > 1:
    time.sleep(0.01)
print(json.dumps(refused))
"""


async def gaps(port: int, data: bytes) -> list[float]:
    """Seconds between the tokens of an answer."""
    moments = [moment async for moment in streamed(port, data)]
    return [b - a for a, b in pairwise(moments)]


def measure_refusals(server: Server, ends: list[int]) -> dict[str, Any]:
    """Gaps in quiet and in the storm, in turn; each figure is the median of some such pairs."""
    pairs = [stormed(server, ends) for _ in range(STORMS)]
    return {name: median(pair[name] for pair in pairs) for name in pairs[0]}


def stormed(server: Server, ends: list[int]) -> dict[str, float]:
    """Gaps in quiet, and then in one storm, whose clients give way to the server as those elsewhere would."""
    quiet = asyncio.run(gaps(server.port, request("Tell me much", 300, ends, chances=True)))
    words = [str(server.port), str(STORM_S), str(STORM_RATE), str(STORM_BYTES)]
    program = ["nice", "-n", "19", sys.executable, "-c", STORM, *words]
    storm = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    time.sleep(1.0)
    stormy: list[float] = []
    while storm.poll() is None:
        stormy += asyncio.run(gaps(server.port, request("Tell me much", 100, ends, chances=True)))
    step, quiet_p99, storm_p99 = (
        median(quiet),
        quantiles(quiet, n=100)[98],
        quantiles(stormy, n=100)[98],
    )
    return {
        "refused": len(json.loads(storm.communicate()[0])),
        "median_gap_ms": 1000 * step,
        "quiet_p99_over_median": quiet_p99 / step,
        "gap_p99_over_median": storm_p99 / step,
    }


async def crowded(server: Server, data: bytes, before_kb: int) -> dict[str, Any]:
    """First tokens beside connections that say nothing, or half a request; and when those are gone."""
    crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(CONNECTIONS)]
    for _, writer in crowd[: CONNECTIONS // 2]:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: local")
    for reader, writer in crowd[CONNECTIONS // 2 :]:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"}")
    opened = time.monotonic()
    firsts = [(await answered(server.port, [data]))[1] for _ in range(FIRSTS)]
    grown = (server.status("VmRSS") - before_kb) / 1024
    alive: dict[str, int] = {}
    for name, deadline in (("half", HEAD_S), ("idle", IDLE_S)):
        await asyncio.sleep(max(0.0, opened + deadline + 2 - time.monotonic()))
        part = crowd[: CONNECTIONS // 2] if name == "half" else crowd[CONNECTIONS // 2 :]
        alive[name] = sum(not reader.at_eof() for reader, _ in part)
    for _, writer in crowd:
        writer.close()
    return {"first_s": median(firsts), "connections_mb": grown, "alive_past_deadline": alive}


def measure_idle(server: Server, ends: list[int]) -> dict[str, Any]:
    """Nobody, then a crowd."""
    data = short(server.port, ends)
    normal = median(asyncio.run(answered(server.port, [data]))[1] for _ in range(FIRSTS))
    began, cpu = time.monotonic(), server.cpu_s
    time.sleep(10)
    idle = (server.cpu_s - cpu) / (time.monotonic() - began)
    found = asyncio.run(crowded(server, data, server.status("VmRSS")))
    ratio = found.pop("first_s") / normal
    return {"idle_share_of_a_core": idle, "first_token_ratio_1000_connections": ratio, **found}


async def left(port: int, data: list[bytes], most_s: float) -> None:
    """Asks, and leaves at random moments."""
    room, rng = asyncio.Semaphore(CLIENTS), random.Random(0)

    async def one(each: bytes, patience_s: float) -> None:
        async with room:
            try:
                async with asyncio.timeout(patience_s):
                    async for _ in streamed(port, each):
                        pass
            except TimeoutError:
                pass

    await asyncio.gather(*(one(each, rng.uniform(0, most_s)) for each in data))


def measure_cancel(server: Server, ends: list[int]) -> dict[str, Any]:
    """What is held after thousands of clients left, over what was held before."""
    data = [request(f"Tell me {n % 7}", 64, ends) for n in range(CANCELLED)]
    asyncio.run(answered(server.port, [request("Tell me " * 99, 8, ends)]))  # pages are written
    asyncio.run(left(server.port, data[: 10 * CLIENTS], 0.05))
    time.sleep(2)
    before = server.held
    began = time.monotonic()
    asyncio.run(left(server.port, data, 0.05))
    took = time.monotonic() - began
    time.sleep(2)
    after = server.held
    return {
        "cancelled": CANCELLED,
        "seconds": took,
        "before": before,
        "after": after,
        "left_over": sum(abs(after[name] - before[name]) for name in before),
    }


def written(folder: Path, config: dict[str, Any]) -> Path:
    """A pack of random weights with kt-mini's tokenizer."""
    source, pack = folder / "source", folder / "pack"
    source.mkdir()
    write_checkpoint(source, config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(MINI / name, source / name)
    with source_at(source, source.name) as opened:
        convert_source(opened, pack, Recipe(), Pool(len(probe().cpu.cores)))
    shutil.rmtree(source)
    return pack


@contextmanager
def serving(pack: str) -> Iterator[Server]:
    """A server at a port that is free."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(pack, port)
    try:
        yield server
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ("http", "refusals", "idle", "cancel")
    parser.add_argument("--only", choices=names, nargs="+", default=list(names))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine, found = probe(), {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KT_HOME"] = str(Path(folder) / "home")
        pack = written(Path(folder), {**CONFIG, "num_hidden_layers": options.layers})
        with serving(str(pack)) as server:
            tokenizer = json.loads((MINI / "generation_config.json").read_text())
            ends: list[int] = tokenizer["eos_token_id"]
            if "http" in options.only:
                alone = Alone(pack, list(range(50, 62)), ends)
                found["http"] = measure_http(server, alone, ends)
                alone.close()
            if "refusals" in options.only:
                found["refusals"] = measure_refusals(server, ends)
            if "idle" in options.only:
                found["idle"] = measure_idle(server, ends)
        if "cancel" in options.only:
            with serving("kt-mini") as server:
                found["cancel"] = measure_cancel(server, ends)
    print(json.dumps(found, indent=2))
    out = options.out or result_path(machine.cpu.model, len(machine.cpu.cores), "serving")
    out.write_text(json.dumps({"goals": GOALS, "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
