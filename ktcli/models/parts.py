"""What families have in common: parts read from a config, and the decoder made of them.

A family file picks parts and says where its checkpoint and config differ from the usual; the reading, with
its bounds, is here. Names are those of transformers 5.23 and of the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.decoder import (
    NO_MULTIPLIERS,
    NO_NORMS,
    USUAL_NORMS,
    Attention,
    Decoder,
    DecoderLayer,
    Multipliers,
    below,
)
from ktcli.layers.grouped_query import GroupedQueryAttention, QkNorm
from ktcli.layers.hyper import HyperConnection
from ktcli.layers.latent import LatentAttention
from ktcli.layers.mlp import (
    USUAL_MLP,
    USUAL_SPARSE,
    DenseMlp,
    Mlp,
    MlpNames,
    SparseMlp,
    SparseNames,
)
from ktcli.models.config import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_TOP_K,
    MAX_VOCAB,
    STRETCHED,
    TEXT,
    Fields,
    read_rope,
    rope_type,
    rotated_columns,
)
from ktcli.models.model import DecoderModel
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.table.experts import GroupScore, Routing, Score
from ktcli.ops.table.streams import MixShape


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Where a checkpoint keeps the parts.

    Attributes:
        body: before "embed_tokens", "layers" and "norm".
        head: of the output projection.
        attention, mlp: below a layer.
        norm_plus: added to the weights of the norms before attention, MLP and head.
        ignored: patterns of names that are left out on purpose, beside those of `_LEFT_OUT`.
        embedding: below the body.
        norms: before attention and MLP, below a layer.
        after: norms of what those give; "": there is none.
    """

    body: str = "model"
    head: str = "lm_head"
    attention: str = "self_attn"
    mlp: str = "mlp"
    norm_plus: float = 0.0
    ignored: tuple[str, ...] = ()
    embedding: str = "embed_tokens"
    norms: tuple[str, str] = USUAL_NORMS
    after: tuple[str, str] = NO_NORMS


USUAL_PREFIXES = Prefixes()
# What configs of DeepSeek-V3's experts may leave out.
V3_EXPERTS: Mapping[str, Any] = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
# Multi-token prediction, numbered on from the last layer or apart, and what follows from the config.
_MTP_LAYERS = 8
_LEFT_OUT = ("*.rotary_emb.inv_freq", "mtp.*", "model.mtp*")
_MAX_STREAMS, _MAX_ITERATIONS = 16, 1000  # of kt_program_mix


def text_part(config: Mapping[str, Any], *model_types: str) -> Fields:
    """The config of the text model in one that also sees.

    Args:
        model_types: that it may have; the first, unless it says.
    """
    text = Fields(config.get(TEXT, {}), f"config.json: {TEXT}")
    kind = text.text("model_type", model_types[0])
    text.require("model_type", kind, *model_types)
    said = {"model_type": kind, "tie_word_embeddings": config.get("tie_word_embeddings")}
    return Fields({**text.values, **{k: v for k, v in said.items() if v is not None}}, text.where)


