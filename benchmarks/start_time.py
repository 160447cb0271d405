"""How long `kt` takes to start: the commands that only look around should answer at once, and the
built-in model nearly so.

    python benchmarks/start_time.py [--json]

Each command runs `RUNS` times after one that is not counted; the median counts. The limit is a goal of
the design, not a test: other programs on the machine slow a start like everything else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

# Command and the seconds it may take. The first chat converts the model; that run is not counted.
COMMANDS = {
    ("--help",): 0.3,
    ("list",): 0.3,
    ("doctor",): 0.3,
    ("chat", "kt-mini", "hi"): 1.0,
}
RUNS = 11


def kt() -> list[str]:
    """The console script of this Python's environment, as a user starts it."""
    script = Path(sys.executable).with_name("kt")
    return [str(script)] if script.exists() else [sys.executable, "-m", "ktcli"]


def once(arguments: tuple[str, ...], home: str) -> float:
    """Seconds of one run, from starting the process to its end."""
    start = time.perf_counter()
    subprocess.run(
        [*kt(), *arguments],
        env={"KT_HOME": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,  # kt doctor ends with 1 or 2 on a machine it finds fault with
    )
    return time.perf_counter() - start


def rows() -> list[dict[str, Any]]:
    """One result per command."""
    found = []
    with tempfile.TemporaryDirectory() as home:
        for arguments, limit_s in COMMANDS.items():
            once(arguments, home)
            times = [once(arguments, home) for _ in range(RUNS)]
            found.append(
                {
                    "work": "start",
                    "command": " ".join(("kt", *arguments)),
                    "seconds": median(times),
                    "seconds_min": min(times),
                    "seconds_max": max(times),
                    "limit_s": limit_s,
                    "runs": RUNS,
                }
            )
    return found


def main() -> None:
    found = rows()
    if "--json" in sys.argv[1:]:
        print(json.dumps(found, indent=2))
        return
    for row in found:
        verdict = "under" if row["seconds"] <= row["limit_s"] else "OVER"
        print(
            f"{row['command']:<18} {row['seconds'] * 1e3:4.0f} ms"
            f" ({row['seconds_min'] * 1e3:.0f} to {row['seconds_max'] * 1e3:.0f}),"
            f" {verdict} {row['limit_s'] * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
