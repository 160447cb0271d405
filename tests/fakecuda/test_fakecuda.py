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
from itertools import takewhile
from pathlib import Path

import pytest
import requests
from fakecuda import libraries
from ports import free_port

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
def test_under_the_fake(
    request: pytest.FixtureRequest, environment: dict[str, str], devices: int, tests: list[str]
) -> None:
    part = [f"--turns={request.config.getoption('--turns')}"]
    if request.config.getoption("--tier"):
        part.append("--tier=all")
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
        *part,
        *tests,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert re.search(r"\b\d+ passed", done.stdout), done.stdout[-2000:]


# kt, on a machine whose driver is loaded, as far as it can tell.
KT = "import uncompiled; import ktcli.hardware.gpu as gpu; gpu._DRIVERS = '/',; from ktcli.start import run; run()"
NVIDIA_SMI = """#!/bin/sh
case "$1" in
*uuid) echo "0, GPU-11111111-2222" ;;
*) echo "0, NVIDIA H100, 81920, 81000, 5, 16, 9.0, 580.65" ;;
esac
"""
ASKED = ("chat", "kt-mini", "hello", "--temperature", "1", "--seed", "1", "-n", "120")
ON_GPU = ": everything except experts, plus 4 of "  # what loading says


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the built-in model, and nvidia-smi."""
    made = tmp_path_factory.mktemp("home")
    program = made / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    return made


def asked(environment: dict[str, str], home: Path) -> subprocess.CompletedProcess[str]:
    """A question on the command line, with this library."""
    path = f"{home / 'bin'}{os.pathsep}{environment['PATH']}"
    given = {**environment, "KT_HOME": str(home), "KT_HEAT": "off", "PATH": path}
    command = [sys.executable, "-c", KT, *ASKED, "--device", "cuda", "--gpu-experts", "1"]
    return subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_a_refused_capture_is_known_at_the_next_start(
    environment: dict[str, str], home: Path
) -> None:
    (home / "gpu.json").unlink(missing_ok=True)
    refused = asked({**environment, "FAKE_FAIL": "cudaStreamBeginCapture:0:900"}, home)
    again = asked(environment, home)
    for done, known in ((refused, False), (again, True)):
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stderr.count("every step is launched separately") == 1
        assert ("after kt doctor --measure" in done.stderr) == known


@pytest.mark.rotates(3)
@pytest.mark.parametrize(
    ("setting", "code", "said"),
    [
        ({}, 0, ON_GPU),
        ({"FAKE_FAIL": "cudaGraphLaunch:3:46"}, 10, "the GPU failed during a step"),
        ({"FAKE_FAIL": "*:300:46"}, 10, "the GPU failed during loading"),
        ({"FAKE_FAIL": "*:1600:46"}, 10, "the GPU failed during a step"),
        ({"FAKE_DRIVER": "12000"}, 10, "driver is too old for torch's CUDA 13.0"),
        ({"FAKE_TAKEN_MB": "40000"}, 0, ON_GPU),  # nvidia-smi has not seen it
        ({"FAKE_TAKEN_MB": "81700"}, 0, "experts on it; trying again with fewer"),
        ({"FAKE_TAKEN_MB": "81900"}, 0, "every layer runs on the CPU"),
        ({"CUDA_VISIBLE_DEVICES": "0,nonsense"}, 0, ON_GPU),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1111"}, 0, ON_GPU),
        ({"CUDA_VISIBLE_DEVICES": "GPU-9"}, 10, "among those in CUDA_VISIBLE_DEVICES='GPU-9'"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1111"}, 0, ON_GPU),
        *(
            ({"CUDA_VISIBLE_DEVICES": each}, 10, f"among those in CUDA_VISIBLE_DEVICES={each!r}")
            for each in ("nonsense", "99", "-1", "", "0,0", "-")
        ),
    ],
    ids=str,
)
def test_a_command_meets_bad_luck(
    environment: dict[str, str], home: Path, setting: dict[str, str], code: int, said: str
) -> None:
    """A sentence, and the next best way or its own exit code; never a traceback, nor a process that is ended."""
    (home / "gpu.json").unlink(missing_ok=True)
    done = asked({**environment, **setting}, home)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == bool(code)


# What a server says whose GPU is gone; it goes on with what it was doing: a step, or copying pages.
FAILED = "the GPU failed during "

# A server whose GPU vanishes when a line comes.
SERVER = """
import ctypes, sys, threading
import uncompiled
import ktcli.hardware.gpu as gpu
import ktcli.planner.placement as placement
from ktcli.start import run

def vanish():
    sys.stdin.readline()
    ctypes.CDLL("libcudart.so.13").fake_fail(b"*", 0, 46, 1)

gpu._DRIVERS = "/",
placement.SMALL_BYTES, placement.Alone.fits = 0, lambda *_: False  # the GPU is used without being asked for
threading.Thread(target=vanish, daemon=True).start()
run()
"""


def answer(port: int) -> tuple[int, str]:
    """The status and the text of an answer."""
    question = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    found = requests.post(url, json=question, timeout=TIMEOUT_S)
    return found.status_code, found.text


@pytest.mark.parametrize("options", [[], ["--device", "cuda"]], ids=["auto", "cuda"])
def test_a_server_whose_gpu_vanishes(
    environment: dict[str, str], home: Path, options: list[str]
) -> None:
    """It continues on the CPU, or ends with the reason where the GPU was asked for."""
    port = free_port()
    path = f"{home / 'bin'}{os.pathsep}{environment['PATH']}"
    given = {**environment, "KT_HOME": str(home), "KT_HEAT": "off", "PATH": path}
    words = ["serve", "kt-mini", "--port", str(port), "--gpu-experts", "1", *options]
    command = [sys.executable, "-c", SERVER, *words]
    with subprocess.Popen(
        command, cwd=ROOT, env=given, text=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        assert server.stdin is not None and server.stderr is not None
        said = list(takewhile(lambda line: not line.startswith("serving"), server.stderr))
        try:
            assert answer(port)[0] == 200 and any(ON_GPU in line for line in said), said
            server.stdin.write("\n")
            server.stdin.flush()
            status, text = answer(port)
            while status == 200:  # the line has not come yet
                status, text = answer(port)
            assert status == 503 and FAILED in text
            if not options:
                assert answer(port)[0] == 200
        finally:
            if not options:
                server.terminate()
            rest = server.stderr.read()
    assert server.returncode == (10 if options else 0), rest
    assert ("kt-mini continues on the CPU" in rest) == (not options)
    assert rest.count(f"error: {FAILED}") == bool(options)
    assert "Traceback" not in rest and "terminate called" not in rest
