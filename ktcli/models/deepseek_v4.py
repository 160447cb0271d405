"""DeepSeek-V4 (Flash, Pro): attention over a sliding window and over pooled rows, a residual of several streams,
experts of the first layers fixed by the token's id.

A layer attends to the window alone, or also to rows pooled from few positions each, among which an indexer chooses,
or to all of the rows pooled from many positions each. Sources: the DeepSeek-V4 report; transformers 5.23. A
multi-token-prediction layer is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ktcli.errors import BadCheckpoint
from ktcli.layers.compressed import CompressedAttention, Compressor, WindowIndexer
from ktcli.layers.names import (
    NUMBERED_EXPERTS,
    CorrectionNames,
    MlpNames,
    RouterNames,
    SharedNames,
    SparseNames,
)
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_index_heads
from ktcli.models.config import (
    MAX_CHOSEN,
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    Defaults,
    Fields,
    read_eps,
)
from ktcli.models.feedforward import read_clamped, read_experts, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_layers, read_types
from ktcli.models.rotation import read_rope
from ktcli.models.skeleton import Prefixes, assemble, read_streams
from ktcli.native import PAGE_TOKENS
from ktcli.ops.table.attention import ChooseShape, MqaShape
from ktcli.ops.table.experts import Routing, Score
from ktcli.ops.table.recurrent import PoolShape
from ktcli.ops.table.rowwise import Rope

MODEL_TYPES: Defaults = {
    "deepseek_v4": {
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "num_hash_layers": 3,
        "compress_rope_theta": 160_000.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "swiglu_limit": 10.0,
    }
}

cut = cut_layers

_WINDOW, _CHOSEN, _ALL = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_RATES = {_CHOSEN: ("compress_rate_csa", 4), _ALL: ("compress_rate_hca", 128)}
_OF_RATE = {0: _WINDOW, 4: _CHOSEN, 128: _ALL}  # as the hub has it
_BY_ID, _ROUTED = "hash_moe", "moe"
_MAX_ROWS = 1 << 24  # pooled rows: the limit of kt_program_mqa
_MAX_GROUPS = 256  # of heads; each is a matrix of its own

_MLP = MlpNames("w1.weight", "w3.weight", "w2.weight")
_NAMES = SparseNames(
    NUMBERED_EXPERTS,
    RouterNames(correction=CorrectionNames("gate.bias")),
    SharedNames(within=_MLP),
)
_PREFIXES = Prefixes(
    body="",
    head="head",
    attention="attn",
    mlp="ffn",
    embedding="embed",
    norms=("attn_norm", "ffn_norm"),
)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f.only({"mlp_bias": False, "attention_bias": False})
    f.only({"num_key_value_heads": 1, "n_shared_experts": 1})
    kinds, by_id = _kinds(f), _by_id(f)
    attentions = {kind: _read_attention(f, kind) for kind in sorted(set(kinds))}
    routed = _read_mlp(f)
    vocab = f.whole("vocab_size", high=MAX_VOCAB)
    fixed = replace(routed, correction=False, by_id=vocab)
    return assemble(
        f,
        "deepseek_v4",
        lambda i: (attentions[kinds[i]], fixed if by_id[i] else routed),
        _PREFIXES,
        read_streams(f),
    )


def _kinds(f: Fields) -> list[str]:
    """Returns each layer's kind of attention: from a list, the hub's list of rates, or the rule of the published
    models."""
    listed = read_types(f, "layer_types", _WINDOW, _CHOSEN, _ALL)
    if listed is not None:
        return listed
    rates = read_types(f, "compress_ratios", *_OF_RATE)
    if rates is not None:
        return [_OF_RATE[rate] for rate in rates]
    return [_CHOSEN if i > 1 and i % 2 else _ALL for i in range(f.n_layers)]


def _by_id(f: Fields) -> list[bool]:
    """Returns for each layer whether a token's id determines its experts."""
    listed = read_types(f, "mlp_layer_types", _BY_ID, _ROUTED)
    if listed is not None:
        return [kind == _BY_ID for kind in listed]
    first = f.whole("num_hash_layers", low=0, high=MAX_LAYERS)
    return [i < first for i in range(f.n_layers)]


def _rate(f: Fields, kind: str) -> int:
    """Reads the number of positions of a window that is pooled into one row."""
    old, usual = _RATES[kind]
    rates = f.values.get("compress_rates")
    nested = Fields(rates, f"{f.where}: compress_rates") if rates is not None else f
    every = nested.whole(kind, old, high=1 << 16, default=usual)
    if PAGE_TOKENS % every and (kind == _CHOSEN or every % PAGE_TOKENS):
        raise BadCheckpoint(f"{f.where}: a rate of {every} positions does not divide {PAGE_TOKENS}")
    return every


