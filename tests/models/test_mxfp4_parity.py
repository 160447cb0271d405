"""gpt-oss as it is published, its experts in MXFP4: taken over exactly, whatever the layout says of transposing
and interleaving. transformers decodes the blocks, and judges."""

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
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

CASE = next(case for case in CASES if case.name == "gpt-oss")
# Columns come in blocks of 32.
WIDE = replace(CASE, values={**CASE.values, "hidden_size": 96, "intermediate_size": 32})


def write_both(folder: Path, published: Path, decoded: Path) -> None:
    """The checkpoint with random blocks for experts, and with what transformers makes of these."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    blocks: dict[str, torch.Tensor] = {}
    for name, value in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            blocks[name] = value
            continue
        experts, columns, rows = value.shape  # transposed
        shape = (experts, rows, columns // 32)
        codes = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(120, 124, shape, generator=generator, dtype=torch.uint8)
        blocks[f"{name}_blocks"], blocks[f"{name}_scales"] = codes, exponents
        tensors[name] = convert_moe_packed_tensors(codes, exponents, dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    for out, files, extra in ((published, blocks, mxfp4), (decoded, tensors, {})):
        out.mkdir()
        contiguous = {name: value.contiguous() for name, value in files.items()}
        save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps({**config, **extra}))


def test_mxfp4_is_taken_over_exactly(tmp_path: Path) -> None:
    published, decoded = tmp_path / "published", tmp_path / "decoded"
    write_both(write_checkpoint(WIDE, tmp_path / "random"), published, decoded)
    packs = [
        convert_checkpoint(source, tmp_path / f"{source.name}-bf16", experts="bf16", dense="bf16")
        for source in (published, decoded)
    ]
    for file in packs[0].glob("*.safetensors"):
        assert file.read_bytes() == (packs[1] / file.name).read_bytes(), file.name
    ids = np.random.default_rng(1).integers(0, 99, 40).tolist()
    judged = judge(WIDE, decoded, ids)
    pack = convert_checkpoint(published, tmp_path / "pack", experts="mxfp4", dense="bf16")
    engine = load_engine(pack, exact=True, all_logits=True, threads=TWO)
    logits = logits_of(engine.session(), ids)
    assert np.abs(logits - judged.logits).max() / judged.logits.std() <= 1e-4
