"""Gemma 3 (270M to 27B, and the text part of those with vision): norms before and after attention and MLP, windows in
five of six layers.

Layers that attend to all positions have a rotation of their own. Gates are gelu by tanh. Embedded rows are multiplied
by the root of their width, which is not rounded here; transformers rounds it to the type of the weights. Source:
transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktcli.layers.decoder import Attention, Mlp, Multipliers
from ktcli.layers.grouped_query import GroupedQueryAttention, QkNorms
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_CONTEXT, MAX_LAYERS, TEXT, Defaults, Fields
from ktcli.models.feedforward import read_dense
from ktcli.models.model import Model
from ktcli.models.pattern import FULL, SLIDING, cut_layers, read_windows
from ktcli.models.skeleton import GELU, Prefixes, assemble, read_limit, text_part
from ktcli.native import GELU_TANH

_TEXT, _VISION = "gemma3_text", "gemma3"
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
MODEL_TYPES: Defaults = {
    _TEXT: _DEFAULTS,
    _VISION: {"tie_word_embeddings": True, TEXT: _DEFAULTS},
}

cut = cut_layers

# The base of each kind's rotation: its field on the hub, and its default.
_THETAS = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
_PREFIXES = Prefixes(
    norm_plus=1.0,
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
)
_VISION_PREFIXES = replace(
    _PREFIXES,
    body="language_model.model",
    head="language_model.lm_head",
    ignored=("vision_tower.*", "multi_modal_projector.*"),
)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    has_vision = f.values["model_type"] == _VISION
    f = text_part(f, _TEXT) if has_vision else f
    f.only({"use_bidirectional_attention": False})
    # Which transformers reads and computes without.
    for name in ("attn_logit_softcapping", *(["final_logit_softcapping"] if has_vision else [])):
        f.require_absent(name)
    f.whole("sliding_window", high=MAX_CONTEXT)
    step = f.whole("sliding_window_pattern", high=MAX_LAYERS)
    window = read_windows(f, default=lambda i: bool((i + 1) % step))
    full, sliding = _attention(f, FULL), _attention(f, SLIDING)
    mlp = replace(read_dense(f), glu=GELU_TANH)

    def parts(i: int) -> tuple[Attention, Mlp]:
        return sliding.within(window(i)) if window(i) else full, mlp

    prefixes = _VISION_PREFIXES if has_vision else _PREFIXES
    multipliers = Multipliers(embedding=f.whole("hidden_size") ** 0.5, limit=read_limit(f))
    return assemble(f, "gemma3", parts, prefixes, multipliers=multipliers, activation=GELU)


def _attention(f: Fields, kind: str) -> GroupedQueryAttention:
    """Returns the attention of the layers of one kind."""
    own = read_gqa(_of_kind(f, kind), norms=QkNorms(plus=1.0), biased=True)
    scale = f.number("query_pre_attn_scalar", low=1e-3) ** -0.5
    return replace(own, shape=replace(own.shape, scale=scale))


def _of_kind(f: Fields, kind: str) -> Fields:
    """Returns the config with the rotation of one kind of layer: listed by kind, or as the hub spells both, of which
    only that of layers without a window is stretched."""
    listed = Fields(f.values.get("rope_parameters") or {}, f"{f.where}: rope_parameters")
    rope = dict(Fields(listed.values.get(kind) or {}, f"{f.where}: rope of {kind}").values)
    if kind == FULL:
        rope |= Fields(f.values.get("rope_scaling") or {}, f"{f.where}: rope_scaling").values
    name, usual = _THETAS[kind]
    rope.setdefault("rope_theta", f.values.get(name, usual))
    return Fields({**f.values, "rope_parameters": rope}, f.where)
