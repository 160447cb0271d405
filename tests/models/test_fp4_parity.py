"""A checkpoint stored as DeepSeek-V4 is, FP8 under powers of two and experts in FP4: `kt convert` takes it over
exactly, and transformers judges what the weights say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cores import TWO
from loading import load_engine
from models.test_fp8_parity import blockwise
from reference import CASES, Judged, judge, write_checkpoint
from safetensors.torch import load_file, save_file
from timelines import logits_of
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from ktcli.main import main

# Experts' columns in groups of 32; dense widths that are no multiple of a block.
CASE = next(case for case in CASES if case.name == "deepseek-v4-flash")
WIDE = replace(
    CASE,
    values={
        **CASE.values,
        "hidden_size": 160,
        "intermediate_size": 64,
    },
)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
# All that is dense in FP8, the head too; compressors, routers and what mixes streams are left as they are.
CODED = re.compile(r"(attn|indexer)\.w[qko]\w*\.weight|experts.*\.w[123]\.weight|^head\.weight")
Tensors = dict[str, torch.Tensor]


def groupwise(matrix: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes int8 of two, scales E8M0, decoded by transformers) of random numbers as large as those of a matrix."""
    n, k = matrix.shape
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8)
    exponents = torch.randint(122, 126, (n, k // 32), generator=generator, dtype=torch.uint8)
    scales = exponents.view(torch.float8_e8m0fnu)
    values = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    return codes, scales, values


def write_both(folder: Path, published: Path, decoded: Path) -> None:
    """The checkpoint as V4 would be published, and the same weights decoded."""
    tensors = load_file(folder / "model.safetensors")
    coded: Tensors = {}
    for seed, (name, value) in enumerate(list(tensors.items())):
        if not CODED.search(name):
            coded[name] = value
            continue
        codes, scale, tensors[name] = (groupwise if ".experts." in name else blockwise)(value, seed)
        coded[name] = codes
        coded[name.removesuffix("weight") + "scale"] = scale.to(torch.float8_e8m0fnu)
    config = json.loads((folder / "config.json").read_text())
    said: dict[str, Any] = {"quantization_config": FP8, "expert_dtype": "fp4"}
    for out, files, extra in ((published, coded, said), (decoded, tensors, {})):
        out.mkdir()
        contiguous = {name: value.contiguous() for name, value in files.items()}
        save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps({**config, **extra}))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int], Judged]:
    """Published, decoded, ids, and what transformers says of them."""
    folder = tmp_path_factory.mktemp("v4")
    published, decoded = folder / "published", folder / "decoded"
    write_both(write_checkpoint(WIDE, folder / "random"), published, decoded)
    ids = np.random.default_rng(4).integers(0, 99, 40).tolist()
    return published, decoded, ids, judge(WIDE, decoded, ids)


def convert(source: Path, out: Path, experts: str, dense: str) -> None:
    line = ["convert", str(source), "--out", str(out), "--experts", experts, "--dense", dense]
    assert main([*line, "--json"]) == 0


@pytest.mark.parametrize("formats", [("bf16", "bf16"), ("int4", "int8"), ("mxfp4", "int8")])
def test_packs_are_those_of_the_decoded_weights(both, formats, tmp_path: Path) -> None:
    """To the byte, in formats that keep the numbers and in those that do not."""
    published, decoded, *_ = both
    convert(published, tmp_path / "a", *formats)
    convert(decoded, tmp_path / "b", *formats)
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert files
    for file in files:
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_experts_and_dense_are_kept_exactly(both, tmp_path: Path, capsys) -> None:
    """mxfp4 and fp8 lose nothing, by kt's own count and by the logits."""
    published, _, ids, judged = both
    convert(published, tmp_path / "pack", "mxfp4", "fp8")
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["experts"] == error["down"] == error["dense"] == 0
    engine = load_engine(tmp_path / "pack", exact=True, all_logits=True, threads=TWO)
    logits = logits_of(engine.session(), ids)
    assert np.abs(logits - judged.logits).max() <= 1e-4 * judged.logits.std()
