"""The plan: pure, monotone, honest about what does not fit."""

from dataclasses import replace
from pathlib import Path

import pytest
from shapes import GIB, RATES, host, shape

from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.profile import read_machine
from ktcli.models import build
from ktcli.ops.recording import record
from ktcli.planner.cost import STEP_S, operation_seconds
from ktcli.planner.host import host_of
from ktcli.planner.memory import (
    DEFAULT_CONTEXT,
    LEAST_CONTEXT,
    MARGIN_LIMIT_BYTES,
    SERVED_CONTEXT,
    Use,
)
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan, Request
from ktcli.settings import SETTINGS
from ktcli.store import catalog
from ktcli.weights.recipe import Recipe

NAMES = ["deepseek-v2-lite", "deepseek-v3", "kimi-k2", "qwen3-30b-a3b", "qwen3-235b-a22b"]
BIG = 4096  # GiB: everything fits


def plan(
    name: str, gib: float, experts: str = "int4", dense: str = "int8", context: int | None = None
) -> Plan:
    return place(shape(name), host(gib), Request(Recipe.named(experts, dense), context))


@pytest.mark.parametrize("name", NAMES)
def test_same_question_same_answer(name: str):
    assert plan(name, 64) == plan(name, 64)


@pytest.mark.parametrize("name", NAMES)
def test_lines_add_up_to_what_is_needed(name: str):
    made = plan(name, BIG)
    assert sum(line.size_bytes for line in made.lines) == made.need_bytes
    assert all(line.reason for line in made.lines)


@pytest.mark.parametrize("name", NAMES)
def test_predicted_parts_add_up_to_the_predicted_step(name: str):
    made = plan(name, BIG)
    parts_s = sum(line.decode_s for line in made.lines)
    assert parts_s <= 1 / made.speed.decode < parts_s * 1.5


@pytest.mark.parametrize("name", NAMES)
def test_wider_formats_take_more_memory_and_decode_slower(name: str):
    made = [
        plan(name, BIG, fmt, "bf16") for fmt in ("int4-g128", "int4", "int4-g32", "int8", "bf16")
    ]
    needs = [each.need_bytes for each in made]
    speeds = [each.speed.decode for each in made]
    assert needs == sorted(needs)
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize("name", NAMES)
def test_more_context_takes_more_memory_and_ends_slower(name: str):
    made = [plan(name, BIG, context=c) for c in (64, 1024, 8192, 32768)]
    assert [p.need_bytes for p in made] == sorted(p.need_bytes for p in made)
    ends = [p.speed.decode_full for p in made]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("rate", ["read_bps", "int8_ops", "bf16_ops"])
def test_a_faster_machine_is_never_slower(rate: str):
    model = shape("deepseek-v2-lite")
    faster = replace(RATES, **{rate: 3 * getattr(RATES, rate)})
    slow = place(model, host(64), Request()).speed
    fast = place(model, host(64, faster), Request()).speed
    assert fast.decode >= slow.decode
    assert fast.decode_full >= slow.decode_full
    assert fast.prefill >= slow.prefill


def test_more_memory_never_refuses_what_less_accepted():
    fits = [plan("qwen3-30b-a3b", gib).fits for gib in (4, 8, 12, 16, 18, 20, 24, 32, 64)]
    assert fits == sorted(fits)
    assert fits[0] is False
    assert fits[-1] is True


def test_context_by_default_shrinks_to_what_fits():
    wide = plan("qwen3-235b-a22b", BIG)
    assert wide.context == DEFAULT_CONTEXT
    tight = plan("qwen3-235b-a22b", (wide.need_bytes - (1 << 29)) / GIB)
    assert tight.fits
    assert LEAST_CONTEXT <= tight.context < DEFAULT_CONTEXT


