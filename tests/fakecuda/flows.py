"""Every kind of layer under the fake CUDA: loaded, read, decoded in graphs, with every way of handing off.

Run by test_fakecuda.py, under the plugin no_numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cores import TWO
from engine.made_adapters import ROOM, random_adapter, room_beside
from hybrid import CONTEXT, IDS, Made
from kinds import KINDS
from loading import load_engine
from reference import Case
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.passes import LongPrompts
from ktcli.errors import KtError
from ktcli.native import Batch
from ktcli.ops.torch.attention import attend, attend_causally
from ktcli.planner.device_cost import (
    KERNELS_EXPERTS,
    KERNELS_HEADS,
    KERNELS_LATENT,
    KERNELS_ROUTER,
)

GPU = torch.device("cuda")
LOG = Path(os.environ["FAKE_LOG"])
# Kernels before the first layer and behind the last, and those that count which experts were chosen.
AROUND_LAYERS = 22
COPIES = 9  # what a step is given, and its logits with their summary
SIZES = (1, 2, 3, 5, 9, 16)


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_each_kind_of_layer_is_captured(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = Made.convert(case.name, tmp_path_factory.mktemp("made"), GPU)
    handoff = list(Handoff)[KINDS.index(case) % len(Handoff)]
    placed = made.placed("some", handoff=handoff, streams=2)
    engine = made.engine(placed, exact=False)
    assert not [each for each in engine.warnings if "anew" in each or "plain torch" in each]
    session = engine.session()
    session.feed(IDS[:70])
    for i, token in enumerate(IDS[70:76]):
        session.feed([token], defer=i % 3, temperature=0.7 if i % 2 else 0.0)
    assert session.length == 76


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek-v3"])
def test_an_fp8_cache_is_captured(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With as many kernels as another, and its pages copied and stored."""
    made = Made.convert(name, tmp_path_factory.mktemp("made"), GPU)
    counts = []
    for cache in ("bf16", "fp8"):
        engine = made.engine(made.placed("some", streams=2, cache=cache), exact=False)
        assert not [each for each in engine.warnings if "anew" in each or "plain torch" in each]
        graphs = [line for line in LOG.read_text().splitlines() if line.startswith("GRAPH")]
        counts.append(re.search(r"\d+ kernels", graphs[-1]))
        session = engine.session()
        session.feed(IDS[:70])
        for token in IDS[70:76]:
            session.feed([token], defer=1)
        sequences = [engine.sequence() for _ in range(2)]
        runs = [each.extend(np.array([3], np.int32)) for each in sequences]
        assert len(engine.run(Batch(tuple(runs)))) == 2
        engine.memory.restore_page(0, engine.memory.saved_page(0))
    one, other = (found and found[0] for found in counts)
    assert one is not None and one == other


@pytest.mark.rotates(3)
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


