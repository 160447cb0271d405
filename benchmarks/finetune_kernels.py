"""The experts of one layer in fine-tuning, forward and backward with LoRA: kt's calls beside kt-kernel's.

    python benchmarks/finetune_kernels.py [--python PYTHON] [--rounds N] [--out FILE.json]

PYTHON is an interpreter with kt-kernel 0.7.2 (`python -m benchmarks.peers --quick` makes build/peers/venv). Shapes are
those of qwen3-30b-a3b: 128 experts of 768 x 2048, 8 for each token, factors of rank 8 on all three matrices. kt
computes from int4 and from bf16, kt-kernel from bf16 (its operator that needs no AMX). Each program is a process of its
own; they take turns. A ratio is the median of the rounds' own, by the clock and by processor time. Memory is what a
process holds after its steps, above its interpreter with the libraries loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
HIDDEN, WIDTH, EXPERTS, TOP_K, RANK = 2048, 768, 128, 8, 8
PROGRAMS = "kt-int4", "kt-bf16", "kt-kernel"


def choices(rows: int) -> tuple[Any, Any]:
    """Returns ids and gates [rows, TOP_K]: every expert is equally likely."""
    import numpy as np

    draw = np.random.default_rng(1)
    ids = np.argsort(draw.random((rows, EXPERTS)), 1)[:, :TOP_K]
    return np.ascontiguousarray(ids), np.full((rows, TOP_K), 1 / TOP_K, np.float32)


def of_kt(fmt: str, rows: int) -> Callable[[], None]:
    """Returns what runs kt's forward and backward call on `rows` tokens."""
    import numpy as np

    from ktcli.assembly.host import team_here
    from ktcli.hardware.numa import OFF
    from ktcli.native import SILU, Batch, Program, Run, Update

    sys.path.insert(0, str(Path(__file__).parent))
    from finetune import weight

    pool, draw = team_here(None, OFF), np.random.default_rng(0)
    both = weight(pool, fmt, 2 * WIDTH, HIDDEN, EXPERTS), weight(pool, fmt, HIDDEN, WIDTH, EXPERTS)
    ids, gates = choices(rows)
    batch = Batch((Run(np.zeros(rows, np.int32), 0, np.zeros(0, np.int32), rows, adapter=1),))
    programs = []
    factors = [
        (0.01 * draw.standard_normal((EXPERTS, RANK, of.k), np.float32),
         0.01 * draw.standard_normal((EXPERTS, of.n // 16, RANK, 16), np.float32))
        for of in both
    ]  # fmt: skip
    for name in ("experts", "experts_backward"):
        program = Program(pool, max_tokens=rows, max_outputs=1, exact=False)
        program.take_adapters(1, RANK)
        x, out = program.buffer(HIDDEN), program.buffer(HIDDEN)
        routing = program.given(EXPERTS, TOP_K)
        facts = {"routing": routing, "gate_up": both[:1], "down": both[1:], "glu": SILU}
        views: tuple[Any, ...] = (out, x)
        if name == "experts_backward":
            views = (out, program.buffer(TOP_K), x, program.buffer(HIDDEN))
        program.append(name, views, **facts)
        program.finish()
        for part, (a, b) in enumerate(factors):
            program.adapt(1, 0, part, [Update(RANK, 0, 1, 1.0, a, b)])
            if name == "experts_backward":
                program.gradients(1, 0, part, [(np.zeros_like(a), np.zeros_like(b))])
        for view in (x, *views[3:]):
            program.rows(view, rows)[:] = draw.standard_normal((rows, HIDDEN), np.float32)
        of_program = program.routing(routing, rows, TOP_K)
        of_program[0][:], of_program[1][:] = ids, gates
        programs.append(program)

    def step() -> None:
        for program in programs:
            program.run(batch)

    return step


def of_kt_kernel(rows: int) -> Callable[[], None]:
    """Returns what runs kt-kernel's forward and backward call on `rows` tokens, as its Python wrapper does."""
    import torch
    from kt_kernel import kt_kernel_ext as ext

    torch.manual_seed(0)
    pool = ext.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map = 1, [0]
    pool.subpool_thread_count = [len(os.sched_getaffinity(0))]
    infer, config = ext.CPUInfer(pool), ext.moe.MOESFTConfig()
    config.expert_num, config.num_experts_per_tok = EXPERTS, TOP_K
    config.hidden_size, config.intermediate_size = HIDDEN, WIDTH
    config.lora_rank, config.lora_alpha, config.max_cache_depth = RANK, 2.0 * RANK, 1
    config.max_len, config.pool = max(512, rows), infer.backend_
    order = torch.arange(EXPERTS)
    config.physical_to_logical_map = order.data_ptr()
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights, factors, gradients = [], [], []
    for name, (n, k) in shapes.items():
        weights.append((torch.randn(EXPERTS, n, k) * k**-0.5).bfloat16())
        setattr(config, f"{name}_proj", weights[-1].data_ptr())
        for letter, shape in (("a", (EXPERTS, RANK, k)), ("b", (EXPERTS, n, RANK))):
            factors.append((0.01 * torch.randn(shape)).bfloat16())
            setattr(config, f"{name}_lora_{letter}", factors[-1].data_ptr())
            gradients.append(torch.zeros(shape))  # f32: room enough for either type
    moe = ext.moe.AMXBF16_SFT_MOE(config)
    infer.submit(moe.load_weights_task())
    infer.sync()
    weights.clear()
    ids, gates = (torch.from_numpy(each) for each in choices(rows))
    x, dout = (torch.randn(rows, HIDDEN).bfloat16() for _ in range(2))
    out, dx, dgates = torch.empty_like(x), torch.empty_like(x), torch.empty(rows, TOP_K)
    count = torch.tensor([rows], dtype=torch.int32)
    forward = count, ids, gates, x, out
    held = (order, factors)

    def step() -> None:
        assert held
        first, *others = (each.data_ptr() for each in forward)
        infer.submit(moe.forward_sft_task(first, TOP_K, *others, True))
        infer.sync()
        pointers = (each.data_ptr() for each in (dout, dx, *gradients, dgates))
        infer.submit(moe.backward_task(*pointers, 0, 0, 0))
        infer.sync()
        assert bool(torch.isfinite(dx.float()).all()) and bool(dx.any())

    return step


def resident_bytes() -> int:
    """Returns the memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(program: str, rows: int) -> None:
    """Answers each line with the figures of one step."""
    if program == "kt-kernel":
        import kt_kernel  # noqa: F401
        import torch  # noqa: F401
    else:
        import ktcli.assembly.host  # noqa: F401
    before = resident_bytes()
    step = of_kt_kernel(rows) if program == "kt-kernel" else of_kt(program[3:], rows)
    print("ready", flush=True)
    for _ in sys.stdin:
        began, processor = time.perf_counter(), time.process_time()
        step()
        took = {
            "seconds": time.perf_counter() - began,
            "processor_s": time.process_time() - processor,
        }
        print(json.dumps({**took, "bytes": resident_bytes() - before}), flush=True)


class Worker:
    """A process that does a step when it is asked to."""

    def __init__(self, python: str, program: str, rows: int) -> None:
        line = [python, __file__, "--worker", program, str(rows)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._child = subprocess.Popen(
            line, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._asks, self._answers = self._child.stdin, self._child.stdout
        if not any(said == "ready\n" for said in self._answers):
            raise SystemExit(f"{program} does not start with {python}")

    def step(self) -> dict[str, float]:
        """Returns the figures of one step."""
        self._asks.write("step\n")
        self._asks.flush()
        for said in self._answers:  # kt-kernel prints what it does, too
            if said.startswith("{"):
                found: dict[str, float] = json.loads(said)
                return found
        raise SystemExit("a program ended in the middle of a step")

    def end(self) -> None:
        """Ends the process."""
        self._child.communicate()


def measure(python: str, per_expert: int, rounds: int) -> dict[str, Any]:
    """Returns the figures of all programs at so many tokens per expert; the first round is left out."""
    rows = per_expert * EXPERTS // TOP_K
    workers = {
        name: Worker(python if name == "kt-kernel" else sys.executable, name, rows)
        for name in PROGRAMS
    }
    taken = [{name: each.step() for name, each in workers.items()} for _ in range(rounds + 1)][1:]
    for each in workers.values():
        each.end()
    found: dict[str, Any] = {"tokens_per_expert": per_expert, "load": os.getloadavg()}
    for name in PROGRAMS:
        of = {key: [turn[name][key] for turn in taken] for key in taken[0][name]}
        peer = [turn["kt-kernel"] for turn in taken]
        found[name] = {
            "step_s": median(of["seconds"]),
            "memory_bytes": of["bytes"][-1],
            "times_as_fast": median(p["seconds"] / own for p, own in zip(peer, of["seconds"], strict=True)),
            "by_processor_time": median(
                p["processor_s"] / own for p, own in zip(peer, of["processor_s"], strict=True)
            ),
            "share_of_memory": of["bytes"][-1] / peer[-1]["bytes"],
        }  # fmt: skip
        print(per_expert, name, {k: round(v, 3) for k, v in found[name].items()}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=str(ROOT / "build/peers/venv/bin/python"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker[0], int(asked.worker[1]))
        return
    rows = [measure(asked.python, per_expert, asked.rounds) for per_expert in (16, 32)]
    from ktcli.hardware.probe import probe

    cpu = probe().cpu
    document = {"machine": {"cpu": cpu.model, "isa": cpu.isa[0], "threads": cpu.threads}, "rows": rows}  # fmt: skip
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
