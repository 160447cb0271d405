"""Reads grouped-query and latent attention from configs, with the limits of the fields.

A family adds what it has beside the usual to the part that was read. Names are those of transformers 5.23 and of the
hub. Every reader raises BadCheckpoint where a field is missing, of the wrong type, out of bounds or not supported.
"""

from __future__ import annotations

from ktcli.errors import BadCheckpoint
from ktcli.layers.grouped_query import GroupedQueryAttention, QkNorms
from ktcli.layers.latent import LatentAttention
from ktcli.models.config import MAX_CONTEXT, MAX_HEADS, Fields, read_eps
from ktcli.models.rotation import STRETCHED, read_rope, rope_type, rotated_columns, rotated_part
from ktcli.ops.table.attention import GqaShape, MlaShape


def read_gqa(
    f: Fields,
    *,
    norms: QkNorms | None = None,
    biased: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    interleaved: bool = False,
    partly: bool = False,
) -> GroupedQueryAttention:
    """Returns the grouped-query attention layer that a config describes: its head sizes, rotary embedding, norms and
    biases.

    Args:
        norms: the norms of q and k.
        biased: whether all projections have biases if the config's `attention_bias` says so.
        qkv_bias, o_bias: whether these projections have biases in any case.
        interleaved: whether neighbouring columns are rotated as pairs, unless the config says.
        partly: whether the config may say that only the first columns of a head are rotated; in other families all are,
            and such a config is refused.
    """
    bias = biased and f.flag("attention_bias", False)
    qkv_bias, o_bias = qkv_bias or bias, o_bias or bias
    shape = read_gqa_shape(f)
    columns = rotated_columns(f, shape.head_dim)
    if not partly:
        f.require("partial_rotary_factor", rotated_part(f) or 1.0, 1.0)
    # GGUF files of Llama have rows of q and k in the order that makes a pair two neighbours.
    interleaved = f.flag("rope_interleave", interleaved)
    rope, _ = read_rope(f, columns, interleaved=interleaved)
    hidden = f.whole("hidden_size")
    return GroupedQueryAttention(hidden, shape, rope, read_eps(f), norms, qkv_bias, o_bias)


def read_gqa_shape(f: Fields) -> GqaShape:
    """Returns the sizes of the grouped-query attention that a config describes: the numbers of query and key heads, and
    the columns of a head, an even number. The scale of scores is head_dim ** -0.5.
    """
    heads = f.whole("num_attention_heads", high=MAX_HEADS)
    kv_heads = f.whole("num_key_value_heads", high=heads, default=heads)
    f.require_multiple("num_attention_heads", heads, kv_heads)
    dim = head_dim(f)
    f.require_multiple("head_dim", dim, 2)
    f.require_width("num_attention_heads x head_dim", heads * dim)
    return GqaShape(heads, kv_heads, dim, dim**-0.5)


def head_dim(f: Fields) -> int:
    """Returns the number of columns of an attention head: the config's `head_dim`, else hidden_size //
    num_attention_heads.
    """
    hidden, heads = f.whole("hidden_size"), f.whole("num_attention_heads", high=MAX_HEADS)
    return f.whole("head_dim", high=4096, default=max(1, hidden // heads))


def read_mla(f: Fields) -> LatentAttention:
    """Returns the multi-head latent attention (MLA) layer that a config describes: head and latent sizes, rotary
    embedding, biases.
    """
    heads, nope = f.whole("num_attention_heads", high=MAX_HEADS), f.whole("qk_nope_head_dim")
    rope_dim, v = f.whole("qk_rope_head_dim"), f.whole("v_head_dim")
    f.require_multiple("qk_rope_head_dim", rope_dim, 2)
    f.require_width("num_attention_heads x head width", heads * (nope + max(rope_dim, v)))
    # The published code of the family rotates interleaved pairs; transformers has a switch for it.
    rope, score_scale = read_rope(f, rope_dim, interleaved=f.flag("rope_interleave", False))
    scale = (nope + rope_dim) ** -0.5 * score_scale
    shape = MlaShape(heads, nope, rope_dim, v, f.whole("kv_lora_rank"), scale)
    q_lora = f.whole("q_lora_rank") if f.has("q_lora_rank") else 0
    bias = f.flag("attention_bias", False)
    if bias and not q_lora:
        raise BadCheckpoint(
            f"{f.where}: attention_bias is true and q_lora_rank null; this version supports biases only with"
            " a query latent"
        )
    return LatentAttention(f.whole("hidden_size"), q_lora, shape, rope, bias)


def require_own_keys(f: Fields) -> int:
    """Returns the config's number of attention heads, each of which must have keys of its own.

    Raises:
        BadCheckpoint: `num_key_value_heads` is a different number.
    """
    heads = f.whole("num_attention_heads", high=MAX_HEADS)
    f.require("num_key_value_heads", f.whole("num_key_value_heads", default=heads), heads)
    return heads


def read_index_heads(f: Fields, low: int = 1) -> tuple[int, int]:
    """Returns the number of heads of an indexer (which chooses the positions to attend to) and the columns of each, an
    even number of at least `low`.
    """
    heads = f.whole("index_n_heads", high=MAX_HEADS)
    dim = f.whole("index_head_dim", low=low, high=4096)
    f.require_multiple("index_head_dim", dim, 2)
    f.require_width("index_n_heads x index_head_dim", heads * dim)
    return heads, dim


def of_kind(f: Fields, kind: str) -> Fields:
    """Returns a copy of a config whose `rope_parameters` are those listed for the layers of type `kind`, such as
    "sliding_attention".
    """
    own = Fields(f.values.get("rope_parameters", ()), f"{f.where}: rope_parameters")
    rope = Fields(own.values.get(kind, ()), f"{f.where}: rope of {kind}")
    if rope_type(rope) in STRETCHED:  # transformers fills it in only where one rotation is for all
        rope.whole("original_max_position_embeddings", high=MAX_CONTEXT)
    return Fields({**f.values, "rope_parameters": rope.values}, f.where)
