"""What commands print is what the files in tests/snapshots say; `python tests/snapshots.py` writes them anew."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("snapshots.py")
KEPT = Path(__file__).with_name("snapshots")


@pytest.mark.parametrize("group", ["printed", pytest.param("measured", marks=pytest.mark.thorough)])
def test_commands_print_what_is_kept(group: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check", group], capture_output=True, text=True, timeout=500
    )
    changed = f"look at it; if it is better: python tests/snapshots.py\n{done.stdout}"
    assert done.returncode == 0, changed + done.stderr


def test_no_line_is_wider_than_its_terminal() -> None:
    """But for words that are: paths of files."""
    broken = [
        line
        for path in KEPT.rglob("*.txt")
        for line in re.findall(r"(?m)^.*⏎$", path.read_text(encoding="utf-8"))
    ]
    assert [line for line in broken if "/" not in line.split()[-1]] == []


def test_nothing_that_is_kept_is_a_mistake_of_kt() -> None:
    texts = [path.read_text(encoding="utf-8") for path in KEPT.rglob("*.txt")]
    assert texts and not any("internal error" in text for text in texts)
