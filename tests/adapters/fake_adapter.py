"""Small adapters in the layouts of other programs, written without them: names and numbers by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from weights.fake_checkpoint import DEEPSEEK3, QWEN3, Stored, write_file

from ktcli.models import Model, build

F32 = NDArray[np.float32]
Arrays = dict[str, F32]

PREFIX = "base_model.model.model.layers."
E, H, I = 6, 80, 40  # noqa: E741  of QWEN3: experts, hidden, width of an expert
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "base_model_name_or_path": "",
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj"],
}
FUSED = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def model(**changed: Any) -> Model:
    return build({**QWEN3, **changed})


def deepseek() -> Model:
    return build(DEEPSEEK3)


def random(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def linear(module: str, n: int, k: int, r: int = 4, seed: int = 0) -> Arrays:
    """A and B of one module: "0.self_attn.q_proj"."""
    stem = f"{PREFIX}{module}"
    return {
        f"{stem}.lora_A.weight": random(seed, r, k),
        f"{stem}.lora_B.weight": random(seed + 1, n, r),
    }


def q_proj(layer: int = 0, r: int = 4, seed: int = 0) -> Arrays:
    return linear(f"{layer}.self_attn.q_proj", 96, H, r, seed)


def fused(layer: int = 0, r: int = 4, *, down: bool = True, gate_up: bool = True) -> Arrays:
    """The factors of all experts of a layer, as peft's wrappers of parameters save them."""
    made: Arrays = {}
    if gate_up:
        inner = ".base_layer" if down else ""
        made |= linear(f"{layer}.mlp.experts{inner}", 2 * I, H, r * E, seed=layer + 10)
    if down:
        made |= linear(f"{layer}.mlp.experts", H, I, r * E, seed=layer + 20)
    return made


def write(folder: Path, arrays: Mapping[str, F32], **config: Any) -> Path:
    """An adapter's folder; a field None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    write_arrays(folder / "adapter_model.safetensors", arrays)
    document = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


def write_arrays(path: Path, arrays: Mapping[str, F32], dtype: str = "F32") -> None:
    stored: Stored = {}
    for name, values in arrays.items():
        data = values.tobytes()
        if dtype == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        stored[name] = (dtype, values.shape, data)
    write_file(path, stored, {"format": "pt"})
