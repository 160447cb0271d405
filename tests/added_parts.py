"""Adds up the parts of a sum in plain torch, to judge kernels that do it on the way."""

from __future__ import annotations

import torch

from ktcli.ops.torch.merged import Parts


def added(of: Parts) -> torch.Tensor:
    """The sum [T, N] f32, added part after part."""
    if (alone := of.alone) is not None:
        return alone
    values = of.values
    if of.routed is not None:
        ids, slots, gates = of.routed
        here = (ids >= 0) & (slots[ids.clamp(min=0).long()] >= 0)
        values = torch.where(here[..., None], values * gates[..., None], 0.0)
    total = torch.zeros_like(values[:, 0])
    for part in values.unbind(1):
        total = total + part
    return total if of.beside is None else total + of.beside
