"""kt beside other engines on this machine, behind `make bench-peers`.

    python -m benchmarks.peers                       everything; see benchmarks/README.md for how long
    python -m benchmarks.peers --quick --only int4   less, only printed

Engines live in one process each, are loaded once per model and take turns; only one works at a time. An
engine that cannot be had or does not run is reported with its reason, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.naming import result_path
from benchmarks.peers import install, moe, report
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.install import ROOT, Place, Unavailable
from benchmarks.peers.measure import Pair, Watch, Worker, alternate
from benchmarks.peers.rows import Pairing, Work, chosen
from benchmarks.peers.shapes import MIXES, expert_bits
from ktcli import __version__
from ktcli.hardware.machine import Machine
from ktcli.hardware.probe import probe
from ktcli.measure.clock import PAIRS
from ktcli.models import cut
from ktcli.store import catalog
from ktcli.weights.formats import format_named

_CONTEXT = 1024
_QUICK = 3


def main() -> None:
    wanted = _arguments()
    if wanted.list:
        print(
            "\n".join(pairing.name(work) for pairing in wanted.pairings for work in pairing.goals)
        )
        return
    start = time.perf_counter()
    bench = Bench(wanted)
    bench.prepare()
    if wanted.prepare:
        return
    document = bench.document()
    tables = (report.text(document["rows"]), report.moe_text(document["moe"]))
    print("\n\n".join(filter(None, tables)))
    for line in document["unavailable"]:
        print(f"not measured: {line['what']}: {line['reason']}")
    say(f"{time.perf_counter() - start:.0f} s")
    if wanted.output is not None and (document["rows"] or document["moe"]):
        _write(document, wanted.output, bench.place)


def say(line: str) -> None:
    """Progress, apart from the results."""
    print(line, file=sys.stderr, flush=True)


class Bench:
    """One run of the command: what is installed, who is loaded, what went wrong."""

    def __init__(self, wanted: argparse.Namespace) -> None:
        self.machine: Machine = probe()
        self.cpus = frozenset(os.sched_getaffinity(0))
        self.wanted = wanted
        cores = len(self.machine.cpu.cores)
        cpu = " ".join((self.machine.cpu.model or "unknown", *self.machine.cpu.flags))
        self.place = Place(wanted.folder, wanted.wheels or wanted.folder / "wheels", cpu, cores)
        self.threads: int = wanted.threads or self.machine.cpu.threads
        self.engines: dict[str, dict[str, Any]] = {}
        self.unavailable: list[dict[str, str]] = []
        # kt's workers by number of layers, and the model and formats they have in common.
        self._loaded: tuple[object, dict[int, Worker]] = (None, {})

    def prepare(self) -> None:
        """Install engines and write model files, so that nothing is compiled or written later."""
        install.prepare(self.place)
        names = dict.fromkeys(pairing.engine for pairing in self.wanted.pairings)
        for name in [*names, *([moe.NAME] if self.wanted.moe else [])]:
            say(f"installing {name}")
            with self._reported(name):
                self.engines[name] = install.install(self.place, name, ENGINES[name])
        for pairing in self.wanted.pairings:
            if ENGINES[pairing.engine].gguf and pairing.engine in self.engines:
                with self._reported(f"{pairing.model} {pairing.mix}"):
                    for layers in _cuts(pairing):
                        self._file(pairing, layers)

    def document(self) -> dict[str, Any]:
        """Measure everything that was asked for."""
        rows = [row for pairing in self.wanted.pairings for row in self._pairing(pairing)]
        self._close_kt()
        return {
            "date": date.today().isoformat(),
            "kt": __version__,
            "machine": {
                "cpu": self.machine.cpu.model,
                "cores": len(self.machine.cpu.cores),
                "memory_bytes": self.machine.memory.total_bytes,
            },
            "threads": self.threads,
            "rounds": self.wanted.rounds,
            "engines": self.engines,
            "rows": rows,
            "moe": list(self._moe()),
            "moe_of_kt": moe.of_kt() if self.wanted.moe else None,
            "unavailable": self.unavailable,
        }

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except Unavailable as error:
            # The tree's own path is nobody's business.
            reason = str(error)
            for path, short in self._own_paths():
                reason = reason.replace(str(path), short)
            self.unavailable.append({"what": what, "reason": reason})
            say(f"not measured: {what}: {reason}")
            self._close_kt()  # it may be kt that ended

    def _own_paths(self) -> Iterator[tuple[Path, str]]:
        """Folders of this machine that no result names."""
        yield self.wanted.folder, "FOLDER"
        if self.wanted.wheels:
            yield self.wanted.wheels, "WHEELS"
        yield ROOT, "."
        yield Path.home(), "~"

    def _pairing(self, pairing: Pairing) -> list[report.Row]:
        if pairing.engine not in self.engines:
            return []
        rows: list[report.Row] = []
        what = f"{pairing.model} {pairing.kt.name} against {pairing.engine} {pairing.mix}"
        with self._reported(what), ExitStack() as stack:
            layers = _cuts(pairing)
            say(f"loading {what}")
            kts = [self._kt(pairing, n) for n in layers]
            peers = []
            for n in layers:
                peers.append(self._peer(pairing, n))
                stack.callback(peers[-1].close)
            pairs = [Pair(peer, kt) for peer, kt in zip(peers, kts, strict=True)]
            for work in pairing.goals:
                rows.append(self._row(pairing, work, pairs if work.by_layer else pairs[:1]))
        return rows

    def _row(self, pairing: Pairing, work: Work, pairs: list[Pair]) -> report.Row:
        watch = Watch(tuple(w for pair in pairs for w in (pair.peer, pair.kt)), self.cpus)
        series = alternate(pairs, work, self.wanted.rounds, watch)
        row = report.row(pairing, work, series)
        row |= report.noise(watch.others_share(), watch.idle_share)
        fmt = format_named(pairing.kt.experts)
        scale_bits = 16 / fmt.group if fmt.group else 0
        row["bits"] = fmt.bits + scale_bits
        row["peer_bits"] = 16.0 if not ENGINES[pairing.engine].gguf else self._peer_bits(pairing)
        row["about"], row["peer_about"] = pairs[0].kt.about, pairs[0].peer.about
        say(f"{pairing.name(work)}: {row['ratio']:.2f} {report.verdict(row)}")
        return row

    def _config(self, pairing: Pairing, layers: int) -> dict[str, Any]:
        profile = catalog.find(pairing.model)
        assert profile is not None, "the rows name models of the catalogue"
        return cut(profile.config, layers)

    def _peer_bits(self, pairing: Pairing) -> float:
        return expert_bits(self._config(pairing, pairing.layers[0]), MIXES[pairing.mix])

    def _file(self, pairing: Pairing, layers: int) -> Path:
        config = self._config(pairing, layers)
        return install.model_file(self.place, config, pairing.model, pairing.mix)

    def _peer(self, pairing: Pairing, layers: int) -> Worker:
        engine = ENGINES[pairing.engine]
        spec: dict[str, Any] = {"context": _CONTEXT, "threads": self.threads}
        spec["streams"] = pairing.streams
        config = self._config(pairing, layers)
        if engine.gguf:
            spec |= {
                "file": str(self._file(pairing, layers)),
                "version": self.engines[pairing.engine]["version"],
            }
            spec["top_k"] = config["num_experts_per_tok"]
        else:
            spec["config"] = config
        env = self.place.environment(pairing.engine, engine)
        log = self.place.log(pairing.engine)
        return Worker(self.place.python, engine.worker, spec, env, log)

    def _kt(self, pairing: Pairing, layers: int) -> Worker:
        """kt with this cut; pairings that follow with the same formats find it loaded."""
        key = (pairing.model, pairing.kt, pairing.streams)
        if self._loaded[0] != key:
            self._close_kt()
            self._loaded = (key, {})
        workers = self._loaded[1]
        if layers not in workers:
            kt = pairing.kt
            spec = {"model": pairing.model, "layers": layers, "experts": kt.experts}
            spec |= {"dense": kt.dense, "context": _CONTEXT, "threads": self.threads}
            spec["streams"] = pairing.streams
            env = self.place.environment("", None) | ({"KT_ISA": kt.isa} if kt.isa else {})
            workers[layers] = Worker(Path(sys.executable), "kt", spec, env, self.place.log("kt"))
        return workers[layers]

    def _close_kt(self) -> None:
        for worker in self._loaded[1].values():
            worker.close()
        self._loaded = (None, {})

    def _moe(self) -> Iterator[report.Row]:
        if moe.NAME not in self.engines:
            return
        for model, method in self.wanted.moe:
            say(f"experts of {model}: {moe.NAME} {method}")
            with self._reported(f"{moe.NAME} {method} {model}"):
                yield from moe.rows(
                    self.place, model, method, self.threads, self.cpus, self.wanted.rounds
                )


def _cuts(pairing: Pairing) -> tuple[int, ...]:
    """Numbers of layers that the works of a pairing need."""
    both = any(work.by_layer for work in pairing.goals)
    return pairing.layers if both else pairing.layers[:1]


def _write(document: dict[str, Any], path: Path, place: Place) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    picture = path.with_suffix(".svg")
    command = [str(place.python), "-m", "benchmarks.peers.plot", str(path), str(picture)]
    drawn = document["rows"] and subprocess.run(command, cwd=ROOT).returncode == 0
    print(f"written to {path}" + (f" and {picture}" if drawn else ""))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Compare kt with other engines: same shapes, same bits, random weights.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{_QUICK} rounds instead of {PAIRS}")
    add(
        "--only",
        action="append",
        default=[],
        metavar="WORD",
        help="rows whose name holds it; again: and",
    )
    add("--skip", action="append", default=[], metavar="WORD", help="not those whose name holds it")
    add("--engines", default="", metavar="A,B", help=f"of {', '.join(ENGINES)}; default: all")
    add(
        "--prepare",
        action="store_true",
        help="install, compile, write model files; measure nothing",
    )
    add("--list", action="store_true", help="names of the rows, nothing else")
    add("--threads", type=int, help="of every engine; default: one per core")
    add("--wheels", type=Path, metavar="DIR", help="where built engines are kept and looked for")
    add("--folder", type=Path, default=ROOT / "build/peers", help="where everything is installed")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON, and a picture beside it; default: when all is run",
    )
    wanted = parser.parse_args()
    engines = tuple(filter(None, wanted.engines.split(",")))
    if unknown := set(engines) - set(ENGINES):
        parser.error(f"unknown engines: {', '.join(sorted(unknown))}")
    words = tuple(wanted.only)
    wanted.pairings = chosen(words, engines, tuple(wanted.skip))
    wanted.moe = moe.cases(words) if not engines or moe.NAME in engines else []
    wanted.rounds = _QUICK if wanted.quick else PAIRS
    wanted.folder = wanted.folder.resolve()
    wanted.wheels = wanted.wheels.resolve() if wanted.wheels else None
    if wanted.output is None and not (wanted.quick or words or wanted.skip or engines):
        cpu = probe().cpu
        wanted.output = result_path(cpu.model, len(cpu.cores), "peers")
    return wanted


if __name__ == "__main__":
    main()
