"""Bytes and operations of models, against figures counted by hand from their published configs."""

import pytest
from shapes import GB, shape

from ktcli.ops.part import Access, ModelPart
from ktcli.planner.spec import (
    StepShape,
    Unit,
    experts_touched,
    kv_bytes_per_token,
    parts,
    sequence_bytes,
    step_work,
    weight_bytes,
)
from ktcli.weights.recipe import Recipe, stored_bytes

# name: all, routed experts, everything else (billions of parameters); one expert (millions);
# active expert bytes per token at 4.5 bits, int8, bf16 (GB); KV per token (KiB, bf16)
FACTS = {
    "deepseek-v2-lite": (15.7, 14.4, 1.31, 8.65, (0.76, 1.35, 2.7), 30.4),
    "deepseek-v3": (671.0, 653.9, 17.1, 44.04, (11.49, 20.43, 40.9), 68.6),
    "deepseek-v3.2": (671.9, 653.9, 17.97, 44.04, (11.49, 20.43, 40.9), 83.9),
    "glm-5": (743.9, 724.8, 19.13, 37.75, (12.74, 22.65, 45.3), 107.25),
    "kimi-k2": (1026.4, 1014.7, 11.7, 44.04, (11.89, 21.14, 42.3), 68.6),
    "qwen3-30b-a3b": (30.5, 29.0, 1.54, 4.72, (1.02, 1.81, 3.6), 96),
    "qwen3-235b-a22b": (235.1, 227.1, 8.0, 18.87, (7.98, 14.19, 28.4), 188),
    "qwen3-next-80b-a3b": (79.7, 77.3, 2.365, 3.146, (0.85, 1.51, 3.0), 24),
    "mimo-v2-flash": (308.8, 302.8, 5.984, 25.17, (5.32, 9.46, 18.92), 217.5),
    "gpt-oss-20b": (20.9, 19.1, 1.80, 24.88, (1.34, 2.39, 4.8), 48),
    # everything else with the biases of experts
    "gpt-oss-120b": (116.8, 114.7, 2.17, 24.88, (2.02, 3.58, 7.2), 72),
}
BF16 = Recipe.named("bf16", "bf16")
CACHED = (ModelPart.CACHE, ModelPart.STATES)


def parameters(name: str, *, routed: bool) -> int:
    """Counted from the declared tensors; the second copy of MLA's W_UK is ours, not the model's."""
    return sum(
        tensor.elements
        for tensor in shape(name).tensors
        if (tensor.part is ModelPart.EXPERTS) is routed and tensor.access is not Access.EXPANSION
    )


@pytest.mark.parametrize("name", FACTS)
def test_parameters(name: str):
    total, experts, rest, *_ = FACTS[name]
    assert parameters(name, routed=True) / 1e9 == pytest.approx(experts, rel=0.004)
    assert parameters(name, routed=False) / 1e9 == pytest.approx(rest, rel=0.006)
    assert (parameters(name, routed=True) + parameters(name, routed=False)) / 1e9 == pytest.approx(
        total, rel=0.002
    )


@pytest.mark.parametrize("name", FACTS)
def test_one_expert(name: str):
    spec = shape(name).spec
    millions = parameters(name, routed=True) / (spec.experts * spec.moe_layers) / 1e6
    assert millions == pytest.approx(FACTS[name][3], rel=0.001)


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize(("position", "fmt"), [(0, "int4-g32"), (1, "int8"), (2, "bf16")])
def test_expert_bytes_per_token(name: str, position: int, fmt: str):
    works = step_work(shape(name), Recipe.named(fmt), StepShape(1))
    read = next(work.read_bytes for work in works if work.part is ModelPart.EXPERTS)
    assert read / GB == pytest.approx(FACTS[name][4][position], rel=0.02)


@pytest.mark.parametrize("name", FACTS)
def test_cache_bytes_per_token(name: str):
    spec = shape(name).spec
    assert kv_bytes_per_token(spec) / 1024 == pytest.approx(FACTS[name][5], rel=0.002)


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("recipe", [Recipe(), BF16], ids=["default", "bf16"])
def test_parts_are_all_tensors_counted_once(name: str, recipe: Recipe):
    model = shape(name)
    assert sum(part.size_bytes for part in parts(model, recipe)) == weight_bytes(model, recipe)


