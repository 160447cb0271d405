"""transformers as the judge of gradients: torch's graph through its model, with the factors added to its weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import Case
from torch import Tensor
from torch.func import functional_call

from ktcli.training.lora import TrainedFactors
from ktcli.training.model import TrainableModel


@dataclass(frozen=True)
class JudgedStep:
    """What the judge says of one step.

    Attributes:
        gradients: of A [count, r, k] and B [count, n, r] of each target.
        embedded: [T, hidden], of the embedded rows.
        logits: [T, vocab] of each document.
    """

    loss: float
    gradients: Mapping[str, tuple[Tensor, Tensor]]
    embedded: Tensor
    logits: list[Tensor]


def reference_model(case: Case, folder: Path) -> Any:
    """transformers' model of a checkpoint, in f32."""
    model = case.model_class.from_pretrained(
        folder, config=case.config(), dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


class _Doubles:
    """torch, but with f64 for f32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def judge_in_doubles(
    model: Any,
    factors: Mapping[str, TrainedFactors],
    documents: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
) -> JudgedStep:
    """The same as `judge_step` in f64, also where transformers asks for f32; the model is f64 then."""
    model.double()
    for each in model.modules():  # torch's grouped products know no f64
        if hasattr(config := getattr(each, "config", None), "_experts_implementation"):
            config._experts_implementation = "eager"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.modules[type(model).__module__], "torch", _Doubles())
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        return judge_step(model, factors, documents, masks)


def randomise(factors: Mapping[str, TrainedFactors], seed: int, size: float = 0.2) -> None:
    """Fills all factors, A and B different for each expert and element."""
    generator = torch.Generator().manual_seed(seed)
    for each in factors.values():
        a, b = each.values
        sizes = size * a.shape[2] ** -0.5, size * a.shape[1] ** -0.5
        each.fill(
            *(
                torch.randn(f.shape, generator=generator) * s
                for f, s in zip((a, b), sizes, strict=True)
            )
        )


def judge_step(
    model: Any,
    factors: Mapping[str, TrainedFactors],
    documents: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
) -> JudgedStep:
    """The loss of a step and its gradients, each document by itself."""
    leaves, changed = joined(model, factors)
    tokens, total, embedded, every = sum(sum(m[1:]) for m in masks), torch.zeros(()), [], []
    first = next(m for n, m in model.named_modules() if n.endswith("layers.0") and _is_text(n))

    def see(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        embedded.append(given[0].detach().requires_grad_())
        return embedded[-1], *given[1:]

    hook = first.register_forward_pre_hook(see)
    for ids, mask in zip(documents, masks, strict=True):
        out = functional_call(model, changed, (torch.tensor([ids]),))
        logits = out.logits[0].float()
        every.append(logits.detach())
        rows = [at - 1 for at in range(1, len(ids)) if mask[at]]
        if rows:
            labels = torch.tensor([ids[row + 1] for row in rows])
            total = total + torch.nn.functional.cross_entropy(logits[rows], labels, reduction="sum")
    hook.remove()
    loss = total / tokens
    flat = [leaf for both in leaves.values() for leaf in both]
    found = torch.autograd.grad(loss, [*flat, *embedded], allow_unused=True, materialize_grads=True)
    pairs = zip(found[: len(flat) : 2], found[1 : len(flat) : 2], strict=True)
    rows = torch.cat([each[0] for each in found[len(flat) :]])
    return JudgedStep(float(loss.detach()), dict(zip(leaves, pairs, strict=True)), rows, every)


def joined(
    model: Any, factors: Mapping[str, TrainedFactors]
) -> tuple[dict[str, tuple[Tensor, ...]], dict[str, Tensor]]:
    """The factors of each target as leaves of a graph, and the weights of the model with them."""
    leaves = {
        name: tuple(f.to(model.dtype, copy=True).requires_grad_() for f in each.values)
        for name, each in factors.items()
    }
    changed, weights = {}, dict(model.named_parameters())
    for name, each in factors.items():
        at = _parameter(weights, name)
        a, b = leaves[name]
        update = each.scale * (b @ a)
        if _is_transposed(each, weights[at]):
            update = update.mT
        changed[at] = weights[at].detach() + update.reshape(weights[at].shape)
    return leaves, changed


def _is_transposed(factors: TrainedFactors, weight: Tensor) -> bool:
    """Whether transformers has each matrix of a target as [k, n], as some have their experts."""
    n, k = factors.target.n, factors.target.k
    stored = factors.target.pieces[0].stored
    return tuple(weight.shape[-2:]) != (n, k) or (n == k and stored.transposed and stored.matrix)


def comparable(model: Any, factors: Mapping[str, TrainedFactors]) -> dict[str, TrainedFactors]:
    """The factors whose target the judge has, too; of the others B is set to zero, which changes nothing."""
    weights, found = dict(model.named_parameters()), {}
    for name, each in factors.items():
        if _parameter(weights, name):
            found[name] = each
        else:
            a, b = each.values
            each.fill(a, torch.zeros_like(b))
    return found


def _parameter(weights: Mapping[str, Any], name: str) -> str:
    """transformers' name of the weight of a target; "": it has none of that name."""
    for each in (name, f"{name}.weight"):
        if each in weights:
            return each
    tail = name[name.index("layers.") :]
    ends = tail, f"{tail}.weight"
    return next((each for each in weights if each.endswith(ends) and _is_text(each)), "")


def _is_text(name: str) -> bool:
    """Whether a module of transformers belongs to the text model."""
    return not any(part in name for part in ("vis", "audio", "encoder"))


def relative(found: Tensor, wanted: Tensor) -> float:
    """The distance of a gradient from the wanted one, of the wanted one's length."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def worst(trained: TrainableModel, wanted: JudgedStep, floor: float = 0.0) -> tuple[float, str]:
    """The largest distance of a gradient of A or B that the judge has, and where.

    Args:
        floor: gradients shorter than this share of the longest are measured by it: a query that sees one key has none.
    """
    longest = max(float(each.norm()) for both in wanted.gradients.values() for each in both)
    return max(
        (float((found - each).norm() / each.norm().clamp(min=floor * longest)), f"{name} {letter}")
        for name, both in wanted.gradients.items()
        for letter, found, each in zip("AB", trained.factors[name].gradients, both, strict=True)
    )


def least_cosine(trained: TrainableModel, wanted: JudgedStep) -> tuple[float, str]:
    """The smallest cosine between a gradient of A or B and the judge's, and where."""
    return min(
        (float(torch.cosine_similarity(found.flatten(), expected.flatten(), 0)), f"{name} {letter}")
        for name, both in wanted.gradients.items()
        for letter, found, expected in zip("AB", trained.factors[name].gradients, both, strict=True)
    )
