"""The engine on torch's own CUDA build, under a CUDA 13 without a GPU (fakecuda.c): what is asked of the runtime,
and in which order, is allowed; what fails is known for it.

Kernels compute nothing there, so that nothing is said of numbers or of speed. `make test-all` installs the torch
that is needed (requirements.txt) into a folder of its own.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakecuda import libraries

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SITE = ROOT / "build" / "fakecuda"
TIMEOUT_S = 1200

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="torch for CUDA is for x86-64 here"),
    pytest.mark.skipif(
        not (SITE / "torch").is_dir(), reason="no torch for CUDA in build/fakecuda: make fakecuda"
    ),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """In which torch finds H100s that compute nothing, one unless told otherwise."""
    if not all(map(shutil.which, ("gcc", "nm", "readelf"))):
        pytest.skip("gcc and binutils are needed")
    made = tmp_path_factory.mktemp("fakecuda")
    libraries.build(SITE, made)
    return {
        **os.environ,
        "LD_PRELOAD": str(made / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(made),
        "TRITON_LIBCUDA_PATH": str(made),
        "TRITON_CACHE_DIR": str(made / "triton"),
        "FAKE_DEVICES": "1",
        "FAKE_LOG": str(made / "log"),
        "PYTHONPATH": os.pathsep.join(map(str, (SITE, HERE, ROOT))),
    }


@pytest.mark.parametrize(
    "devices, tests",
    [
        (1, ["tests/fakecuda/flows.py"]),
        (1, ["tests/fakecuda/failures.py"]),
        (1, ["-m", "gpu", "tests/engine/device"]),
        (3, ["tests/fakecuda/several.py"]),
    ],
    ids=["flows", "failures", "gpu", "several"],
)
def test_under_the_fake(environment: dict[str, str], devices: int, tests: list[str]) -> None:
    environment = {**environment, "FAKE_DEVICES": str(devices)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no_numbers",
        *tests,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert re.search(r"\b\d+ passed", done.stdout), done.stdout[-2000:]