def _rotated(f: Fields, dim: int) -> int:
    """Reads the number of columns of a head that are rotated."""
    name, part = "qk_rope_head_dim", "partial_rotary_factor"
    if f.has(name):
        rotated = f.whole(name, high=dim)
    else:
        name, rotated = f"{part} of {dim}", int(dim * f.number(part, high=1.0, default=64 / 512))
    f.require_multiple(name, rotated, 2)
    if not rotated:
        raise BadCheckpoint(f"{f.where}: no column of a head of {dim} is rotated")
    return rotated


def _read_rope(f: Fields, dim: int, *, compressed: bool) -> Rope:
    """Reads the rotation of the layers with the window alone or, if `compressed`, of the others. Only the latter may be
    scaled, and only in their frequencies.

    Args:
        dim: columns of a head.
    """
    rotated = _rotated(f, dim)
    given = f.values.get("rope_parameters") or f.values.get("rope_scaling") or {}
    given = Fields(given, f"{f.where}: rope").values
    name = "compress" if compressed else "main"
    if all(isinstance(given.get(each), Mapping) for each in ("main", "compress")):
        own = dict(given[name])
    elif compressed:
        own = {k: v for k, v in given.items() if k not in ("rope_theta", "main", "compress")}
        own["rope_theta"] = f.number("compress_rope_theta", low=1.0, high=1e12)
    else:
        own = {"rope_theta": f.number("rope_theta", low=1.0, high=1e12, default=10_000.0)}
    own = {k: v for k, v in own.items() if v is not None}
    own.setdefault("attention_factor", 1.0)
    part = Fields(own, f"{f.where}: rope").number("partial_rotary_factor", high=1.0, default=0.0)
    if part and int(dim * part) != rotated:
        raise BadCheckpoint(
            f"{f.where}: the rope of {name} rotates {int(dim * part)} columns of a head, but qk_rope_head_dim says"
            f" {rotated} (or partial_rotary_factor)"
        )
    rope, _ = read_rope(Fields({**f.values, "rope_parameters": own}), rotated, interleaved=True)
    return rope


def _read_attention(f: Fields, kind: str) -> CompressedAttention:
    heads = f.whole("num_attention_heads", high=MAX_HEADS)
    dim = f.whole("head_dim", low=2, high=4096)
    f.require_multiple("head_dim", dim, 2)
    f.require_width("num_attention_heads x head_dim", heads * dim)
    rope = _read_rope(f, dim, compressed=kind != _WINDOW)
    window = f.whole("sliding_window", high=1 << 20)
    groups = f.whole("o_groups", high=min(heads, _MAX_GROUPS))
    f.require_few("o_groups", groups)
    f.require_multiple("num_attention_heads x head_dim", heads * dim, groups)
    o_lora = f.whole("o_lora_rank")
    f.require_width("o_groups x o_lora_rank", groups * o_lora)
    hidden, q_lora, eps = f.whole("hidden_size"), f.whole("q_lora_rank"), read_eps(f)
    shape = MqaShape(heads, dim, dim**-0.5, window)
    plain = CompressedAttention(hidden, q_lora, shape, rope, eps, groups, o_lora)
    if kind == _WINDOW:
        return plain
    every = _rate(f, kind)
    most = min(MAX_CONTEXT, _MAX_ROWS * every)
    context = f.whole("max_position_embeddings", high=most)
    shape = replace(shape, every=every, context=context)
    pool = Compressor(hidden, PoolShape(dim, every, kind == _CHOSEN), rope, eps)
    if kind == _ALL:
        return replace(plain, shape=shape, compressor=pool)
    indexer = _read_indexer(f, shape, pool, q_lora)
    shape = replace(shape, beside=indexer.shape.elements)
    return replace(plain, shape=shape, compressor=pool, indexer=indexer)


def _read_indexer(f: Fields, shape: MqaShape, pool: Compressor, q_lora: int) -> WindowIndexer:
    heads, dim = read_index_heads(f, pool.rope.dim)
    top_k = f.whole("index_topk", high=MAX_CHOSEN)
    scale = (heads * dim) ** -0.5
    choice = ChooseShape(heads, dim, top_k, scale, behind=shape.paged, every=shape.every)
    keys = replace(pool, shape=replace(pool.shape, dim=dim))
    return WindowIndexer(pool.hidden, q_lora, choice, keys)


def _read_mlp(f: Fields) -> SparseMlp:
    """Reads the experts; their router always normalises its weights, whatever the config says."""
    scores = {
        "sqrtsoftplus": Score.SQRT_SOFTPLUS,
        "sigmoid": Score.SIGMOID,
        "softmax": Score.SOFTMAX,
    }
    score = f.text("scoring_func", "")
    f.require("scoring_func", score, *scores)
    f.only({"topk_method": "noaux_tc"})
    experts, top_k = read_experts(f)
    scale = f.number("routed_scaling_factor", high=1e4)
    routing = Routing(experts, top_k, scores[score], scale=scale)
    glu = read_clamped(f)
    return replace(read_sparse(f, routing, correction=True, names=_NAMES), glu=glu)
