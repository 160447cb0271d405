"""The forward that is trained is the forward that chats: an engine with the factors as its adapter gives the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from cores import TWO
from reference import Case, case_named
from timelines import logits_of
from training.opened import documents, opened

from benchmarks.loading import load_pack
from ktcli.adapters.packed import PackedAdapter
from ktcli.assembly.request import Wanted
from ktcli.planner.memory import AdapterRoom
from ktcli.training.lora import ExpertFactors, LoraSettings
from ktcli.training.model import TrainingOptions
from ktcli.weights.pack import Pack

SETTINGS = LoraSettings(4, 6.0, ("experts.gate_up_proj", "experts.down_proj"))


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("qwen3", True),
        ("deepseek-v3", True),
        ("qwen3", False),
        ("gpt-oss", False),
        ("lfm2-moe", True),
        ("qwen3.5-moe", True),
    ],
)
def test_an_engine_gives_the_trained_logits(
    name: str, exact: bool, checkpoint_of: Callable[[Case], Path], tmp_path: Path
) -> None:
    """Latent attention rounds in several places of its own, and is only compared where nothing is rounded."""
    checkpoint = checkpoint_of(case_named(name))
    pack = convert_checkpoint(checkpoint, tmp_path / "pack", experts="int4", dense="int8")
    trained = opened(Pack.open(pack), SETTINGS, TrainingOptions(128, exact=exact))
    experts = [each for each in trained.factors.values() if isinstance(each, ExpertFactors)]
    adapter = PackedAdapter(
        "trained", "0" * 64, {each.tensor.name: (each.update,) for each in experts}
    )
    room = AdapterRoom(1, adapter.ranks, adapter.size_bytes)
    wanted = Wanted(exact=exact, cache="f32", all_logits=True, threads=TWO, adapters=room)
    (text,) = documents(60)
    chatted = logits_of(load_pack(pack, wanted, adapter=adapter).session(), text)
    (found,) = trained.logits([text])
    off = np.sqrt(((found.numpy() - chatted) ** 2).mean(axis=1)) / chatted.std()
    assert off.max() <= 1e-5
