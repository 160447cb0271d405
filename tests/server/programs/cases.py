"""For the programs beside: runs cases one after the other and prints what came of each."""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from collections.abc import Callable

URL = sys.argv[1]
MODEL, KEY = "fake", "none"
WEATHER = "It is 18 degrees in Paris."
PERSON = {"name": "Ada", "age": 36}


def run(cases: dict[str, object]) -> None:
    """Runs the functions of a module whose names begin with `case_`."""
    for name, case in cases.items():
        if not name.startswith("case_") or not inspect.isfunction(case):
            continue
        print(f"case {name.removeprefix('case_')}: {_said(case)}", flush=True)


def _said(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:
        return json.dumps(traceback.format_exc()[-1500:])
    return "ok"
