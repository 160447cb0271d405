"""What a model takes from a checkpoint, counted from the declarations of its tensors."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from ktcli.models import Model
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role, Stored, Tensor


def declared(model: Model, roles: Collection[Role] = tuple(Role)) -> dict[str, int]:
    """Checkpoint name → elements, each name once: MLA's kv_b and a tied head are stored twice."""
    return {
        piece.name: prod(piece.shape) * (tensor.count if "{e}" in piece.name else 1)
        for tensor in model.tensors
        if tensor.role in roles
        for piece in _usual(tensor)
    }


def _usual(tensor: Tensor) -> tuple[Stored, ...]:
    """What a published checkpoint has of a tensor: of a head that may be the embedding, nothing else."""
    return tensor.sources[-1 if tensor.part is ModelPart.HEAD else 0]
