"""The GPU day: what only a machine with a GPU can say, in steps of falling value, on a machine without network.

    python benchmarks/gpu_day.py wheels DIR                        here: fetches the wheels that the machine lacks
    python benchmarks/gpu_day.py run [STEP ...] --wheels DIR       there: runs steps, all unless some are named
    python benchmarks/gpu_day.py run --smoke --out DIR             tiny, without a GPU; its figures are no results
    python benchmarks/gpu_day.py results DIR                       here: makes a result of what came back, with a table
    python benchmarks/gpu_day.py steps                             names the steps, in calls of ten minutes

A run installs the wheels and builds the library where that is not done yet, so any call may meet a bare machine. Each
step has a limit of its own and ends alone: one that fails or hangs is noted, and the rest goes on. What does not fit
into the time of the call (--limit) is left out, and named, so that calls of ten minutes do: `--limit 570`, with the
steps of a line of `steps`; of a machine that is fresh at each call only DIR and the tree must come along. The folder
--out then has day.jsonl (a line for each step: exit
status, seconds, limit), all.log (the end of what each command said), and the documents of the steps, those of kt's own
commands as STEP.jsonl.

Needs nothing but Python: the packages of kt come with the wheels.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gpu_steps import STEPS, Step

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "benchmarks" / "gpu_wheels.txt"
_PYTHON = "3.12"  # of the machine with a GPU
# glibc 2.31 is that of Debian 11 and Ubuntu 20.04; llguidance needs it.
_PLATFORMS = "manylinux_2_31 manylinux_2_28 manylinux_2_17 manylinux2014 manylinux1".split()
_LEAST_S = 15.0  # with less no step begins
_CALL_S = 570.0  # of a call on a machine that gives it ten minutes
_BUILT_S = 60.0  # that a bare machine takes from a call
_GRACE_S = 10.0  # for a command that is told to end
_NOT_THERE, _CUT_OFF = 127, 124  # exit statuses, as a shell's and `timeout`'s
_SHOWN_LINES = 40  # of a command's last words
_KEPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Day:
    """A call of the day.

    Attributes:
        work: the folder of packages, build and settings, which lasts from call to call.
        out: the folder of results.
        wheels: the folder of wheels.
        ends: when the call ends, of time.monotonic.
    """

    work: Path
    out: Path
    wheels: Path
    smoke: bool
    ends: float

    def run(self, steps: Sequence[Step]) -> bool:
        """Runs steps, the build before all that need it; returns whether all that ran went well."""
        well, ready = True, self.work / "ready"
        build = next(step for step in STEPS if step.name == "build")
        for step in steps:
            if not ready.exists() and step.name not in ("facts", "build"):
                well &= self._step(build)
                ready.touch()  # whatever came of it: the other steps say more than another try
            well &= self._step(step)
            if step is build:
                ready.touch()
        return well

    def _step(self, step: Step) -> bool:
        """Runs a step under its limit, and notes how it went."""
        commands = step.tiny if self.smoke else step.commands
        start = time.monotonic()
        limit = min(step.limit_s, self.ends - start)
        if limit < min(_LEAST_S, step.limit_s) or not commands:
            why = "the call has too little time left" if commands else "it needs a GPU"
            self._say(f"== {step.name} left out: {why}\n")
            self._note({"step": step.name, "left_out": why})
            return True
        self._say(f"== {step.name}, at most {limit:.0f} s\n")
        codes, answers = [], set()
        for command in commands:
            left = start + limit - time.monotonic()
            code, answer = self._ended(command, left) if left > 0 else (_CUT_OFF, "")
            codes.append(code)
            answers.add(answer)
            if "--json" in command and code == 0:
                self._keep(step, answer)
            if code and step.stops:
                break
        took = time.monotonic() - start
        self._say(f"== {step.name}: exits {codes} after {took:.0f} s\n")
        facts = {"step": step.name, "exits": codes, "seconds": round(took, 1), "limit": limit}
        alike = {"alike": len(answers) == 1} if step.alike else {}
        self._note(facts | alike)
        return not any(codes) and all(alike.values())

    def _keep(self, step: Step, answer: str) -> None:
        """Appends the document that a command gave to those of its step."""
        with (
            suppress(ValueError),
            open(self.out / f"{step.name}.jsonl", "a", encoding="utf-8") as lines,
        ):
            lines.write(json.dumps(json.loads(answer)) + "\n")

    def _ended(self, command: Sequence[str], limit_s: float) -> tuple[int, str]:
        """Runs a command; returns its exit status, which is _CUT_OFF where the limit ended it with all that it started,
        and the end of what it wrote to stdout."""
        given = [word.format_map(self._places) for word in command]
        self._say(f"$ {' '.join(given)}\n")
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as answered:
            try:
                child = subprocess.Popen(
                    given,
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=answered,
                    stderr=said,
                    start_new_session=True,
                )
            except OSError as error:
                self._say(f"{error}\n")
                return _NOT_THERE, ""
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = _CUT_OFF
            finally:
                _end(child)
            answer = _last_words(answered)
            self._say(_last_words(said) + answer)
        return code, answer

    @property
    def _places(self) -> Mapping[str, object]:
        """What the names in commands stand for."""
        return {
            "python": sys.executable,
            "root": ROOT,
            "work": self.work,
            "wheels": self.wheels,
            "out": self.out,
        }

    @property
    def _environment(self) -> dict[str, str]:
        """The environment of a step: the packages, the tree, a home of its own, no network."""
        before = os.environ
        found = [str(self.work / "site"), str(ROOT), before.get("PYTHONPATH", "")]
        tools = [sysconfig.get_path("scripts"), before.get("PATH", "")]
        return {
            **before,
            "PATH": os.pathsep.join(filter(None, tools)),
            "PYTHONPATH": os.pathsep.join(filter(None, found)),
            "PYTHONUNBUFFERED": "1",
            "KT_HOME": str(self.work / "home"),
            "TRITON_CACHE_DIR": str(self.work / "triton"),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def _say(self, words: str) -> None:
        """Keeps words in the log, and shows their end."""
        with open(self.out / "all.log", "a", encoding="utf-8") as log:
            log.write(words)
        for line in words.splitlines()[-_SHOWN_LINES:]:
            print(line[:220], flush=True)

    def _note(self, facts: Mapping[str, object]) -> None:
        with open(self.out / "day.jsonl", "a", encoding="utf-8") as lines:
            lines.write(json.dumps(facts) + "\n")


def _last_words(of: IO[bytes]) -> str:
    """The end of a file."""
    of.seek(max(0, of.seek(0, os.SEEK_END) - _KEPT_BYTES))
    return of.read().decode(errors="replace")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends whatever a command has started, politely first."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)


def fetch(folder: Path) -> int:
    """Fetches the wheels that travel, for the machine with a GPU; returns pip's exit status."""
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", _PYTHON, "--implementation", "cp", *platforms]
    command += ["--dest", str(folder), "--requirement", str(WHEELS)]
    return subprocess.run(command, check=False).returncode


