"""Conversion needs memory for two layers of the source at most, however many the model has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from weights.fake_checkpoint import DEEPSEEK3, FP8, QWEN3, write_file

from ktcli.models import build
from ktcli.weights.header import encode_header

# One layer: 32 experts of 3 x 256 x 512 and attention, 27 MB as bf16.
CONFIG = {
    **QWEN3,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 30_000,
}
MIB = 1 << 20

# The largest RssAnon seen by a thread that looks every millisecond, in bytes.
MEASURE = """
import re, sys, threading
from pathlib import Path
from ktcli.native import Pool
from ktcli.weights.convert import convert_source
from ktcli.weights.reader import source_at
from ktcli.weights.recipe import Recipe
peak, over = 0, threading.Event()
def look():
    global peak
    while not over.wait(0.001):
        status = open("/proc/self/status").read()
        peak = max(peak, int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) * 1024)
watcher = threading.Thread(target=look)
watcher.start()
with source_at(Path(sys.argv[1]), "x") as source:
    convert_source(source, Path(sys.argv[2]), Recipe.named("int8", "int8"), Pool(2, spin_us=0))
over.set()
watcher.join()
print(peak)
"""


def checkpoint(folder: Path, layers: int) -> int:
    """A checkpoint whose shards are one layer each; bytes of one layer."""
    folder.mkdir()
    config = {**CONFIG, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(0).integers(0x3C00, 0x3D00, 1 << 20, dtype=np.uint16).tobytes()
    shards: dict[int | None, dict[str, tuple]] = {}
    for tensor in build(config).tensors:
        for index in range(tensor.count):
            for piece in tensor.sources[0]:
                size = 2 * int(np.prod(piece.shape))
                data = (noise * (size // len(noise) + 1))[:size]
                shards.setdefault(tensor.layer, {})[piece.at(index)] = ("BF16", piece.shape, data)
    weight_map = {}
    for i, stored in enumerate(shards.values()):
        write_file(folder / f"shard-{i}.safetensors", stored)
        weight_map.update(dict.fromkeys(stored, f"shard-{i}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(len(data) for _, _, data in shards[0].values())


def peak(tmp_path: Path, layers: int) -> tuple[int, int]:
    """Peak of RssAnon and bytes of one layer."""
    layer = checkpoint(tmp_path / f"source{layers}", layers)
    folders = [str(tmp_path / f"source{layers}"), str(tmp_path / f"pack{layers}")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *folders], capture_output=True, text=True, check=True
    )
    return int(done.stdout), layer


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_model(tmp_path: Path):
    few, layer = peak(tmp_path, 4)
    many, _ = peak(tmp_path, 8)
    assert layer > 25 * MIB
    assert many <= 2 * layer + 200 * MIB
    assert many < few * 1.05, f"{few / MIB:.0f} MiB for 4 layers, {many / MIB:.0f} MiB for 8"


# A layer of DeepSeek-V3 in its true shape, but for how many experts there are.
V3 = {
    **DEEPSEEK3,
    **FP8,
    "hidden_size": 7168,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_group": 2,
    "n_routed_experts": 4,
}


def hollow(folder: Path) -> int:
    """A checkpoint of `V3` in FP8 with blocks, all zeros, in a file with holes; its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(V3))
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in build(V3).tensors:
        for e in range(tensor.count):
            for p in tensor.sources[0]:
                stored[p.at(e)] = ("BF16", p.shape)
                if "_proj" in p.name:
                    stored[p.at(e)] = ("F8_E4M3", p.shape)
                    blocks = tuple(-(-each // 128) for each in p.shape)
                    stored[f"{p.at(e)}_scale_inv"] = ("F32", blocks)
    header = encode_header(stored, {})
    size = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
    data = sum(size[dtype] * int(np.prod(shape)) for dtype, shape in stored.values())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + data)
    return data


@pytest.mark.thorough
def test_a_true_layer_needs_little(tmp_path: Path):
    """Largest matrix: 7168 x 16384, 470 MB as f32; pieces of it are what is ever in memory."""
    size = hollow(tmp_path / "source")
    folders = [str(tmp_path / "source"), str(tmp_path / "pack")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *folders], capture_output=True, text=True, check=True
    )
    assert size > 370e6 and int(done.stdout) < 260 * MIB
