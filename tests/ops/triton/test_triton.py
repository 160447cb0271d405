"""The Triton kernels: their laws under Triton's interpreter, that they compile, and on a GPU the laws again.

The interpreter is chosen when triton is imported, for the whole process; so each runs in one of its own, all at
the same time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent
# Each half has a process of its own, which takes as long as the other's.
HALVES = (
    "few_rows rows_alone unpacking rows_rotated small route send router summary".split(),
    "tiles tiles_of_few linear experts beside rotated groups gqa mla fp8 fp8_written sums heads latent".split(),
)
LAWS = [law for half in HALVES for law in half]
GPU_SHARES = 6
# Rows of experts elsewhere are memory that nothing fills and nothing reads; NumPy warns when they are rotated.
WARNINGS = ("-W", "error", "-W", "ignore::RuntimeWarning")
CAPABILITIES = (80, 89, 90, 120)
# Bytes of shared memory a program may have.
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
IN_REGISTERS = (
    "_product_kernel",
    "_gate_up_kernel",
    "_down_kernel",
    "_tile_kernel",
    "_sum_kernel",
    "_add_norm_kernel",
    "_router_kernel",
)

# Kernels of prompts alone, which nobody started early would gain by.
OF_PROMPTS = ("_unpack_kernel", "_expert_gate_up_kernel", "_expert_down_kernel")

Children = dict[str, subprocess.Popen[str]]


@pytest.fixture(scope="module")
def children(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Children]:
    """The processes that this run's tests wait for, by each of their arguments."""
    names = {item.name for item in request.session.items}
    wanted = [[law for law in half if f"test_laws[{law}]" in names] for half in HALVES]
    commands = [["triton_laws.py", *laws] for laws in wanted if laws]
    if "test_what_models_launch_compiles" in names:
        commands.append(["triton_launches.py", *map(str, CAPABILITIES)])
    environment = _environment() | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    with ExitStack() as stack:
        started = {}
        for script, *arguments in commands:
            child = subprocess.Popen(
                [sys.executable, *WARNINGS, HERE / script, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            started |= dict.fromkeys(arguments, child)
        yield started


def _environment() -> dict[str, str]:
    """That of a process which finds this tree, the modules of tests, and packages where this one does."""
    found = [str(HERE.parents[2]), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found))}


@cache
def _output(child: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process printed, and its errors, once it has ended; one that hangs is ended for all who wait for it."""
    try:
        return child.communicate(timeout=900)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.communicate()


@pytest.mark.rotates(2)
@pytest.mark.parametrize("law", LAWS)
def test_laws(law: str, children: Children) -> None:
    out, errors = _output(children[law])
    assert law in out.split()[1::2], errors[-4000:]
    assert children[law].returncode == 0, errors[-4000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_laws_on_a_gpu() -> None:
    """Laws spend their time compiling kernels: shares of them do it at once."""
    with ExitStack() as stack:
        shares = [LAWS[first::GPU_SHARES] for first in range(GPU_SHARES)]
        children = [
            subprocess.Popen(
                [sys.executable, HERE / "triton_laws.py", "--gpu", *share],
                env=_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for share in shares
        ]
        for child in children:
            stack.enter_context(child)
            stack.callback(child.kill)
        said = [_output(child) for child in children]
    held = {law for out, _ in said for law in out.split()[1::2]}
    assert held == set(LAWS), "\n".join(errors[-2000:] for _, errors in said)
    assert all(child.returncode == 0 for child in children)


def test_every_law_is_run() -> None:
    text = (HERE / "triton_laws.py").read_text()
    listed = text.split("LAWS = (")[1].split(")")[0].replace(",", " ").split()
    assert sorted(LAWS) == sorted(listed)


@pytest.mark.thorough
def test_what_models_launch_compiles(children: Children) -> None:
    """At the shapes of published models, for each generation of GPUs. Products of few rows, above all, keep
    everything in registers."""
    child = children[str(CAPABILITIES[0])]
    out, errors = _output(child)
    assert child.returncode == 0, errors[-4000:]
    made = [json.loads(line) for line in out.splitlines()]
    assert {each["capability"] for each in made} == set(CAPABILITIES)
    for each in made:
        assert each["shared"] <= SHARED[each["capability"]], each
        assert each["stack"] == 0 or each["kernel"] not in IN_REGISTERS, each
        early = each["capability"] >= 90 and each["kernel"] not in OF_PROMPTS
        assert (each["early"], each["waits"]) == ((True, True) if early else (False, None)), each
