"""What the GPU code takes for granted, one assumption after the other, in a minute or two.

    python benchmarks/gpu_probe.py OUT.json                         every check
    python benchmarks/gpu_probe.py OUT.json --memory-operations     those that can hang, in a process of their own
    python benchmarks/gpu_probe.py OUT.json --smoke                 tiny, with torch and Triton's interpreter on the CPU

Each check stands alone: one that fails is noted with its error, and the next one goes on. The document is written anew
after each. Times are medians, in microseconds unless a name says otherwise; matrices take turns, so that none is read
from a cache. Figures of a smoke run mean nothing.
"""

from __future__ import annotations

import os
import sys

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import argparse
import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gpu_probe_driver import CHECKS as DRIVER
from gpu_probe_driver import MEMORY_OPERATIONS
from gpu_probe_kernels import CHECKS as KERNELS
from gpu_probe_place import Check, Probe

from ktcli.engine.device.stream import stream_on


def probed(checks: Mapping[str, Check], probe: Probe, keep: Callable[[Any], None]) -> None:
    """Runs checks in turn; `keep` gets all that is known after each."""
    document: dict[str, Any] = {}
    for name, check in checks.items():
        start = time.perf_counter()
        try:
            said: Any = check(probe)
        except Exception as error:  # whatever it is, the other checks can still say something
            last = traceback.format_exc().splitlines()[-6:]
            said = {"error": f"{type(error).__name__}: {error}"[:400], "traceback": last}
        document[name] = said
        keep(document)
        took = time.perf_counter() - start
        print(f"{name} ({took:.1f} s): {json.dumps(said, default=str)[:700]}", flush=True)
        if probe.on_gpu:
            torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--memory-operations", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    if not asked.smoke and not torch.cuda.is_available():
        sys.exit("there is nothing to probe: torch sees no GPU")
    device = torch.device("cpu") if asked.smoke else torch.device("cuda", 0)
    checks = MEMORY_OPERATIONS if asked.memory_operations else {**DRIVER, **KERNELS}
    found: dict[str, Any] = {}

    def keep(document: dict[str, Any]) -> None:
        found.update(document)
        asked.out.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")

    probed(checks, Probe(device, stream_on(device)), keep)
    return int(any("error" in each for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
