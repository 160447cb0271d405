"""Writes the findings of `kt doctor` to files: a machine for `--machine`, and a report without personal data."""

from __future__ import annotations

import getpass
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.hardware.machine import Machine
from ktcli.hardware.profile import document
from ktcli.hardware.redaction import names_of, redacted


def record_machine(machine: Machine, path: Path) -> None:
    """Writes a file that `--machine` reads, without the path of the library.

    Raises:
        UsageError: it cannot be written.
    """
    disk = replace(machine.disk, path="") if machine.disk else None
    _write(path, document(replace(machine, name=path.stem or "recorded", disk=disk)))


def write_report(found: Mapping[str, Any], path: Path) -> None:
    """Writes the output of `kt doctor --json` and the versions to a file, without names, folders and tokens.

    Raises:
        UsageError: it cannot be written.
    """
    variables = {key: value for key, value in os.environ.items() if key.startswith("KT_")}
    report = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "terminal": {
            "TERM": os.environ.get("TERM", ""),
            "encoding": sys.stdout.encoding,
            "is_terminal": sys.stdout.isatty(),
        },
        "variables": variables,
        **found,
    }
    names = names_of(os.environ, _user(), platform.node(), os.path.expanduser("~"))
    _write(path, redacted({**report, "home": "KT_HOME"}, {str(found["home"]): "KT_HOME", **names}))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return ""


def _write(path: Path, found: Any) -> None:
    smallfiles.write_named(path, json.dumps(found, indent=2, ensure_ascii=True) + "\n")
