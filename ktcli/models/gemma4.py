"""Gemma 4 (31B, 26B-A4B, and the text part of those with vision or audio): a dense MLP and experts side by side, each
with norms before and after.

Five of six layers have a window. The others, and the last, have wider heads, fewer of which are for keys; these may be
the values, too; and of their columns only the first pairs turn. Each layer ends with a factor of the residual. The
small models (E2B, E4B) have embeddings for each layer and layers without keys of their own; these are refused. Source:
transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ktcli.layers.decoder import Attention, Mlp, Multipliers
from ktcli.layers.grouped_query import GroupedQueryAttention, QkNorms
from ktcli.layers.names import RouterNames, SharedNames, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import of_kind, read_gqa
from ktcli.models.config import MAX_CONTEXT, TEXT, Defaults, Fields, read_eps
from ktcli.models.feedforward import read_dense, read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import FULL, SLIDING, cut_layers, read_windows
from ktcli.models.rotation import read_proportional, read_theta, rope_fields, rope_type
from ktcli.models.skeleton import GELU, Prefixes, assemble, read_limit, text_part
from ktcli.native import GELU_TANH

_TEXT, _VISION = "gemma4_text", "gemma4"
_PER_LAYER = "per_layer_config"
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
MODEL_TYPES: Defaults = {
    _TEXT: _DEFAULTS,
    _VISION: {"tie_word_embeddings": True, TEXT: _DEFAULTS},
}

cut = cut_layers
_DENSE_PREFIXES = Prefixes(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
    scalar="layer_scalar",
)
_SPARSE_PREFIXES = replace(_DENSE_PREFIXES, mlp="", norms=("input_layernorm", ""))
_SEEN = tuple(
    f"model.{of}.*" for of in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
)
_NAMES = SparseNames(router=RouterNames("router.proj.weight"), shared=SharedNames("mlp"))


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    has_vision = f.values["model_type"] == _VISION
    f = text_part(f, _TEXT) if has_vision else f
    f.only({"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0})
    direction = "use_bidirectional_attention"
    f.require(direction, f.values.get(direction), None, "vision")
    sparse = f.flag("enable_moe_block", False)
    mlp = _sparse(f) if sparse else replace(read_dense(f), glu=GELU_TANH)
    window = _windows(f)

    def parts(i: int) -> tuple[Attention, Mlp]:
        full = not window(i)
        return _attention(_of_layer(f, i, full), full).within(window(i)), mlp

    prefixes = _SPARSE_PREFIXES if sparse else _DENSE_PREFIXES
    if has_vision:
        prefixes = replace(prefixes, body="model.language_model", ignored=_SEEN)
    multipliers = Multipliers(embedding=f.whole("hidden_size") ** 0.5, limit=read_limit(f))
    return assemble(f, "gemma4", parts, prefixes, multipliers=multipliers, activation=GELU)


def _sparse(f: Fields) -> SparseMlp:
    """Returns the experts with the dense MLP beside them."""
    routing = read_routing(f, normalize=True)
    return SparseMlp(
        f.whole("hidden_size"),
        f.whole("moe_intermediate_size"),
        routing,
        shared_width=f.whole("intermediate_size"),
        names=_NAMES,
        glu=GELU_TANH,
        branch_eps=read_eps(f),
    )


def _windows(f: Fields) -> Callable[[int], int]:
    """Returns a function from a layer's number to the positions that a token of it sees; 0: all, as in the last."""
    f.whole("sliding_window", high=MAX_CONTEXT)
    last = f.n_layers - 1
    window = read_windows(f, default=lambda i: bool((i + 1) % 6))
    return lambda i: 0 if i == last else window(i)


def _of_layer(f: Fields, i: int, full: bool) -> Fields:
    """Returns the config with the heads of a layer, which transformers lists by number, and the hub by kind."""
    values = dict(f.values)
    if f.has(_PER_LAYER):
        listed = Fields(f.values[_PER_LAYER], f"{f.where}: {_PER_LAYER}").values
        own = dict(Fields(listed.get(str(i)) or {}, f"{f.where}: {_PER_LAYER}").values)
        for name in own:
            f.require(f"{_PER_LAYER} field", name, "head_dim", "num_key_value_heads")
        values |= own
    elif full:
        values["head_dim"] = values.get("global_head_dim")
        own_heads = f.has("num_global_key_value_heads") and f.flag("attention_k_eq_v", False)
        if own_heads:
            values["num_key_value_heads"] = values["num_global_key_value_heads"]
    return Fields(values, f.where)


def _attention(f: Fields, full: bool) -> GroupedQueryAttention:
    """Returns the attention of a layer with a window or without."""
    of = of_kind(f, FULL if full else SLIDING)
    rope = rope_fields(of)
    kind = rope_type(rope)
    rope.require("type", kind, "default", "proportional")
    rope.number("rope_theta", high=1e12)  # transformers has no default where there is a list
    plain = Fields({**of.values, "rope_parameters": {"rope_theta": read_theta(of)}}, f.where)
    made = read_gqa(plain, norms=QkNorms(values=True), biased=True)
    return replace(
        made,
        shape=replace(made.shape, scale=1.0),
        rope=made.rope if kind == "default" else read_proportional(of, made.shape.head_dim),
        keys_as_values=full and f.flag("attention_k_eq_v", False),
    )
