"""Fetches the wheels of programs by others for tests, once into the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ktcli.store.engines import ExternalEngine

_FETCH_S = 300


def wheels_of(row: ExternalEngine) -> Path:
    """Returns a folder with the wheels of a program; skips the test where pip cannot fetch them."""
    folder = _cache() / f"{row.name}-{row.version}"
    stems = [f"{each.name.replace('-', '_')}-{each.version}" for each in row.packages]
    if all(any(folder.glob(f"{stem}-*.whl")) for stem in stems):
        return folder
    names = [f"{each.name}=={each.version}" for each in row.packages]
    words = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
    pip([*words, "--dest", str(folder), *names], row.name)
    return folder


def packages_of(name: str, version: str) -> Path:
    """Returns a folder with a package and what it needs, which pip installs once; skips the test where it cannot."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = _cache() / f"{name}-{version}-{python}"
    if folder.exists():
        return folder
    begun = folder.with_name(f"{folder.name}.{os.getpid()}")
    words = ["install", "--quiet", "--only-binary", ":all:", "--retries", "1"]
    pip([*words, "--target", str(begun), f"{name}=={version}"], name)
    begun.rename(folder)
    return folder


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kt-tests" / "engines"


def pip(words: Sequence[str], name: str) -> None:
    """Runs pip, which fetches a package; skips the test where it cannot."""
    command = [sys.executable, "-m", "pip", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name}: pip took more than {_FETCH_S} s")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["pip"])[-1]
        pytest.skip(f"{name} cannot be fetched: {why}")
