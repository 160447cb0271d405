"""What deferral costs kt-mini, beside leaving the same experts out, at every depth.

    python benchmarks/deferral.py [--tokens 90112] [--tasks 2000] [--out FILE.json]

The same measures as the gates of tests/test_kt_mini_deferral.py, over more text and more generated tasks. An
engine that skips is one that never adds what is late: test code, no way of running a model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from convert import convert_checkpoint  # type: ignore[import-not-found]
from mini_tasks import MINI, is_right, tasks  # type: ignore[import-not-found]

from benchmarks.loading import load_pack
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.engine import Engine, cpu
from ktcli.hardware.gpu import CPU
from ktcli.measure.evaluate import EvalCase, score, windows
from ktcli.measure.intervals import interval
from ktcli.ops.passes import defer_experts
from ktcli.ops.recording import Recording
from ktcli.ops.table.experts import Carry
from ktcli.text.passage import read_passage, read_with

LENGTH, SEED = 512, 2
DEPTHS = range(1, 7)


@contextmanager
def skipping() -> Iterator[None]:
    """Engines made inside never add what is late."""
    with patch.object(cpu, "defer_experts", skip_experts):
        yield


def skip_experts(recording: Recording, layers: int) -> Recording:
    """The pass that defers experts, and then forgets them."""
    made = defer_experts(recording, layers)
    kept = (each for each in made.records if not isinstance(each.operation, Carry))
    return replace(made, records=tuple(kept))


def load(pack: Path) -> Engine:
    """With one thread, as the steps are short, and room for a sequence of each depth."""
    words, streams = DeviceWords(device=CPU, defer=max(DEPTHS)), 1 + len(DEPTHS)
    wanted = Wanted(LENGTH + 1, threads=1, all_logits=True, streams=streams, device=words)
    return load_pack(pack, wanted)


def losses(pack: Path, tokens: int) -> list[dict[str, Any]]:
    """Nats per token lost at each depth, by deferring and by skipping, and the contrast of the gate."""
    reading = read_with(pack, read_passage(None), tokens)
    over = windows(reading.ids, LENGTH, LENGTH, reading.begin)
    own = load(pack)
    with skipping():
        other = load(pack)
    cases = [
        EvalCase(own),
        *(EvalCase(engine, depth) for depth in DEPTHS for engine in (own, other)),
    ]
    plain, *found = (scores.nll for scores in score(cases, over, compare=False))
    rows = []
    for depth, late, dropped in zip(DEPTHS, found[::2], found[1::2], strict=True):
        gate = late - plain - 0.7 * (dropped - plain)
        row = {
            "depth": depth,
            "tokens": len(plain),
            "ratio": float((late - plain).mean() / (dropped - plain).mean()),
        }
        values = {
            "deferred": late - plain,
            "skipped": dropped - plain,
            "deferred_less_0.7_skipped": gate,
        }
        rows.append(row | {name: asdict(interval(value)) for name, value in values.items()})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def answers(pack: Path, n_of_each: int, depths: tuple[int, ...] = (3, 6)) -> list[dict[str, Any]]:
    """Share of tasks answered exactly right, and points lost with their 95 % interval, by kind and in all."""
    session = load(pack).session()
    made = tasks(n_of_each, SEED)
    right = {
        (kind, depth): np.array([is_right(session, task, depth) for task in some])
        for kind, some in made.items()
        for depth in (0, *depths)
    }
    for depth in (0, *depths):
        right["all", depth] = np.concatenate([right[kind, depth] for kind in made])
    rows = []
    for kind in (*made, "all"):
        plain = right[kind, 0]
        row: dict[str, Any] = {"kind": kind, "tasks": len(plain), "right": float(plain.mean())}
        for depth in depths:
            lost = 100 * (plain.astype(float) - right[kind, depth])
            half = 1.96 * float(lost.std()) / len(lost) ** 0.5  # tasks are independent
            row[f"points_lost_{depth}"] = {"mean": float(lost.mean()), "half": half}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=90_112)
    parser.add_argument("--tasks", type=int, default=2000, help="of each of five kinds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pack = convert_checkpoint(MINI, Path(folder) / "pack", experts="int8", dense="bf16")
        document = {
            "model": "kt-mini@int8-bf16",
            "isa": load(pack).pool.isa,
            "losses": losses(pack, args.tokens),
        }
        document["answers"] = answers(pack, args.tasks)
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
