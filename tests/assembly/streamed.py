"""A small model on a hub of this machine, for tests that pull and convert it as one stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from convert import convert
from store.fake_hub import COMMIT, Hub, serve
from weights.fake_checkpoint import QWEN3, Stored, sources, write_file

from ktcli.native import Pool
from ktcli.store import transfer
from ktcli.weights.conversion import Provenance
from ktcli.weights.recipe import Recipe

LAYERS, N_SHARDS = 6, 5
CONFIG = {**QWEN3, "num_hidden_layers": LAYERS, "hidden_size": 256, "moe_intermediate_size": 128}
NAME = "org/tiny"
HEADER = 6 << 10  # bytes of a file that are asked for first, with its header in them
CHUNK = 64 << 10

Files = dict[str, bytes]
Case = tuple[Files, Files]


def make_case(folder: Path, n_shards: int = N_SHARDS) -> Case:
    """The repository, and the pack that a pull and a conversion give."""
    source, pack = folder / "source", folder / "pack"
    source.mkdir()
    stored = sources(CONFIG)
    weight_map = {}
    in_order = {name: stored[name] for name in sorted(stored, key=_natural)}
    for file, its in _shards(in_order, n_shards).items():
        write_file(source / file, its, {"format": "pt"})
        weight_map.update(dict.fromkeys(its, file))
    (source / "config.json").write_text(json.dumps(CONFIG))
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert(source, pack, Recipe(), Pool(2), provenance=Provenance("hf", NAME, COMMIT))
    return contents_of(source), contents_of(pack)


@contextmanager
def streaming_hub(case: Case, monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Hub]:
    """A hub with the repository, to which a library in `home` connects; what is fetched at once is little."""
    monkeypatch.setenv("KT_HOME", str(home))
    monkeypatch.setattr(transfer, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("ktcli.assembly.preview._FIRST_BYTES", HEADER)
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        running.repositories[NAME] = dict(case[0])
        yield running


def contents_of(folder: Path) -> Files:
    """Every file and its bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def weights(files: Files) -> dict[str, int]:
    """The bytes of each weight file."""
    return {name: len(data) for name, data in files.items() if name.endswith(".safetensors")}


def _shards(stored: Stored, n_shards: int) -> dict[str, Stored]:
    """The tensors as a hub has them: layer after layer, in files of about one size."""
    total = sum(len(data) for _, _, data in stored.values())
    files: dict[str, Stored] = {}
    before = 0
    for name, each in stored.items():
        number = min(n_shards - 1, before * n_shards // total)
        files.setdefault(f"model-{number + 1:05}-of-{n_shards:05}.safetensors", {})[name] = each
        before += len(each[2])
    return files


def _natural(name: str) -> tuple[int, str]:
    parts = name.split(".")
    layer = int(parts[2]) if "layers" in parts else (-1 if "embed" in name else LAYERS)
    return layer, name
