"""A.X K2 (Light): DeepSeek-V3.2 whose norms have gates, as the heads' outputs do.

Queries and gates of the heads are one projection, of the query latent with its norm and without. Larger releases may
have groups of experts, of which those that are closed count as 0 instead of not at all: such a config is refused.
Source: transformers 5.23 (axk2).
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.layers.decoder import DecoderLayer
from ktcli.layers.gates import NormGate, QueryGates
from ktcli.layers.sparse import SparseMlp
from ktcli.models.config import MAX_LAYERS, Defaults, Fields
from ktcli.models.deepseek_v32 import ONLY, read_indexed
from ktcli.models.feedforward import V3_EXPERTS, read_corrected_routing, read_mlps, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_typed_dense, read_typed_dense
from ktcli.models.skeleton import assemble

_RANK = "gated_norm_rank"
MODEL_TYPES: Defaults = {
    "axk2": {
        **V3_EXPERTS,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": 384,
        "rope_interleave": True,
        "indexer_rope_interleave": False,
        "index_head_dim": 128,
        "index_n_heads": 16,
        "index_topk": 2048,
        _RANK: 16,
    }
}

cut = cut_typed_dense
_GROUPS = "n_group", "topk_group"


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    # A null means that experts are in no groups, which is one group of all.
    f = Fields({**f.values, **{name: f.values.get(name) or 1 for name in _GROUPS}})
    f.only(ONLY)
    f.require("moe_layer_freq", f.whole("moe_layer_freq", high=MAX_LAYERS), 1)
    for name in _GROUPS:
        f.require(name, f.whole(name), 1)
    attention = replace(read_indexed(f), gates=QueryGates(), raw=True)
    f.require_few("num_attention_heads", attention.shape.heads)
    sparse = read_sparse(f, read_corrected_routing(f), correction=True)
    mlp = read_mlps(f, sparse, read_typed_dense(f))
    model = assemble(f, "axk2", lambda i: (attention, mlp(i)))
    rank = f.whole(_RANK)
    return model.with_layers(lambda layer: _gated(layer, rank))


def _gated(layer: DecoderLayer, rank: int) -> DecoderLayer:
    """Returns the layer with a gate on the norm before attention, and on that before experts."""
    first, second = layer.norm_names

    def gate(of: str, norm: str) -> NormGate:
        name, source = f"layers.{layer.layer}.{of}_norm", f"{layer.source}.{norm}"
        return NormGate(layer.hidden, rank, layer=layer.layer, name=name, source=source)

    is_sparse = isinstance(layer.mlp, SparseMlp)
    names = f"{first}.norm", f"{second}.norm" if is_sparse else second
    gates = gate("attn", first), gate("mlp", second) if is_sparse else None
    return replace(layer, norm_names=names, gates=gates)
