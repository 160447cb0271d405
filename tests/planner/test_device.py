"""Plans with a GPU: what fits, laws of the budget, what is forced, and smaller plans after a failure."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from shapes import GIB, shape

from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.machine import Gpu, Machine
from ktcli.hardware.profile import read_machine
from ktcli.planner.deferral import Times
from ktcli.planner.device import GRAPH_BYTES, DeviceSizes, share_out
from ktcli.planner.device_cost import device_rates
from ktcli.planner.host import Host, host_of
from ktcli.planner.lower import step_down
from ktcli.planner.memory import LEAST_CONTEXT, Use
from ktcli.planner.placement import place
from ktcli.planner.plan import DevicePlan, Plan, Request
from ktcli.planner.prefill import NEVER
from ktcli.planner.segments import Devices
from ktcli.planner.spec import weight_bytes
from ktcli.planner.stack import split, stack_of
from ktcli.weights.recipe import Recipe

NAMES = ["qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "kimi-k2"]
MACHINES = ["laptop-8gb-gpu", "desktop-24gb-gpu", "workstation-4090-512gb", "workstation-2x4090",
            "cloud-h200-128gb", "server-8xl20-1tb", "xeon-2x36-4090-512gb",
            "xeon-2x36-2x4090-1tb"]  # fmt: skip
QWEN = "qwen3-30b-a3b"
model = cache(shape)


@cache
def machine(name: str) -> Machine:
    return read_machine(Path(name))


@cache
def host(name: str) -> Host:
    return host_of(machine(name), torch=True)


def with_vram(gib: float, name: str = "workstation-4090-512gb") -> Host:
    gpu = replace(host(name).gpus[0], vram_bytes=int(gib * GIB), free_bytes=int(gib * GIB))
    return replace(host(name), gpus=(gpu,))


def used(made: Plan) -> DevicePlan:
    assert made.device is not None, made.notes
    return made.device


# machine, model: fits, the fewest experts on GPUs of a layer (None: the CPU alone), depth, least threshold
DECISIONS = {
    ("laptop-8gb-gpu", QWEN): (True, 28, 4, 576),
    ("laptop-8gb-gpu", "deepseek-v2-lite"): (True, 26, 1, 576),
    ("laptop-8gb-gpu", "deepseek-v3"): (False, None, 0, NEVER),
    ("laptop-8gb-gpu", "kimi-k2"): (False, None, 0, NEVER),
    ("desktop-24gb-gpu", QWEN): (True, 128, 0, NEVER),
    ("desktop-24gb-gpu", "deepseek-v2-lite"): (True, 64, 0, NEVER),
    ("desktop-24gb-gpu", "deepseek-v3"): (False, 1, 1, 960),
    ("desktop-24gb-gpu", "kimi-k2"): (False, 4, 1, 1088),
    ("workstation-4090-512gb", QWEN): (True, 128, 0, NEVER),
    ("workstation-4090-512gb", "deepseek-v2-lite"): (True, 64, 0, NEVER),
    ("workstation-4090-512gb", "deepseek-v3"): (True, 1, 2, 1600),
    ("workstation-4090-512gb", "kimi-k2"): (False, 5, 2, 1600),
    ("workstation-2x4090", QWEN): (True, 128, 0, NEVER),
    ("workstation-2x4090", "deepseek-v2-lite"): (True, 64, 0, NEVER),
    ("workstation-2x4090", "deepseek-v3"): (False, 13, 1, 960),
    ("workstation-2x4090", "kimi-k2"): (False, 17, 1, 1088),
    ("cloud-h200-128gb", QWEN): (True, 128, 0, NEVER),
    ("cloud-h200-128gb", "deepseek-v2-lite"): (True, 64, 0, NEVER),
    ("cloud-h200-128gb", "deepseek-v3"): (False, 91, 1, 1088),
    ("cloud-h200-128gb", "kimi-k2"): (False, 93, 1, 1088),
    ("server-8xl20-1tb", QWEN): (True, 128, 0, NEVER),
    ("server-8xl20-1tb", "deepseek-v2-lite"): (True, 64, 0, NEVER),
    ("server-8xl20-1tb", "deepseek-v3"): (True, 118, 2, NEVER),
    ("server-8xl20-1tb", "kimi-k2"): (True, 136, 3, 3584),
    ("xeon-2x36-4090-512gb", QWEN): (True, 128, 0, NEVER),
    ("xeon-2x36-4090-512gb", "deepseek-v2-lite"): (True, 64, 0, NEVER),
    ("xeon-2x36-4090-512gb", "deepseek-v3"): (True, 1, 4, NEVER),
    ("xeon-2x36-4090-512gb", "kimi-k2"): (False, 7, 4, NEVER),
    ("xeon-2x36-2x4090-1tb", QWEN): (True, 128, 0, NEVER),
    ("xeon-2x36-2x4090-1tb", "deepseek-v2-lite"): (True, 64, 0, NEVER),
    ("xeon-2x36-2x4090-1tb", "deepseek-v3"): (True, 14, 4, 3584),
    ("xeon-2x36-2x4090-1tb", "kimi-k2"): (True, 23, 4, NEVER),
}


@pytest.mark.each_once
@pytest.mark.parametrize(("where", "name"), DECISIONS, ids=lambda text: text)
def test_decisions_of_recorded_machines(where: str, name: str):
    fits, count, depth, threshold = DECISIONS[where, name]
    made = place(model(name), host(where), Request())
    assert made.fits is fits
    assert bool(made.advice) is not fits
    if count is None:
        assert made.device is None
        assert "everything but the experts" in made.notes[0]
        return
    device = used(made)
    assert min(device.n_experts) == count and (
        len(device.segments) > 1 or max(device.n_experts) == count
    )
    assert (device.depth, device.prefill_threshold) == (depth, threshold)
    assert all(e.need.total <= e.budget_bytes <= e.gpu.free_bytes for e in device.segments)
    assert all(line.reason for line in made.lines)
    there = [line for line in made.lines if line.where == "GPU"]
    here = [line for line in made.lines if line.where != "GPU"]
    assert sum(line.size_bytes for line in there) == device.need.total
    assert sum(line.size_bytes for line in here) == made.need_bytes
    plain = place(model(name), host(where), Request(device="cpu"))
    assert made.speed.decode > plain.speed.decode
    assert made.need_bytes < plain.need_bytes + 10 * GIB  # torch and pinned buffers come on top


def test_every_shipped_machine_with_a_gpu_has_its_rows():
    shipped = Path(__file__).parents[2] / "profiles" / "machines"
    with_gpu = {path.stem for path in shipped.glob("*.toml") if machine(path.stem).gpus}
    assert with_gpu == set(MACHINES) == {where for where, _ in DECISIONS}


@pytest.mark.parametrize("name", NAMES)
def test_both_memories_together_hold_the_model_once(name: str):
    stack = stack_of(model(name), Recipe())
    mask = np.random.default_rng(0).random((len(stack.moe), stack.experts)) < 0.3
    here, there = split(model(name), mask)
    both = weight_bytes(here, Recipe()) + weight_bytes(there, Recipe())
    assert both == weight_bytes(model(name), Recipe())


def test_a_residual_of_several_streams_needs_their_workspace():
    """Before and after a block, and normed; more streams take that much more."""
    few, many = (
        DeviceSizes.of(made.spec, stack_of(made, Recipe()))
        for made in (shape("deepseek-v4-flash", hc_mult=n) for n in (2, 4))
    )
    hidden = shape("deepseek-v4-flash").spec.hidden
    assert many.token_bytes - few.token_bytes == 4 * 3 * 2 * hidden


def test_biases_of_experts_in_main_memory_are_no_rows_of_a_table():
    """Of gpt-oss's 32 experts a token reads the biases of 4."""
    made = place(model("gpt-oss-20b"), host("laptop-8gb-gpu"), Request())
    assert sum(used(made).n_experts) < 24 * 32
    (biases,) = (e for e in made.lines if e.part == "norms, biases" and e.where != "GPU")
    assert biases.reason == "biases of experts"
    assert biases.decode_bytes == pytest.approx(biases.size_bytes * 4 / 32, rel=0.01)


