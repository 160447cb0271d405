"""The text part of GLM-5.3: most layers have Kimi Delta Attention (linear, with a decay for each channel), the others
latent attention over windows of positions that an indexer chooses; a residual of several streams, whose mean the last
norm reads.

There are no rotary embeddings: positions enter through the linear layers alone. Experts are DeepSeek-V3's, with clamped
activations. Vision and multi-token prediction are not read. Source: transformers 5.23 (glm5_next).
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.errors import BadCheckpoint
from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.hyper import StreamMean
from ktcli.layers.indexer import Indexer
from ktcli.layers.kimi_delta import KimiDelta
from ktcli.layers.latent import LatentAttention
from ktcli.models.attention import read_index_heads, require_own_keys
from ktcli.models.config import MAX_CHOSEN, TEXT, Defaults, Fields, read_eps
from ktcli.models.deepseek_v32 import read_shared
from ktcli.models.feedforward import (
    V3_EXPERTS,
    read_clamped,
    read_corrected_routing,
    read_dense,
    read_sparse,
)
from ktcli.models.kimi_linear import LINEAR_PART, read_delta, read_linear_part
from ktcli.models.model import Model
from ktcli.models.pattern import LINEAR, cut_typed_dense, read_typed_dense, read_types
from ktcli.models.skeleton import Prefixes, assemble, read_streams, text_part
from ktcli.native import PAGE_TOKENS
from ktcli.ops.table.attention import ChooseShape, MlaShape
from ktcli.ops.table.recurrent import PoolShape

_TEXT_TYPE = "glm5_next_text"
_USUAL = {
    **V3_EXPERTS,
    "first_k_dense_replace": 3,
    "num_key_value_heads": 64,
    "swiglu_limit": 10.0,
    "linear_num_heads": 64,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_kpool": 16,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
}
MODEL_TYPES: Defaults = {"glm5_next": {**_USUAL, TEXT: _USUAL, "tie_word_embeddings": False}}

cut = cut_typed_dense

_INDEXED = "indexed_attention", "full_attention", "deepseek_sparse_attention"  # the last on the hub
_PREFIXES = Prefixes(body="model.language_model", ignored=("model.visual.*",))
_LOWEST = -5.0  # published


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f = _text(f)
    f.only({"attention_bias": False, "topk_method": "noaux_tc", "scoring_func": "sigmoid"})
    shared, full = _attentions(f)
    linear, is_linear, is_shared = _delta(f), _linear_layers(f), _shared_layers(f)
    glu = read_clamped(f)
    sparse = replace(read_sparse(f, read_corrected_routing(f), correction=True), glu=glu)
    is_dense = read_typed_dense(f)

    def parts(i: int) -> tuple[Attention, Mlp]:
        indexed = shared if is_shared[i] else full
        mlp = replace(read_dense(f), glu=glu) if is_dense(i) else sparse
        return linear if is_linear[i] else indexed, mlp

    streams = read_streams(f)
    model = assemble(f, "glm5_next", parts, _PREFIXES, streams)
    mean = StreamMean(f.whole("hidden_size"), streams.streams)
    return replace(model, decoder=replace(model.decoder, mixer=mean))


def _text(f: Fields) -> Fields:
    """Returns the config of the text model, in transformers' spelling; without a vision part it may lie flat."""
    f = text_part(f, _TEXT_TYPE) if f.has(TEXT) else f
    if not f.has(LINEAR_PART):
        return f
    part, found = read_linear_part(f)
    lowest = part.values.get("gate_lower_bound", f.values.get("linear_lower_bound"))
    if lowest is None and part.flag("safe_gate", True):
        lowest = _LOWEST
    return Fields({**f.values, **found, "linear_lower_bound": lowest}, f.where)


def _linear_layers(f: Fields) -> list[bool]:
    """Returns for each layer whether its attention is linear."""
    kinds = read_types(f, "layer_types", LINEAR, *_INDEXED)
    return [kind == LINEAR for kind in kinds] if kinds else [i % 4 != 3 for i in range(f.n_layers)]


def _shared_layers(f: Fields) -> list[bool]:
    """Returns for each layer whether it attends to the choice of the indexer of the layer right before it."""
    linear, shared = _linear_layers(f), read_shared(f)
    for i, one in enumerate(shared):
        if one and not linear[i] and (i == 0 or linear[i - 1] or shared[i - 1]):
            raise BadCheckpoint(
                f"{f.where}: layer {i} shares what an indexer chose, but the layer before it has none"
            )
    return shared


def _delta(f: Fields) -> KimiDelta:
    """Reads the linear attention; sizes that the config leaves out are those of the published model."""
    bounded = f.has("linear_lower_bound")
    return read_delta(f, f.number("linear_lower_bound", low=-1e3, high=-1e-3) if bounded else 0.0)


def _attentions(f: Fields) -> tuple[LatentAttention, LatentAttention]:
    """Reads latent attention over what an indexer chose: an earlier layer's, and its own."""
    f.only({"qk_rope_head_dim": 0})
    heads = require_own_keys(f)
    nope, v, lora = f.whole("qk_nope_head_dim"), f.whole("v_head_dim"), f.whole("kv_lora_rank")
    f.require_multiple("kv_lora_rank", lora, 2)
    f.require_width("num_attention_heads x head width", heads * max(nope, v))
    hidden = f.whole("hidden_size")
    indexer = _indexer(f, hidden, lora)
    shape = MlaShape(heads, nope, 0, v, lora, nope**-0.5)
    shared = LatentAttention(
        hidden,
        f.whole("q_lora_rank"),  # the indexer reads the query latent
        shape,
        None,
        False,
        chosen=indexer.shape.positions,
        inner_eps=read_eps(f),
    )
    beside = replace(shape, beside=indexer.shape.elements)
    return shared, replace(shared, shape=beside, indexer=indexer)


def _indexer(f: Fields, hidden: int, behind: int) -> Indexer:
    """Reads the indexer; `behind` is the number of elements of a position that come before the index key."""
    f.only({"index_kpool_always_select_tail": True})
    heads, dim = read_index_heads(f)
    every = f.whole("index_kpool")
    if PAGE_TOKENS % every:
        raise BadCheckpoint(
            f"{f.where}: index_kpool is {every}, which does not divide {PAGE_TOKENS}"
        )
    chosen = f.whole("index_topk", high=MAX_CHOSEN)
    f.require_multiple("index_topk", chosen, every)
    scale = (heads * dim) ** -0.5
    shape = ChooseShape(heads, dim, chosen // every, scale, behind=behind, every=every)
    return Indexer(hidden, shape, None, PoolShape(dim, every, overlap=False))
