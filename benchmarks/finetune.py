"""What fine-tuning costs: products with the transpose, the experts of a layer backwards, and steps of one layer.

    python benchmarks/finetune.py [--rounds N] [--skip-steps] [--out FILE.json]
    python benchmarks/finetune.py --memory NAME [--tokens N]

Shapes are those of qwen3-30b-a3b (experts: a quarter of them), weights random. What is compared is measured in turns
within each round, beside the arithmetic peak; figures are medians of what a round says. --memory computes one step
through a whole model and prints the memory of the process above that of the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ktcli.assembly.host import team_here
from ktcli.hardware.numa import OFF
from ktcli.hardware.probe import probe
from ktcli.measure.synthetic import ApartSource
from ktcli.models import build, cut
from ktcli.native import SILU, Arena, Batch, Ceiling, Pool, Program, Run, Update, Weight
from ktcli.planner.spec import weight_bytes
from ktcli.store.catalog import get
from ktcli.training.lora import LoraSettings
from ktcli.training.model import TrainableModel, TrainingOptions
from ktcli.weights.formats import format_named
from ktcli.weights.recipe import Recipe

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 32, 8
SHAPES = (1536, 2048), (2048, 768)  # rows and columns of an expert's gate_up and down
COPIES = 6  # of a matrix: together larger than the caches
NO_PAGES = np.zeros(0, np.int32)
STEP, SHORT = 8192, 512


def weight(pool: Pool, fmt: str, n: int, k: int, count: int = 1) -> Weight:
    """Returns random packed matrices."""
    empty = Weight(format_named(fmt), n, k, count, 0, None)
    arena = Arena(empty.size_bytes)
    made = Weight(empty.format, n, k, count, arena.address, arena)
    pool.fill_random(made, 1)
    return made


def _batch(rows: int, adapter: int = 0) -> Batch:
    return Batch((Run(np.zeros(rows, np.int32), 0, NO_PAGES, rows, adapter=adapter),))


def product(pool: Pool, name: str, fmt: str, shape: tuple[int, int], rows: int) -> Callable[[], None]:  # fmt: skip
    """Returns what runs one product after the other, each with a matrix of its own."""
    n, k = shape
    program = Program(pool, max_tokens=rows, max_outputs=1, exact=False)
    into, outof = (k, n) if name == "linear" else (n, k)
    x, y = program.buffer(into), program.buffer(outof)
    for copy in range(COPIES):
        if copy:
            program.part()
        program.input(x)
        program.append(name, (y, x), weight=(weight(pool, fmt, n, k),))
    program.finish()
    program.rows(x, rows)[:] = np.random.default_rng(0).standard_normal((rows, into), np.float32)
    batch = _batch(rows)

    def run() -> None:
        for copy in range(COPIES):
            program.run_part(batch, copy)

    return run


def experts(pool: Pool, fmt: str, per_expert: int, rank: int) -> Callable[[], None]:
    """Returns what runs the experts of a layer backwards, each with as many tokens on average."""
    rows, draw = per_expert * EXPERTS // TOP_K, np.random.default_rng(0)
    program = Program(pool, max_tokens=rows, max_outputs=1, exact=False)
    if rank:
        program.take_adapters(1, rank)
    x, dout, dx = (program.buffer(HIDDEN) for _ in range(3))
    dgate, routing = program.buffer(TOP_K), program.given(EXPERTS, TOP_K)
    both = weight(pool, fmt, 2 * WIDTH, HIDDEN, EXPERTS), weight(pool, fmt, HIDDEN, WIDTH, EXPERTS)
    views = dx, dgate, x, dout
    facts = {"routing": routing, "gate_up": both[:1], "down": both[1:], "glu": SILU}
    program.append("experts_backward", views, **facts)
    program.finish()
    for part, of in enumerate(both if rank else ()):
        a = 0.01 * draw.standard_normal((EXPERTS, rank, of.k), np.float32)
        b = 0.01 * draw.standard_normal((EXPERTS, of.n // 16, rank, 16), np.float32)
        program.adapt(1, 0, part, [Update(rank, 0, 1, 1.0, a, b)])
        program.gradients(1, 0, part, [(np.zeros_like(a), np.zeros_like(b))])
    for view in (x, dout):
        program.rows(view, rows)[:] = draw.standard_normal((rows, HIDDEN), np.float32)
    ids, gate = program.routing(routing, rows, TOP_K)
    ids[:], gate[:] = np.argsort(draw.random((rows, EXPERTS)), 1)[:, :TOP_K], 1 / TOP_K
    batch = _batch(rows, 1 if rank else 0)
    return lambda: program.run(batch)


def seconds(run: Callable[[], object]) -> float:
    """Returns the seconds of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def products(pool: Pool, rounds: int) -> list[dict[str, Any]]:
    """Measures products with the transpose beside the forward product in bf16 of the same shape."""
    found = []
    for shape in SHAPES:
        for rows in (32, 128):
            forward = product(pool, "linear", "bf16", shape, rows)
            back = {fmt: product(pool, "transposed", fmt, shape, rows) for fmt in ("int4", "int8", "bf16")}  # fmt: skip
            times = [
                {"forward": seconds(forward), **{fmt: seconds(run) for fmt, run in back.items()}}
                for _ in range(rounds)
            ]
            shares = {fmt: round(median(t["forward"] / t[fmt] for t in times), 3) for fmt in back}
            print(f"{shape[0]} x {shape[1]}, {rows:4} tokens: {shares}", flush=True)
            found.append({"shape": shape, "tokens": rows, "of_forward": shares})
    return found


