"""How fast checkpoints are converted, what bounds it, and how much memory it needs.

    python benchmarks/conversion.py [--only NAME] [--folder DIR] [--out FILE.json]

Writes a checkpoint of random weights in the true shapes of a model, cut to one layer with experts, takes it out of the
page cache, and converts it with the command that a user types. Reading, encoding and writing overlap; the bytes of the
checkpoint over the time that each was busy is what it alone would allow: the ceilings of the disk and of the cores.
Where cores are few, reading and hashing take some of them from encoding; so the encoding stage is measured by itself
too, on a checkpoint in memory and with nobody who writes, in turn with the encoder alone on matrices in memory: the
share of the encoder's speed that the stage has. Peak memory is the process's own, beside the bytes of the layer. The
largest takes 20 GB of disk for a while.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from naming import result_path

from ktcli.hardware.probe import probe
from ktcli.models import build, cut
from ktcli.native import DType, Format, Numbers, Pool, packed_bytes
from ktcli.ops.tensors import Tensor
from ktcli.store import catalog
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.encode import Encoder
from ktcli.weights.formats import format_named
from ktcli.weights.header import encode_header
from ktcli.weights.recipe import Recipe, stored_bytes
from ktcli.weights.storage import Raw, Read

# Model, dtype of the checkpoint, formats of the experts.
CASES = {
    "qwen3-30b-a3b": ("BF16", ("int4", "int8", "nl4-g32", "bf16")),
    "deepseek-v3": ("F8_E4M3", ("int4",)),
}
GOAL_MB_S = 150.0  # of BF16 per core, int4 with searched scales
RUNS = 3
BLOCK = 128  # of FP8, both ways
VOCAB = 16_384  # a layer is what counts
SIDE = 2048  # of the matrix that the encoder gets by itself
ENCODER_RUNS = 9
STAGE_EXPERTS = 32  # that are in memory

# The command, then the most memory that the process ever had, in KiB, without pages of files.
CHILD = """
import re, sys
from ktcli.main import main
code = main(["convert", *sys.argv[1:], "--json"])
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
sys.exit(code)
"""


def parts(tensor: Tensor, dtype: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of what a tensor is made of in a checkpoint; FP8 has its factors behind it."""
    for index in range(tensor.count):
        for piece in tensor.sources[0]:
            coded = dtype == "F8_E4M3" and len(piece.shape) > 1 and ".mlp." in piece.name
            coded = coded and not piece.name.endswith("mlp.gate.weight")
            yield piece.at(index), dtype if coded else "BF16", piece.shape
            if coded:
                blocks = tuple(-(-size // BLOCK) for size in piece.shape)
                yield f"{piece.at(index)}_scale_inv", "F32", blocks


@cache
def noise() -> dict[str, bytes]:
    """Of each dtype a block of numbers, to be repeated."""
    values = np.random.default_rng(0).standard_normal(1 << 24, dtype=np.float32) / 50
    codes = np.random.default_rng(1).integers(0x20, 0x60, 1 << 24, dtype=np.uint8)
    codes |= np.random.default_rng(2).integers(0, 2, codes.size, dtype=np.uint8) << 7
    factors = np.full(1 << 20, 1e-3, np.float32)
    return {
        "BF16": (values.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        "F8_E4M3": codes.tobytes(),
        "F32": factors.tobytes(),
    }


def write_checkpoint(folder: Path, config: dict[str, Any], dtype: str) -> int:
    """One file that is in no cache; its bytes."""
    if dtype == "F8_E4M3":
        quantised = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        config = {**config, "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {
        name: (kind, shape)
        for tensor in build(config).tensors
        for name, kind, shape in parts(tensor, dtype)
    }
    blocks, size = noise(), {"BF16": 2, "F8_E4M3": 1, "F32": 4}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header(stored, {}))
        for kind, shape in stored.values():
            left = size[kind] * int(np.prod(shape))
            while left:
                left -= file.write(memoryview(blocks[kind])[:left])
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.tell()


def forget(folder: Path) -> None:
    """Take the checkpoint out of the page cache."""
    with (folder / "model.safetensors").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def converted(folder: Path, experts: str) -> dict[str, Any]:
    """What one conversion says, and its peak memory."""
    forget(folder)
    with tempfile.TemporaryDirectory(dir=folder) as home:
        words = [str(folder), "--out", f"{home}/pack", "--experts", experts, "--quiet"]
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=True
        )
    found = re.findall(r"^\d+$", done.stderr, re.MULTILINE)
    speed: dict[str, Any] = json.loads(done.stdout)["speed"]
    return {**speed, "peak_bytes": int(found[-1]) * 1024}


def rows(name: str, parent: Path, threads: int) -> Iterator[dict[str, Any]]:
    """Of encoding alone, where the checkpoint is BF16; then of each format, medians of RUNS conversions."""
    profile = catalog.find(name)
    assert profile is not None
    dtype, formats = CASES[name]
    config = {**cut(profile.config, 1), "vocab_size": VOCAB}
    layer = sum(
        stored_bytes(t, Recipe.named("bf16")) for t in build(config).tensors if t.layer == 0
    )
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        size = write_checkpoint(Path(folder), config, dtype)
        if dtype == "BF16":
            yield from encoding(Path(folder), formats, threads)
        for experts in formats:
            runs = [converted(Path(folder), experts) for _ in range(RUNS)]
            ceilings = {
                stage: median(run["ceilings_mb_per_s"][stage] for run in runs)
                for stage in ("reading", "encoding", "writing")
            }
            yield {
                "work": "convert",
                "model": name,
                "layers": 1,
                "checkpoint": dtype,
                "format": experts,
                "bytes": size,
                "threads": runs[0]["threads"],
                "mb_s": median(run["mb_per_s"] for run in runs),
                "ceilings_mb_s": ceilings,
                "encoding_mb_s_per_core": ceilings["encoding"] / runs[0]["threads"],
                "peak_bytes": max(run["peak_bytes"] for run in runs),
                "layer_bytes_as_bf16": layer,
                "runs": RUNS,
            }


class InMemory(Checkpoint):
    """A checkpoint that keeps what was read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._kept: dict[Read, Raw] = {}

    def read(self, wanted: Read, into: Raw | None = None) -> Raw:
        if wanted not in self._kept:
            self._kept[wanted] = super().read(wanted)
        return self._kept[wanted]


def both_rates(
    tensors: list[Tensor], checkpoint: Checkpoint, fmt: Format, pool: Pool
) -> tuple[float, float]:
    """Bytes of BF16 per second of the encoder and of its stage, which take turns strip by strip."""
    stage, alone, turns = Encoder(checkpoint, Recipe(experts=fmt, dense=fmt), pool), 0.0, 0
    stored = np.empty(packed_bytes(fmt, SIDE, SIDE), np.uint8)
    matrices = np.frombuffer(noise()["BF16"], np.uint8).reshape(-1, 2 * SIDE * SIDE)
    for _ in stage.encode(tensors):
        source = Numbers(DType.BF16, matrices[turns % len(matrices)], SIDE, SIDE)
        begun = time.perf_counter()
        pool.pack(fmt, source.whole, stored)
        alone, turns = alone + time.perf_counter() - begun, turns + 1
    taken = stage.stages(0.0, 0.0)
    return 2 * SIDE * SIDE * turns / alone, taken.rate(taken.encoding)


def encoding(folder: Path, formats: tuple[str, ...], threads: int) -> Iterator[dict[str, Any]]:
    """Encoder and encoding stage, each by itself, in turn: one row for each format and number of threads."""
    with InMemory(folder) as checkpoint:
        all_tensors = build(checkpoint.config).tensors
        tensors = [replace(t, count=min(t.count, STAGE_EXPERTS)) for t in all_tensors]
        for n in sorted({1, threads}):
            pool = Pool(n)
            for name in formats:
                fmt = format_named(name)
                rates = [both_rates(tensors, checkpoint, fmt, pool) for _ in range(ENCODER_RUNS)]
                yield {
                    "work": "encode",
                    "checkpoint": "BF16",
                    "format": name,
                    "threads": n,
                    "mb_s": median(alone for alone, _ in rates) / 1e6,
                    "mb_s_per_core": median(alone for alone, _ in rates) / n / 1e6,
                    "stage_mb_s": median(stage for _, stage in rates) / 1e6,
                    "stage_share": median(stage / alone for alone, stage in rates),
                    "runs": ENCODER_RUNS,
                }


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    if row["work"] == "encode":
        return (
            f"encoder alone, {row['threads']} threads, {row['format']:<8} {row['mb_s']:6.0f} MB/s,"
            f" {row['mb_s_per_core']:.0f} per core; its stage alone {row['stage_mb_s']:6.0f},"
            f" {row['stage_share']:.2f} of it"
        )
    alone = row["ceilings_mb_s"]
    return (
        f"{row['model']:<15}{row['checkpoint']:<8} to {row['format']:<8} {row['mb_s']:6.0f} MB/s; alone: reading"
        f" {alone['reading']:6.0f}, encoding {alone['encoding']:5.0f} ({row['encoding_mb_s_per_core']:.0f} per core),"
        f" writing {alone['writing']:5.0f}; {row['peak_bytes'] / 2**20:.0f} MiB of memory,"
        f" layer {row['layer_bytes_as_bf16'] / 2**20:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES, help="one of the models")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: the usual one"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = probe()
    found = []
    parent, threads = options.folder or Path(tempfile.gettempdir()), len(machine.cpu.cores)
    for name in [options.only] if options.only else CASES:
        for row in rows(name, parent, threads):
            print(line(row), flush=True)
            found.append(row)
    out = options.out or result_path(machine.cpu.model, len(machine.cpu.cores), "conversion")
    out.write_text(json.dumps({"goal_mb_s_per_core": GOAL_MB_S, "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
