"""The weights of a model in training: loaded as for a chat, and combined with the trained factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ktcli.models import Model
from ktcli.native import Arena, Weight
from ktcli.ops import tensors
from ktcli.ops.native import Loaded
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role
from ktcli.ops.torch.packed import Packed
from ktcli.training.backend import TrainedWeights
from ktcli.training.denselayers import DenseLayers, is_read
from ktcli.training.dropout import Dropout
from ktcli.training.lora import DenseFactors, TrainedFactors
from ktcli.training.products import DenseProduct, DifferentiableExperts, HeadMatrices, Products

Places = Mapping[str, Loaded]


def join_factors(
    model: Model,
    loaded: Places,
    products: Products,
    factors: Sequence[TrainedFactors],
    added: Sequence[bool],
    dropout: Dropout,
    dense: DenseLayers | None = None,
) -> TrainedWeights:
    """Returns the weights that the operations of a model read in training: its loaded tensors combined with the trained
    factors.

    Args:
        added: for each layer with experts, whether no gradient depends on the values of the experts' sum.
        dropout: drops elements of what the factors of dense matrices read.
        dense: the matrices on a device that trains; None: all are loaded.
    """
    matrices: dict[str, DenseProduct | HeadMatrices | None] = {}
    for tensor in model.tensors:
        own = [each for each in factors if isinstance(each, DenseFactors) and each.changes(tensor)]
        if not is_read(tensor):
            matrices[tensor.name] = None
        elif tensor.part is ModelPart.LATENT:
            of_heads = [(each, each.of_heads(tensor)) for each in own]
            packed = _packed(loaded, tensor, dense)
            matrices[tensor.name] = HeadMatrices(packed, of_heads, dropout)
        elif tensor.role in (Role.DENSE, Role.KEPT):
            placed = [(each, each.placed(tensor)) for each in own]
            matrices[tensor.name] = DenseProduct(tensor.name, tensor.n, products, placed, dropout)
    device = torch.device("cpu") if dense is None else dense.device
    vectors = {
        tensor.name: vector_of(loaded, tensor).to(device)
        for tensor in model.tensors
        if tensor.role is Role.VECTOR
    }
    experts, again = DifferentiableExperts(products), DifferentiableExperts(products, added)
    return TrainedWeights(matrices, vectors, experts, again)


def packed_of(weights: Sequence[Weight]) -> Packed:
    """Returns a torch view, which shares the memory, of the one loaded packed weight in `weights`, which lies whole on
    one NUMA node.
    """
    (weight,) = weights
    owner = weight.owner
    assert isinstance(owner, Arena)
    first = weight.address - owner.address
    data = torch.from_numpy(owner.bytes[first : first + weight.size_bytes])
    return Packed(weight.format, weight.n, weight.k, data.view(weight.count, -1))


def vector_of(loaded: Places, tensor: tensors.Tensor) -> Tensor:
    """Returns a torch view, which shares the memory, of a loaded vector: f32 [k], or [E, k] for a bias of experts."""
    found = loaded[tensor.name]
    assert isinstance(found, np.ndarray)
    flat = torch.from_numpy(found)
    return flat.view(tensor.count, tensor.k) if tensor.is_expert_bias else flat


def embedding_of(model: Model, loaded: Places) -> Tensor:
    """Returns a torch view, which shares the memory, of the loaded embedding [vocab, H], bf16 or f32."""
    table = next(tensor for tensor in model.tensors if tensor.role is Role.TABLE)
    found = loaded[table.name]
    assert isinstance(found, np.ndarray)
    if found.dtype == np.uint16:
        return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(found)


def _packed(
    loaded: Places, tensor: tensors.Tensor, dense: DenseLayers | None
) -> Callable[[], Packed]:
    """Returns a function that returns a tensor as torch sees it, when its layer's turn has come."""
    if dense is not None:
        return partial(dense.matrix, tensor.name)
    found = packed_of(weights_of(loaded, tensor))
    return lambda: found


def weights_of(loaded: Places, tensor: tensors.Tensor) -> tuple[Weight, ...]:
    """Returns the loaded packed weights of a tensor, one for each NUMA node that has a part of it."""
    found = loaded[tensor.name]
    assert isinstance(found, tuple), tensor.name
    return found
