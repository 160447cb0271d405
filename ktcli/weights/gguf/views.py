"""Views of the tensors that GGUF converters rearrange, by the tensors' names on the hub below their layer."""

from __future__ import annotations

from ktcli.models.config import MAX_HEADS, Fields
from ktcli.weights.gguf.types import Order, TensorView, less_one, log_of_positive, log_of_rate

_ADDED_ONE = TensorView(value=less_one)
NORMS_LESS_ONE = {
    f"{name}.weight": _ADDED_ONE
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "model.norm",
        "language_model.model.norm",
        "self_attn.index_q_norm",
        "self_attn.index_k_norm",
    )
}


RATES_AND_RUNS = {
    f"{layer}.{name}": view
    for layer in ("mixer", "mamba")
    for name, view in (
        ("A_log", TensorView(value=log_of_rate)),
        ("norm.weight", TensorView(in_runs=True)),
    )
}


def _delta_heads(f: Fields) -> tuple[int, int, int, int]:
    """The numbers of key heads and of value heads for each, the columns of a value head, and the rows of q and k."""
    heads, keys = f.whole("linear_num_value_heads", high=MAX_HEADS), "linear_num_key_heads"
    key_heads = f.whole(keys, high=heads)
    f.require_multiple("linear_num_value_heads", heads, key_heads)
    width = 2 * key_heads * f.whole("linear_key_head_dim", high=4096)
    dim = f.whole("linear_value_head_dim", high=4096)
    f.require_width("width of linear attention", width + heads * dim)
    return key_heads, heads // key_heads, dim, width


# Ling 3's are stored as they are, the others' with a minus.
RATES_AS_LOGS = {
    "self_attn.A_log": TensorView(value=log_of_rate),
    "attention.A_log": TensorView(value=log_of_positive),
}
DELTA_BY_HEAD = {**NORMS_LESS_ONE, "linear_attn.A_log": TensorView(value=log_of_rate)}


def next_views(f: Fields) -> dict[str, TensorView]:
    """Returns, by hub name below the layer (such as "linear_attn.A_log"), a `TensorView` for each tensor of Qwen3-Next
    that its GGUF file stores rearranged or transformed: norms, decay rates, and alpha and beta, whose rows the file has
    in one tensor."""
    keys, each, _, _ = _delta_heads(f)
    beta, alpha = (Order((keys, each), (2 * each, 1), first=first) for first in (0, each))
    return {
        **DELTA_BY_HEAD,
        "linear_attn.in_proj_b.weight": TensorView(beta, sharing=2),
        "linear_attn.in_proj_a.weight": TensorView(alpha, sharing=2),
    }


def tiled_views(f: Fields) -> dict[str, TensorView]:
    """Returns, by hub name below the layer (such as "linear_attn.A_log"), a `TensorView` for each tensor of Qwen3.5
    that its GGUF file stores rearranged or transformed: norms, decay rates, and what has a part for each value head, as
    the file orders value heads otherwise."""
    keys, each, dim, others = _delta_heads(f)

    def tiled(dim: int = 1, kept: int = 0) -> Order:
        return Order((keys, each, dim), (dim, keys * dim, 1), kept)

    return {
        **NORMS_LESS_ONE,
        "linear_attn.in_proj_qkv.weight": TensorView(tiled(dim, others)),
        "linear_attn.conv1d.weight": TensorView(tiled(dim, others)),
        "linear_attn.in_proj_z.weight": TensorView(tiled(dim)),
        "linear_attn.in_proj_b.weight": TensorView(tiled()),
        "linear_attn.in_proj_a.weight": TensorView(tiled()),
        "linear_attn.A_log": TensorView(columns=tiled(), value=log_of_rate),
        "linear_attn.dt_bias": TensorView(columns=tiled()),
        "linear_attn.out_proj.weight": TensorView(columns=tiled(dim)),
    }