@pytest.mark.parametrize("name", FACTS)
def test_one_format_per_part(name: str):
    names = [part.part for part in parts(shape(name), Recipe())]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", FACTS)
def test_decode_reads_less_than_it_stores(name: str):
    model = shape(name)
    stored = {part.part: part.size_bytes for part in parts(model, Recipe())}
    for work in step_work(model, Recipe(), StepShape(1, start=100)):
        assert work.part in CACHED or work.read_bytes <= stored[work.part]


@pytest.mark.parametrize("name", FACTS)
def test_products_of_one_token_are_two_operations_per_active_weight(name: str):
    """Qwen3-30B-A3B has 3.3 billion active parameters, of which the embedding is only looked up."""
    model = shape(name)
    spec = model.spec
    expected = sum(
        2 * tensor.elements * (spec.top_k / spec.experts if tensor.role.value == "experts" else 1)
        for tensor in model.tensors
        if tensor.role.value in ("experts", "dense", "kept")
        and tensor.access is not Access.EXPANSION
    )
    works = [w for w in step_work(model, BF16, StepShape(1)) if w.part not in CACHED]
    assert sum(work.ops for work in works) == pytest.approx(expected)


@pytest.mark.parametrize("name", FACTS)
def test_a_chunk_costs_no_more_bytes_than_the_model_and_its_cache(name: str):
    model = shape(name)
    works = step_work(model, Recipe(), StepShape(512))
    limit = weight_bytes(model, Recipe()) + 512 * kv_bytes_per_token(model.spec)
    limit += sequence_bytes(model.spec)
    assert sum(work.read_bytes for work in works) <= limit


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("step", [StepShape(1, 64), StepShape(512, 64)], ids=["decode", "prefill"])
def test_more_tokens_before_never_make_a_step_cheaper(name: str, step: StepShape):
    model = shape(name)
    later = StepShape(step.n_tokens, step.start * 10, step.outputs)
    for early, late in zip(
        step_work(model, Recipe(), step), step_work(model, Recipe(), later), strict=True
    ):
        assert early.read_bytes <= late.read_bytes
        assert early.ops <= late.ops


@pytest.mark.parametrize("step", [StepShape(1), StepShape(512)], ids=["decode", "prefill"])
def test_latent_attention_reads_one_direction_of_w_uk(step: StepShape):
    """The other direction, for expanding keys, lies in memory and is not read."""
    model = shape("deepseek-v2-lite")
    read = next(w.read_bytes for w in step_work(model, BF16, step) if w.part is ModelPart.LATENT)
    assert read == sum(
        stored_bytes(tensor, BF16)
        for tensor in model.tensors
        if tensor.name.endswith((".uk_in", ".uv"))
    )


def test_experts_touched():
    spec = shape("qwen3-30b-a3b").spec
    assert experts_touched(spec, 1) == pytest.approx(spec.top_k)
    assert experts_touched(spec, 2) < 2 * spec.top_k
    assert experts_touched(spec, 512) == pytest.approx(spec.experts)


def test_number_formats_choose_the_arithmetic():
    model = shape("qwen3-30b-a3b")
    units = {
        work.part: work.unit
        for work in step_work(model, Recipe.named("int4", "bf16"), StepShape(1))
    }
    assert units[ModelPart.EXPERTS] is Unit.INT8
    assert units[ModelPart.ATTENTION] is units[ModelPart.ROUTER] is Unit.BF16
    fp8 = {
        work.part: work.unit for work in step_work(model, Recipe.named("fp8", "fp8"), StepShape(1))
    }
    assert fp8[ModelPart.EXPERTS] is fp8[ModelPart.ATTENTION] is Unit.F32
    assert fp8[ModelPart.ROUTER] is Unit.BF16
    assert units[ModelPart.CACHE] is Unit.ATTENTION