def test_same_question_same_answer():
    assert place(model(QWEN), with_vram(8), Request()) == place(
        model(QWEN), with_vram(8), Request()
    )


# --- laws of the budget -----------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("choice", [None, "uniform", "front"])
@pytest.mark.parametrize("name", [QWEN, "deepseek-v3", "gpt-oss-20b"])
def test_more_vram_never_fewer_experts(name: str, choice: str | None):
    """Fine steps around where shares for long prompts begin and end."""
    stack = stack_of(model(name), Recipe())
    sizes = DeviceSizes.of(model(name).spec, stack)
    base = host("workstation-4090-512gb").gpus[0]
    for streams in (True, False):
        counts = []
        for mib in range(4 << 10, 48 << 10, 97):
            gpu = replace(base, vram_bytes=mib << 20, free_bytes=mib << 20)
            budget = share_out(sizes, gpu, 8192, streams=streams)
            counts.append(budget.experts_bytes if budget.fits else -1)
        assert counts == sorted(counts)
    asked = [place(model(name), with_vram(gib), Request(device="cuda", context=4096, gpu_experts=choice))
             for gib in (22, 24, 48)]  # fmt: skip
    counts = [sum(used(made).n_experts) for made in asked]
    assert counts == sorted(counts)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("name", [QWEN, "gpt-oss-20b"])
