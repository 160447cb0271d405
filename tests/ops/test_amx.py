"""The row amx gives the bits of the others, in child processes that run it, emulated or not: the table of
test_same_bits.py, and an answer whose prompt went through tiles and whose tokens did not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from amx import Amx
from convert import convert_checkpoint

from ktcli.store import library
from ktcli.store.entry import BUILTIN
from ktcli.store.places import EntryKind

HERE = Path(__file__).parent
CHECKPOINT = library.find(BUILTIN, EntryKind.CHECKPOINT)
QUESTION = "What does kt convert do?"


def python(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


@pytest.mark.parametrize("fmt", ["int8", pytest.param("int4", marks=pytest.mark.thorough)])
def test_same_bits(amx: Amx, fmt: str) -> None:
    """Both shapes of work, from the table that only such a process has; all formats are in the C tests.

    Without pytest's faulthandler, which would take SIGILL from the emulator.
    """
    table = (f"{HERE / 'test_same_bits.py'}::test_same_bits", "-k", f"{fmt}-amx")
    plain = ("-q", "-p", "no:cacheprovider", "-p", "no:faulthandler")
    done = python("pytest", *table, *plain, environment=amx.environment)
    assert "1 passed" in done.stdout
    assert amx.count(done.stderr, "tdpbssd") > 0 or not amx.emulated


@pytest.mark.thorough
def test_a_run_gets_the_same_in_any_batch(amx: Amx) -> None:
    """Operation by operation; with bf16, products and models within their bounds."""
    models = HERE.parent / "engine" / "test_batches.py"
    tests = (str(HERE / "test_same_batch.py"), str(models), "-k", "amx or test_tiles")
    plain = ("-q", "-p", "no:cacheprovider", "-p", "no:faulthandler")
    done = python("pytest", *tests, *plain, environment=amx.environment)
    assert "passed" in done.stdout and "skipped" not in done.stdout
    assert amx.count(done.stderr, "tdpbf16ps") > 0 or not amx.emulated


@pytest.mark.thorough
@pytest.mark.skipif(CHECKPOINT is None, reason="the trained model is not in this tree")
@pytest.mark.parametrize("fmt", ["int4", pytest.param("int8", marks=pytest.mark.thorough)])
def test_tiles_for_the_prompt_and_vectors_for_the_answer(
    amx: Amx, fmt: str, tmp_path: Path
) -> None:
    assert CHECKPOINT is not None
    pack = convert_checkpoint(CHECKPOINT.path, tmp_path / "pack", experts=fmt, dense=fmt)
    chat = ("ktcli", "chat", str(pack), QUESTION, "--greedy", "-n", "24", "-t", "2")
    want = python(*chat, environment={**os.environ, "KT_ISA": "avx512"})
    got = python(*chat, environment=amx.environment)
    assert got.stdout == want.stdout and len(want.stdout.split()) > 3
    assert amx.count(got.stderr, "tdpbssd") > 0 or not amx.emulated
