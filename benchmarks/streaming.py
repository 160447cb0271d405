"""How fast a pull is beside curl, how long pulling and converting as one stream takes beside the slower of both alone,
and repairing one layer of 61.

    python benchmarks/streaming.py [--folder DIR] [--out FILE.json]

The hub is that of the tests, a process of its own on this machine, which takes cores that a hub elsewhere would not:
without a limit, two cores are busy with it, with the pull and with the conversion, and a stream is no faster than both
one after the other. A network is what `--limit` lets through. Pull, conversion and stream each run as a command, start
and end included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from conversion import noise, parts
from naming import result_path

from ktcli.hardware.probe import probe
from ktcli.models import build
from ktcli.native import Pool
from ktcli.weights.convert import convert_source
from ktcli.weights.header import encode_header
from ktcli.weights.reader import source_at
from ktcli.weights.recipe import Recipe
from ktcli.weights.repair import Damage, repair

ROOT = Path(__file__).resolve().parent.parent
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_hidden_layers": 61,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 96,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
N_SHARDS = 24
# Of the repair: fewer and larger tensors, as models have them, so that layers count beside headers.
LARGER = {"hidden_size": 2048, "moe_intermediate_size": 1024, "num_experts": 4}
REPAIRS = 3
PULLED = {**CONFIG, **LARGER, "num_hidden_layers": 33}  # 2 GB
PULLS = 2  # by kt and by curl, in turn
NAME, LAYER = "org/bench", "layer-00030.safetensors"
LIMITS = ("60M", "0")  # bytes per second; 0: what hub and machine can do
GOAL_STREAM, GOAL_REPAIR = 0.9, 1 / 40
GOAL_PULL, GOAL_PULL_BYTES = 0.8, 200 << 20  # of what curl reaches; of memory

# Runs kt, and says the most memory that it had; what the system tells its parent counts the parent's, too.
KT = """
import atexit, sys
from ktcli.start import run
atexit.register(lambda: print(*[l for l in open("/proc/self/status") if l.startswith("VmHWM")]))
sys.exit(run())
"""

# Serves the files of a folder until its input ends.
SERVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from store.fake_hub import serve
with serve() as hub:
    hub.repositories[sys.argv[3]] = {p.name: p.read_bytes() for p in Path(sys.argv[2]).iterdir()}
    print(hub.url, flush=True)
    sys.stdin.read()
"""