def calls() -> Iterator[list[str]]:
    """The steps in calls of ten minutes: each has room for those that are likely to need all of their time."""
    call: list[str] = []
    left = _CALL_S
    for step in STEPS:
        if call and step.usual_s > left:
            yield call
            call, left = [], _CALL_S - _BUILT_S  # which may meet a bare machine
        call.append(step.name)
        left -= step.usual_s
    yield call


def make_result(folder: Path, into: Path) -> int:
    """Makes a result of a day's folder, and shows its table."""
    from gpu_results import found_in, keep, table

    try:
        found = found_in(folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(found))
    print(*keep(found, into), sep="\n", file=sys.stderr)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    doing = parser.add_subparsers(dest="doing", required=True)
    doing.add_parser("steps", help="name the steps")
    fetching = doing.add_parser("wheels", help="fetch the wheels that the machine lacks")
    fetching.add_argument("folder", type=Path)
    making = doing.add_parser("results", help="make a result of what a run found")
    making.add_argument("folder", type=Path)
    making.add_argument("--into", type=Path, default=ROOT / "benchmarks" / "results")
    running = doing.add_parser("run", help="run steps")
    names = [step.name for step in STEPS]
    running.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(names))
    running.add_argument("--wheels", type=Path, default=ROOT / "build" / "wheels")
    running.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kt-gpu-day")
    running.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-day")
    running.add_argument("--limit", type=float, default=3600, help="seconds of the whole call")
    running.add_argument("--smoke", action="store_true", help="tiny, without a GPU")
    asked = parser.parse_args()
    if asked.doing == "steps":
        for call in calls():
            print(*call)
        return 0
    if asked.doing == "results":
        return make_result(asked.folder, asked.into)
    if asked.doing == "wheels":
        return fetch(asked.folder)
    unknown = [name for name in asked.steps if name not in names]
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such step; there are {', '.join(names)}")
    for folder in (asked.work, asked.out):
        folder.mkdir(parents=True, exist_ok=True)
    work, out, wheels = (each.resolve() for each in (asked.work, asked.out, asked.wheels))
    day = Day(work, out, wheels, asked.smoke, time.monotonic() + asked.limit)
    wanted = [step for step in STEPS if not asked.steps or step.name in asked.steps]
    return 0 if day.run(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
