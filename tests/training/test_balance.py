"""The auxiliary loss of routers equals that of transformers, with its gradient, in every family that has one."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path

import pytest
import torch
from convert import convert_checkpoint
from reference import CASES, Case
from torch.func import functional_call
from training.judge import comparable, joined, reference_model
from training.opened import documents, opened

from ktcli.models import build
from ktcli.training.balance import RouterBalance, has_auxiliary_loss
from ktcli.training.model import TrainingOptions
from ktcli.weights.pack import Pack

FACTOR = 0.5  # more than anybody uses, so that its gradient is seen beside that of the tokens


def balanced(case: Case) -> bool:
    gives = "output_router_logits" in signature(case.model_class.forward).parameters
    return has_auxiliary_loss(build(case.own_spelling())) and gives


@pytest.mark.in_turn("case")
@pytest.mark.parametrize("case", [c for c in CASES if balanced(c)], ids=lambda case: case.name)
@pytest.mark.parametrize("retain", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_auxiliary_loss_is_that_of_transformers(
    retain: bool, case: Case, checkpoint_of: Callable[[Case], Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(case)
    pack = Pack.open(
        convert_checkpoint(checkpoint, tmp_path / "pack", experts="bf16", dense="bf16")
    )
    options = TrainingOptions(128, exact=True, retain=retain, balance=FACTOR)
    model, judge = opened(pack, options=options), reference_model(case, checkpoint)
    factors = comparable(judge, model.factors)
    texts = documents(21, 21, 21)
    found = model.loss_and_gradients(texts, [[True] * 21] * 3)
    leaves, changed = joined(judge, factors)
    out = functional_call(judge, changed, (torch.tensor(texts),), {"output_router_logits": True})
    logits, labels = out.logits[:, :-1].flatten(0, 1).float(), torch.tensor(texts)[:, 1:].flatten()
    flat = [leaf for both in leaves.values() for leaf in both]
    own, loss = FACTOR * out.aux_loss, torch.nn.functional.cross_entropy(logits, labels)
    alone, others = (
        torch.autograd.grad(
            each, flat, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for each in (own, loss)
    )
    assert found.balance == pytest.approx(float(out.aux_loss.detach()), rel=1e-6)
    ours = [each for name in leaves for each in model.factors[name].gradients]
    for one, first, second in zip(ours, alone, others, strict=True):
        assert (one - first - second).norm() <= 1e-5 * (first + second).norm()
    assert max(float(each.norm()) for each in alone) > 1e-3  # so that it would be missed


def test_experts_that_are_chosen_alike_cost_as_many_as_a_row_chooses() -> None:
    """The least that it can be; a router that always chooses the same one of them costs their number."""
    even, narrow = RouterBalance(4, 1), RouterBalance(4, 1)
    even.add([100 * torch.eye(4)])
    assert even.loss == pytest.approx(1.0)
    narrow.add([torch.tensor([[100.0, 0, 0, 0]] * 7)])
    assert narrow.loss == pytest.approx(4.0)
