"""Where the results of one machine and day go: a file name that says the CPU and never the host."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def result_path(cpu: str | None, cores: int, kind: str = "") -> Path:
    """results/DATE-CPU-CORES[-KIND].json"""
    slug = re.sub(r"[^a-z0-9]+", "-", (cpu or "").lower()).strip("-") or "unknown"
    ending = f"-{kind}" if kind else ""
    return RESULTS / f"{date.today().isoformat()}-{slug}-{cores}-cores{ending}.json"
