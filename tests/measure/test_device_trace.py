"""Laws of traces: whose clock, which track, and that what is in them happened in the step."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import engine_on
from shapes import config
from torch.profiler import ProfilerActivity, profile

from ktcli.engine import Engine
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.placement import Placement
from ktcli.measure.baselines import OnCpu, engine_under
from ktcli.measure.bench import Ceilings, Job, Phase, run, traced
from ktcli.measure.device_ceilings import DeviceCeilings, measure_rates
from ktcli.measure.device_trace import CallRecord, _marked, clock_offset, recorded, track_of
from ktcli.measure.device_trace import trace as device_trace
from ktcli.measure.policy import COPIES, CPU_EXPERTS, GPU_EXPERTS, Policy
from ktcli.measure.synthetic import ApartSource
from ktcli.measure.trace import CPU, DEVICE, LAUNCHES, Trace, trace
from ktcli.models import Model, build
from ktcli.native import Pool
from ktcli.planner.spec import StepShape, step_work
from ktcli.weights.recipe import Recipe

HERE = torch.device("cpu")
POOL = Pool(1)


def tiny() -> Model:
    small = {
        "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 4,
        "moe_intermediate_size": 64, "vocab_size": 256,
    }  # fmt: skip
    return build(config("qwen3-30b-a3b", **small))


def engine(
    policy: Policy = Policy.KT, on_cpu: OnCpu | None = None, **changes: object
) -> DeviceEngine:
    model = tiny()
    mask = np.zeros((model.spec.moe_layers, model.spec.experts), bool)
    mask[0] = True  # the first layer does not leave the device
    mask[1:, :3] = True
    placed = replace(Placement(mask, 300), **changes)
    given = (model, Recipe(), ApartSource(POOL, 1), POOL, placed, (HERE,))
    return engine_under(policy, *given, on_cpu=on_cpu)


def on_cpu() -> Engine:
    return engine_on(POOL, ApartSource(POOL, 1), tiny(), Recipe(), 300)


def events(trace: Trace, track: str) -> list[str]:
    return [event.name for event in trace.events if event.track == track]


@pytest.mark.parametrize("handoff", Handoff)
def test_a_step_with_a_device(handoff: Handoff) -> None:
    """Layer 2 defers nothing, as it is the last; layer 0 has no experts on the CPU."""
    made = engine(depths=((0, 1),), handoff=handoff)
    found = traced(made, 10, partial(device_trace, made))
    parts = ["experts, MoE layer 1", "deferred, MoE layer 1", "experts, MoE layer 2"]
    assert events(found, CPU) == parts
    assert events(found, DEVICE) == []
    calls = {"calls": ("call", "call"), "flags": ("write_flag", "await_flag")}[handoff.value]
    given = events(found, LAUNCHES)
    assert [given.count(name) for name in calls] == [4 // len(set(calls))] * 2
    first = min(event.start_ns for event in found.events)
    last = max(event.end_ns for event in found.events)
    assert last - first <= 1e9 * found.seconds
    assert 0 < found.busy_share(CPU) <= 1 and 0 < found.launch_share <= 1


def test_a_step_on_the_cpu_alone(tmp_path: Path) -> None:
    alone = on_cpu()
    found = traced(alone, 10, partial(trace, alone))
    assert events(found, CPU) == alone.program.labels
    pairs = zip(found.events, found.events[1:], strict=False)
    assert all(one.end_ns == next_.start_ns for one, next_ in pairs)
    assert sum(event.seconds for event in found.events) <= found.seconds
    found.write(tmp_path / "step.json")
    rows = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert [row["name"] for row in rows if row["ph"] == "X"] == alone.program.labels


@pytest.mark.parametrize("policy", [Policy.GPU_STREAM, Policy.FIDDLER])
def test_sequential_policies_say_what_their_time_went_to(policy: Policy) -> None:
    made = engine(policy, on_cpu=lambda n_tokens: True)
    made.session().feed([1, 2, 3])
    found = dict(made.operations())
    fetches = policy is Policy.GPU_STREAM
    assert (found[COPIES] > 0, found[CPU_EXPERTS] > 0) == (fetches, not fetches)
    assert found[GPU_EXPERTS] > 0


def test_both_engines_are_measured_alike() -> None:
    """The same job gives the same demand, and every choice of the measured runs is counted."""
    made, job = engine(), Job(Phase.DECODE, 3, 10)
    alone = on_cpu()
    roofline = replace(Ceilings.of(POOL), seconds=0.001)
    device = DeviceCeilings(roofline, measure_rates(HERE), made.placement)
    found = [run(alone, job, roofline, pairs=2), run(made, job, device, pairs=2)]
    assert found[0].demand == found[1].demand
    for result in found:
        assert (result.chosen.sum(axis=1) == 2 * job.n_tokens * 4).all()
        assert result.predicted_s > 0 and result.measured.share > 0


def test_what_cpu_and_device_do_is_the_whole() -> None:
    made = engine()
    device = DeviceCeilings(
        replace(Ceilings.of(POOL), seconds=0.001), measure_rates(HERE), made.placement
    )
    for step in (StepShape(1, 20), StepShape(64, 0)):
        job = Job(Phase.DECODE if step.n_tokens == 1 else Phase.PREFILL, step.n_tokens, step.start)
        works, found = step_work(made.model, made.recipe, step), device.split(made, job, step)
        read = sum(work.read_bytes for work in works)
        ops = sum(work.ops for work in works)
        assert found.cpu_bytes + found.device_bytes == pytest.approx(read)
        assert sum(found.cpu_ops.values()) + found.device_ops == pytest.approx(ops, rel=1e-6)
        assert 0 < found.cpu_bytes < read


def test_pages_of_a_session_that_is_gone_are_free_at_once() -> None:
    """Without waiting for the collector of cycles: the next session needs them."""
    made = engine()
    for _ in range(3):
        session = made.session()
        session.feed([1, 2, 3])
        session.feed([4])
        del session


# --- the profiler's clock ---------------------------------------------------------------------------


def test_the_offset_is_that_of_the_tightest_marker() -> None:
    true = 1_000_000
    readings = [(100, 900), (2000, 2010), (3000, 3400)]
    markers = [CallRecord("kt.clock", False, a + 5 - true, b - 5 - true) for a, b in readings]
    late = replace(markers[0], start_ns=markers[0].start_ns + 300)
    assert clock_offset([markers[2], late, markers[1]], readings) == true


def test_markers_bring_torchs_clock_to_ours() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        readings = [_marked() for _ in range(8)]
    after = time.monotonic_ns()
    markers = [each for each in recorded(profiler) if each.name == "kt.clock"]
    offset = clock_offset(markers, readings)
    for marker, (before, end) in zip(markers, readings, strict=True):
        slack = end - before  # each reading may be off by as much as it took
        assert before - slack <= marker.start_ns + offset <= marker.end_ns + offset <= end + slack
    assert markers[-1].end_ns + offset < after + 10_000_000


@pytest.mark.parametrize(
    ("name", "on_device", "track"),
    [
        ("cudaGraphLaunch", False, LAUNCHES),
        ("cudaLaunchKernel", False, LAUNCHES),
        ("cuLaunchKernelEx", False, LAUNCHES),
        ("cudaLaunchHostFunc", False, LAUNCHES),
        ("cudaMemcpyAsync", False, LAUNCHES),
        ("cudaStreamSynchronize", False, None),
        ("aten::copy_", False, None),
        ("void gemv<...>", True, DEVICE),
        ("Memcpy HtoD (Pinned -> Device)", True, DEVICE),
        ("Stream Sync", True, None),
        ("kt.clock", True, None),
    ],
)
def test_tracks(name: str, on_device: bool, track: str | None) -> None:
    assert track_of(CallRecord(name, on_device, 0, 1)) == track
