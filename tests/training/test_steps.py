"""Laws of a step: documents do not see each other, nothing depends on how it is cut, and NaN is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from convert import convert_checkpoint
from reference import Case, case_named
from training.judge import JudgedStep, judge_step, randomise, reference_model, relative, worst
from training.opened import LENGTHS, documents, every_target, masks, opened

from ktcli.errors import KtError, UsageError
from ktcli.hardware.team import NodeTeam
from ktcli.models import build
from ktcli.native import Pool
from ktcli.training import loss
from ktcli.training.documents import pack_documents
from ktcli.training.lora import LoraSettings
from ktcli.training.model import TrainableModel, TrainingOptions
from ktcli.weights.pack import Pack

EXACT = TrainingOptions(context=128, exact=True)
FAST = TrainingOptions(context=128)


@pytest.fixture(scope="module")
def pack_of(
    checkpoint_of: Callable[[Case], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Pack]:
    """The conversion of a case in bf16, made once."""
    made: dict[str, Pack] = {}

    def pack(name: str) -> Pack:
        if name not in made:
            out = tmp_path_factory.mktemp(name) / "pack"
            checkpoint = checkpoint_of(case_named(name))
            made[name] = Pack.open(
                convert_checkpoint(checkpoint, out, experts="bf16", dense="bf16")
            )
        return made[name]

    return pack


def same_bits(a: TrainableModel, b: TrainableModel) -> bool:
    pairs = zip(a.factors.values(), b.factors.values(), strict=True)
    return all(
        torch.equal(one, other)
        for ours, theirs in pairs
        for one, other in zip(ours.gradients, theirs.gradients, strict=True)
    )


@pytest.mark.each_once
@pytest.mark.parametrize("options", [EXACT, FAST], ids=["exact", "fast"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "qwen3-next", "nemotron-3-nano"])
def test_a_document_does_not_see_another(
    name: str, options: TrainingOptions, pack_of: Callable[[str], Pack]
) -> None:
    """What the second says changes no bit of the first's gradient, nor of any factor's if the second is not trained."""
    first, one, other = documents(40), documents(40, seed=5), documents(40, seed=6)
    mask = masks(first)
    a, b = (opened(pack_of(name), options=options) for _ in range(2))
    ours, theirs = (
        each.loss_and_gradients(first + second, mask + mask)
        for each, second in ((a, one), (b, other))
    )
    assert torch.equal(ours.embedded[:40], theirs.embedded[:40])
    assert not torch.equal(ours.embedded[40:], theirs.embedded[40:])
    assert not same_bits(a, b)
    untrained = [[False] * 40]
    for each, second in ((a, one), (b, other)):
        each.loss_and_gradients(first + second, mask + untrained)
    assert same_bits(a, b)


def test_a_step_of_many_documents_is_the_sum_of_its_documents(
    pack_of: Callable[[str], Pack],
) -> None:
    """With the weight of its trained tokens each."""
    texts = documents(*LENGTHS)
    trained = opened(pack_of("qwen3"))
    found = trained.loss_and_gradients(texts, masks(texts))
    whole = {name: each.gradients for name, each in trained.factors.items()}
    total = {name: [torch.zeros_like(g) for g in both] for name, both in whole.items()}
    for text, mask in zip(texts, masks(texts), strict=True):
        if not any(mask[1:]):
            continue
        part = trained.loss_and_gradients([text], [mask])
        for name, each in trained.factors.items():
            for into, gradient in zip(total[name], each.gradients, strict=True):
                into += gradient * part.tokens / found.tokens
    for name, both in whole.items():
        for gradient, added in zip(both, total[name], strict=True):
            assert relative(gradient, added) <= 1e-5, name


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "kimi-linear"])
def test_recomputing_gives_the_same_bits_as_retaining(
    name: str, pack_of: Callable[[str], Pack]
) -> None:
    texts = documents(*LENGTHS)
    trained = [
        opened(pack_of(name), options=TrainingOptions(128, exact=True, retain=retain))
        for retain in (False, True)
    ]
    for each in trained:
        each.loss_and_gradients(texts, masks(texts))
    assert same_bits(*trained)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "lfm2-moe"])
@pytest.mark.parametrize("retain", [False, True])
def test_documents_that_go_through_layers_in_groups_have_the_same_gradient(
    name: str, retain: bool, pack_of: Callable[[str], Pack]
) -> None:
    """But for rounding, as sums over documents have another order; the same elements are dropped."""
    pack = pack_of(name)
    settings = LoraSettings(4, 6.0, every_target(build(pack.config)), dropout=0.2)
    texts, found = documents(*LENGTHS), []
    assert [g.lengths for g in pack_documents(texts, None, vocab=99, context=99).groups(40)] == [
        (30,), (17, 17, 1), (45,),
    ]  # fmt: skip
    for rows in (200, 40):
        options = TrainingOptions(128, exact=True, retain=retain, max_rows=rows, balance=0.5)
        model = opened(pack, settings, options)
        step = model.loss_and_gradients(texts, masks(texts), 3)
        own = {name: each.gradients for name, each in model.factors.items()}
        found.append((model, step, JudgedStep(step.loss, own, step.embedded, [])))
    (_, whole, wanted), (model, parts, _) = found
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.balance == pytest.approx(whole.balance, rel=1e-6)
    assert worst(model, wanted, 1e-4)[0] <= 1e-5, worst(model, wanted, 1e-4)
    assert relative(parts.embedded, whole.embedded) <= 1e-5
    assert model.loss(texts, masks(texts)) == pytest.approx(
        found[0][0].loss(texts, masks(texts)), rel=1e-6
    )


def test_residuals_in_bf16_are_close(pack_of: Callable[[str], Pack]) -> None:
    texts = documents(*LENGTHS)
    found = [
        opened(pack_of("qwen3"), options=TrainingOptions(128, residuals=dtype)).loss_and_gradients(
            texts, masks(texts)
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert relative(found[1].embedded, found[0].embedded) <= 0.01


def test_logits_exist_for_a_few_rows_at_a_time(
    pack_of: Callable[[str], Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = documents(*LENGTHS)
    whole = opened(pack_of("qwen3"))
    expected = whole.loss_and_gradients(texts, masks(texts))
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 7 * 99)
    seen: list[int] = []
    head = TrainableModel._head

    def watched(self: TrainableModel, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return head(self, x)

    monkeypatch.setattr(TrainableModel, "_head", watched)
    pieces = opened(pack_of("qwen3"))
    found = pieces.loss_and_gradients(texts, masks(texts))
    assert max(seen) == 7 and sum(seen) == expected.tokens
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert relative(found.embedded, expected.embedded) <= 1e-5
    assert pieces.loss(texts, masks(texts)) == pytest.approx(expected.loss, rel=1e-6)


def test_threads_change_no_bit_and_nodes_next_to_nothing(pack_of: Callable[[str], Pack]) -> None:
    pack, texts = pack_of("deepseek-v3"), documents(*LENGTHS)
    settings = LoraSettings(4, 6.0, every_target(build(pack.config)))
    pools = (
        Pool(1, spin_us=0),
        Pool(3, spin_us=0),
        Pool(3, teams=tuple(NodeTeam(1) for _ in range(3)), spin_us=0),
    )
    trained = []
    for pool in pools:
        each = TrainableModel.open(pack, pool, settings, EXACT)
        randomise(each.factors, 1)
        each.loss_and_gradients(texts, masks(texts))
        trained.append(each)
    assert same_bits(*trained[:2])
    for ours, theirs in zip(trained[0].factors.values(), trained[2].factors.values(), strict=True):
        for a, b in zip(ours.gradients, theirs.gradients, strict=True):
            assert relative(a, b) <= 1e-5, ours.name


@pytest.mark.each_once
@pytest.mark.parametrize(
    ("rank", "targets"), [(1, ("all",)), (64, ("q_proj", "experts.gate_up_proj"))], ids=["1", "64"]
)
@pytest.mark.parametrize("lengths", [(2,), (3, 1)], ids=["one row", "few rows"])
def test_few_rows_and_extreme_ranks(
    rank: int,
    targets: tuple[str, ...],
    lengths: tuple[int, ...],
    pack_of: Callable[[str], Pack],
    checkpoint_of: Callable[[Case], Path],
) -> None:
    """Most experts have no row at all, others one."""
    trained = opened(pack_of("qwen3"), LoraSettings(rank, 2.0, targets))
    texts = documents(*lengths)
    every = [[True] * length for length in lengths]
    found = trained.loss_and_gradients(texts, every)
    case = case_named("qwen3")
    wanted = judge_step(reference_model(case, checkpoint_of(case)), trained.factors, texts, every)
    assert relative(found.embedded, wanted.embedded) <= 1e-5
    assert worst(trained, wanted, 0.05)[0] <= 1e-5, worst(trained, wanted, 0.05)


def test_the_padding_of_factors_stays_zero(pack_of: Callable[[str], Pack]) -> None:
    trained, texts = opened(pack_of("qwen3")), documents(*LENGTHS)
    trained.loss_and_gradients(texts, masks(texts))
    for each in trained.factors.values():
        plain = sum(float(g.abs().sum()) for g in each.gradients)
        lying = sum(float(g.abs().sum()) for g in (each.gradient_a, each.gradient_b))
        assert lying == pytest.approx(plain, rel=1e-5), each.name


def test_what_an_optimizer_writes_is_computed_with(pack_of: Callable[[str], Pack]) -> None:
    """Eight steps down the gradient, in place: the loss of the same documents falls."""
    settings = LoraSettings(4, 8.0, seed=3)
    trained = TrainableModel.open(pack_of("qwen3"), Pool(1, spin_us=0), settings, FAST)
    texts = documents(40, 30)
    losses = []
    for _ in range(8):
        losses.append(trained.loss_and_gradients(texts, masks(texts)).loss)
        for each in trained.factors.values():
            with torch.no_grad():
                each.a -= 0.5 * each.gradient_a
                each.b -= 0.5 * each.gradient_b
    assert losses[-1] < 0.9 * losses[0]
    again = TrainableModel.open(pack_of("qwen3"), Pool(1, spin_us=0), settings, FAST)
    assert again.loss_and_gradients(texts, masks(texts)).loss == losses[0]


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "trained", "said"),
    [
        ([], [], "at least one document"),
        ([[1, 2], []], [[True, True], []], "document 2 of the step is empty"),
        (
            [[1, 99]],
            [[True, True]],
            "token 1 of document 1 is 99, which is not one of the model's 99",
        ),
        ([[-1, 3]], [[True, True]], "token 0 of document 1 is -1"),
        (
            [[1] * 200],
            [[True] * 200],
            "document 1 has 200 tokens, but the model was opened for at most 128",
        ),
        ([[1, 2]], [[True]], "document 1 has 2 tokens, but its mask has 1"),
        ([[1, 2]], [], "0 masks for 1 documents"),
        ([[1, 2]], [[True, False]], "no token of the step is trained"),
    ],
)
def test_bad_documents_are_refused(
    texts: list[list[int]], trained: list[list[bool]], said: str, pack_of: Callable[[str], Pack]
) -> None:
    with pytest.raises(UsageError, match=said):
        opened(pack_of("qwen3"), LoraSettings()).loss_and_gradients(texts, trained)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (LoraSettings(0), "rank of an adapter is 0"),
        (LoraSettings(targets=()), "no target is named"),
        (LoraSettings(64), "rank 64 is more than .*down_proj can have: its matrix is 80 x 40"),
        (LoraSettings(targets=("q_prj",)), "'q_prj' is not the name of anything"),
        (LoraSettings(targets=("lm_head",)), "'lm_head' is not the name of anything"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: LoraSettings, said: str, pack_of: Callable[[str], Pack]
) -> None:
    with pytest.raises(UsageError, match=said):
        opened(pack_of("qwen3"), settings)


def test_nan_is_named_with_its_layer(pack_of: Callable[[str], Pack]) -> None:
    trained, texts = opened(pack_of("qwen3")), documents(20)
    products = trained._weights.experts._products  # type: ignore[attr-defined]
    transposed = products.transposed

    def broken(name: str, x: torch.Tensor) -> torch.Tensor:
        return transposed(name, x) * (torch.nan if name == "layers.1.attn.o" else 1.0)

    products.transposed = broken
    before = {name: each.values for name, each in trained.factors.items()}
    with pytest.raises(KtError, match="gradient of layer 1 contains NaN"):
        trained.loss_and_gradients(texts, masks(texts))
    for name, each in trained.factors.items():
        assert all(map(torch.equal, before[name], each.values))
    products.transposed = transposed
    own = trained.factors["model.layers.2.self_attn.q_proj"]
    own.fill(own.values[0] * torch.inf, own.values[1])
    with pytest.raises(KtError, match="output of layer 2 contains NaN"):
        trained.loss_and_gradients(texts, masks(texts))


def test_a_context_beyond_the_models_is_refused(pack_of: Callable[[str], Pack]) -> None:
    with pytest.raises(UsageError, match="longer than the model's context of 512"):
        opened(pack_of("qwen3"), LoraSettings(), TrainingOptions(context=1024))
