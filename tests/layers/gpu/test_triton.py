"""The Triton kernels: the laws of triton_laws.py under Triton's interpreter, in two processes.

The interpreter is chosen when triton is imported, for the whole process; so it is not this one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
HALVES = (
    ("few_rows", "rows_alone", "unpacking", "small", "route"),
    ("tiles", "linear", "experts", "groups", "gqa", "mla"),
)


@pytest.mark.parametrize("laws", HALVES, ids=lambda laws: laws[0])
def test_laws(laws: tuple[str, ...]) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", HERE / "triton_laws.py", *laws],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert sorted(run.stdout.split()[1::2]) == sorted(laws)


def test_the_halves_hold_every_law() -> None:
    text = (HERE / "triton_laws.py").read_text()
    listed = text.split("LAWS = (")[1].split(")")[0].split("#")[0].replace(",", " ").split()
    assert sorted(law for half in HALVES for law in half) == sorted(listed)
