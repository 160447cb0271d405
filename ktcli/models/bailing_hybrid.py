"""Ling 3 (tiny, Flash: 124B-A5B): the last layer of each group has gated latent attention, the others Kimi Delta
Attention with full-rank projections; DeepSeek-V3's experts.

The last layers may clamp what an expert's down projection reads, which transformers' code leaves out and the
publisher's own engine does not. Sources: transformers 5.23 (bailing_hybrid); for the limits and a query latent vLLM
(bailing_moe_v3). Ling 2.5 and 2.6, of the same model_type, have another linear attention and are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.gates import OwnGates
from ktcli.layers.kimi_delta import KimiDelta
from ktcli.layers.latent import LatentAttention
from ktcli.layers.names import CorrectionNames, RouterNames, SparseNames
from ktcli.models.attention import read_mla, require_own_keys
from ktcli.models.config import MAX_HEADS, MAX_LAYERS, Defaults, Fields, read_eps
from ktcli.models.feedforward import V3_EXPERTS, read_corrected_routing, read_dense, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import FULL, LINEAR, cut_typed_dense, read_typed_dense, read_types
from ktcli.models.skeleton import Prefixes, assemble
from ktcli.models.step3p7 import limited, read_limits
from ktcli.ops.table.recurrent import DeltaShape

MODEL_TYPES: Defaults = {
    "bailing_hybrid": {
        **V3_EXPERTS,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 2,
        "rope_theta": 6e6,
        "rope_interleave": True,
        "num_key_value_heads": 32,
        "layer_group_size": 6,
        "head_dim": 128,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
    }
}

_PREFIXES = Prefixes(attention="attention", embedding="word_embeddings")
_NAMES = SparseNames(router=RouterNames(correction=CorrectionNames("gate.expert_bias")))
_GATES = OwnGates("g_proj")
# Fields of which one value is known.
_ONLY = {
    "attention_bias": False,
    "moe_router_enable_expert_bias": True,
    "no_kda_lora": True,
    "rope_interleave": True,
    "scale_router_input": False,
    "up_proj_norm": False,
    "use_bias": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_qkv_bias": False,
    "value_norm": False,
    "gated_attention_proj_granularity_type": "head_wise",
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f = _own(f)
    f.only(_ONLY)
    linear, full, is_linear = _delta(f), _latent(f), _linear_layers(f)
    sparse = read_sparse(f, read_corrected_routing(f), correction=True, names=_NAMES)
    width = f.whole("moe_shared_expert_intermediate_size", default=sparse.width)
    f.require("moe_shared_expert_intermediate_size", width, sparse.width)
    limits = read_limits(f, "expert_swiglu_limit_list")
    shared_limits = read_limits(f, "share_expert_swiglu_limit_list")
    is_dense = read_typed_dense(f)

    def parts(i: int) -> tuple[Attention, Mlp]:
        own, beside = limited(limits[i]), limited(shared_limits[i])
        mlp = read_dense(f) if is_dense(i) else replace(sparse, glu=own, shared_glu=beside)
        return linear if is_linear[i] else full, mlp

    return assemble(f, "bailing_hybrid", parts, _PREFIXES)


def cut(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the model's first `layers` layers, at least one of them with routed
    experts.
    """
    f = _own(f)
    kinds = [LINEAR if linear else FULL for linear in _linear_layers(f)]
    return cut_typed_dense(Fields({**f.values, "layer_types": kinds}), layers)


def _own(f: Fields) -> Fields:
    """Returns the fields of a config, which must not be one of Ling 2.5 or 2.6."""
    if not f.has("short_conv_kernel_size"):
        raise BadCheckpoint(
            f"{f.where}: short_conv_kernel_size is missing, as in Ling 2.5 and 2.6, which are not supported"
        )
    return f


def _linear_layers(f: Fields) -> list[bool]:
    """Returns for each layer whether its attention is linear."""
    kinds = read_types(f, "layer_types", LINEAR, FULL)
    if kinds is not None:
        return [kind == LINEAR for kind in kinds]
    group = f.whole("layer_group_size", high=MAX_LAYERS)
    # Of layers behind the last whole group, vLLM and transformers say different things.
    f.require_multiple("num_hidden_layers", f.n_layers, group, "layer_group_size")
    return [(i + 1) % group != 0 for i in range(f.n_layers)]


def _delta(f: Fields) -> KimiDelta:
    """Reads the linear attention."""
    heads = f.whole("linear_num_heads", "num_attention_heads", high=MAX_HEADS)
    # transformers keeps the width of these heads under another name once it has read `head_dim`.
    dim = f.whole("linear_head_dim", "head_dim", high=4096)
    f.require_width("width of linear attention", 3 * heads * dim)
    f.require("num_kv_heads_for_linear_attn", f.values.get("num_kv_heads_for_linear_attn", 0), 0)
    width = f.whole("linear_conv_kernel_dim", "short_conv_kernel_size", low=2, high=16)
    lowest = f.number("kda_lower_bound", low=-1e3, high=-1e-3)
    bounded = f.flag("kda_safe_gate", False)
    shape = DeltaShape(heads, heads, dim, dim, by_channel=True, lowest=lowest if bounded else 0)
    # The hub calls the last projection as in the first; transformers writes the second.
    names = "o_proj", "dense"
    return KimiDelta(f.whole("hidden_size"), shape, width, read_eps(f), direct=True, o_names=names)


def _latent(f: Fields) -> LatentAttention:
    """Reads the latent attention, each of whose heads has a gate."""
    require_own_keys(f)
    made = read_mla(f)
    f.require("rotary_dim", f.whole("rotary_dim", default=made.shape.rope), made.shape.rope)
    return replace(made, gates=_GATES, o_name="dense")
