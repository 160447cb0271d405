"""Routers at their edges: all scores equal, all tokens to the same experts; here, on a device, in the reference.

Of equal scores the lower id is chosen. transformers leaves that open, so that its routers are told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from convert import convert_checkpoint
from cores import TWO
from device import DeviceRun
from loading import load_engine
from reference import CASES, Case, judge, write_checkpoint
from safetensors.torch import load_file, save_file
from timelines import logits_of

from ktcli.errors import BadCheckpoint, BadPack
from ktcli.models import build
from ktcli.weights.pack import Pack

IDS = np.random.default_rng(4).integers(0, 99, 70).tolist()
BY_NAME = {case.name: case for case in CASES}
V4 = BY_NAME["deepseek-v4"]
# Two layers with the window alone, each of which looks an id's experts up.
BY_NAME["deepseek-v4-by-id"] = replace(
    V4,
    values={
        **V4.values,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention"] * 2,
        "mlp_layer_types": ["hash_moe"] * 2,
    },
)
CORRECTIONS = ("correction_bias", "gate.expert_bias")
Tensors = dict[str, torch.Tensor]


def zero(tensors: Tensors) -> None:
    """All experts score alike, and all groups; the ids of tokens name the lowest."""
    for name, value in tensors.items():
        gates = (".mlp.gate.weight", ".ffn.gate.weight", "gate.wg.weight")
        if name.endswith((*gates, *CORRECTIONS, "gate.bias")):
            value.zero_()
        if name.endswith("tid2eid"):
            value[:] = torch.arange(value.shape[1])


def crowd(tensors: Tensors) -> None:
    """The correction lifts three experts of two groups above all others."""
    for name, value in tensors.items():
        if name.endswith(CORRECTIONS):
            value.zero_()[[1, 2, 14]] = 8.0


def twice(tensors: Tensors) -> None:
    """Every token's id names an expert two times, whose output then counts twice."""
    for name, value in tensors.items():
        if name.endswith("tid2eid"):
            value[:] = torch.tensor([14, 1, 1])


def tell_lowest(_: Any, __: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The lowest ids: their weights are those of all."""
    chosen = torch.arange(out[2].shape[-1]).expand_as(out[2]).contiguous()
    return (*out[:2], chosen)


@pytest.mark.each_once("change")
@pytest.mark.parametrize(
    ("name", "change", "chosen", "tell"),
    [
        ("qwen3", zero, [0, 1, 2], tell_lowest),
        ("deepseek-v3", zero, [0, 1, 2], tell_lowest),
        ("deepseek-v2", zero, [0, 1, 2], tell_lowest),
        ("mimo-v2-flash", zero, [0, 1, 2], tell_lowest),
        ("hunyuan-a13b", zero, [0, 1, 2], tell_lowest),
        ("deepseek-v4", zero, [0, 1, 2], tell_lowest),
        ("glm-5.3", zero, [0, 1, 2], tell_lowest),
        ("ling-3", zero, [0, 1, 2], tell_lowest),
        ("ax-k1", zero, [0, 1, 2], tell_lowest),
        ("deepseek-v4-by-id", twice, [1, 1, 14], None),
        ("deepseek-v3", crowd, [1, 2, 14], None),
        ("glm-5.3", crowd, [1, 2, 14], None),
        ("ling-3", crowd, [1, 2, 14], None),
        ("ax-k1-corrected", crowd, [1, 2, 14], None),
    ],
)
def test_ties_and_crowds(
    name: str,
    change: Callable[[Tensors], None],
    chosen: list[int],
    tell: Callable[..., Any] | None,
    tmp_path: Path,
) -> None:
    case: Case = BY_NAME[name]
    checkpoint = write_checkpoint(case, tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    judged = judge(case, checkpoint, IDS, on_router=tell)
    pack = convert_checkpoint(checkpoint, tmp_path / "pack", experts="bf16", dense="bf16")
    bound = 1e-4 * judged.logits.std()

    engine = load_engine(pack, exact=True, all_logits=True, threads=TWO)
    assert np.abs(logits_of(engine.session(), IDS) - judged.logits).max() <= bound
    device = DeviceRun.load(pack, exact=True)
    assert np.abs(device.feed(IDS, [1000]) - judged.logits).max() <= bound
    fast = load_engine(pack, all_logits=True, threads=TWO)
    logits_of(fast.session(), IDS)
    for one in (engine, fast):
        for number in one.routings:
            ids, _ = one.program.routing(number, len(IDS), len(chosen))
            np.testing.assert_array_equal(np.sort(ids, axis=1), [chosen] * len(IDS))
    for ids, _ in device.routings:
        np.testing.assert_array_equal(np.sort(ids.numpy(), axis=1), [chosen] * len(IDS))


@pytest.mark.parametrize("number", [-1, 16, 1 << 40])
def test_a_table_that_names_no_expert(number: int, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(BY_NAME["deepseek-v4-by-id"], tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["layers.1.ffn.gate.tid2eid"][7, 2] = number
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"layers\.1.*tid2eid .* token 7 to expert .* only 16"):
        convert_checkpoint(checkpoint, tmp_path / "pack", experts="bf16", dense="bf16")
    assert not (tmp_path / "pack").exists()


def test_a_damaged_table_is_not_loaded(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(BY_NAME["deepseek-v4-by-id"], tmp_path / "checkpoint")
    pack = convert_checkpoint(checkpoint, tmp_path / "pack", experts="bf16", dense="bf16")
    opened = Pack.open(pack)
    place = opened.locate(next(t for t in build(opened.config).tensors if t.below))
    data = bytearray(place.path.read_bytes())
    data[place.offset : place.offset + 4] = np.float32(16.0).tobytes()
    place.path.write_bytes(data)
    for load in (load_engine, DeviceRun.load):
        with pytest.raises(BadPack, match=r"value 0 of .*router_table is 16\.0"):
            load(pack)
