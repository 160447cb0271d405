"""Where the results of one machine and day go: a file name that says the CPU and never the host."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def slug(name: str | None) -> str:
    """A name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", (name or "").lower()).strip("-") or "unknown"


def result_path(cpu: str | None, cores: int, kind: str = "") -> Path:
    """results/DATE-CPU-CORES[-KIND].json"""
    ending = f"-{kind}" if kind else ""
    return RESULTS / f"{date.today().isoformat()}-{slug(cpu)}-{cores}-cores{ending}.json"
