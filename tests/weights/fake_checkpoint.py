"""Small random checkpoints in the layout of the hub, written without any library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ktcli import manifest
from ktcli.models import build
from ktcli.store import integrity

QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 99,
    "hidden_size": 80,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
DEEPSEEK3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 99,
    "hidden_size": 144,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]  # name -> dtype, shape, bytes


def sources(config: Mapping[str, Any], dtype: str = "BF16", seed: int = 0) -> Stored:
    """Random values for everything a model of this config reads.

    With dtype F8_E4M3, matrices of projections are FP8 with factors; the rest is BF16.
    """
    rng = np.random.default_rng(seed)
    made: Stored = {}
    for tensor in build(config).tensors:
        for index in range(tensor.count):
            for piece in tensor.sources[0]:
                if piece.at(index) not in made:
                    made.update(_random(piece.at(index), piece.shape, dtype, rng))
    return made


def _random(name: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Stored:
    if dtype == "F8_E4M3" and "_proj" in name and len(shape) == 2:
        codes = rng.integers(0, 256, shape, dtype=np.uint8)
        codes[(codes & 127) == 127] = 0  # NaN
        blocks = tuple(-(-each // 128) for each in shape)
        factors = rng.uniform(1e-4, 1e-3, blocks).astype(np.float32)
        return {
            name: ("F8_E4M3", shape, codes.tobytes()),
            f"{name}_scale_inv": ("F32", blocks, factors.tobytes()),
        }
    values = (rng.standard_normal(shape) * 0.05 + (len(shape) == 1)).astype(np.float32)
    if name.endswith("e_score_correction_bias") or dtype == "F32":
        return {name: ("F32", shape, values.tobytes())}
    if dtype == "F16":
        return {name: ("F16", shape, values.astype(np.float16).tobytes())}
    return {name: ("BF16", shape, (values.view(np.uint32) >> 16).astype(np.uint16).tobytes())}


def write_file(path: Path, stored: Stored, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape, data) in stored.items():
        begin, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    parts = [len(text).to_bytes(8, "little"), text, *(data for _, _, data in stored.values())]
    path.write_bytes(b"".join(parts))


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    stored: Stored,
    *,
    shards: int = 1,
    indexed: bool = True,
) -> Path:
    """A model folder; with several shards the tensors are dealt out in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "README.md").write_text("not taken over")
    if shards == 1:
        write_file(folder / "model.safetensors", stored, {"format": "pt"})
        return folder
    weight_map = {}
    names = sorted(stored)
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        mine = names[i::shards]
        write_file(folder / file, {name: stored[name] for name in mine}, {"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    if indexed:
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def random_checkpoint(
    folder: Path, config: Mapping[str, Any], *, dtype: str = "BF16", shards: int = 1
) -> Path:
    """Config and random weights."""
    return write_checkpoint(folder, config, sources(config, dtype), shards=shards)


def damaged(pack: Path) -> list[str]:
    """Files of a pack whose bytes are not those of its manifest."""
    found = manifest.read(pack / manifest.PACK)
    assert found is not None
    checked = integrity.check(pack, found.records, lambda n_bytes: None)
    return [file.name for file, problem in checked if problem]
