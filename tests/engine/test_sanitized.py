"""Thousands of random requests and cancels on loaded models leave every page and state free, with addresses watched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import amx
import pytest
from hybrid import Made

from ktcli.native import isa_rows

PROGRAM = Path(__file__).with_name("random_requests.py")
REQUESTS = {"qwen3": 1500, "deepseek-v3": 500, "qwen3-next": 500, "deepseek-v4": 500}
FLAGS = "-Og -g1 -fsanitize=address"
ROWS = "-DKT_ROWS=avx2"  # one with vectors will do; C tests have them all


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """That of a process whose library is built with the sanitizer."""
    if not shutil.which(amx.compiler()) or not shutil.which("cmake", path=amx.tools()):
        pytest.skip("there is no C compiler, or no cmake")
    asked = [amx.compiler(), "-print-file-name=libasan.so"]
    runtime = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(runtime).is_file():
        pytest.skip(f"{amx.compiler()} has no libasan.so")
    if not any(row.name == "avx2" and row.usable for row in isa_rows()):
        pytest.skip("this CPU has no AVX2")
    flags = [ROWS, "-DCMAKE_BUILD_TYPE=Sanitized", f"-DCMAKE_C_FLAGS={FLAGS}"]
    library = amx.build_library(tmp_path_factory.mktemp("sanitized"), flags)
    # Python itself leaks at its end; and it starts with what was loaded before.
    options = "detect_leaks=0:verify_asan_link_order=0"
    return {
        **os.environ,
        "KT_LIBRARY": str(library),
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": options,
    }


@pytest.mark.thorough
@pytest.mark.rotates(4, "name")
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("name", REQUESTS)
def test_random_requests_leave_everything_free(
    environment: dict[str, str], tmp_path: Path, name: str, seed: int
) -> None:
    made = Made.convert(name, tmp_path)
    command = [sys.executable, str(PROGRAM), str(made.path), str(REQUESTS[name]), str(seed)]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert all(f"{finish}=" in done.stdout for finish in ("LENGTH", "CANCELLED")), done.stdout
