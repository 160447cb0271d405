"""Reads settings of fine-tuning as they stand on a command line: key=value, and files of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LINE = "the command line"
Given = tuple[str, dict[str, Any]]  # where keys are given, and their values
_FILES = (".yaml", ".yml", ".json")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns a dict of the words that have the form key=value, and a list of the other words."""
    pairs = {found[1]: found[2] for word in words if (found := _ASSIGNMENT.fullmatch(word))}
    return pairs, [word for word in words if not _ASSIGNMENT.fullmatch(word)]


def settings_file(word: str) -> Given | None:
    """Returns (the word cut at 200 characters, a dict of the settings in the file that it names); None if the word does
    not end in .yaml, .yml or .json, in any case.

    Raises:
        NotFound, UsageError: see `finetune.document.read_document`.
    """
    if not word.lower().endswith(_FILES):
        return None
    from ktcli.finetune.document import read_document

    return word[:200], read_document(Path(word).expanduser())
