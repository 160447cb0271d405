"""What a router in front of two servers brings, and what it costs: kt route with the real smg, two servers of kt-mini.

    python benchmarks/route.py [--only PART ...] [--model NAME] [--out FILE.json]      first: kt engine install smg

Each server has one thread and four streams; the one server beside which they are measured has one thread and eight, so
that its cache is as large as both. KV pages on disk are off: two servers of one library would find each other's. The
servers, the router and the clients share one machine: with kt-mini look at shares and counts, not at times. `--model`
names one that computes more than its clients do, for tokens per second on a machine of two cores.

    cached   24 conversations of 6 turns, 4, 8 and 16 clients, with and without a system text in common: share of tokens
             found in a cache, requests per server, tokens per second, beside one server
    faults   requests that fail while a server is killed, started again, answers 500 and 503, and is drained; when a
             killed one is used again
    latency  what the router adds to a request, 16 clients: a server that answers at once, asked directly and through it
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from statistics import quantiles
from typing import Any

from naming import result_path
from route_faults import measure_faults
from route_latency import measure_latency
from routed import MODEL, STREAMS, Asked, ask, free_port, router, server

from ktcli.hardware.probe import probe

CONVERSATIONS, TURNS, CLIENTS = 24, 6, (4, 8, 16)
QUESTION_WORDS, COMMON_WORDS = 30, (0, 100)
SEEDS = (1, 2, 3)
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


def converse(
    port: int, clients: int, talks: list[Conversation], model: str = MODEL
) -> tuple[list[Asked], float]:
    """Lets clients go on with whichever conversation waits longest; returns the requests and the seconds of all."""
    waiting: SimpleQueue[tuple[Conversation, int] | None] = SimpleQueue()
    done: SimpleQueue[Asked] = SimpleQueue()
    for talk in talks:
        waiting.put((talk, 0))

    def client() -> None:
        while (item := waiting.get()) is not None:
            talk, turn = item
            talk.messages.append({"role": "user", "content": talk.questions[turn]})
            asked, answer = ask(port, talk.messages, model=model)
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


def measure_cached(model: str) -> list[dict[str, Any]]:
    """Two servers behind a router beside one with a cache as large as both, in turns."""
    rows = []
    for common in COMMON_WORDS:
        for clients in CLIENTS:
            pairs = [_pair(seed, common, clients, model) for seed in SEEDS]
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


def _pair(
    seed: int, common: int, clients: int, model: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    ports = [free_port() for _ in range(4)]
    with (
        server(ports[0], model=model, core=0),
        server(ports[1], model=model, core=1),
        router(ports[0], ports[1], port=ports[2]),
    ):
        two = figures(*converse(ports[2], clients, conversations(seed, common), model))
    with server(ports[3], 2 * STREAMS, model, core=0):
        one = figures(*converse(ports[3], clients, conversations(seed, common), model))
    return two, one


PARTS: dict[str, Callable[[str], Any]] = {
    "cached": measure_cached,
    "faults": lambda _: measure_faults(),
    "latency": lambda _: measure_latency(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default=MODEL, help="of the part `cached`")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = probe()
    found = {name: PARTS[name](options.model) for name in options.only}
    document = {
        "cpu": machine.cpu.model,
        "cores": machine.cpu.physical_cores,
        "model": options.model,
        "goals": GOALS,
        **found,
    }
    path = options.out or result_path(machine.cpu.model, machine.cpu.physical_cores, "route")
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
