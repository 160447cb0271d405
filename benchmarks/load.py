"""How fast a converted model is loaded from the page cache, beside the speed of copying memory.

    python benchmarks/load.py [--json]

Writes about 2.6 GB of random weights (five layers of qwen3-30b-a3b, int4 and int8) with kt's own writer,
reads them once, then loads them `RUNS` times with kt's own loader. The ceiling, taken before and after
each, is a plain copy by all threads into memory that is there already. A loader also has to get its
memory from the system, which fills it with zeros; `fresh_percent` is what the same plain copy
reaches into new memory, and `touch_gb_s` how fast new memory can be had at all.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli import smallfiles
from ktcli.assembly.host import team_here
from ktcli.engine.loader import PackSource, load
from ktcli.manifest import PACK, FileRecord, Manifest
from ktcli.measure.clock import PAIRS, alternate
from ktcli.models import Model, build, cut
from ktcli.native import Arena, Pool
from ktcli.store import catalog
from ktcli.weights.manifest import format_names
from ktcli.weights.pack import Pack, weight_files
from ktcli.weights.recipe import Recipe, stored_bytes
from ktcli.weights.writer import FileWriter

MODEL, LAYERS = "qwen3-30b-a3b", 5
LIMIT_PERCENT = 60
RUNS = PAIRS
_COPY_BYTES = 1 << 30
_PIECE_BYTES = 4 << 20


def write_pack(folder: Path, config: dict[str, Any], recipe: Recipe) -> Pack:
    """A pack of random bytes: every file as a conversion would write it."""
    model = build(config)
    block = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8).tobytes()
    text = json.dumps(config).encode()
    smallfiles.write(folder / "config.json", text)
    records = []
    for file in weight_files(model.tensors, recipe):
        with FileWriter(folder / file.name) as target:
            target.write(file.header)
            for tensor in file.tensors:
                left = stored_bytes(tensor, recipe)
                while left:
                    target.write(memoryview(block)[: min(left, len(block))])
                    left -= min(left, len(block))
            records.append(FileRecord(file.name, target.size_bytes, target.finish()))
    manifest = Manifest(
        tuple(records),
        extras=(FileRecord("config.json", len(text), sha256(text).hexdigest()),),
        formats=format_names(recipe),
        family=model.spec.family,
        digest="0" * 64,
    )
    smallfiles.write(folder / PACK, manifest.encode())
    return Pack.open(folder)


class Copy:
    """A plain copy by all threads."""

    def __init__(self, threads: int) -> None:
        self._team = ThreadPoolExecutor(threads)
        self.source = Arena(_COPY_BYTES)
        self.source.bytes.fill(1)
        self._target = Arena(_COPY_BYTES)
        self.rate()

    def rate(self) -> float:
        """Bytes per second into memory that is there."""
        return self._rate(self._copy, self._target)

    def fresh_rate(self) -> float:
        """Bytes per second into memory that the system must give first."""
        return self._rate(self._copy, Arena(_COPY_BYTES))

    def touch_rate(self) -> float:
        """Bytes per second of getting memory: one byte of each small page is written."""
        return self._rate(lambda to, a, b: to[a:b:4096].fill(1), Arena(_COPY_BYTES))

    def _copy(self, to: NDArray[np.uint8], first: int, last: int) -> None:
        np.copyto(to[first:last], self.source.bytes[first:last])

    def _rate(self, work: Callable[[NDArray[np.uint8], int, int], None], to: Arena) -> float:
        starts = range(0, _COPY_BYTES, _PIECE_BYTES)
        start = time.perf_counter()
        list(self._team.map(lambda first: work(to.bytes, first, first + _PIECE_BYTES), starts))
        return _COPY_BYTES / (time.perf_counter() - start)


def measure(model: Model, pack: Pack, pool: Pool, copy: Copy) -> dict[str, Any]:
    """The row of one pack."""
    size = sum(record.size_bytes for record in pack.manifest.files)
    fresh, touch, rates = [], [], []

    def ideal() -> float:
        rates.append(copy.rate())
        fresh.append(copy.fresh_rate() / rates[-1])
        touch.append(copy.touch_rate())
        return size / rates[-1]

    def work() -> float:
        start = time.perf_counter()
        tensors = load(model, pack.recipe, PackSource(pack, pool), pool)
        seconds = time.perf_counter() - start
        del tensors  # giving memory back is no part of loading
        return seconds

    work()
    measured = alternate(work, ideal, pairs=RUNS)
    return {
        "work": "load",
        "model": MODEL,
        "layers": LAYERS,
        "bytes": size,
        "threads": pool.threads,
        "seconds": measured.seconds,
        "gb_s": size / measured.seconds / 1e9,
        "copy_gb_s": median(rates) / 1e9,
        "touch_gb_s": median(touch) / 1e9,
        "percent_of_ceiling": 100 * measured.share,
        "fresh_percent": 100 * median(fresh),
        "limit_percent": LIMIT_PERCENT,
        "runs": RUNS,
        "noisy": measured.noisy,
        "others_percent": 100 * measured.others_share,
    }


def rows() -> list[dict[str, Any]]:
    """The result, as a list like those of the other benchmarks."""
    profile = catalog.find(MODEL)
    assert profile is not None
    config = cut(profile.config, LAYERS)
    with tempfile.TemporaryDirectory() as folder:
        pack = write_pack(Path(folder), config, Recipe())
        pool = team_here()
        return [measure(build(config), pack, pool, Copy(pool.threads))]


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    return (
        f"load     {row['bytes'] / 1e9:.1f} GB in {row['seconds']:.2f} s, {row['gb_s']:.1f} GB/s:"
        f" {row['percent_of_ceiling']:.0f} % of copying ({row['copy_gb_s']:.1f} GB/s),"
        f" goal {row['limit_percent']} %; a copy into new memory reaches {row['fresh_percent']:.0f} %"
    )


def main() -> None:
    found = rows()
    print(json.dumps(found, indent=2) if "--json" in sys.argv[1:] else line(found[0]))


if __name__ == "__main__":
    main()
