"""What `kt bench serve` says of a server beside what an independent load generator, aiperf, says of the same.

    python benchmarks/generators.py [--only NAME ...] [--aiperf PROGRAM] [--out FILE.json] [--add]

Both ask the server of `paced.py` in turn, whose pace is slow enough that no core is the bottleneck: the first piece
after 500 ms, another each 50 ms. aiperf (`pip install aiperf`, in an environment of its own) is found on PATH. At a
rate, kt draws the moments and aiperf sends at the same ones, so that both see as many requests at once. `seen` is what
the server noted of the requests of each, `ratio` kt over aiperf. aiperf calls ITL what SGLang and kt call TPOT, a mean
of each request, and ICL what they call ITL, the time between two pieces.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from naming import result_path

from ktcli.hardware.probe import probe

HERE = Path(__file__).resolve().parent
MINI = HERE.parent / "profiles" / "kt-mini"  # a folder with a tokenizer, which aiperf wants
FIRST_MS, NEXT_MS = 500, 50
INPUT, OUTPUT = 64, 32
WITHIN = 0.03
Words = list[str | int | float | Path]
KT = "import sys; from ktcli.start import run; sys.exit(run())"
# Of a latency: SGLang's name, aiperf's, and what is compared.
LATENCIES = (
    ("e2e_latency", "request_latency"),
    ("ttft", "time_to_first_token"),
    ("tpot", "inter_token_latency"),
    ("itl", "inter_chunk_latency"),
)
STATISTICS = (("mean", "avg"), ("median", "p50"), ("p99", "p99"))


@dataclass(frozen=True, slots=True)
class Setting:
    """What both generators send.

    Attributes:
        at_once: the most requests under way; 0: as many as come.
        rate: requests per second at random moments; 0: as soon as one may.
        together: tokens in each piece of an answer.
    """

    name: str
    requests: int
    at_once: int = 0
    rate: float = 0.0
    together: int = 1


SETTINGS = (
    Setting("1 at once", 10, at_once=1),
    Setting("4 at once", 40, at_once=4),
    Setting("16 at once", 160, at_once=16),
    Setting("4 a second", 80, rate=4.0),
    Setting("4 at once, two tokens a piece", 40, at_once=4, together=2),
)


def kt_figures(url: str, setting: Setting, requests: Path) -> dict[str, float]:
    """What `kt bench serve` says; it writes a line for each request."""
    load: Words = ["--max-concurrency", setting.at_once] if setting.at_once else []
    load += ["--request-rate", setting.rate] if setting.rate else []
    words: Words = ["bench", "serve", "--url", url, "--num-prompts", setting.requests, *load]
    sizes: Words = ["--input-len", INPUT, "--output-len", OUTPUT, "--output-file", requests]
    said = _run([sys.executable, "-c", KT, *words, *sizes, "--json", "--seed", 1])
    found = json.loads(said)
    wanted = [f"{each}_{name}_ms" for name, _ in LATENCIES for each, _ in STATISTICS]
    return {name: found[name] for name in ("request_throughput", "output_throughput", *wanted)}


def aiperf_figures(
    program: str, url: str, setting: Setting, requests: Path, folder: Path
) -> dict[str, float]:
    """What aiperf says, under SGLang's names; at a rate it sends when kt did."""
    if setting.rate:
        load: Words = ["--input-file", _trace(requests, folder / "trace.jsonl")]
        load += ["--custom-dataset-type", "mooncake_trace", "--fixed-schedule"]
    else:
        load = ["--concurrency", setting.at_once, "--request-count", setting.requests]
        load += ["--isl", INPUT, "--osl", OUTPUT]
    words: Words = ["profile", "--model-names", "paced", "--url", url, "--endpoint-type", "chat"]
    words += ["--streaming", "--tokenizer", MINI, "--use-server-token-count", "--ui", "none"]
    # kt sends two requests before those that it counts.
    words += ["--warmup-request-count", 2, "--random-seed", 1, "--artifact-dir", folder]
    _run([program, *words, *load])
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    figures = {
        "request_throughput": found["request_throughput"]["avg"],
        "output_throughput": found["output_token_throughput"]["avg"],
    }
    for name, theirs in LATENCIES:
        for each, statistic in STATISTICS:
            figures[f"{each}_{name}_ms"] = found[theirs][statistic]
    return figures


def _trace(requests: Path, path: Path) -> Path:
    """Writes the moments at which kt sent requests as a schedule for aiperf."""
    sent = sorted(json.loads(line)["sent_s"] for line in requests.read_text().splitlines())
    sizes = {"input_length": INPUT, "output_length": OUTPUT}
    rows = [json.dumps({"timestamp": round(1e3 * at_s), **sizes}) for at_s in sent]
    path.write_text("\n".join(rows) + "\n")
    return path


