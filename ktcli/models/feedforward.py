"""Reads dense MLPs, experts and their routing from configs, with the limits of the fields.

Names are those of transformers 5.23 and of the hub. Every reader raises BadCheckpoint where a field is missing, of the
wrong type, out of bounds or not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.decoder import Mlp
from ktcli.layers.mlp import DenseMlp
from ktcli.layers.names import USUAL_SPARSE, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.config import MAX_EXPERTS, MAX_TOP_K, Fields
from ktcli.native import Glu
from ktcli.ops.table.experts import GroupScore, Routing, Score

# Defaults of the fields that configs of DeepSeek-V3's experts may leave out.
V3_EXPERTS: Mapping[str, Any] = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}


def read_dense(f: Fields, *, bias: bool = False) -> DenseMlp:
    """Returns the gated MLP without experts that a config describes, of width `intermediate_size`."""
    return DenseMlp(f.whole("hidden_size"), f.whole("intermediate_size"), bias=bias)


def read_sparse(
    f: Fields, routing: Routing, *, correction: bool = False, names: SparseNames = USUAL_SPARSE
) -> SparseMlp:
    """Returns the mixture-of-experts MLP that a config describes: routed experts of width `moe_intermediate_size`,
    chosen by `routing`, and the shared experts as one MLP of their total width.

    Args:
        correction: whether the router has a stored bias for choosing experts.
        names: the names of the weights in the checkpoint.
    """
    width = f.whole("moe_intermediate_size")
    shared = f.whole("n_shared_experts", low=0, high=64, default=0) * width
    f.require_width("n_shared_experts x moe_intermediate_size", shared)
    return SparseMlp(f.whole("hidden_size"), width, routing, correction, shared, names=names)


def read_mlps(
    f: Fields, sparse: SparseMlp, is_dense: Callable[[int], bool], dense: DenseMlp | None = None
) -> Callable[[int], Mlp]:
    """Returns a function from a layer's number to its MLP: `sparse`, or, for layers that are dense, `dense`. If that is
    None, the dense MLP is read from the config when it is needed.
    """
    return lambda i: sparse if not is_dense(i) else read_dense(f) if dense is None else dense


def read_routing(
    f: Fields, *, normalize: bool, score: Score = Score.SOFTMAX, scale: str = ""
) -> Routing:
    """Returns the rule by which a config chooses a token's experts: those with the best scores among all, not in
    groups.

    Args:
        normalize: whether the weights of the chosen experts are divided by their sum.
        scale: the field with a factor of the weights; "": there is none.
    """
    experts, top_k = read_experts(f)
    factor = f.number(scale, high=1e4, default=1.0) if scale else 1.0
    return Routing(experts, top_k, score, normalize=normalize, scale=factor)


def read_corrected_routing(f: Fields) -> Routing:
    """Returns DeepSeek-V3's rule of choosing experts with a config's sizes: sigmoid scores, groups of experts ranked by
    the sum of their two best.
    """
    experts, top_k = read_experts(f)
    routing = Routing(
        experts,
        top_k,
        Score.SIGMOID,
        group_score=GroupScore.TOP2,
        normalize=f.flag("norm_topk_prob", False),
        scale=f.number("routed_scaling_factor", high=1e4, default=1.0),
    )
    n_group, topk_group = read_groups(f, routing)
    return replace(routing, n_group=n_group, topk_group=topk_group)


def read_clamped(f: Fields, *, shifted: bool = False) -> Glu:
    """Returns the gated activation of experts that clamps gate and up to the config's `swiglu_limit`; if `shifted`, the
    gate is scaled by `swiglu_alpha` inside its sigmoid, and 1 is added to up.
    """
    alpha = f.number("swiglu_alpha", low=1e-3, high=1e3) if shifted else 1.0
    return Glu(alpha, f.number("swiglu_limit", low=1e-3, high=1e6), float(shifted))


def read_groups(f: Fields, routing: Routing) -> tuple[int, int]:
    """Returns the number of groups of experts (`n_group`), and the number of groups that a token's experts may come
    from (`topk_group`).
    """
    experts, top_k = routing.experts, routing.top_k
    n_group = f.whole("n_group", high=experts)
    topk_group = f.whole("topk_group", high=n_group)
    f.require_multiple("n_routed_experts", experts, n_group, "n_group")
    available = experts // n_group * topk_group
    if top_k > available:
        raise BadCheckpoint(
            f"{f.where}: num_experts_per_tok is {top_k}, but there are only {available} experts in"
            f" {topk_group} (topk_group) of {n_group} groups (n_group)"
        )
    return n_group, topk_group


def read_experts(f: Fields) -> tuple[int, int]:
    """Returns the number of routed experts of a layer, and the number of them chosen for each token."""
    experts = f.whole("n_routed_experts", high=MAX_EXPERTS)
    top_k = f.whole("num_experts_per_tok", high=MAX_TOP_K)
    if top_k > experts:
        raise BadCheckpoint(
            f"{f.where}: num_experts_per_tok is {top_k}, but there are only {experts} experts"
        )
    return experts, top_k
