"""What one team per NUMA node brings: the same layers with teams and without, in turns.

    python benchmarks/nodes.py [--numa auto|N|nodes=LIST] [--layers N] [--json]

Two engines of the shapes of qwen3-30b-a3b, random weights: one team with its memory anywhere
(`--numa off`), and teams with their own (default auto; on a machine with one node, 2 pretend ones, which
shows what the cut itself costs). Each run of the teams is taken between two runs of the one team; `ratio`
is the median of how many times as fast the teams are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.loading import load_random
from ktcli.assembly.request import Wanted
from ktcli.engine import Engine
from ktcli.hardware.numa import AUTO, OFF, Numa, parse_numa
from ktcli.hardware.probe import probe
from ktcli.measure.bench import Job, Phase, once
from ktcli.measure.clock import PAIRS, Measurement, alternate
from ktcli.measure.streams import GreedyChoice
from ktcli.store import catalog
from ktcli.weights.recipe import Recipe

MODEL, LAYERS = "qwen3-30b-a3b", 4
JOBS = (Job(Phase.DECODE, 64), Job(Phase.PREFILL, 512))


def engine_with(numa: Numa, layers: int) -> Engine:
    """An engine of so many layers."""
    profile = catalog.find(MODEL)
    assert profile is not None
    context = max(job.context + job.n_tokens for job in JOBS)
    return load_random(profile.config, Recipe(), Wanted(context, numa=numa), layers)


def runner(engine: Engine, job: Job) -> Callable[[], None]:
    """One run of a job, on ids that are new each time."""
    session, draw = engine.session(), np.random.default_rng(1)
    choice = GreedyChoice(engine)

    def work() -> None:
        ids = draw.integers(0, engine.spec.vocab, job.n_tokens).tolist()
        once(engine, session, job, ids, choice)

    work()
    return work


def timed(work: Callable[[], None]) -> Callable[[], float]:
    """The same, returning its seconds."""

    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run


def row(job: Job, teams: Engine, found: Measurement) -> dict[str, Any]:
    """One result."""
    return {
        "work": job.kind.value,
        "model": MODEL,
        "layers": teams.spec.layers,
        "teams": len(teams.pool.node_threads),
        "threads": teams.pool.threads,
        "isa": teams.pool.isa,
        "tok_s": job.n_tokens / found.seconds,
        "ratio": found.share,
        "ratios": [run.share for run in found.runs],
        "noisy": found.noisy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numa", type=parse_numa, default=None)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    machine = probe()
    numa = asked.numa or (AUTO if len(machine.worker_nodes) > 1 else Numa(2))
    one, teams = engine_with(OFF, asked.layers), engine_with(numa, asked.layers)
    rows = []
    for job in JOBS:
        found = alternate(timed(runner(teams, job)), timed(runner(one, job)), pairs=PAIRS)
        rows.append(row(job, teams, found))
    if asked.json:
        print(
            json.dumps({"machine": machine.cpu.model, "numa": str(numa), "results": rows}, indent=1)
        )
        return
    for each in rows:
        note = ", noisy" if each["noisy"] else ""
        print(
            f"{each['work']:<8}{each['tok_s']:8.1f} tokens/s in {each['teams']} teams,"
            f" {each['ratio']:.2f} times one team{note}"
        )


if __name__ == "__main__":
    main()