def test_a_longer_context_never_leaves_more_for_experts(name: str, streams: bool):
    sizes = DeviceSizes.of(model(name).spec, stack_of(model(name), Recipe()))
    gpu = with_vram(12).gpus[0]
    contexts = [64, 512, 1000, 1024, 4096, 4100, 8192, 16384, 32768, 40960]
    left = [share_out(sizes, gpu, context, streams=streams).experts_bytes for context in contexts]
    assert left == sorted(left, reverse=True)


def test_each_captured_size_is_counted():
    """From one answer to the next number nothing changes but cache and logits until a larger graph is needed."""
    spec, recipe = model(QWEN).spec, Recipe()
    of = [DeviceSizes.of(spec, stack_of(model(QWEN), recipe), n) for n in range(1, 20)]
    graphs = [sizes.graph_bytes(8192) for sizes in of]
    assert [a < b for a, b in pairwise(graphs)] == [n in (1, 2, 4, 8) for n in range(1, 19)]
    assert graphs[0] == GRAPH_BYTES and graphs[-1] - graphs[0] >= (2 + 4 + 8 + 16) * 4 * spec.vocab


@pytest.mark.parametrize(
    ("name", "gib", "answers"),
    [
        *((QWEN, gib, 1) for gib in (2.6, 2.8, 3.0, 3.5, 4.0)),
        *((QWEN, gib, answers) for gib, answers in ((4.5, 3), (6, 16))),
        *(("gpt-oss-20b", gib, answers) for gib, answers in ((2.6, 1), (2.9, 1), (3.3, 2))),
    ],
)
def test_the_context_that_fits_is_the_longest(name: str, gib: float, answers: int):
    spec, stack = model(name).spec, stack_of(model(name), Recipe())
    sizes, gpu = DeviceSizes.of(spec, stack, answers), with_vram(gib).gpus[0]
    found = Devices(spec, (), stack, (gpu,), answers=answers).fitting(40960)
    assert share_out(sizes, gpu, found, streams=False).fits or found == 0
    assert found == 40960 or not share_out(sizes, gpu, found + 64, streams=False).fits


def test_the_context_by_default_shrinks_to_what_the_gpu_holds():
    made = place(model(QWEN), with_vram(2.9), Request(device="cuda"))
    assert LEAST_CONTEXT <= made.context < 8192
    with pytest.raises(NotEnoughMemory, match=r"8192 positions on NVIDIA.*") as caught:
        place(model(QWEN), with_vram(2.9), Request(device="cuda", context=8192))
    assert caught.value.hint.startswith("--context ")
    shorter = int(caught.value.hint.split()[1])
    assert used(place(model(QWEN), with_vram(2.9), Request(device="cuda", context=shorter)))


