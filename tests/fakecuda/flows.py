"""Every family's layers under the fake CUDA: loaded, read, decoded in graphs, with every way of handing off.

Run by test_fakecuda.py, under the plugin no_numbers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hybrid import IDS, Made
from reference import CASES

from ktcli.engine.device.experts import Handoff
from ktcli.engine.device.passes import LongPrompts
from ktcli.errors import KtError
from ktcli.native import Batch

GPU = torch.device("cuda")
SIZES = (1, 2, 3, 5, 9, 16)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_kind_of_layer_is_captured(
    case: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = Made.convert(case.name, tmp_path_factory.mktemp("made"), GPU)
    if not made.model.spec.moe_layers:
        pytest.skip("it has no experts")
    number = [each.name for each in CASES].index(case.name)
    handoff = list(Handoff)[number % len(Handoff)]
    placed = made.placed("some", handoff=handoff, streams=2)
    engine = made.engine(placed, exact=False)
    assert not [each for each in engine.warnings if "anew" in each or "plain torch" in each]
    session = engine.session()
    session.feed(IDS[:70])
    for i, token in enumerate(IDS[70:76]):
        session.feed([token], defer=i % 3, temperature=0.7 if i % 2 else 0.0)
    assert session.length == 76


@pytest.mark.parametrize("handoff", Handoff)
@pytest.mark.parametrize("mask", ["none", "some", "all"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_batches_of_each_size(
    name: str, mask: str, handoff: Handoff, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = Made.convert(name, tmp_path_factory.mktemp("made"), GPU)
    engine = made.engine(made.placed(mask, handoff=handoff, streams=16), exact=False)
    sequences = [engine.sequence() for _ in range(max(SIZES))]
    for size in SIZES:
        runs = [each.extend(np.array([3], np.int32), defer=size % 3) for each in sequences[:size]]
        assert len(engine.run(Batch(tuple(runs)))) == size
        for sequence, run in zip(sequences, runs, strict=False):
            sequence.commit(run)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_experts_are_streamed(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = Made.convert(name, tmp_path_factory.mktemp("made"), GPU)
    placed = made.placed(long_prompts=LongPrompts(0, 40), slab_bytes=1 << 14)
    session = made.engine(placed, exact=False).session()
    session.feed(IDS)
    session.feed([1])


def test_an_error_of_the_cpu_is_a_sentence(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = Made.convert("qwen3", tmp_path_factory.mktemp("made"), GPU)
    session = made.engine(made.placed("none"), exact=False).session()
    with pytest.raises(KtError):
        session.feed([made.model.spec.vocab + 7])