def assemble(
    f: Fields,
    family: str,
    parts: Callable[[int], tuple[Attention, Mlp]],
    prefixes: Prefixes = USUAL_PREFIXES,
    streams: MixShape | None = None,
    multipliers: Multipliers = NO_MULTIPLIERS,
) -> DecoderModel:
    """The model of a config.

    Args:
        parts: attention and MLP of a layer; this puts them in their place. One that names a source lies there
            below its layer, and not where the others do.
        streams: of the residual; None: one, which is added to.
        multipliers: of rows and logits.
    """
    f.require("hidden_act", f.text("hidden_act", "silu"), "silu")
    hidden, eps = f.whole("hidden_size"), read_eps(f)

    def mixer(i: int, source: str, of: str) -> HyperConnection | None:
        name = f"layers.{i}.{of}_mix"
        where = f"{source}.hc_{'ffn' if of == 'mlp' else of}"
        return HyperConnection(hidden, streams, eps, False, i, name, where) if streams else None

    def layer(i: int) -> DecoderLayer:
        source = below(prefixes.body, f"layers.{i}")
        attention, mlp = parts(i)
        where = attention.source or prefixes.attention
        attention = replace(attention, layer=i, source=f"{source}.{where}")
        where = mlp.source or prefixes.mlp
        mlp = replace(mlp, layer=i, name=f"layers.{i}.mlp", source=f"{source}.{where}")
        around, beside = mixer(i, source, "attn"), mixer(i, source, "mlp")
        mixers = (around, beside) if around and beside else None
        names, plus, added = prefixes.norms, prefixes.norm_plus, multipliers.residual
        made = DecoderLayer(i, source, hidden, eps, attention, mlp, plus, names, mixers, added)
        return replace(made, after=prefixes.after)

    n_layers = f.whole("num_hidden_layers", high=MAX_LAYERS)
    where = below(prefixes.body, "hc_head")
    last = HyperConnection(hidden, streams, eps, True, None, "mix", where) if streams else None
    decoder = Decoder(
        hidden=hidden,
        vocab=f.whole("vocab_size", high=MAX_VOCAB),
        eps=eps,
        layers=tuple(layer(i) for i in range(n_layers)),
        tied=f.flag("tie_word_embeddings", False),
        body=prefixes.body,
        head_source=prefixes.head,
        norm_plus=prefixes.norm_plus,
        embedding_name=prefixes.embedding,
        mixer=last,
        multipliers=multipliers,
    )
    context = f.whole("max_position_embeddings", high=MAX_CONTEXT)
    beyond = (below(prefixes.body, f"layers.{n_layers + i}.*") for i in range(_MTP_LAYERS))
    ignored = (*_LEFT_OUT, *beyond, *prefixes.ignored)
    return DecoderModel(family, decoder, context, ignored)


def read_eps(f: Fields) -> float:
    """What every RMSNorm adds to the mean square."""
    return f.number("rms_norm_eps", high=1.0)


def read_streams(f: Fields) -> MixShape:
    """Hyper-connections of the residual."""
    return MixShape(
        f.whole("hc_mult", high=_MAX_STREAMS),
        f.whole("hc_sinkhorn_iters", high=_MAX_ITERATIONS),
        f.number("hc_eps", high=1.0),
    )


