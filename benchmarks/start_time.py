"""How long `kt` takes to start: until the commands that only look around have answered, and until the built-in
model has said its first word.

    python benchmarks/start_time.py [--json | --write]

Each command runs `RUNS` times after one that is not counted; the median counts. The limit is a goal of
the design, not a test: other programs on the machine slow a start like everything else, so the processor time of the
whole command, of which they change less, stands beside it. `--write` keeps the rows in
results/DATE-CPU-CORES-start.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from naming import result_path

from ktcli import __version__
from ktcli.hardware.probe import probe

# Commands and the seconds that may pass before something is on standard output, which people wait for. The first
# chat converts the model; that run is not counted.
COMMANDS = {
    ("--version",): 0.06,
    ("--help",): 0.06,
    ("list",): 0.15,
    ("doctor",): 0.5,
    ("chat", "kt-mini", "hi"): 0.3,
}
RUNS = 11


def kt() -> list[str]:
    """The console script of this Python's environment, as a user starts it."""
    script = Path(sys.executable).with_name("kt")
    return [str(script)] if script.exists() else [sys.executable, "-m", "ktcli"]


def once(arguments: tuple[str, ...], home: str) -> tuple[float, float, float]:
    """Seconds of one run from starting the process to its first byte on standard output, and to its end; and those of
    processors."""
    start = time.perf_counter()
    with subprocess.Popen(
        [*kt(), *arguments],
        env={"KT_HOME": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:  # kt doctor ends with 1 or 2 on a machine it finds fault with
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        first_s = time.perf_counter() - start
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return first_s, time.perf_counter() - start, used.ru_utime + used.ru_stime


def rows() -> list[dict[str, Any]]:
    """One result per command."""
    found = []
    with tempfile.TemporaryDirectory() as home:
        for arguments, limit_s in COMMANDS.items():
            once(arguments, home)
            runs = [once(arguments, home) for _ in range(RUNS)]
            times, ends, used = zip(*runs, strict=True)
            found.append(
                {
                    "work": "start",
                    "command": " ".join(("kt", *arguments)),
                    "seconds": median(times),
                    "seconds_min": min(times),
                    "seconds_max": max(times),
                    "end_seconds": median(ends),
                    "cpu_seconds": median(used),
                    "cpu_seconds_min": min(used),
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
    if "--write" in sys.argv[1:]:
        cpu = probe(gpus=False).cpu
        about = {"date": date.today().isoformat(), "kt": __version__, "cpu": cpu.model}
        path = result_path(cpu.model, len(cpu.cores), "start")
        path.write_text(json.dumps({**about, "results": found}, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")
    for row in found:
        verdict = "under" if row["seconds"] <= row["limit_s"] else "OVER"
        print(
            f"{row['command']:<18} {row['seconds'] * 1e3:4.0f} ms"
            f" ({row['seconds_min'] * 1e3:.0f} to {row['seconds_max'] * 1e3:.0f}),"
            f" end {row['end_seconds'] * 1e3:.0f} ms, {verdict} {row['limit_s'] * 1e3:.0f} ms;"
            f" processors {row['cpu_seconds'] * 1e3:.0f} ms ({row['cpu_seconds_min'] * 1e3:.0f} at least)"
        )


if __name__ == "__main__":
    main()