@pytest.mark.filterwarnings("always:called a synchronizing CUDA operation")
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "gpt-oss"])
def test_no_operation_of_a_prompt_waits_for_the_device(
    name: str, tmp_path_factory: pytest.TempPathFactory, recwarn: pytest.WarningsRecorder
) -> None:
    """Only the step does, for what it gives and for its end."""
    made = Made.convert(name, tmp_path_factory.mktemp("made"), GPU)
    session = made.engine(made.placed("all"), exact=False).session()
    session.feed(IDS[:40])
    recwarn.clear()
    torch.cuda.set_sync_debug_mode("warn")
    session.feed(IDS[40:])
    torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in recwarn if "a synchronizing" in str(each.message)]
    assert {Path(each.filename).name for each in waits} == {"steps.py", "streams.py"}


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_adapters_are_captured(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One graph for all of them, each with its own values in the same buffers."""
    made = Made.convert(name, tmp_path_factory.mktemp("made"), GPU)
    cpu = load_engine(made.path, context=CONTEXT, threads=TWO, adapters=ROOM)
    given = [random_adapter(cpu, seed) for seed in (1, 2)]
    engine = made.engine(made.placed("none", adapters=room_beside(cpu, *given)), exact=False)
    assert not [each for each in engine.warnings if "anew" in each or "plain torch" in each]
    assert engine.adapters is not None
    captured = LOG.read_text().count("GRAPH")
    for adapter in (None, *(engine.adapters.attach(each) for each in given), None):
        session = engine.session()
        session.sequence.adopt(IDS[:1], adapter=adapter)
        session.feed(IDS[:70])
        for token in IDS[70:74]:
            session.feed([token], defer=1)
        assert session.length == 74
    assert LOG.read_text().count("GRAPH") == captured


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_experts_are_streamed(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = Made.convert(name, tmp_path_factory.mktemp("made"), GPU)
    placed = made.placed(long_prompts=LongPrompts(0, 40), slab_bytes=1 << 14)
    engine = made.engine(placed, exact=False)
    session = engine.session()
    session.feed(IDS)
    session.feed([1])
    assert engine.pinned.finished.wait(60) and engine.pinned.size_bytes
    engine.session().feed(IDS)  # copies the experts from where they lie


def test_an_error_of_the_cpu_is_a_sentence(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = Made.convert("qwen3", tmp_path_factory.mktemp("made"), GPU)
    session = made.engine(made.placed("none"), exact=False).session()
    with pytest.raises(KtError):
        session.feed([made.model.spec.vocab + 7])


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.bfloat16, 64), (torch.bfloat16, 32), (torch.float32, 64)]
)
def test_prompts_attend_without_a_mask_and_without_cudnn(dtype: torch.dtype, value: int) -> None:
    """By flash attention where heads are alike, else by the memory-efficient one."""
    q, k = (torch.zeros(2, 4, n, 64, dtype=dtype, device=GPU) for n in (33, 99))
    v = torch.zeros(2, 4, 99, value, dtype=dtype, device=GPU)
    way = "flash" if (dtype, value) == (torch.bfloat16, 64) else "efficient"
    assert ways_of(lambda: attend_causally(q, k, v, 0.1)) == {f"aten::_{way}_attention_forward"}


def test_windows_attend_without_cudnn() -> None:
    """torch itself would take it for a mask on such a GPU."""
    q, k, v = (torch.zeros(2, 4, n, 64, dtype=torch.bfloat16, device=GPU) for n in (33, 99, 99))
    seen = torch.ones(33, 99, dtype=torch.bool, device=GPU)
    assert torch._fused_sdp_choice(q, k, v, attn_mask=seen, scale=0.1) == int(
        SDPBackend.CUDNN_ATTENTION
    )
    ways = ways_of(lambda: attend(q, k, v, seen, 0.1))
    assert ways == {"aten::_efficient_attention_forward"}


def ways_of(work: Callable[[], object]) -> set[str]:
    """The kernels of attention that torch takes."""
    watched = profile(activities=[ProfilerActivity.CPU], acc_events=True)
    with watched, torch.inference_mode():
        work()
    return {each.key for each in watched.key_averages() if "attention_forward" in each.key}


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("qwen3", KERNELS_HEADS + KERNELS_ROUTER + KERNELS_EXPERTS),
        ("deepseek-v3", KERNELS_LATENT + KERNELS_ROUTER + KERNELS_EXPERTS),
    ],
)
def test_a_graph_has_the_nodes_that_plans_count(
    name: str, kernels: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A rotation, as int8 has it, is a launch that plans do not count.
    made = Made.convert(name, tmp_path_factory.mktemp("made"), GPU, dense="int8-row")
    made.engine(made.placed("all"), exact=False)
    graphs = [line for line in LOG.read_text().splitlines() if line.startswith("GRAPH")]
    found = re.search(r"(\d+) kernels, (\d+) copies, 0 sets, 0 host.* (\d+) early", graphs[-1])
    assert found is not None, graphs[-1]
    assert int(found[1]) <= made.model.spec.layers * kernels + AROUND_LAYERS
    assert int(found[2]) <= COPIES
    assert int(found[3]) >= made.model.spec.layers * kernels
