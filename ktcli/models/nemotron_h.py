"""Nemotron 3 (Nano 30B-A3B, Super 120B-A12B, Ultra) and Nemotron-H: each layer is a single part after a norm:
Mamba-2, attention without positions, experts or an MLP.

MLPs have no gate: down(relu(up x)^2). Experts are routed as DeepSeek-V3's; in the larger models they read and give rows
of a latent space. Layers of multi-token prediction (`mtp.*`) are not read. The time step is bounded by
`time_step_limit`, as the publisher's own code has it; transformers 5.23 bounds it by `time_step_min` where it reads
many tokens at once, and not at all where it reads one. Source: transformers 5.23 (nemotron_h).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.grouped_query import GroupedQueryAttention
from ktcli.layers.names import EachExpert, SparseNames
from ktcli.models.attention import read_gqa_shape
from ktcli.models.config import MAX_LAYERS, Defaults, Fields, read_eps
from ktcli.models.feedforward import read_corrected_routing, read_dense, read_sparse
from ktcli.models.mamba import read_mamba
from ktcli.models.model import Model
from ktcli.models.pattern import read_types
from ktcli.models.skeleton import Prefixes, assemble
from ktcli.native import SQUARED_RELU

MODEL_TYPES: Defaults = {
    "nemotron_h": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "layer_norm_epsilon": 1e-5,
    }
}

_MAMBA, _ATTENTION, _SPARSE, _DENSE = "linear_attention", "full_attention", "moe", "mlp"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "E": _SPARSE, "-": _DENSE}
_OTHER_WORDS = {"mamba": _MAMBA, "attention": _ATTENTION}  # of transformers before 5.13
_TYPES, _PATTERN = "layers_block_type", "hybrid_override_pattern"
# transformers' loader has "backbone." for "model."; its experts may lie in one tensor.
_PREFIXES = Prefixes(
    body="backbone",
    attention="mixer",
    mlp="mixer",
    embedding="embeddings",
    norms=("norm", "norm"),
    norm="norm_f",
)
_NAMES = SparseNames((EachExpert(), EachExpert(up="experts.up_proj", down="experts.down_proj")))
# Fields of which one value is known.
_ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
}


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f = _own(f)
    f.only(_ONLY)
    f.require_absent("sliding_window")
    kinds = _kinds(f)
    made = {kind: _part(f, kind) for kind in dict.fromkeys(kinds)}
    return assemble(f, "nemotron_h", lambda i: made[kinds[i]], _PREFIXES)


def cut(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the model's first `layers` layers, at least one of them with routed
    experts if the model has any.
    """
    f = _own(f)
    kinds = _kinds(f)
    kept = kinds[:layers]
    if _SPARSE in kinds and _SPARSE not in kept:
        kept = [*kept[:-1], _SPARSE]
    return {**f.values, _TYPES: kept, "num_hidden_layers": layers}


def _own(f: Fields) -> Fields:
    """Returns the fields of a config, with each layer's kind listed in transformers' words."""
    listed, pattern = f.values.get(_TYPES, f.values.get("layer_types")), f.values.get(_PATTERN)
    if listed is None and pattern is None:
        raise BadCheckpoint(f"{f.where}: {_TYPES} and {_PATTERN} are missing")
    if listed is None:
        if not isinstance(pattern, str) or set(pattern) - set(_LETTERS) or not pattern:
            raise BadCheckpoint(
                f"{f.where}: {_PATTERN} is {str(pattern)[:60]!r}, not a letter of {''.join(_LETTERS)} for each layer"
            )
        listed = [_LETTERS[letter] for letter in pattern]
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_LAYERS:
        raise BadCheckpoint(f"{f.where}: {_TYPES} is not a list of 1..{MAX_LAYERS} layers")
    n_layers = f.whole("num_hidden_layers", high=MAX_LAYERS, default=len(listed))
    if n_layers != len(listed):
        raise BadCheckpoint(
            f"{f.where}: num_hidden_layers is {n_layers}, but {len(listed)} layers are listed"
        )
    kinds = [_OTHER_WORDS.get(kind, kind) if isinstance(kind, str) else kind for kind in listed]
    eps = f.number("layer_norm_epsilon", high=1.0)
    own = {_TYPES: kinds, "num_hidden_layers": n_layers, "rms_norm_eps": eps}
    return Fields({**f.values, **own}, f.where)


def _kinds(f: Fields) -> list[str]:
    """Returns each layer's kind."""
    return read_types(f, _TYPES, *_LETTERS.values()) or []


def _part(f: Fields, kind: str) -> tuple[Attention | None, Mlp | None]:
    """Reads the one part of a layer of this kind."""
    match kind:
        case "linear_attention":
            return read_mamba(f, f.whole("mamba_head_dim", high=4096)), None
        case "full_attention":
            hidden, shape = f.whole("hidden_size"), read_gqa_shape(f)
            return GroupedQueryAttention(hidden, shape, None, read_eps(f)), None
        case "moe":
            return None, _sparse(f)
    return None, replace(read_dense(f), glu=SQUARED_RELU)


def _sparse(f: Fields) -> Mlp:
    shared = f.whole("moe_shared_expert_intermediate_size")
    f.require("n_shared_experts", f.whole("n_shared_experts"), 1)
    own = read_sparse(f, read_corrected_routing(f), correction=True, names=_NAMES)
    latent = f.whole("moe_latent_size") if f.has("moe_latent_size") else 0
    return replace(own, shared_width=shared, glu=SQUARED_RELU, latent=latent)
