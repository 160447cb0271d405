"""As many layers as fit, and how evenly random weights spread their experts."""

import pytest
from shapes import GIB, RATES, config

from benchmarks.loading import load_random
from ktcli.assembly.request import Wanted
from ktcli.engine.logits import Logits
from ktcli.errors import NotEnoughMemory
from ktcli.measure.synthetic import expert_spread, fitting_plan
from ktcli.native import Batch, Program
from ktcli.planner.host import Host
from ktcli.planner.memory import PREFILL_CHUNK, scratch_bytes
from ktcli.planner.plan import Request
from ktcli.weights.recipe import Recipe


def host(gib: float) -> Host:
    return Host("made up", 1, "avx2", 0, int(gib * GIB), RATES)


@pytest.mark.parametrize("gib", [3, 10, 18, 64])
def test_as_many_layers_as_fit(gib: int):
    asked = Request(context=512)
    model, plan = fitting_plan(config("qwen3-30b-a3b"), host(gib), asked)
    assert plan.fits
    if (layers := model.spec.layers) < 48:
        assert not fitting_plan(config("qwen3-30b-a3b"), host(gib), asked, layers + 1)[1].fits


def test_not_even_one_layer():
    with pytest.raises(NotEnoughMemory, match="one layer"):
        fitting_plan(config("kimi-k2"), host(1), Request(context=512))


@pytest.mark.parametrize("experts", ["int4", "int8", "bf16"])
def test_random_weights_choose_every_expert_about_equally_often(
    experts: str, monkeypatch: pytest.MonkeyPatch
):
    """Ten layers deep, where averaging by attention would have made all tokens alike."""
    shape = config(
        "qwen3-30b-a3b",
        hidden_size=256,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        vocab_size=4096,
    )
    recipe = Recipe.named(experts, "bf16")
    made = load_random(shape, recipe, Wanted(256, threads=1))
    run, rows = made.run, []

    def counted(batch: Batch) -> list[Logits]:
        rows.append(batch.rows)
        return run(batch)

    monkeypatch.setattr(made, "run", counted)
    spread = expert_spread(made, made.session(), seed=7)
    assert spread is not None and rows == [64] * 4  # Ctrl-C is heard between steps
    assert spread.even
    assert spread.seen == 1.0
    assert spread.busiest < 3.0  # 32 +- 5.3 tokens per expert: six standard deviations


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3-30b-a3b", 2),
        ("deepseek-v2-lite", 2),
        ("deepseek-v4-flash", 2),
        ("qwen3-next-80b-a3b", 4),  # the rows of both kinds of attention are held
        pytest.param("mimo-v2-flash", 2, marks=pytest.mark.thorough),
        pytest.param("deepseek-v3.2", 2, marks=pytest.mark.thorough),
    ],
)
def test_the_plan_reserves_at_least_the_buffers_of_the_program(
    name: str, layers: int, monkeypatch: pytest.MonkeyPatch
):
    sizes: list[int] = []
    finish = Program.finish

    def noted(program: Program) -> int:
        sizes.append(finish(program))
        return sizes[-1]

    monkeypatch.setattr(Program, "finish", noted)
    few = {"num_experts": 16, "n_routed_experts": 16, "n_group": 1, "topk_group": 1}
    small = config(name, vocab_size=512, **few)
    made = load_random(small, Recipe(), Wanted(PREFILL_CHUNK, threads=1), layers)
    assert sizes[0] <= scratch_bytes(made.model) < 4 / 3 * sizes[0]
