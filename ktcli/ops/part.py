"""Declares the purpose of a tensor: the part of a model that it belongs to, and how one step reads it.

The layers declare both with each tensor. Planner, loader, benchmarks and reports read the declarations and ask no
name, so a new kind of layer is counted right from its first day.
"""

from __future__ import annotations

from enum import Enum


class ModelPart(Enum):
    """A part of a model, under which bytes and operations are counted; the values are shown to people.

    All tensors of one part have one number format, but routed experts whose down projections are more precise.
    """

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    LATENT = "latent attention"  # between cached latents and keys and values
    LINEAR = "linear attention"
    LINEAR_GATES = "linear attention gates"
    POOLING = "pooling"
    INDEXER = "indexer"
    HYPER = "hyper-connections"
    ROUTER = "router"
    EXPERTS = "routed experts"
    EXPERT_LATENT = "expert latent"  # to the rows that experts read, and back
    SHARED = "shared experts"
    DENSE_MLP = "dense MLP"
    NORM_GATES = "gates of norms"
    VECTORS = "norms, biases"
    HEAD = "output head"
    # No tensors, but read and computed with in each step:
    CACHE = "KV cache"
    STATES = "attention state"
    ADAPTERS = "adapters"

    @property
    def runs_beside_experts(self) -> bool:
        """Whether the part can run at the same time as the routed experts of its layer: neither needs the other.
        Every other part of a layer comes before them."""
        return self in (ModelPart.SHARED, ModelPart.DENSE_MLP)


class Access(Enum):
    """The way in which one step reads a tensor, hence which bytes and operations it costs."""

    EVERY_TOKEN = "every token"  # all of it, multiplied with each token's vector
    OUTPUTS = "outputs"  # all of it, multiplied with the vector of each token that gives logits
    CHOSEN = "chosen"  # the matrices, or the biases, of the experts that the tokens choose
    ROWS = "rows"  # one row per token, looked up
    ONCE = "once"  # all of it, whatever the number of tokens: norms and biases
    # Read only where a step expands keys from latents, instead of another tensor of the same size, which is the one
    # that is counted; what positions before the step cost is counted with the cache.
    EXPANSION = "expansion"
