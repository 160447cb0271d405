"""Commands in a child process that runs the row amx, emulated or not: what is said, and what is not kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from amx import Amx

KERNEL = ("bench", "kernel", "--shape", "64,64,4,2", "--work", "prefill", "-n", "8", "--runs", "1")


def kt(amx: Amx, home: Path, *arguments: str, **environment: str) -> tuple[Any, str]:
    """(the document, what went to stderr) of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "ktcli", *arguments, "--json"],
        env={**amx.environment, "KT_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-4000:]
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    "forced", ["amx", *(pytest.param(row, marks=pytest.mark.thorough) for row in ("portable", ""))]
)
def test_doctor_says_that_all_conditions_hold(amx: Amx, forced: str, tmp_path: Path) -> None:
    found, _ = kt(amx, tmp_path, "doctor", KT_ISA=forced)
    said = found["amx"]
    assert [said[name]["ok"] for name in ("cpuid", "os", "permission")] == [True] * 3
    assert said["used"] is (forced != "portable")
    if forced == "portable":
        assert "KT_ISA asks for portable" in said["reason"]
    elif amx.emulated:
        assert "an emulator" in said["reason"]
        assert said["tile_min"] == {"int4": 2, "int8": 2, "bf16": 2}


@pytest.mark.thorough
def test_kernels_are_compared_with_the_peak_of_tiles(amx: Amx, tmp_path: Path) -> None:
    found, stderr = kt(amx, tmp_path, *KERNEL, "--isa", "amx")
    rows = found["results"]
    assert [(row["isa"], row["format"], *row["ceilings"]) for row in rows] == [
        ("amx", "int4", "int8_gop_s"),
        ("amx", "int8", "int8_gop_s"),
        ("amx", "bf16", "bf16_gflop_s"),
    ]
    assert all(row["gop_s"] > 0 and row["percent_of_ceiling"] > 0 for row in rows)
    for instruction in ("tileloadd", "tdpbssd", "tdpbf16ps"):
        assert amx.count(stderr, instruction) > 0 or not amx.emulated
    assert not [*tmp_path.iterdir()], "under KT_ISA nothing is kept"


@pytest.mark.thorough
@pytest.mark.parametrize(("least", "tiles"), [(8, True), (9, False)])
def test_the_variable_says_from_how_many_tokens(
    amx: Amx, least: int, tiles: bool, tmp_path: Path
) -> None:
    if not amx.emulated:
        pytest.skip("only the emulator counts instructions")
    _, stderr = kt(amx, tmp_path, *KERNEL, "--format", "int8", KT_TILE_MIN=str(least))
    assert (amx.count(stderr, "tileloadd") > 0) is tiles  # ceilings load no tiles
