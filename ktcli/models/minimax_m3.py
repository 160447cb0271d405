"""The text part of MiniMax-M3: grouped-query attention over chosen blocks of positions, clamped activations.

Norms multiply by 1 + weight; experts are chosen by sigmoid with a learned correction, and a shared one is added.
Vision and multi-token prediction are not read. Source: transformers 5.23 (minimax_m3_vl).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.grouped_query import GroupedQueryAttention, QkNorms
from ktcli.layers.indexer import BlockIndexer
from ktcli.layers.mlp import DenseMlp
from ktcli.layers.names import NUMBERED_EXPERTS, CorrectionNames, RouterNames, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_CHOSEN, MAX_HEADS, TEXT, Defaults, Fields
from ktcli.models.feedforward import read_clamped, read_mlps, read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import cut_typed_dense, read_typed_dense, read_types
from ktcli.models.skeleton import Prefixes, assemble
from ktcli.native import PAGE_TOKENS
from ktcli.ops.table.attention import ChooseShape
from ktcli.ops.table.experts import Score

MODEL_TYPES: Defaults = {
    "minimax_m3_vl": {
        TEXT: {
            "head_dim": 128,
            "num_key_value_heads": 4,
            "rotary_dim": 64,
            "rope_theta": 5e6,
            "first_k_dense_replace": 0,
            "index_n_heads": 4,
            "index_head_dim": 128,
            "index_block_size": 128,
            "index_topk_blocks": 16,
            "index_local_blocks": 1,
            "routed_scaling_factor": 2.0,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "shared_intermediate_size": 3072,
            "dense_intermediate_size": 12288,
        }
    }
}

_SPARSE, _FULL = "minimax_m3_sparse", "full_attention"
_PREFIXES = Prefixes(
    "language_model.model",
    "language_model.lm_head",
    norm_plus=1.0,
    ignored=("vision_tower.*", "multi_modal_projector.*", "patch_merge_mlp.*", "*.mtp.*"),
)
_NORMS = QkNorms(plus=1.0)
_NAMES = SparseNames(
    NUMBERED_EXPERTS, RouterNames(correction=CorrectionNames("e_score_correction_bias"))
)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f = _own(Fields(f.values.get(TEXT) or {}, f"{f.where}: {TEXT}"))
    attention = read_gqa(f, norms=_NORMS, partly=True)
    kinds = read_types(f, "layer_types", _SPARSE, _FULL) or []  # `_own` has made them
    indexed = _indexed(f, attention)
    dense, sparse = _mlps(f)
    mlp = read_mlps(f, sparse, read_typed_dense(f), dense)

    def parts(i: int) -> tuple[Attention, Mlp]:
        return indexed if kinds[i] == _SPARSE else attention, mlp(i)

    return assemble(f, "minimax_m3", parts, _PREFIXES)


def cut(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the model's first `layers` layers, at least one of them with routed
    experts.
    """
    return cut_typed_dense(Fields(_own(Fields(f.values, f"{f.where}: {TEXT}")).values), layers)


def _own(f: Fields) -> Fields:
    """Returns the config of the text model, in transformers' spelling."""
    f.require("hidden_act", f.text("hidden_act", "silu"), "silu", "swigluoai")
    sparse = Fields(f.values.get("sparse_attention_config") or {}, f"{f.where}: sparse attention")
    values, n_layers = {**f.values, "hidden_act": "silu"}, f.n_layers
    for name, old in _OLD_NAMES.items():
        if sparse.has(old):
            values[name] = sparse.values[old]
    listed = (sparse.values.get("sparse_attention_freq"), values.get("moe_layer_freq"))
    attention, mlp = (each if isinstance(each, list) else None for each in listed)
    if values.get("layer_types") is None:
        values["layer_types"] = [_SPARSE if x else _FULL for x in attention or [0] * n_layers]
    if values.get("mlp_layer_types") is None and mlp is not None:
        values["mlp_layer_types"] = ["sparse" if x else "dense" for x in mlp]
    return Fields(values, f.where)


# The names that the hub's config gives the sizes of the indexer, in a part of its own.
_OLD_NAMES = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}


def _indexed(f: Fields, attention: GroupedQueryAttention) -> GroupedQueryAttention:
    """Returns the attention with its indexer."""
    s, rope = attention.shape, attention.rope
    assert rope is not None
    heads = f.whole("index_n_heads", high=MAX_HEADS)
    f.require("index_n_heads", heads, s.kv_heads)  # each chooses for one kv head
    dim = f.whole("index_head_dim", low=rope.dim, high=4096)
    f.require_multiple("index_head_dim", dim, 2)
    block = f.whole("index_block_size", high=MAX_CHOSEN)
    f.require_multiple("index_block_size", block, PAGE_TOKENS)
    top_k = f.whole("index_topk_blocks", high=MAX_CHOSEN)
    local = f.whole("index_local_blocks", low=0, high=top_k)
    shape = ChooseShape(heads, dim, top_k, 1.0, behind=s.kept, block=block, local=local)
    indexer = BlockIndexer(shape, rope, attention.eps, _NORMS.plus)
    return replace(attention, shape=replace(s, beside=dim), indexer=indexer)


def _mlps(f: Fields) -> tuple[DenseMlp, SparseMlp]:
    hidden, routing = f.whole("hidden_size"), read_routing(f, normalize=True)
    scale, glu = f.number("routed_scaling_factor", high=1e4), read_clamped(f, shifted=True)
    sparse = SparseMlp(
        hidden,
        f.whole("intermediate_size"),
        replace(routing, score=Score.SIGMOID, scale=scale),
        correction=True,
        shared_width=f.whole("shared_intermediate_size"),
        names=_NAMES,
        glu=glu,
        source="block_sparse_moe",
    )
    return DenseMlp(hidden, f.whole("dense_intermediate_size"), glu=glu), sparse
