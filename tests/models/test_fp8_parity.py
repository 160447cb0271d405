"""FP8 checkpoints (E4M3 with 128 x 128 block scales) and multi-token-prediction layers.

Scales are powers of two, so that the decoded values are bf16 and the comparison is exact.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from convert import convert_checkpoint
from cores import TWO
from loading import load_engine
from reference import CASES, judge, write_checkpoint
from safetensors.torch import load_file, save_file
from timelines import logits_of

# Wider than one 128 x 128 block in both directions, and not a multiple of it.
CASE = next(case for case in CASES if case.name == "deepseek-v3")
WIDE = replace(CASE, values={**CASE.values, "hidden_size": 144, "intermediate_size": 200})


def blockwise(matrix: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes E4M3, weight_scale_inv, decoded) of a matrix."""
    n, k = matrix.shape
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, -4, (-(-n // 128), -(-k // 128)), generator=generator)
    scale = 2.0**exponents
    full = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    codes = (matrix.float() / full).to(torch.float8_e4m3fn)
    return codes, scale.float(), codes.float() * full


def write_fp8(folder: Path, fp8: Path, decoded: Path) -> None:
    """The checkpoint in FP8 as DeepSeek-V3 publishes it, and the same weights decoded."""
    tensors = load_file(folder / "model.safetensors")
    coded: dict[str, torch.Tensor] = {}
    for seed, (name, value) in enumerate(list(tensors.items())):
        if "_proj" in name:
            codes, scale, tensors[name] = blockwise(value, seed)
            coded[name] = codes
            coded[f"{name}_scale_inv"] = scale
        else:
            coded[name] = value
    # A multi-token-prediction layer behind the last one must not matter.
    coded["model.layers.3.eh_proj.weight"] = torch.full((144, 288), float("nan"))
    coded["model.layers.3.self_attn.o_proj.weight"] = torch.zeros(3, 3)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    for out, files, extra in (
        (fp8, coded, {"quantization_config": quantization, "num_nextn_predict_layers": 1}),
        (decoded, tensors, {}),
    ):
        out.mkdir()
        contiguous = {name: value.contiguous() for name, value in files.items()}
        save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps({**config, **extra}))


def test_scales_multiply_and_the_extra_layer_is_ignored(tmp_path: Path) -> None:
    source = write_checkpoint(WIDE, tmp_path / "source")
    write_fp8(source, tmp_path / "fp8", tmp_path / "decoded")
    pack = convert_checkpoint(tmp_path / "fp8", tmp_path / "pack", experts="bf16", dense="bf16")
    ids = np.random.default_rng(3).integers(0, 99, 40).tolist()
    judged = judge(WIDE, tmp_path / "decoded", ids)
    logits = logits_of(load_engine(pack, exact=True, all_logits=True, threads=TWO).session(), ids)
    assert np.abs(logits - judged.logits).max() <= 1e-4 * judged.logits.std()
