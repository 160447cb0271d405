"""What adapters cost: answers and prompts with them beside the same without, on random weights of true shapes.

    python benchmarks/adapters.py [NAME] [--layers N] [--rounds N] [--out FILE.json]
    python benchmarks/adapters.py deepseek-v2-lite --swap [--layers N] [--rounds N] [--out FILE.json]

Each adapter has an update of rank 8 (prompts: 8 and 64) of every linear product and of every expert. An engine without
room for adapters, and one with room, are measured in turns within each round, in the one with room also sequences
that name none; figures are medians of what a round says of both.

With --swap an answer is generated on a server's engine thread while every second a request names another adapter, which
is read from disk each time: how long until it can be used, and how long the answer waits for each of its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.loading import load_random
from ktcli.adapters.factors import hash_of
from ktcli.adapters.folder import open_adapter
from ktcli.adapters.packed import PackedAdapter, pack_adapter
from ktcli.adapters.targets import Targets
from ktcli.assembly.request import Wanted
from ktcli.assembly.subject import find_subject
from ktcli.engine import CpuEngine, Sequence
from ktcli.engine.adapters import AttachedAdapter
from ktcli.engine.request import Event, GenerationRequest, Token
from ktcli.engine.scheduler import Limits
from ktcli.hardware.probe import probe
from ktcli.models import Model
from ktcli.native import PANEL_ROWS, Batch, Update
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Tensor, ceil_to
from ktcli.planner.memory import AdapterRoom
from ktcli.server.models.adapters import ServedAdapters
from ktcli.server.models.enginethread import EngineThread

PROMPT, STREAMS, STEPS, WARM_UP, CONTEXT = 512, 8, 12, 3, 1024
QUIET_TOKENS = 64  # whose gaps are compared with those while adapters come


def _update(tensor: Tensor, rank: int, draw: np.random.Generator) -> Update:
    panels = ceil_to(tensor.n, PANEL_ROWS) // PANEL_ROWS
    shapes = (tensor.count, rank, ceil_to(tensor.k, PANEL_ROWS)), (tensor.count, panels, rank, 16)
    a, b = (draw.integers(0x3A00, 0x3C00, shape, np.uint16) for shape in shapes)  # bf16, small
    a[:, :, tensor.k :] = 0
    return Update(rank, 0, 1, 1.0, a, b)


def adapter_of(engine: CpuEngine, rank: int, seed: int) -> PackedAdapter:
    """Returns an adapter of all linear products and experts, its head and routers left out."""
    draw, tensors = np.random.default_rng(seed), {each.name: each for each in engine.model.tensors}
    assert engine.adapters is not None
    updates = {
        name: (_update(tensors[name], rank, draw),)
        for name in engine.adapters.products
        if tensors[name].layer is not None and tensors[name].role.value != "kept"
    }
    return PackedAdapter(f"made{seed}", f"{seed:064x}", updates)


def steps_s(engine: CpuEngine, adapters: list[AttachedAdapter | None]) -> float:
    """Returns the median seconds of a step of one token of as many sequences."""
    lines = [_begun(engine, each, 16) for each in adapters]
    took = []
    for step in range(WARM_UP + STEPS):
        runs = tuple(line.extend(np.array([step], np.int32)) for line in lines)
        began = time.perf_counter()
        engine.run(Batch(runs))
        took.append(time.perf_counter() - began)
        for line, run in zip(lines, runs, strict=True):
            line.commit(run)
    for line in lines:
        line.close()
    engine.pools.forget()
    return median(took[WARM_UP:])


def prompt_s(engine: CpuEngine, adapter: AttachedAdapter | None) -> float:
    """Returns the seconds that a prompt takes."""
    line = _begun(engine, adapter, 0)
    ids = np.random.default_rng(1).integers(0, engine.spec.vocab, PROMPT).astype(np.int32)
    run = line.extend(ids)
    began = time.perf_counter()
    engine.run(Batch((run,)))
    took = time.perf_counter() - began
    line.commit(run)
    line.close()
    engine.pools.forget()
    return took


def _begun(engine: CpuEngine, adapter: AttachedAdapter | None, tokens: int) -> Sequence:
    line = engine.sequence()
    line.adopt([0], adapter=adapter)
    if tokens:
        run = line.extend(np.arange(tokens, dtype=np.int32))
        engine.run(Batch((run,)))
        line.commit(run)
    return line


def measure(name: str, layers: int, rounds: int) -> dict[str, Any]:
    """Returns the document of the result."""
    subject = find_subject(name)
    wanted = Wanted(CONTEXT, streams=STREAMS)
    room = AdapterRoom(STREAMS + 1, 64, 1 << 34)
    plain = load_random(subject.config, subject.recipe, wanted, layers)
    roomy = load_random(subject.config, subject.recipe, replace(wanted, adapters=room), layers)
    assert roomy.adapters is not None
    small: list[AttachedAdapter | None] = [
        roomy.adapters.attach(adapter_of(roomy, 8, seed)) for seed in range(STREAMS)
    ]
    large = roomy.adapters.attach(adapter_of(roomy, 64, STREAMS))
    nobody: list[AttachedAdapter | None] = [None]
    rows: dict[str, Callable[[CpuEngine], float]] = {
        "decode, 1 stream, room": lambda e: steps_s(e, nobody),
        "decode, 1 stream, r 8": lambda e: steps_s(e, small[:1] if e is roomy else nobody),
        "decode, 8 streams, 8 adapters, r 8": lambda e: steps_s(
            e, small if e is roomy else nobody * STREAMS
        ),
        "prefill 512, room": lambda e: prompt_s(e, None),
        "prefill 512, r 8": lambda e: prompt_s(e, small[0] if e is roomy else None),
        "prefill 512, r 64": lambda e: prompt_s(e, large if e is roomy else None),
    }
    found = []
    for what, run in rows.items():
        pairs = [(run(plain), run(roomy)) for _ in range(rounds)]
        slower = [100 * (with_ / without - 1) for without, with_ in pairs]
        without, with_ = (median(pair[i] for pair in pairs) for i in (0, 1))
        row = {
            "what": what,
            "without_s": without,
            "with_s": with_,
            "slower_percent": round(median(slower), 1),
            "least_percent": round(min(slower), 1),
            "most_percent": round(max(slower), 1),
        }
        print(
            f"{what:36} {1e3 * without:8.2f} ms {1e3 * with_:8.2f} ms "
            f"{median(slower):+6.1f} % ({min(slower):+.1f} to {max(slower):+.1f})",
            flush=True,
        )
        found.append(row)
    return _document(name, layers, plain, found)


def write_adapter(folder: Path, model: Model, rank: int) -> Path:
    """Writes an adapter of all linear products and experts in peft's layout, f32, and returns its folder."""
    draw, targets = np.random.default_rng(1), Targets(model)
    found = [each for each in targets.by_name.values() if not each.is_each]
    found = [each for each in found if each.part not in (ModelPart.HEAD, ModelPart.ROUTER)]
    tensors, modules, parameters = dict[str, tuple[int, int]](), list[str](), list[str]()
    for target in found:
        (parameters if target.is_fused else modules).append(target.name)
        stem, _, leaf = target.name.rpartition(".")
        inner = ".base_layer" if leaf == "gate_up_proj" else ""
        name = f"base_model.model.{f'{stem}{inner}' if target.is_fused else target.name}"
        ranks = rank * (target.count if target.is_fused else 1)
        tensors[f"{name}.lora_A.weight"] = ranks, target.k
        tensors[f"{name}.lora_B.weight"] = target.n, ranks
    header, at = {}, 0
    for name, (rows, columns) in tensors.items():
        size = 4 * rows * columns
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            file.write((0.01 * draw.standard_normal(shape, np.float32)).tobytes())
    settings = {"peft_type": "LORA", "peft_version": "0.21.2", "r": rank, "lora_alpha": 2 * rank}
    settings |= {"target_modules": modules, "target_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def measure_swap(name: str, layers: int, rounds: int) -> dict[str, Any]:
    """Returns the document of the result."""
    subject = find_subject(name)
    room = AdapterRoom(2, 192, 1 << 30)
    wanted = Wanted(4096, streams=2, adapters=room)
    engine = load_random(subject.config, subject.recipe, wanted, layers)
    thread, token_s, swap_s = EngineThread(engine, Limits()), list[float](), list[float]()

    def heard(event: Event) -> None:
        token_s.extend([time.perf_counter()] * isinstance(event, Token))

    with TemporaryDirectory() as temporary:
        folder = write_adapter(Path(temporary) / "made", engine.model, 8)
        size = sum(each.stat().st_size for each in folder.iterdir())

        hashes = {each.name: hash_of(each) for each in folder.iterdir()}  # as an import knows them

        def read(name: str) -> PackedAdapter:
            with open_adapter(folder, engine.model, hashes) as adapter:
                return replace(
                    pack_adapter(adapter, name, subject.recipe, exact=False), digest=name
                )

        async def swap() -> None:
            assert engine.adapters is not None
            served = ServedAdapters(thread, engine.adapters, read)
            for number in range(rounds):
                await asyncio.sleep(1.0)
                began = time.perf_counter()
                (await served.borrow(str(number), str(number))).give_back()
                swap_s.append(time.perf_counter() - began)

        prompt = np.random.default_rng(1).integers(0, engine.spec.vocab, 64).tolist()
        thread.submit(GenerationRequest(prompt, max_tokens=4000), heard)
        while len(token_s) < QUIET_TOKENS:
            time.sleep(0.1)
        before = len(token_s)
        asyncio.run(swap())
        during = len(token_s)
        thread.close()
    quiet, gaps = np.diff(token_s[:before]), np.diff(token_s[before:during])
    usual = float(np.median(quiet))
    row = {
        "what": f"swap of an adapter of rank 8, {size / 1e6:.0f} MB in f32",
        "swap_s": [round(each, 3) for each in swap_s],
        "median_swap_s": round(median(swap_s), 3),
        "median_gap_s": usual,
        "p99_gap_s": float(np.percentile(gaps, 99)),
        "most_gap_s": float(gaps.max()),
        "p99_of_median": round(float(np.percentile(gaps, 99)) / usual, 2),
        "p99_of_median_without": round(float(np.percentile(quiet, 99)) / usual, 2),
        "tokens": len(gaps),
    }
    print(json.dumps(row, indent=1), flush=True)
    return _document(name, layers, engine, [row])


def _document(
    name: str, layers: int, engine: CpuEngine, found: list[dict[str, Any]]
) -> dict[str, Any]:
    machine = {"cpu": probe().cpu.model, "isa": engine.pool.isa, "threads": engine.pool.threads}
    load = [round(each, 2) for each in os.getloadavg()]
    return {"machine": machine, "load": load, "model": name, "layers": layers, "results": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--swap", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    job = measure_swap if asked.swap else measure
    document = job(asked.name, asked.layers, asked.rounds)
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