def test_a_servers_context_is_longer_where_little_of_the_memory_holds_it():
    model, recipe = shape("qwen3-30b-a3b"), Recipe.named("int4", "int8")
    served = Use(streams=4, served=True)
    contexts = []
    for gib in (19, 24, 32, 64, 128, BIG):
        made = place(model, host(gib), Request(recipe, use=served))
        plain = place(model, host(gib), Request(recipe, use=replace(served, served=False)))
        contexts.append(made.context)
        assert made.fits and made.context >= plain.context
        if made.context > plain.context:  # three quarters of what was free still are
            least = place(model, host(gib), Request(recipe, 1, use=served)).need_bytes
            assert made.need_bytes - least <= (host(gib).available_bytes - least) / 4
    assert contexts == sorted(contexts)
    assert contexts[0] < DEFAULT_CONTEXT < contexts[2] and contexts[-1] == model.spec.context
    assert place(shape("deepseek-v3"), host(BIG), Request(use=served)).context == SERVED_CONTEXT


def test_the_help_states_the_default_contexts():
    stated = SETTINGS["context"].default
    assert f"up to {DEFAULT_CONTEXT}; with kt serve up to {SERVED_CONTEXT}" in stated


def test_context_never_exceeds_the_models():
    model = shape("qwen3-30b-a3b", max_position_embeddings=1000)
    assert place(model, host(64), Request()).context == 1000
    with pytest.raises(UsageError, match="1000 positions"):
        place(model, host(64), Request(context=1001))


def test_a_context_of_one_position_is_a_plan():
    assert plan("qwen3-30b-a3b", 64, context=1).speed.decode > 0


# --- refused plans: what they advise is true --------------------------------------------------------


def test_a_plan_that_fits_advises_nothing():
    made = plan("qwen3-30b-a3b", 64)
    assert made.advice == ()
    made.require("the model")


def test_refused_plan_names_a_format_that_fits():
    refused = plan("qwen3-30b-a3b", 40, "bf16", "bf16")
    assert not refused.fits
    lever = next(each for each in refused.advice if each.options == "--experts int8")
    assert lever.plan is not None and lever.text.startswith("--experts int8 fits: 3")
    same = plan("qwen3-30b-a3b", 40, "int8", "bf16")
    assert same.fits and lever.plan.need_bytes == same.need_bytes


def test_refused_plan_names_a_context_that_fits():
    refused = plan("qwen3-30b-a3b", 20, context=40960)
    assert not refused.fits
    shorter = int(refused.advice[0].options.split()[1])
    assert plan("qwen3-30b-a3b", 20, context=shorter).fits
    assert not plan("qwen3-30b-a3b", 20, context=shorter + 64).fits


def test_refused_plan_says_how_much_memory_is_missing():
    refused = plan("kimi-k2", 100)
    missing = (refused.need_bytes - refused.host.available_bytes) / GIB
    (only,) = refused.advice
    assert only.plan is None
    assert only.text.startswith(f"it would fit with {missing:.1f} GiB more memory, or ")
    assert only.text.endswith(" GiB more in the smallest format")
    with pytest.raises(NotEnoughMemory, match="kimi-k2") as caught:
        refused.require("kimi-k2")
    assert caught.value.hint == only.text


@pytest.mark.parametrize("name", NAMES)
def test_advised_memory_is_enough(name: str):
    refused = plan(name, 4, context=4096)
    machine = host((refused.need_bytes + (1 << 20)) / GIB)
    # The margin grows with the machine, so room for it comes on top.
    roomier = replace(machine, available_bytes=machine.available_bytes + MARGIN_LIMIT_BYTES)
    assert place(shape(name), roomier, Request(context=4096)).fits


def test_the_operations_of_a_step_cost_something_as_such():
    """A model of no size at all is not infinitely fast, and more threads take longer to meet than one."""
    tiny = catalog.get("kt-mini")
    rates = replace(RATES, read_bps=1e30, int8_ops=1e30, bf16_ops=1e30)
    for threads in (1, 2, 64):
        each = operation_seconds(threads)
        machine = host(BIG, replace(rates, operation_s=each), threads)
        model = build(tiny.config)
        made = place(model, machine, Request(Recipe.named(tiny.experts, tiny.dense)))
        counted = len(record(model.forward).records)
        assert 1 / made.speed.decode == pytest.approx(STEP_S + counted * each)
    assert operation_seconds(1) < operation_seconds(2)


