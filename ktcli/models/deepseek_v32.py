"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose attention reads few positions, which an indexer chooses.

In GLM-5 a layer may attend to what the indexer of an earlier layer chose. Sources: the DeepSeek-V3.2 report;
transformers 5.23 (deepseek_v32, glm_moe_dsa). A multi-token-prediction layer in the checkpoint is not read.
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.errors import BadCheckpoint
from ktcli.layers.indexer import Indexer
from ktcli.layers.latent import LatentAttention
from ktcli.models.attention import read_index_heads, read_mla
from ktcli.models.config import MAX_CHOSEN, MAX_LAYERS, Defaults, Fields
from ktcli.models.feedforward import V3_EXPERTS, read_corrected_routing, read_mlps, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_typed_dense, read_typed_dense
from ktcli.models.skeleton import assemble
from ktcli.ops.table.attention import ChooseShape

_FULL, _SHARED = "full", "shared"
# Fields of which one value is known.
ONLY = {
    "rope_interleave": True,
    "attention_bias": False,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

_USUAL = {
    **V3_EXPERTS,
    "first_k_dense_replace": 3,
    "rope_interleave": True,
    "index_head_dim": 128,
    "index_topk": 2048,
}
MODEL_TYPES: Defaults = {
    "deepseek_v32": {
        **_USUAL,
        "n_group": 8,
        "topk_group": 4,
        "index_n_heads": 64,
        "indexer_rope_interleave": False,
    },
    "glm_moe_dsa": {**_USUAL, "index_n_heads": 32, "indexer_rope_interleave": True},
}

cut = cut_typed_dense


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f.only({"mlp_bias": False, **ONLY})
    full = read_indexed(f)
    shared = replace(full, shape=replace(full.shape, beside=0), indexer=None)
    is_shared = read_shared(f)
    if is_shared[0]:
        raise BadCheckpoint(
            f"{f.where}: indexer_types begins with a layer that shares a choice, but no layer before it made one"
        )
    sparse = read_sparse(f, read_corrected_routing(f), correction=True)
    mlp = read_mlps(f, sparse, read_typed_dense(f))
    return assemble(f, "deepseek_v32", lambda i: (shared if is_shared[i] else full, mlp(i)))


def read_indexed(f: Fields) -> LatentAttention:
    """Returns the latent attention (MLA) layer that a config describes, with an indexer that chooses the positions
    attended to.
    """
    f.whole("q_lora_rank")  # the indexer reads the query latent
    attention = read_mla(f)
    indexer = _read_indexer(f, attention)
    beside = replace(attention.shape, beside=indexer.shape.dim)
    return replace(attention, chosen=indexer.shape.top_k, shape=beside, indexer=indexer)


def _read_indexer(f: Fields, attention: LatentAttention) -> Indexer:
    s = attention.shape
    heads, dim = read_index_heads(f, s.rope)
    top_k = f.whole("index_topk", high=MAX_CHOSEN)
    assert attention.rope is not None  # `read_mla` reads one
    rope = replace(attention.rope, interleaved=f.flag("indexer_rope_interleave", False))
    shape = ChooseShape(heads, dim, top_k, (heads * dim) ** -0.5, behind=s.lora + s.rope)
    return Indexer(attention.hidden, shape, rope)


def read_shared(f: Fields) -> list[bool]:
    """Returns one boolean per layer: whether it attends to the positions that an earlier layer's indexer chose, instead
    of having an indexer itself.

    Read from the list `indexer_types`, else the letters of `index_topk_pattern` (F: own indexer, S: shared), else
    `index_topk_freq`: then the first `index_skip_topk_offset` layers, and every n-th after them, have one.

    Raises:
        BadCheckpoint: the list has an unknown type, or is too short.
    """
    types = f.values.get("indexer_types")
    if types is None and (pattern := f.values.get("index_topk_pattern")) is not None:
        letters = {"F": _FULL, "S": _SHARED}
        types = [letters.get(c) for c in pattern] if isinstance(pattern, str) else pattern
    if types is None:
        every = f.whole("index_topk_freq", low=0, high=MAX_LAYERS, default=1) or 1
        first = f.whole("index_skip_topk_offset", low=0, high=MAX_LAYERS, default=2)
        return [max(i - first + 1, 0) % every > 0 for i in range(f.n_layers)]
    if not isinstance(types, list) or any(each not in (_FULL, _SHARED) for each in types):
        raise BadCheckpoint(f"{f.where}: indexer_types is not a list of {_FULL} and {_SHARED}")
    if len(types) < f.n_layers:
        raise BadCheckpoint(
            f"{f.where}: indexer_types lists {len(types)} layers instead of {f.n_layers}"
        )
    return [each == _SHARED for each in types[: f.n_layers]]