def backward(pool: Pool, rounds: int) -> list[dict[str, Any]]:
    """Measures the experts of a layer backwards beside the peak of bf16, and what factors of rank 8 add."""
    found = []
    for per_expert in (16, 32, 128):
        plain, lora = experts(pool, "int4", per_expert, 0), experts(pool, "int4", per_expert, 8)
        ops = 10 * per_expert * EXPERTS * HIDDEN * WIDTH
        rows = []
        for _ in range(rounds):
            peak = pool.ceiling(Ceiling.BF16, 0.15, ())
            took = seconds(plain), seconds(lora)
            peak = (peak + pool.ceiling(Ceiling.BF16, 0.15, ())) / 2
            rows.append((ops / took[0] / peak, took[1] / took[0] - 1))
        share, added = (round(median(row[i] for row in rows), 3) for i in (0, 1))
        print(
            f"experts backward, {per_expert:3} tokens each: {share:.0%} of the peak; r 8 {added:+.1%}",
            flush=True,
        )
        found.append({"tokens_per_expert": per_expert, "of_peak": share, "lora_adds": added})
    return found


def trainable(pool: Pool, name: str, layers: int | None, length: int) -> TrainableModel:
    """Returns a model of random weights in int4, with factors of rank 8 of everything."""
    config = get(name).config
    model = build(config if layers is None else cut(config, layers))
    options = TrainingOptions(context=length, max_rows=STEP)
    recipe = Recipe.named("int4", "int8")
    return TrainableModel.load(
        model, recipe, ApartSource(pool, 1), pool, LoraSettings(rank=8), options
    )


def steps(pool: Pool, rounds: int) -> dict[str, Any]:
    """Measures all documents of a step together beside one after the other, through one layer without its head."""
    model, draw = trainable(pool, "qwen3-30b-a3b", 1, SHORT), np.random.default_rng(1)
    texts = [draw.integers(0, model.model.spec.vocab, SHORT).tolist() for _ in range(STEP // SHORT)]
    # Of each document one token is trained: the head, which is the same for both, costs next to nothing.
    masks = [[False] * (SHORT - 1) + [True]] * len(texts)

    def one_by_one() -> None:
        for text, mask in zip(texts, masks, strict=True):
            model.loss_and_gradients([text], [mask])

    pairs = [
        (seconds(lambda: model.loss_and_gradients(texts, masks)), seconds(one_by_one))
        for _ in range(rounds)
    ]
    together, apart = (median(pair[i] for pair in pairs) for i in (0, 1))
    print(f"{STEP} tokens of a layer: {together:.2f} s together, {apart:.2f} s apart", flush=True)
    return {"together_s": together, "apart_s": apart, "ratio": apart / together}


def memory(pool: Pool, name: str, tokens: int) -> dict[str, Any]:
    """Computes one step through a whole model; returns the most memory of the process, above its weights."""
    model = trainable(pool, name, None, tokens)
    ids = np.random.default_rng(1).integers(0, model.model.spec.vocab, tokens).tolist()
    took = seconds(lambda: model.loss_and_gradients([ids], [[True] * tokens]))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = weight_bytes(model.model, Recipe.named("int4", "int8"))
    # Each with its gradient.
    factors = 2 * sum(each.a.nbytes + each.b.nbytes for each in model.factors.values())
    found = {
        "model": name, "tokens": tokens, "seconds": took, "weights_bytes": weights,
        "factors_bytes": factors, "most_bytes": most, "above_bytes": most - weights,
    }  # fmt: skip
    print(json.dumps(found, indent=1), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--skip-steps", action="store_true")
    parser.add_argument("--memory", metavar="NAME")
    parser.add_argument("--tokens", type=int, default=SHORT)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    pool = team_here(None, OFF)
    machine = {"cpu": probe().cpu.model, "isa": pool.isa, "threads": pool.threads}
    found: dict[str, Any] = {"machine": machine, "load": [round(x, 2) for x in os.getloadavg()]}
    if asked.memory:
        found["memory"] = memory(pool, asked.memory, asked.tokens)
    else:
        found |= {"products": products(pool, asked.rounds), "experts": backward(pool, asked.rounds)}
        if not asked.skip_steps:
            found["steps"] = steps(pool, max(1, asked.rounds // 3))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
