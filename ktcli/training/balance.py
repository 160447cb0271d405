"""The auxiliary loss of routers: small where all experts are chosen alike, over all layers and rows of a step.

With E experts it is E * sum over e of f_e * p_e: f_e is the mean number of times that a row chooses expert e, p_e the
mean probability that its router gives it, both over all layers with experts together. Only p has a gradient.
Source: Switch Transformers, section 2.2, as transformers computes it (`load_balancing_loss_func`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ktcli.models import Model
from ktcli.ops.torch.functions import softmax

# The families whose models in transformers add this loss; in others LLaMA-Factory's moe_aux_loss_coef changes nothing.
_FAMILIES = frozenset(
    """
    ernie4_5_moe gpt_oss granitemoe laguna mellum mixtral olmoe qwen2_moe qwen3_moe qwen3_vl
    """.split()
)


def has_auxiliary_loss(model: Model) -> bool:
    """Returns whether transformers adds the routers' auxiliary (load-balancing) loss for models of this family, and the
    model has experts.
    """
    return model.spec.family in _FAMILIES and model.spec.experts > 0


class RouterBalance:
    """Accumulates the routing of a step, for the auxiliary loss and its gradient."""

    def __init__(self, experts: int, top_k: int) -> None:
        self._chosen, self._probability = torch.zeros(experts), torch.zeros(experts)
        self._experts, self._top_k, self._rows = experts, top_k, 0

    def add(self, logits: Sequence[Tensor]) -> None:
        """Adds the choices and probabilities of a layer's routers, whose logits are [T, E] each, to the sums of the
        step.
        """
        for each in logits:
            probability = each.detach().softmax(-1).cpu()
            chosen = probability.topk(self._top_k, -1).indices
            self._chosen += torch.bincount(chosen.flatten(), minlength=self._experts)
            self._probability += probability.sum(0)
            self._rows += len(each)

    @property
    def loss(self) -> float:
        """The routers' auxiliary (load-balancing) loss over all rows that were added; 0.0 if there are none."""
        found = (self._chosen.double() * self._probability.double()).sum()
        return float(found) * self._experts / self._rows**2 if self._rows else 0.0

    def share(self, logits: Sequence[Tensor]) -> Tensor:
        """Returns the part of the auxiliary loss that comes from a layer's routers, a scalar tensor with a graph
        through their logits [T, E]; valid once all layers were added.
        """
        weight = (self._chosen * (self._experts / self._rows**2)).to(logits[0].device)
        return sum(((softmax(each).sum(0) * weight).sum() for each in logits), weight.new_zeros(()))
