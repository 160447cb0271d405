"""The weights of a model in training: loaded as for a chat, and combined with the trained factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ktcli.models import Model
from ktcli.native import Weight
from ktcli.ops import tensors
from ktcli.ops.native import Loaded
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role
from ktcli.ops.torch.packed import Extras
from ktcli.training.backend import TrainedWeights
from ktcli.training.decoded import DecodedExperts, DecodedProducts, packed_of
from ktcli.training.dropout import Dropout
from ktcli.training.lora import DenseFactors, TrainedFactors, factors_of
from ktcli.training.products import (
    DenseProduct,
    DifferentiableExperts,
    HeadMatrices,
    Products,
)
from ktcli.training.recorded import ModelProducts

Places = Mapping[str, Loaded]


def join_factors(
    model: Model,
    loaded: Places,
    products: Products,
    factors: Sequence[TrainedFactors],
    added: Sequence[bool],
    dropout: Dropout,
) -> TrainedWeights:
    """Returns what the operations of a model read: its loaded tensors with the trained factors.

    Args:
        added: see `ModelProducts`.
        dropout: of what factors of dense matrices read.
    """
    matrices: dict[str, DenseProduct | HeadMatrices | None] = {}
    for tensor in model.tensors:
        own = [each for each in factors if isinstance(each, DenseFactors) and each.changes(tensor)]
        if tensor.part is ModelPart.LATENT and tensor.sources[0][0].transposed:
            matrices[tensor.name] = None  # keys for the absorbed form
        elif tensor.part is ModelPart.LATENT:
            of_heads = [(each, each.of_heads(tensor)) for each in own]
            matrices[tensor.name] = HeadMatrices(
                packed_of(_weights(loaded, tensor)), of_heads, dropout
            )
        elif tensor.role in (Role.DENSE, Role.KEPT):
            placed = [(each, each.placed(tensor)) for each in own]
            matrices[tensor.name] = DenseProduct(tensor.name, tensor.n, products, placed, dropout)
    vectors = {
        tensor.name: vector_of(loaded, tensor)
        for tensor in model.tensors
        if tensor.role is Role.VECTOR
    }
    experts, again = DifferentiableExperts(products), DifferentiableExperts(products, added)
    return TrainedWeights(matrices, vectors, experts, again)


def decoded_products(
    loaded: Places, found: ModelProducts, factors: Sequence[TrainedFactors]
) -> DecodedProducts:
    """Returns products of the loaded weights in plain torch, f32; no nodes may share them."""
    dense = {each.weight.name: packed_of(_weights(loaded, each.weight)) for each in found.linear}
    experts = []
    for each in found.experts:
        both = packed_of(_weights(loaded, each.gate_up)), packed_of(_weights(loaded, each.down))
        of_both = factors_of(each.gate_up, factors), factors_of(each.down, factors)
        biases = (
            None if bias is None else vector_of(loaded, bias)
            for bias in (each.gate_up_bias, each.down_bias)
        )
        experts.append(DecodedExperts(*both, Extras(each.glu, *biases), of_both))
    return DecodedProducts(dense, experts)


def vector_of(loaded: Places, tensor: tensors.Tensor) -> Tensor:
    """Returns a loaded vector as torch sees it, f32 [k], of experts [E, k]: the same memory."""
    found = loaded[tensor.name]
    assert isinstance(found, np.ndarray)
    flat = torch.from_numpy(found)
    return flat.view(tensor.count, tensor.k) if tensor.is_expert_bias else flat


def embedding_of(model: Model, loaded: Places) -> Tensor:
    """Returns the embedding [vocab, H] as torch sees it, bf16 or f32: the same memory."""
    table = next(tensor for tensor in model.tensors if tensor.role is Role.TABLE)
    found = loaded[table.name]
    assert isinstance(found, np.ndarray)
    if found.dtype == np.uint16:
        return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(found)


def _weights(loaded: Places, tensor: tensors.Tensor) -> tuple[Weight, ...]:
    found = loaded[tensor.name]
    assert isinstance(found, tuple), tensor.name
    return found
