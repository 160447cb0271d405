"""The benchmark set of one machine, behind `make bench`.

    python benchmarks/run.py                               the whole set, about ten minutes
    python benchmarks/run.py NAME --layers N [...]         decode and prefill of one model

Every row is made by `kt bench` in a process of its own, on random weights of true shapes. The whole set
is written to results/DATE-CPU-CORES.json; one model is only printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from typing import Any

import load
import start_time
from naming import result_path

from ktcli import __version__

# What the goals of the project are set in: the same layers as the figures of other engines.
SET = (
    ("qwen3-30b-a3b", "--layers", "8", "--experts", "int4"),
    ("qwen3-30b-a3b", "--layers", "8", "--experts", "int8"),
    ("qwen3-30b-a3b", "--layers", "8", "--experts", "bf16", "--dense", "bf16"),
    ("deepseek-v2-lite", "--layers", "6", "--experts", "int4"),
)
WORKS = (("decode", "--tokens", "64"), ("prefill", "--tokens", "512"))
# One layer by itself, every shape and format.
KERNELS = (
    *(("--work", "decode", "--work", "prefill", "--shape", shape) for shape in "ABC"),
    ("--work", "linear", "--format", "int8", "--format", "bf16"),
)


def bench(*arguments: str) -> dict[str, Any]:
    """The document of one `kt bench`."""
    command = [sys.executable, "-m", "ktcli", "bench", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    noisy = "  noisy" if row["noisy"] else ""
    return (
        f"{row['work']:<8} {row['model']:<18} {row['layers']:>2} layers  {row['format']:<5}"
        f" {row['tok_s']:7.1f} tok/s  {row['gb_s']:5.1f} GB/s {row['gop_s']:6.0f} GOP/s"
        f"  {row['percent_of_ceiling']:3.0f} % of the ceiling{noisy}"
    )


def kernel_line(row: dict[str, Any]) -> str:
    """One row of `kt bench kernel` for people."""
    noisy = "  noisy" if row["noisy"] else ""
    return (
        f"{row['work']:<8} {row['shape']:<9} {row['n_tokens']:>5} tokens  {row['format']:<5}"
        f" {row['seconds'] * 1e3:9.3f} ms  {row['gb_s']:5.1f} GB/s {row['gop_s']:6.0f} GOP/s"
        f"  {row['percent_of_ceiling']:3.0f} % of the ceiling{noisy}"
    )


def kernels() -> list[dict[str, Any]]:
    """Measure and print the layers by themselves."""
    rows = []
    for arguments in KERNELS:
        for row in bench("kernel", *arguments)["results"]:
            rows.append(row)
            print(kernel_line(row), flush=True)
    return rows


def main() -> None:
    chosen = tuple(sys.argv[1:])
    results: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    for subject in [chosen] if chosen else SET:
        for work in WORKS:
            found = bench(*(work[:1] if chosen else work), *subject, "--profile")
            machine = found["machine"]
            for row in found["results"]:
                results.append({**row, "ceilings": found["ceilings"]})
                print(line(row), flush=True)
    if chosen:
        return
    results += kernels()
    loads = load.rows()
    print(load.line(loads[0]), flush=True)
    starts = start_time.rows()
    for row in starts:
        print(f"start    {row['command']:<18} {row['seconds'] * 1e3:.0f} ms")
    path = result_path(machine["cpu"], machine["cores"])
    document = {
        "date": date.today().isoformat(),
        "kt": __version__,
        "machine": machine,
        "results": [*results, *loads, *starts],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
