"""kt-kernel, which runs only the experts of a layer: its figures, and those of `kt bench kernel`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.peers import report
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.install import ROOT, Place
from benchmarks.peers.measure import Watch, Worker
from benchmarks.peers.rows import Work

NAME = "kt-kernel"

# hidden, width of an expert, experts, experts per token; the last with a part of the model's experts.
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "deepseek-v2-lite": (2048, 1408, 64, 6),
    "deepseek-v3": (7168, 2048, 32, 8),
}
METHODS = ("RAWINT4", "FP8_PERCHANNEL", "AMXINT8", "BF16")
_DECODE = Work("decode", 64)
_ROUNDS = 5  # at most: nothing alternates with them, so more would not mean more


def cases(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """(model, method) whose names hold every word."""
    return [
        (model, method)
        for model in SHAPES
        for method in METHODS
        if all(word in f"experts {model} {NAME} {method}" for word in words)
    ]


def rows(
    place: Place, model: str, method: str, threads: int, cpus: frozenset[int], rounds: int
) -> Iterator[report.Row]:
    """Decode and prefill of one layer's experts.

    One worker thread less than there are cores: with as many, they and its queue's thread get in each
    other's way.

    Raises:
        Unavailable: the worker cannot be loaded or died.
    """
    engine, shape = ENGINES[NAME], SHAPES[model]
    prefill = Work("prefill", 512 if shape[0] > 4096 else 1024)
    workers = max(1, threads - 1)
    spec = {"shape": shape, "method": method, "threads": workers, "context": prefill.n_tokens}
    env = place.environment(NAME, engine)
    worker = Worker(place.python, engine.worker, spec, env, place.log(NAME))
    try:
        for work in (_DECODE, prefill):
            watch = Watch((worker,), cpus)
            seconds = [watch.turn(worker, work, seed) for seed in range(min(rounds, _ROUNDS) + 1)]
            step_s = median(seconds[1:]) / (work.n_tokens if work is _DECODE else 1)
            bits = worker.about["bits"]
            weights = 3 * shape[0] * shape[1] * shape[3]  # of one token
            yield {
                "work": work.kind,
                "n_tokens": work.n_tokens if work is prefill else 1,
                "model": model,
                "shape": shape,
                "format": method,
                "bits": bits,
                "threads": workers,
                "ms": 1e3 * step_s,
                "gb_s": weights * bits / 8 / step_s / 1e9,
                "gop_s": 2 * weights * (prefill.n_tokens if work is prefill else 1) / step_s / 1e9,
                "runs_s": seconds[1:],
                **report.noise(watch.others_share(), 0.0),
            }
    finally:
        worker.close()


def of_kt() -> Any:
    """The document of `kt bench kernel`; None where this kt has no such command or it fails."""
    command = [sys.executable, "-m", "ktcli", "bench", "kernel", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if done.returncode:
        return None
    try:
        return json.loads(done.stdout)
    except ValueError:
        return None
