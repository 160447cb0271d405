"""The pages say what the commands print; `python docs/record.py` writes them anew."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import record
from ktcli import errors

TROUBLE = Path(record.__file__).with_name("troubleshooting.md")


@pytest.mark.parametrize("page", record.PAGES, ids=lambda page: page.name)
def test_tables_of_a_page_are_not_stale(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert record.with_tables(text) == text, "stale: python docs/record.py"


def test_every_error_has_its_entry() -> None:
    """With its exit code."""
    sections = dict(
        re.findall(r"(?ms)^## (\w+Error|\w+)$\n(.*?)(?=^## |\Z)", TROUBLE.read_text("utf-8"))
    )
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.KtError)
    }
    assert classes.keys() <= sections.keys()
    for name, kind in classes.items():
        assert re.search(rf"\bcode {kind.exit_code:d}\b", sections[name]), name


@pytest.mark.thorough
def test_sessions_of_the_pages_print_this() -> None:
    done = subprocess.run(
        [sys.executable, record.__file__, "--check"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"python docs/record.py\n{done.stdout}{done.stderr}"
