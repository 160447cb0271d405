"""Declares the purpose of a tensor: the part of a model that it belongs to, and how one step reads it.

The layers declare both with each tensor. Planner, loader, benchmarks and reports read the declarations and ask no
name, so a new kind of layer is counted right from its first day.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


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
    def is_mlp(self) -> bool:
        """Whether the part is an MLP that every token passes: the shared experts or a dense MLP. It needs its rows
        only, neither router nor cache: so it can run at the same time as the routed experts of its layer, and on the
        CPU while the layer is on a GPU. Every other part of a layer comes before its experts.
        """
        return self in (ModelPart.SHARED, ModelPart.DENSE_MLP)


class LayerPart(NamedTuple):
    """A part of one decoder layer."""

    layer: int
    part: ModelPart


# The rows of kernels of parts that have another one than the pool, by layer (None: of no layer) and part.
RowOf = Mapping[tuple[int | None, ModelPart], str]


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