def test_a_servers_context_is_longer_where_little_of_the_gpu_holds_it():
    contexts, served = [], Use(streams=4, served=True)
    for gib in (3.5, 4, 8, 16, 24, 48, 80):
        made, plain = (
            place(model(QWEN), with_vram(gib), Request(device="cuda", use=use))
            for use in (served, replace(served, served=False))
        )
        contexts.append(made.context)
        assert made.context >= plain.context
        if (
            made.context > plain.context
        ):  # three quarters of what experts could have are still theirs
            sizes = DeviceSizes.of(model(QWEN).spec, stack_of(model(QWEN), made.recipe), 4)
            least, taken = (
                share_out(sizes, used(made).gpus[0], n, streams=False).experts_bytes
                for n in (64, made.context)
            )
            assert taken >= least * 3 / 4
    assert contexts == sorted(contexts)
    assert contexts[0] <= 8192 < contexts[-2] and contexts[-1] == min(
        65536, model(QWEN).spec.context
    )


def test_experts_on_the_gpu_are_not_needed_in_main_memory():
    small, large = (place(model("deepseek-v3"), with_vram(gib), Request()) for gib in (48, 140))
    taken = used(large).need.experts - used(small).need.experts
    assert taken > 80 * GIB
    assert small.need_bytes - large.need_bytes == pytest.approx(taken, rel=0.01)


# --- choices ----------------------------------------------------------------------------------------


def test_a_heat_map_places_what_is_hot_and_raises_the_hit_rate():
    heat = np.random.default_rng(3).zipf(1.5, (48, 128)).clip(max=10_000)
    plain = used(place(model(QWEN), host("laptop-8gb-gpu"), Request()))
    made = place(model(QWEN), host("laptop-8gb-gpu"), Request(heat=heat))
    device = used(made)
    assert device.rule == "hot"
    assert device.hit_rate > 2 * plain.hit_rate
    assert heat[device.mask].sum() / heat.sum() > 0.5
    assert made.speed.decode > place(model(QWEN), host("laptop-8gb-gpu"), Request()).speed.decode


def test_a_gpu_takes_a_core_and_the_cpu_alone_has_all():
    beside = place(model(QWEN), host("laptop-8gb-gpu"), Request())
    alone = place(model(QWEN), host("laptop-8gb-gpu"), Request(device="cpu"))
    assert (beside.host.threads, alone.host.threads) == (7, 8)
    forced = host_of(machine("laptop-8gb-gpu"), threads=8, torch=True)
    assert place(model(QWEN), forced, Request()).host.threads == 8


def test_without_torch_nothing_changes_but_a_note():
    with_gpu = host_of(machine("laptop-8gb-gpu"))
    without = host_of(replace(machine("laptop-8gb-gpu"), gpus=()))
    one, other = (place(model(QWEN), each, Request()) for each in (with_gpu, without))
    assert one.lines == other.lines and one.speed == other.speed
    assert other.notes == ()
    with pytest.raises(UsageError, match="there is no GPU cuda"):
        place(model(QWEN), with_gpu, Request(device="cuda"))


def test_a_slow_gpu_is_left_alone():
    slow = replace(with_vram(8).gpus[0], name="Old GPU", read_bps=5e9, bf16_ops=1e11)
    made = place(model(QWEN), replace(with_vram(8), gpus=(slow,)), Request())
    assert made.device is None
    assert made.notes[0].endswith("stays unused, because the CPU alone is faster")
    assert made.host.threads == 32


def test_a_small_model_does_not_wait_for_cuda():
    tiny = shape(QWEN, num_hidden_layers=2, num_experts=8)
    made = place(tiny, host("laptop-8gb-gpu"), Request())
    assert made.device is None or weight_bytes(tiny, Recipe()) >= 256 << 20
    small = shape(QWEN, num_hidden_layers=1, num_experts=8, vocab_size=1024)
    assert place(small, host("laptop-8gb-gpu"), Request()).device is None
    assert place(small, host("laptop-8gb-gpu"), Request(device="cuda")).device is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "gpu"}, "'gpu' is not a device"),
        ({"device": "cuda:x"}, "not a device"),
        ({"device": "cpu:0"}, "not a device"),
        ({"device": "cuda:3"}, "there is no GPU cuda:3"),
        ({"defer": 7}, "7 of 8 experts per token; at most 6"),
        ({"defer": -1}, "at most 6"),
        ({"gpu_experts": 129}, "the model has 128"),
        ({"gpu_experts": "hot"}, "no heat map"),
        ({"context": 50_000}, "40960 positions"),
    ],
)
def test_what_makes_no_sense(change: dict, words: str):
    with pytest.raises(UsageError, match=words):
        place(model(QWEN), host("laptop-8gb-gpu"), Request(**change))