# --- known machines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "name", "fits"),
    [
        ("laptop-16gb", "deepseek-v2-lite", True),
        ("laptop-16gb", "qwen3-30b-a3b", False),
        ("desktop-24gb-gpu", "qwen3-30b-a3b", True),
        ("desktop-24gb-gpu", "qwen3-235b-a22b", False),
        ("xeon-2x32-512gb", "qwen3-235b-a22b", True),
        ("xeon-2x32-512gb", "deepseek-v3", True),
        ("xeon-2x32-512gb", "kimi-k2", False),
    ],
)
def test_what_fits_where(machine: str, name: str, fits: bool):
    made = place(shape(name), host_of(read_machine(Path(machine))), Request())
    assert made.fits is fits
    assert bool(made.advice) is not fits


def test_a_gpu_without_torch_is_named_and_said_to_be_idle():
    made = place(shape("qwen3-30b-a3b"), host_of(read_machine(Path("desktop-24gb-gpu"))), Request())
    assert made.device is None
    assert any(
        "RTX 4090" in note and "does not use NVIDIA GeForce RTX 4090" in note for note in made.notes
    )


def test_decode_never_beats_the_bandwidth():
    """Ceiling rule: tokens per second <= bandwidth / bytes per token."""
    for name in NAMES:
        made = plan(name, BIG)
        read = sum(line.decode_bytes for line in made.lines)
        assert made.speed.decode * read < RATES.read_bps


def test_prefill_never_beats_the_arithmetic():
    made = plan("qwen3-30b-a3b", 64)
    active = 3.3e9 * 2  # operations per token, without the head
    assert made.speed.prefill * active * 0.9 < RATES.int8_ops


@pytest.mark.parametrize("name", NAMES)
def test_an_fp8_cache_takes_half_the_bytes_and_a_scale_of_each_head(name: str):
    spec = shape(name).spec
    asked = Request(Recipe(), 4096)
    plans = [
        place(shape(name), host(BIG), replace(asked, use=Use(cache=fmt))) for fmt in ("bf16", "fp8")
    ]
    sizes = [{line.part: line for line in made.lines}["KV cache"] for made in plans]
    assert [line.format for line in sizes] == ["bf16", "fp8"]
    heads = 4096 * spec.position_heads
    assert sizes[1].size_bytes == sizes[0].size_bytes / 2 + heads <= 0.52 * sizes[0].size_bytes
    assert sizes[1].decode_bytes < 0.52 * sizes[0].decode_bytes
    assert plans[1].need_bytes == plans[0].need_bytes - sizes[0].size_bytes + sizes[1].size_bytes


def test_a_family_that_chooses_positions_has_no_fp8_cache():
    for name in ("deepseek-v3.2", "deepseek-v4-flash", "glm-5"):
        model = shape(name)
        with pytest.raises(UsageError, match=f"^{model.spec.family} cannot use an fp8 cache: "):
            place(model, host(BIG), Request(Recipe(), 4096, use=Use(cache="fp8")))


def test_a_cpu_decodes_an_fp8_cache():
    """One thread of few heads is slower than with bf16, and many threads, which memory stops, are faster."""
    asked = Request(Recipe(), 32768)
    cached = {}
    for threads, read_bps in ((1, 20e9), (64, 200e9)):
        rates = replace(RATES, read_bps=read_bps, bf16_ops=threads * 128 * 3.5e9)
        made = [
            place(
                shape("qwen3-30b-a3b"),
                replace(host(BIG), rates=rates),
                replace(asked, use=Use(cache=fmt)),
            )
            for fmt in ("bf16", "fp8")
        ]
        bf16, fp8 = ({line.part: line for line in each.lines}["KV cache"].decode_s for each in made)
        cached[threads] = fp8 / bf16
    assert cached[1] > 1 and cached[64] < 0.55
