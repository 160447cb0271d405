"""Attention with gradients: each document attends to itself, causally, without a cache.

The functions are kernels of the table of operations (`ops.torch.kernels`), whose rows are whole documents of one
length. All is f32, as in a chat whose cache is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.torch.attention import attend, attend_from_start
from ktcli.ops.torch.functions import Rows

Rowwise = Callable[[Tensor, int], Tensor]

# Queries that attend at once where a mask is needed: bounds it, [queries, keys].
_BLOCK_QUERIES = 1024


def gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: GqaShape,
    sinks: Tensor | None = None,
    chosen: Any = None,
    *,
    rows: Rows,
) -> Tensor:
    """Returns the output of causal grouped-query attention of documents of one length, each of which attends to itself
    alone.

    Args:
        q: [T, heads * D], rotated; k: [T, kv * D]; v: [T, kv * V].
        shape: the numbers of heads, the scale and the window.
        sinks: [heads], or None.
        chosen: None: a choice of blocks has no gradient here.
    Returns:
        [T, heads * V] f32.
    """
    assert chosen is None, "a model that chooses positions is refused"
    s, group = shape, shape.heads // shape.kv_heads
    query = _heads(q, s.heads, rows.run)
    keys, values = (
        _heads(each, s.kv_heads, rows.run).repeat_interleave(group, 1) for each in (k, v)
    )
    mixed = _attend(query, keys, values, s.scale, s if s.window else None, sinks)
    return mixed.transpose(1, 2).reshape(q.shape[0], -1)


def mla(
    q: Tensor,
    latent: Tensor,
    uk_in: None,
    uk_out: Rowwise,
    uv: Rowwise,
    shape: MlaShape,
    chosen: Any = None,
    *,
    rows: Rows,
    first: int,
) -> Tensor:
    """Returns the output of causal multi-head latent attention of documents of one length, each of which attends to
    itself alone, with keys and values expanded from latents.

    Args:
        q: [T, heads * (nope + rope)], rotated; latent: [T, lora + rope], normed and rotated.
        uk_in: uk_out transposed, which only the absorbed form reads.
        uk_out, uv: the products of rows [T, lora] with the matrices of all heads, [T, heads * nope] and [T, heads * v].
        chosen: None: a choice of positions has no gradient here.
        first: the number of the first row in its step.
    Returns:
        [T, heads * v] f32.
    """
    assert chosen is None, "a model that chooses positions is refused"
    s = shape
    low, rotated = torch.split(latent, [s.lora, s.rope], -1)
    nope, values = (_heads(product(low, first), s.heads, rows.run) for product in (uk_out, uv))
    shared = _heads(rotated, 1, rows.run).expand(*nope.shape[:3], s.rope)
    query = _heads(q, s.heads, rows.run)
    mixed = _attend(query, torch.cat((nope, shared), -1), values, s.scale)
    return mixed.transpose(1, 2).reshape(q.shape[0], -1)


def _heads(x: Tensor, heads: int, run: int) -> Tensor:
    """Returns rows [documents * run, heads * D] as [documents, heads, run, D]."""
    return x.reshape(-1, run, heads, x.shape[1] // heads).transpose(1, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    within: GqaShape | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns causal attention [documents, heads, T, V] of q, k [documents, heads, T, D] and v [..., V].

    torch has a fused kernel, which keeps no scores, where the widths of k and v are equal: the narrower one is padded.

    Args:
        within: has the window; None: there is none.
    """
    width = v.shape[-1]
    if sinks is not None:
        q, k, v = _with_sink(q, k, v, sinks / scale)
    if k.shape[-1] > v.shape[-1]:
        v = pad(v, (0, k.shape[-1] - v.shape[-1]))
    elif k.shape[-1] < v.shape[-1]:
        q, k = (pad(each, (0, v.shape[-1] - each.shape[-1])) for each in (q, k))
    if within is None and sinks is None:
        return attend_from_start(q, k, v, scale)[..., :width]
    return _attend_masked(q, k, v, scale, within)[..., :width]


def _attend_masked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, within: GqaShape | None
) -> Tensor:
    """Returns attention within a window (None: there is none) where keys may have one more at the front, which all see;
    a block of queries at a time, over the keys that it reaches."""
    length = q.shape[2]
    extra = k.shape[2] - length
    out = []
    for first in range(0, length, _BLOCK_QUERIES):
        last = min(first + _BLOCK_QUERIES, length)
        start = max(0, within.first_seen(first)) if within else 0
        tokens = torch.arange(first, last, device=q.device)[:, None]
        places = torch.arange(start, last, device=q.device)
        seen = places <= tokens
        if within:
            seen &= places >= within.first_seen(tokens)
        seen = torch.cat((seen.new_ones(last - first, extra), seen), -1)
        keys, values = (
            torch.cat((each[:, :, :extra], each[:, :, extra + start : extra + last]), 2)
            for each in (k, v)
        )
        block = q[:, :, first:last]
        out.append(attend(block, keys, values, seen, scale))
    return torch.cat(out, 2)


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values with one more key at the front, whose product with each head's queries is
    `sinks` [heads] and whose value is 0."""
    column = sinks[None, :, None, None].expand(*q.shape[:3], 1)
    key = k.new_zeros(*k.shape[:2], 1, k.shape[3] + 1)
    key[..., -1] = 1.0
    return (torch.cat((q, column), -1), torch.cat((key, pad(k, (0, 1))), 2), pad(v, (0, 0, 1, 0)))