def write_checkpoint(folder: Path, config: dict[str, Any]) -> int:
    """Shards of about one size, layer after layer; their bytes."""
    stored = {
        name: (kind, shape)
        for tensor in sorted(
            build(config).tensors, key=lambda t: -1 if t.layer is None else t.layer
        )
        for name, kind, shape in parts(tensor, "BF16")
    }
    blocks, weight_map, names = noise()["BF16"], {}, list(stored)
    for number in range(N_SHARDS):
        file = f"model-{number + 1:05}-of-{N_SHARDS:05}.safetensors"
        start, stop = (len(names) * n // N_SHARDS for n in (number, number + 1))
        mine = {name: stored[name] for name in names[start:stop]}
        weight_map.update(dict.fromkeys(mine, file))
        with (folder / file).open("wb") as stream:
            stream.write(encode_header(mine, {}))
            for _, shape in mine.values():
                left = 2
                for each in shape:
                    left *= each
                while left:
                    left -= stream.write(memoryview(blocks)[:left])
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(path.stat().st_size for path in folder.iterdir())


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a hub that has the files of a folder."""
    words = [sys.executable, "-c", SERVER, str(ROOT / "tests"), str(folder), NAME]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate()


@contextmanager
def repository(parent: Path, config: dict[str, Any]) -> Iterator[tuple[Path, Path, str, int]]:
    """A checkpoint on a hub that kt asks: its folder, that of an empty library, the hub, the bytes."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        source, home = Path(folder) / "source", Path(folder) / "home"
        source.mkdir()
        size = write_checkpoint(source, config)
        os.environ["KT_HOME"] = str(home)
        with served(source) as hub:
            os.environ["HF_ENDPOINT"] = hub
            yield source, home, hub, size


def timed(*words: str) -> tuple[float, int]:
    """How long a command of kt takes, written bytes flushed, and the most bytes of memory it had."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", KT, *words, "--quiet"], check=True, stdout=subprocess.PIPE, text=True
    )
    return time.perf_counter() - begun, int(done.stdout.split()[-2]) << 10


def seconds(*words: str) -> float:
    """How long a command of kt takes, written bytes flushed."""
    return timed(*words)[0]


def empty(home: Path) -> None:
    """Removes the models of the library."""
    for kind in ("checkpoints", "packs"):
        shutil.rmtree(home / kind, ignore_errors=True)


def streams(home: Path) -> Iterator[dict[str, Any]]:
    """Of each speed of the network: pull, conversion and both as one stream."""
    for limit in LIMITS:
        pulled = seconds("pull", NAME, "--yes", "--no-stream", "--limit", limit)
        converted = seconds("convert", NAME)
        empty(home)
        both = seconds("pull", NAME, "--yes", "--stream", "--limit", limit)
        empty(home)
        yield {
            "work": "stream",
            "limit": limit,
            "pull_s": pulled,
            "convert_s": converted,
            "stream_s": both,
            "share_of_the_slower": max(pulled, converted) / both,
        }


def pulls(source: Path, home: Path, hub: str) -> dict[str, Any]:
    """The files of a repository by kt, verified and flushed, and by curl, in turn; medians, and the memory of kt."""
    names, taken = (
        sorted(path.name for path in source.iterdir()),
        defaultdict[str, list[float]](list),
    )
    beside, memory = home.with_name("curl"), 0
    for _ in range(PULLS):
        by_kt, used = timed("pull", NAME, "--yes", "--no-stream")
        taken["kt"].append(by_kt)
        memory = max(memory, used)
        empty(home)
        beside.mkdir()
        words = [
            w for n in names for w in ("-o", str(beside / n), f"{hub}/{NAME}/resolve/main/{n}")
        ]
        begun = time.perf_counter()
        subprocess.run(["curl", "-sf", *words], check=True)
        taken["curl"].append(time.perf_counter() - begun)
        shutil.rmtree(beside)
    by_kt, by_curl = median(taken["kt"]), median(taken["curl"])
    return {
        "work": "pull",
        "pull_s": by_kt,
        "curl_s": by_curl,
        "share_of_curl": by_curl / by_kt,
        "memory_bytes": memory,
    }


def repairs(folder: Path) -> dict[str, Any]:
    """One layer of all, from a checkpoint that is here; medians."""
    source, pack, pool = folder / "source", folder / "pack", Pool(len(probe().cpu.cores))
    source.mkdir()
    size = write_checkpoint(source, {**CONFIG, **LARGER})
    begun = time.perf_counter()
    with source_at(source, source.name) as opened:
        convert_source(opened, pack, Recipe(), pool)
    converted, taken = time.perf_counter() - begun, []
    for _ in range(REPAIRS):
        data = bytearray((pack / LAYER).read_bytes())
        data[len(data) // 2] ^= 1
        (pack / LAYER).write_bytes(data)
        begun = time.perf_counter()
        with source_at(source, source.name) as opened:
            repair(opened, Damage(pack, [LAYER]), pool)
        taken.append(time.perf_counter() - begun)
    return {
        "work": "repair",
        "layers": CONFIG["num_hidden_layers"],
        "bytes": size,
        "convert_s": converted,
        "repair_s": median(taken),
        "share_of_the_conversion": median(taken) / converted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("pull", "stream", "repair"), help="one of them")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: the usual one"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = probe()
    parent, found = options.folder or Path(tempfile.gettempdir()), []
    wanted = [options.only] if options.only else ["pull", "stream", "repair"]
    if "pull" in wanted:
        with repository(parent, PULLED) as (source, home, hub, size):
            found.append(pulls(source, home, hub) | {"bytes": size})
    if "stream" in wanted:
        with repository(parent, CONFIG) as (_, home, _, size):
            found += [row | {"bytes": size} for row in streams(home)]
    if "repair" in wanted:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            found.append(repairs(Path(folder)))
    for row in found:
        print(json.dumps(row), flush=True)
    out = options.out or result_path(machine.cpu.model, len(machine.cpu.cores), "streaming")
    goals = {
        "share_of_curl": GOAL_PULL,
        "memory_bytes": GOAL_PULL_BYTES,
        "share_of_the_slower": GOAL_STREAM,
        "share_of_the_conversion": GOAL_REPAIR,
    }
    out.write_text(json.dumps({"goals": goals, "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
