"""Cohere 2 with experts (Command A+, North Mini Code): attention and experts read the same row, and are added.

Norms are LayerNorms without a bias, or RMSNorms; only layers with a sliding window have rotary embeddings, of
neighbouring columns, and the first dense ones where the config's pattern says so. Source: transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ktcli.layers.decoder import Attention, Mlp, Multipliers, Wiring
from ktcli.layers.mlp import DenseMlp
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_LAYERS, Defaults, Fields
from ktcli.models.feedforward import read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import cut_typed_dense, read_typed_dense, read_windows
from ktcli.models.skeleton import Prefixes, assemble
from ktcli.ops.table.experts import Score

_PATTERN, _PREFIX_PATTERN = "sliding_window_pattern", "prefix_dense_sliding_window_pattern"
MODEL_TYPES: Defaults = {
    "cohere2_moe": {
        "head_dim": 128,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        _PATTERN: 4,
        _PREFIX_PATTERN: 1,
    }
}

cut = cut_typed_dense

_PREFIXES = Prefixes(norms=("input_layernorm", ""))
_SHARES = {"average": 0.5, "sum": 1.0}
_SCORES = {"softmax": Score.SOFTMAX, "sigmoid": Score.SIGMOID}


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    centred = not f.has("rms_norm_eps")
    eps = f.number("layer_norm_eps" if centred else "rms_norm_eps", high=1.0)
    f = Fields({**f.values, "rms_norm_eps": eps}, f.where)
    attention = read_gqa(f, biased=True, interleaved=True)
    window, is_dense = _windows(f), read_typed_dense(f)
    turned = f.whole(_PREFIX_PATTERN, high=MAX_LAYERS) == 1
    dense, sparse = _dense(f), _sparse(f)

    def parts(i: int) -> tuple[Attention, Mlp]:
        own = attention.within(window(i))
        if not window(i) and not (is_dense(i) and turned):
            own = replace(own, rope=None)
        return own, dense if is_dense(i) else sparse

    scale = Multipliers(logits=f.number("logit_scale", low=1e-6, high=1e6))
    wiring = Wiring(parallel=True, centred=centred)
    return assemble(f, "cohere2_moe", parts, _PREFIXES, multipliers=scale, wiring=wiring)


def _windows(f: Fields) -> Callable[[int], int]:
    """Returns the window of each layer: of the first dense ones and of the others, all but every n-th have one."""
    first = f.whole("first_k_dense_replace", low=0, high=MAX_LAYERS)
    every = f.whole(_PATTERN, high=MAX_LAYERS)
    every_dense = f.whole(_PREFIX_PATTERN, high=MAX_LAYERS)

    def has_window(i: int) -> bool:
        return bool((i + 1) % every_dense if i < first else (i - first + 1) % every)

    return read_windows(f, default=has_window)


def _dense(f: Fields) -> DenseMlp:
    """Reads the MLP of layers without experts."""
    width = f.whole("prefix_dense_intermediate_size", "intermediate_size")
    return DenseMlp(f.whole("hidden_size"), width)


def _sparse(f: Fields) -> SparseMlp:
    """Reads the experts, and how their sum is shared with the expert of all tokens."""
    chosen = f.text("expert_selection_fn", "softmax")
    f.require("expert_selection_fn", chosen, *_SCORES)
    normalize = chosen == "softmax" or f.flag("norm_topk_prob", False)
    routing = read_routing(f, normalize=normalize, score=_SCORES[chosen])
    width, n_shared = f.whole("intermediate_size"), f.whole("n_shared_experts", low=0, high=64)
    f.require_width("num_shared_experts x intermediate_size", n_shared * width)
    way = f.text("shared_expert_combination_strategy", "average")
    f.require("shared_expert_combination_strategy", way, *_SHARES)
    made = SparseMlp(f.whole("hidden_size"), width, routing, shared_width=n_shared * width)
    return replace(made, scale=_SHARES[way] if n_shared else 1.0)
