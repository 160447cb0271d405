"""What a model takes from a checkpoint, counted from the declarations of its tensors."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from ktcli.models import Model
from ktcli.ops.tensors import Role


def declared(model: Model, roles: Collection[Role] = tuple(Role)) -> dict[str, int]:
    """Checkpoint name → elements, each name once: MLA's kv_b is stored twice, a tied head is the embedding."""
    seen: set[str] = set()
    found: dict[str, int] = {}
    for tensor in model.tensors:
        ways = tensor.sources
        way = next((w for w in ways if w and seen.issuperset(p.name for p in w)), ways[0])
        seen.update(piece.name for piece in way)
        if tensor.role in roles:
            for piece in way:
                found[piece.name] = prod(piece.shape) * (tensor.count if "{e}" in piece.name else 1)
    return found
