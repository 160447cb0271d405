"""Chooses the Triton kernel of each operation by the number of rows. For signatures see `ops.torch.kernels`.

With one row per sequence and at most FEW_ROWS of them everything here can be captured into a CUDA graph: no
synchronisation, no shape that depends on data. Kernels are compiled at their first call, which must come before
the capture. There is no `exact` here: the kernels in torch have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ktcli.native import Glu
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.table.rowwise import Reads
from ktcli.ops.torch import chosen as torch_chosen
from ktcli.ops.torch import functions
from ktcli.ops.torch.chosen import Chosen
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.merged import Latent, Mlp, Parts
from ktcli.ops.torch.packed import Matrix, Packed, PackedStack, PlainMatrix
from ktcli.ops.torch.pages import KvPages, Pages
from ktcli.ops.triton.attention import append, attend_latent, gqa_one
from ktcli.ops.triton.panels import unpack_all
from ktcli.ops.triton.product import vector_experts, vector_product
from ktcli.ops.triton.small import norm, rope, route, swiglu, unrotated
from ktcli.ops.triton.sums import sum_parts
from ktcli.ops.triton.tiles import TILE_ROWS, operand_type, tile_experts, tile_product

# Up to this many rows, each slot of a routing reads its expert by itself: of 256 experts, 16 rows of 8 choose
# 100 different ones with 128 slots. Above, slots are grouped.
FEW_ROWS = 16
# Elements of a matrix that are un-packed at once, 128 MiB of bf16: the dense layers of DeepSeek-V3 have
# matrices of four times that, for which a plan sets nothing aside.
UNPACKED_ELEMENTS = 1 << 26


def product(
    x: Tensor, weight: Matrix, bias: Tensor | None = None, reads: Reads = Reads.FORMAT
) -> Parts | None:
    """Returns x [T, K] W^T + bias as a sum of parts [T, N] that is not yet added up; None: no kernel here computes it
    in parts.
    """
    w = weight
    if isinstance(w, PlainMatrix) or reads is Reads.F32:
        return None
    if x.shape[0] == 1:
        return vector_product(x, w, bias)
    return tile_product(x, w, bias) if x.shape[0] <= TILE_ROWS else None


def linear(
    x: Tensor, weight: Matrix, bias: Tensor | None = None, reads: Reads = Reads.FORMAT
) -> Tensor:
    """Returns x [T, K] W^T + bias, [T, N] f32."""
    if (parts := product(x, weight, bias, reads)) is not None:
        return sum_parts(parts)
    if isinstance(weight, PlainMatrix) or reads is Reads.F32:
        return functions.linear(x, weight, bias, reads)
    x, w = unrotated(x, weight)
    first, dtype = torch.zeros(1, dtype=torch.int32, device=x.device), operand_type(w)
    done = [
        functions.product(x, unpack_all(block, first, dtype)[0], exact=dtype is torch.float32)
        for block in functions.blocks(w, UNPACKED_ELEMENTS)
    ]
    out = done[0] if len(done) == 1 else torch.cat(done, -1)
    return out if bias is None else out + bias


def few_experts(
    x: Tensor, ids: Tensor, gate: Tensor, stack: PackedStack, mlp: Mlp | None = None
) -> tuple[Parts, Parts | None] | None:
    """Returns two sums of parts, not yet added up: the weighted outputs [T, H] of the chosen experts, and the output of
    `mlp` or None if it was not computed with them. None instead of both: too many rows, or no kernel for these experts.
    """
    if stack.gate_up.count == 0 or stack.extras.glu.ungated or x.shape[0] > FEW_ROWS:
        return None
    parts, along = vector_experts(x, ids, gate, stack, _beside(mlp) if x.shape[0] == 1 else None)
    if along is not None and mlp is not None:
        along = replace(along, beside=mlp.bias)
    return replace(parts, beside=_down_bias(ids, gate, stack)), along


def _beside(mlp: Mlp | None) -> tuple[Packed, Packed, Glu] | None:
    """What stands beside the experts of one row; None: nothing. Of several rows, tensor cores take an MLP in one go."""
    if mlp is None or isinstance(mlp.gate_up, PlainMatrix) or isinstance(mlp.down, PlainMatrix):
        return None
    return None if mlp.glu.ungated else (mlp.gate_up, mlp.down, mlp.glu)


def experts(x: Tensor, ids: Tensor, gate: Tensor, stack: PackedStack) -> Tensor:
    """Returns the weighted sum of the chosen experts that are on the device, [T, H] f32; see `functions.experts`."""
    if (few := few_experts(x, ids, gate, stack)) is not None:
        return sum_parts(few[0])
    if stack.gate_up.count == 0 or stack.extras.glu.ungated:  # the kernels here have a gate
        return functions.experts(x, ids, gate, stack)
    out = tile_experts(x, ids, gate, stack)
    bias = _down_bias(ids, gate, stack)
    return out if bias is None else out.add_(bias)


def _down_bias(ids: Tensor, gate: Tensor, stack: PackedStack) -> Tensor | None:
    """The biases of the chosen experts that are here, times their gates, [T, H]. This is a product with all biases:
    there are few experts, and many rows of a long prompt."""
    if (bias := stack.extras.down_bias) is None:
        return None
    expert = ids.clamp(min=0).long()
    weights = torch.where((ids >= 0) & (stack.slots[expert] >= 0), gate, 0.0)
    return gate.new_zeros(ids.shape[0], bias.shape[0]).scatter_add_(1, expert, weights) @ bias


def gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: GqaShape,
    sinks: Tensor | None = None,
    chosen: Chosen | None = None,
    *,
    rows: Rows,
    cache: KvPages,
) -> Tensor:
    """Appends k and v to the cache, then returns causal grouped-query attention, [T, heads * V] f32; runs of more
    than one row, and chosen blocks, are computed in torch."""
    if not rows.single or chosen is not None:
        return torch_chosen.gqa(q, k, v, shape, sinks, chosen, rows=rows, cache=cache)
    append(cache[0], k, rows)
    append(cache[1], v, rows)
    return gqa_one(q, cache, rows, shape, sinks)


def mla(
    q: Tensor,
    latent: Tensor,
    uk_in: Packed,
    uk_out: Packed,
    uv: Packed,
    shape: MlaShape,
    chosen: Chosen | None = None,
    *,
    rows: Rows,
    cache: tuple[Pages],
) -> Tensor:
    """Appends the latent to the cache, then returns the output of causal latent attention, [T, heads * v] f32; runs of
    more than one row, and chosen positions, are computed in torch."""
    if not rows.single or chosen is not None:
        weights = uk_in, uk_out, uv
        return torch_chosen.mla(q, latent, *weights, shape, chosen, rows=rows, cache=cache)
    of = Latent(Parts.of(q), Parts.of(latent), None, 0.0, None)
    return attend_latent(of, uk_in, uv, shape, rows=rows, cache=cache)


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "norm": norm,
    "linear": linear,
    "rope": rope,
    "gqa": gqa,
    "mla": mla,
    "route": route,
    "swiglu": swiglu,
}