def read_gqa(
    f: Fields,
    *,
    qk_norm: QkNorm = QkNorm.NONE,
    qkv_bias: bool = False,
    o_bias: bool = False,
    interleaved: bool = False,
    norms: tuple[str, str] = ("q_norm", "k_norm"),
) -> GroupedQueryAttention:
    """Grouped-query attention.

    Args:
        interleaved: it turns pairs of neighbours.
        norms: what the checkpoint calls those of q and k.
    """
    hidden, heads = f.whole("hidden_size"), f.whole("num_attention_heads", high=MAX_HEADS)
    kv_heads = f.whole("num_key_value_heads", high=heads, default=heads)
    f.require_multiple("num_attention_heads", heads, kv_heads)
    head_dim = f.whole("head_dim", high=4096, default=max(1, hidden // heads))
    f.require_multiple("head_dim", head_dim, 2)
    f.require_width("num_attention_heads x head_dim", heads * head_dim)
    columns = rotated_columns(f, head_dim)
    # GGUF files of Llama have rows of q and k in the order that makes a pair two neighbours.
    interleaved = f.flag("rope_interleave", interleaved)
    rope, _ = read_rope(f, columns, interleaved=interleaved)
    shape = GqaShape(heads, kv_heads, head_dim, head_dim**-0.5)
    made = GroupedQueryAttention(hidden, shape, rope, read_eps(f), qk_norm, qkv_bias, o_bias)
    return replace(made, norms=norms)


def of_kind(f: Fields, kind: str) -> Fields:
    """The config with the rotation of one kind of layer, of which transformers lists one for each."""
    own = Fields(f.values.get("rope_parameters", ()), f"{f.where}: rope_parameters")
    rope = Fields(own.values.get(kind, ()), f"{f.where}: rope of {kind}")
    if rope_type(rope) in STRETCHED:  # transformers fills it in only where one rotation is for all
        rope.whole("original_max_position_embeddings", high=MAX_CONTEXT)
    return Fields({**f.values, "rope_parameters": rope.values}, f.where)


def read_windows(f: Fields, *, default: Callable[[int], bool]) -> Callable[[int], int]:
    """How many positions a token of each layer sees; 0: all.

    Args:
        default: whether a layer has a window, unless the config lists the layers' types.
    """
    window = f.whole("sliding_window", high=MAX_CONTEXT) if f.has("sliding_window") else 0
    types = read_types(f, "layer_types", "full_attention", "sliding_attention")
    if types is None:
        return lambda i: window if default(i) else 0
    if not window and "sliding_attention" in types:
        raise BadCheckpoint(f"{f.where}: sliding_window is missing, but layer_types has windows")
    return lambda i: window if types[i] == "sliding_attention" else 0


def read_late_windows(f: Fields) -> Callable[[int], int]:
    """The windows of a model whose layers have one from a number on, unless the config lists the layers' types."""
    first = f.whole("max_window_layers", low=0, high=MAX_LAYERS)
    return read_windows(f, default=lambda i: i >= first)


def read_types(f: Fields, name: str, *kinds: str | int) -> list[Any] | None:
    """Which of `kinds` each layer is, as the field `name` lists; None: it is not there. A list may go on behind the
    last layer, of what predicts several tokens at once."""
    types = f.values.get(name)
    if types is None:
        return None
    n_layers = f.whole("num_hidden_layers", high=MAX_LAYERS)
    if not isinstance(types, list) or len(types) < n_layers:
        raise BadCheckpoint(f"{f.where}: {name} is not a list of {n_layers} layers")
    for kind in types[:n_layers]:
        f.require(name, kind, *kinds)
    return types[:n_layers]


def read_mla(f: Fields) -> LatentAttention:
    """Multi-head latent attention."""
    heads, nope = f.whole("num_attention_heads", high=MAX_HEADS), f.whole("qk_nope_head_dim")
    rope_dim, v = f.whole("qk_rope_head_dim"), f.whole("v_head_dim")
    f.require_multiple("qk_rope_head_dim", rope_dim, 2)
    f.require_width("num_attention_heads x head width", heads * (nope + max(rope_dim, v)))
    # The published code of the family rotates interleaved pairs; transformers has a switch for it.
    rope, score_scale = read_rope(f, rope_dim, interleaved=f.flag("rope_interleave", True))
    scale = (nope + rope_dim) ** -0.5 * score_scale
    shape = MlaShape(heads, nope, rope_dim, v, f.whole("kv_lora_rank"), scale)
    q_lora = f.whole("q_lora_rank") if f.has("q_lora_rank") else 0
    bias = f.flag("attention_bias", False)
    if bias and not q_lora:
        raise BadCheckpoint(
            f"{f.where}: attention_bias is true and q_lora_rank null; this version computes biases only with"
            " a query latent"
        )
    return LatentAttention(f.whole("hidden_size"), q_lora, shape, rope, bias)


def read_dense(f: Fields, names: MlpNames = USUAL_MLP) -> DenseMlp:
    """An MLP without experts."""
    return DenseMlp(f.whole("hidden_size"), f.whole("intermediate_size"), names)


def read_sparse(
    f: Fields, routing: Routing, *, correction: bool = False, names: SparseNames = USUAL_SPARSE
) -> SparseMlp:
    """Experts, with so many shared ones as the config says, which lie in one MLP."""
    width = f.whole("moe_intermediate_size")
    shared = f.whole("n_shared_experts", low=0, high=64, default=0) * width
    f.require_width("n_shared_experts x moe_intermediate_size", shared)
    return SparseMlp(f.whole("hidden_size"), width, routing, correction, shared, names=names)


def read_softmax_routing(f: Fields, *, normalize: bool, scaled: bool = False) -> Routing:
    """The best of all experts by softmax.

    Args:
        scaled: the weights have a factor in the config.
    """
    experts, top_k = read_experts(f)
    scale = f.number("routed_scaling_factor", high=1e4, default=1.0) if scaled else 1.0
    return Routing(experts, top_k, normalize=normalize, scale=scale)


def read_corrected_routing(f: Fields) -> Routing:
    """DeepSeek-V3's: sigmoid scores and a learned correction, groups by the sum of their two best."""
    experts, top_k = read_experts(f)
    routing = Routing(
        experts,
        top_k,
        Score.SIGMOID,
        group_score=GroupScore.TOP2,
        normalize=f.flag("norm_topk_prob", False),
        scale=f.number("routed_scaling_factor", high=1e4, default=1.0),
    )
    n_group, topk_group = read_groups(f, routing)
    return replace(routing, n_group=n_group, topk_group=topk_group)


def read_groups(f: Fields, routing: Routing) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may use."""
    experts, top_k = routing.experts, routing.top_k
    n_group = f.whole("n_group", high=experts)
    topk_group = f.whole("topk_group", high=n_group)
    f.require_multiple("n_routed_experts", experts, n_group)
    available = experts // n_group * topk_group
    if top_k > available:
        raise BadCheckpoint(
            f"{f.where}: num_experts_per_tok is {top_k}, of only {available} experts in"
            f" {topk_group} of {n_group} groups"
        )
    return n_group, topk_group


def read_experts(f: Fields) -> tuple[int, int]:
    """(experts, experts per token)"""
    experts = f.whole("n_routed_experts", high=MAX_EXPERTS)
    top_k = f.whole("num_experts_per_tok", high=MAX_TOP_K)
    if top_k > experts:
        raise BadCheckpoint(f"{f.where}: {top_k} of only {experts} experts per token")
    return experts, top_k


def read_first_dense(f: Fields) -> int:
    """How many layers come before the first with experts."""
    return f.whole("first_k_dense_replace", low=0, high=MAX_LAYERS)


def cut_first_dense(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with only its first layers; fewer dense ones, so that one has experts."""
    dense = min(read_first_dense(Fields(config)), layers - 1)
    return {**cut_layers(config, layers), "first_k_dense_replace": dense}


def read_typed_dense(f: Fields) -> Callable[[int], bool]:
    """Whether a layer has no experts: by a list of types, or the first so many."""
    types = _mlp_types(f)
    if types is not None:
        return lambda i: types[i] == "dense"
    first = read_first_dense(f)
    return lambda i: i < first


def cut_typed_dense(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with only its first layers, at least one of them with experts."""
    types = _mlp_types(Fields(config))
    if types is None:
        return cut_first_dense(config, layers)
    kept = types[:layers]
    if "sparse" not in kept:
        kept = [*kept[:-1], "sparse"]
    return {**cut_layers(config, layers), "mlp_layer_types": kept}


def _mlp_types(f: Fields) -> list[str] | None:
    """Of each layer "dense" or "sparse"; None: the config does not list them."""
    return read_types(f, "mlp_layer_types", "dense", "sparse")


def read_listed_dense(f: Fields) -> Callable[[int], bool]:
    """Whether a layer has no experts: those of a list, and all but every so many-th."""
    listed, step = _listed_dense(f), _sparse_step(f)
    return lambda i: i in listed or bool((i + 1) % step)


def cut_listed_dense(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with only its first layers, the last of them with experts."""
    f = Fields(config)
    return {
        **cut_layers(config, layers),
        "mlp_only_layers": [i for i in _listed_dense(f) if i < layers - 1],
        "decoder_sparse_step": min(_sparse_step(f), layers),
    }


def _listed_dense(f: Fields) -> list[int]:
    listed = f.values.get("mlp_only_layers") or []
    short = isinstance(listed, list) and len(listed) <= MAX_LAYERS
    if not short or any(type(each) is not int for each in listed):
        raise BadCheckpoint(f"{f.where}: mlp_only_layers is not a short list of layers")
    return listed


def _sparse_step(f: Fields) -> int:
    return f.whole("decoder_sparse_step", high=MAX_LAYERS, default=1)


def cut_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with only its first layers, where all have experts or none."""
    each = ("layer_types", "mlp_layer_types")
    lists = {name: config[name][:layers] for name in each if isinstance(config.get(name), list)}
    return {**config, "num_hidden_layers": layers, **lists}
