"""What a family file gives: the facts of one model, its tensors, and its forward.

`Spec` holds the few numbers that planner, engine and commands need; everything about bytes follows from
the tensors, so that nothing is counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ktcli.layers.backend import Backend, Value
from ktcli.layers.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape of one model.

    Attributes:
        family: name of the family file, e.g. "deepseek_v3".
        hidden: width of the residual stream.
        layers: decoder layers (a multi-token-prediction layer is not one).
        moe_layers: those of them with routed experts.
        vocab: rows of the embedding.
        context: positions the model was made for.
        kv_elements: cached elements per token and layer (GQA: K and V; MLA: latent and rope).
        attention_ops: multiply-adds x 2 per token, layer and cached position, as decode computes them.
        experts, top_k, expert_width: of a MoE layer; 0 for a dense model.
    """

    family: str
    hidden: int
    layers: int
    moe_layers: int
    vocab: int
    context: int
    kv_elements: int
    attention_ops: int
    experts: int
    top_k: int
    expert_width: int


class Model(Protocol):
    """A built model: no weights, no memory."""

    @property
    def spec(self) -> Spec: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every stored tensor: embedding, layers in order, final norm, head."""

    def forward(self, b: Backend) -> Value:
        """Record or run one step: ids of the step in, logits [outputs, vocab] out."""
