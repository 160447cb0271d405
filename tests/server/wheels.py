"""Fetches the wheels of programs by others for tests, once into the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktcli.store.engines import ExternalEngine

_FETCH_S = 300


def wheels_of(row: ExternalEngine) -> Path:
    """Returns a folder with the wheels of a program; skips the test where pip cannot fetch them."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "kt-tests" / "engines" / f"{row.name}-{row.version}"
    stems = [f"{each.name.replace('-', '_')}-{each.version}" for each in row.packages]
    names = [f"{each.name}=={each.version}" for each in row.packages]
    words = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
    command = [sys.executable, "-m", "pip", *words, "--dest", str(folder), *names]
    if all(any(folder.glob(f"{stem}-*.whl")) for stem in stems):
        return folder
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{row.name}: pip took more than {_FETCH_S} s")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["pip"])[-1]
        pytest.skip(f"{row.name} cannot be fetched: {why}")
    return folder