def seen_figures(url: str, setting: Setting) -> dict[str, float]:
    """What the server noted of the last requests, those that were counted."""
    with urllib.request.urlopen(f"{url}/seen", timeout=30) as reply:
        answers = sorted(json.load(reply))[-setting.requests :]
    seconds = max(each[-1] for each in answers) - answers[0][0]
    values = {
        "e2e_latency": [each[-1] - each[0] for each in answers],
        "ttft": [each[1] - each[0] for each in answers],
        "tpot": [(each[-1] - each[1]) / (OUTPUT - 1) for each in answers],
        "itl": [gap for each in answers for gap in np.diff(each[1:])],
    }
    figures = {
        "request_throughput": len(answers) / seconds,
        "output_throughput": OUTPUT * len(answers) / seconds,
    }
    for name, of in values.items():
        found = (np.mean(of), np.median(of), np.percentile(of, 99))
        for (each, _), value in zip(STATISTICS, found, strict=True):
            figures[f"{each}_{name}_ms"] = 1e3 * float(value)
    return figures


def compare(program: str, setting: Setting) -> dict[str, Any]:
    """The figures of both, and what the server saw of each."""
    with tempfile.TemporaryDirectory() as folder, paced(setting.together) as url:
        requests, artifacts = Path(folder) / "requests.jsonl", Path(folder) / "aiperf"
        artifacts.mkdir()
        kt = kt_figures(url, setting, requests)
        kt_seen = seen_figures(url, setting)
        other = aiperf_figures(program, url, setting, requests, artifacts)
        other_seen = seen_figures(url, setting)
    figures = {
        name: {
            "kt": value,
            "aiperf": other[name],
            "ratio": value / other[name],
            "kt_seen": kt_seen[name],
            "aiperf_seen": other_seen[name],
        }
        for name, value in kt.items()
    }
    worst = max(figures, key=lambda name: abs(figures[name]["ratio"] - 1))
    return {
        "setting": setting.name,
        "requests": setting.requests,
        "worst": worst,
        "worst_ratio": figures[worst]["ratio"],
        "figures": figures,
    }


@contextmanager
def paced(together: int) -> Iterator[str]:
    """The address of the paced server, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pace = [str(port), str(FIRST_MS), str(NEXT_MS), str(together)]
    child = subprocess.Popen([sys.executable, str(HERE / "paced.py"), *pace])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/v1/models", timeout=5).close()
                break
            except OSError:
                if child.poll() is not None:
                    raise SystemExit("the paced server ended") from None
                time.sleep(0.05)
        yield url
    finally:
        child.terminate()
        child.wait()


def _run(command: Words) -> str:
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def show(found: dict[str, Any]) -> None:
    """Prints the comparison as a table."""
    print(f"\n{found['setting']}, {found['requests']} requests")
    print(f"{'':<24}{'kt':>12}{'aiperf':>12}{'ratio':>9}{'server':>12}")
    for name, row in found["figures"].items():
        line = (
            f"{row['kt']:>12.3f}{row['aiperf']:>12.3f}{row['ratio']:>9.4f}{row['kt_seen']:>12.3f}"
        )
        print(f"{name:<24}{line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [each.name for each in SETTINGS]
    parser.add_argument("--only", choices=names, nargs="+", default=names)
    parser.add_argument("--aiperf", default="aiperf", help="the program, if it is not on PATH")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="keep what else the file has")
    options = parser.parse_args()
    program = shutil.which(options.aiperf)
    if program is None:
        raise SystemExit(f"{options.aiperf} is not on PATH: pip install aiperf, in another venv")
    machine = probe()
    out = options.out or result_path(machine.cpu.model, len(machine.cpu.cores), "bench-serve")
    found = []
    for setting in (each for each in SETTINGS if each.name in options.only):
        found.append(compare(program, setting))
        show(found[-1])
    before = json.loads(out.read_text())["results"] if options.add and out.exists() else []
    results = [row for row in before if row["setting"] not in options.only] + found
    results.sort(key=lambda row: names.index(row["setting"]))
    document = {
        "goal_within": WITHIN,
        "generator": _run([program, "--version"]).strip(),
        "kt": version("ktcli"),
        "first_ms": FIRST_MS,
        "next_ms": NEXT_MS,
        "input_tokens": INPUT,
        "output_tokens": OUTPUT,
        "worst_ratio": max((row["worst_ratio"] for row in results), key=lambda it: abs(it - 1)),
        "results": results,
    }
    out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