# --- what is forced wins and says what it costs -----------------------------------------------------


def test_forced_values_win():
    mask = np.zeros((48, 128), bool)
    mask[3, 5] = mask[40, 127] = True
    request = Request(
        device="cuda:0", gpu_experts=mask, defer=1, prefill_threshold=64, context=1000
    )
    made = place(model(QWEN), host("laptop-8gb-gpu"), request)
    device = used(made)
    assert (device.mask == mask).all()
    assert device.resident[3] == (5,) and device.n_experts[40] == 1
    assert (device.depth, device.prefill_threshold, made.context) == (1, 64, 1000)
    never = used(place(model(QWEN), host("laptop-8gb-gpu"), Request(prefill_threshold=NEVER)))
    assert not never.streams and never.need.stream == 0


def test_costs_are_the_difference_of_two_plans():
    where, own = host("laptop-8gb-gpu"), place(model(QWEN), host("laptop-8gb-gpu"), Request())
    assert own.costs == ()
    for change, option, what in [
        ({"defer": 0}, "--defer 0", "decode"),
        ({"gpu_experts": 2}, "--gpu-experts 2", "decode"),
        ({"device": "cpu"}, "--device cpu", "decode"),
        ({"prefill_threshold": NEVER}, "--prefill-threshold never", "prefill"),
    ]:
        made = place(model(QWEN), where, Request(**change))
        (cost,) = made.costs
        assert (cost.option, cost.what) == (option, what)
        assert cost.own == getattr(own.speed, what)
        assert cost.forced == getattr(made.speed, what) < cost.own


def test_measured_times_replace_the_roofline():
    times = Times(expert_s=100e-6, device_s=281e-6, shared_s=0.0)
    made = place(model(QWEN), host("laptop-8gb-gpu"), Request(times=times, gpu_experts=0))
    assert used(made).times.expert_s == pytest.approx(times.expert_s)
    assert used(made).times.device_s == pytest.approx(times.device_s)
    assert used(made).depth == 3  # the check of the paper
    assert 1 / made.speed.decode == pytest.approx(48 * 800e-6, rel=0.12)  # and the head


def test_measured_rates_replace_the_data_sheet():
    gpu = Gpu(0, "NVIDIA GeForce RTX 4090", GIB, GIB, link_bps=30e9)
    assert device_rates(gpu).copy_bps == pytest.approx(24e9)
    assert not device_rates(gpu).measured
    known = device_rates(replace(gpu, read_bps=9e11, bf16_ops=1e14, copy_bps=2e10))
    assert (known.read_bps, known.copy_bps, known.measured) == (9e11, 2e10, True)


# --- after an out-of-memory -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(QWEN, "laptop-8gb-gpu", marks=pytest.mark.thorough),
        pytest.param("deepseek-v2-lite", "desktop-24gb-gpu", marks=pytest.mark.thorough),
        ("gpt-oss-20b", "laptop-8gb-gpu"),
    ],
)
def test_every_step_down_is_smaller_and_the_last_is_the_cpu(name: str, where: str):
    request = Request(device="cuda")
    made, seen = place(model(name), host(where), request), []
    while (lower := step_down(model(name), request, made)) is not None:
        before, request = made, lower.request
        assert lower.sentence.startswith("NVIDIA ")
        made = place(model(name), host(where), request)
        if made.device is None:
            break
        assert made.device.need.total < used(before).need.total
        assert made.context <= before.context
        seen.append((sum(made.device.n_experts), made.context))
        assert len(seen) < 60
    assert made.device is None and step_down(model(name), request, made) is None
    assert "every layer runs on the CPU" in lower.sentence
    contexts = [context for _, context in seen]
    assert contexts[0] == 8192 and contexts[-1] < 2 * LEAST_CONTEXT


def test_the_first_step_down_gives_up_experts_only():
    made = place(model(QWEN), host("laptop-8gb-gpu"), Request())
    lower = step_down(model(QWEN), Request(), made)
    assert lower is not None
    again = place(model(QWEN), host("laptop-8gb-gpu"), lower.request)
    assert 0 < sum(used(again).n_experts) < sum(used(made).n_experts)
    assert again.context == made.context
