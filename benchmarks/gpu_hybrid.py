"""Everything about CPU and GPU together that only a machine with a GPU can say, in one run.

    python benchmarks/gpu_hybrid.py [--only SECTION ...] [--out FILE]
    python benchmarks/gpu_hybrid.py --smoke --out FILE       every section, tiny, without a GPU

About 25 minutes on one H200 with 16 cores and 128 GB. The result is written anew after every row, so
that a run that is ended early has said what it knows; a section that fails is recorded with its error,
and the rest goes on. Progress goes to stderr.

A smoke run puts torch on the CPU in the GPU's place. Its figures mean nothing, and it never writes
among the results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu_models import FULL, SMOKE, Place
from gpu_sections import SECTIONS, free
from naming import result_path

from ktcli import __version__
from ktcli.assembly.host import team_here
from ktcli.engine.device.usable import why_not
from ktcli.hardware.machine import Gpu, Machine
from ktcli.hardware.probe import probe
from ktcli.measure.bench import Ceilings
from ktcli.measure.device_ceilings import measure_rates

_STAND_IN = Gpu(0, "torch on the CPU", 8 << 30, 8 << 30)
_FACTS = (("lscpu",), ("nvidia-smi",), ("nvidia-smi", "topo", "-m"))


def place_of(machine: Machine, *, smoke: bool) -> Place:
    """Where to measure, with the device's rates."""
    if smoke:
        torch.set_num_threads(1)
        device = torch.device("cpu")
        ceilings = replace(Ceilings.of(team_here(1)), seconds=0.002)
        return Place(device, _STAND_IN, machine, measure_rates(device), ceilings, SMOKE)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi numbers them
    reason = why_not() or ("" if machine.gpus else "nvidia-smi names no GPU")
    if reason:
        sys.exit(f"there is nothing to measure: {reason}")
    gpu = machine.gpus[0]
    device = torch.device("cuda", gpu.index)
    threads = max(1, len(machine.cpu.cores) - 1)  # the GPU takes one
    ceilings = Ceilings.of(team_here(threads))
    return Place(device, gpu, machine, measure_rates(device), ceilings, FULL)


def facts(place: Place) -> dict[str, Any]:
    """The machine, and what its programs say of it; without its name."""
    said = {}
    for command in () if place.scale.smoke else _FACTS:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            said[" ".join(command)] = done.stdout.splitlines()
        except (OSError, subprocess.TimeoutExpired) as error:
            said[" ".join(command)] = [str(error)]
    return {
        "cpu": place.machine.cpu.model,
        "cores": len(place.machine.cpu.cores),
        "threads": place.pool.threads,
        "memory_bytes": place.machine.memory.total_bytes,
        "gpu": place.gpu.name,
        "vram_bytes": place.gpu.vram_bytes,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpu_rates": asdict(place.ceilings.rates()),
        "gpu_rates": asdict(place.rates),
        "said": said,
    }


def section(name: str, place: Place, found: dict[str, Any], keep: Callable[[], None]) -> None:
    """Measures the rows of a section, up to its error if it has one.

    Args:
        found: gets them.
        keep: called after each.
    """
    start = time.perf_counter()
    found["rows"] = []
    try:
        for row in SECTIONS[name](place):
            found["rows"].append(row)
            keep()
            print(f"{name}: {_short(row)}", file=sys.stderr, flush=True)
    except Exception as error:  # whatever it is, the other sections can still say something
        found["error"] = f"{type(error).__name__}: {error}"
        found["traceback"] = traceback.format_exc().splitlines()[-12:]
        print(f"{name} failed: {found['error']}", file=sys.stderr, flush=True)
    free(place)
    found["seconds"] = time.perf_counter() - start
    keep()


def _short(row: dict[str, Any]) -> str:
    """The single values of a row, on a line."""
    shown = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if isinstance(value, (str, int, float))
    )
    return ", ".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", action="append", choices=SECTIONS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.smoke and asked.out is None:
        parser.error("--smoke needs --out: its figures are no results")
    machine = probe()
    place = place_of(machine, smoke=asked.smoke)
    path = asked.out or result_path(machine.cpu.model, len(machine.cpu.cores), "hybrid")
    document: dict[str, Any] = {
        "date": date.today().isoformat(),
        "kt": __version__,
        "smoke": asked.smoke,
        "machine": facts(place),
        "sections": {},
    }
    path.parent.mkdir(exist_ok=True)

    def keep() -> None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    for name in asked.only or SECTIONS:
        section(name, place, document["sections"].setdefault(name, {}), keep)
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
