"""The metadata of a GGUF file as the hub's `config.json`.

Values are checked here for their type, by the family for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models.config import TEXT
from ktcli.models.pooling import KEY, PoolingMode
from ktcli.weights.gguf.architectures import ARCHITECTURES
from ktcli.weights.gguf.metadata import Metadata, scaling
from ktcli.weights.gguf.rules import Architecture, Rows

_COMMON: Rows = {
    "hidden_size": ("embedding_length", int),
    "num_attention_heads": ("attention.head_count", int),
    "num_key_value_heads": ("attention.head_count_kv", int),
    "head_dim": ("attention.key_length", int),
    "intermediate_size": ("feed_forward_length", int),
    "max_position_embeddings": ("context_length", int),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float),
    "rope_theta": ("rope.freq_base", float),
}
# llama.cpp's numbers; 0: none.
_POOLING = "pooling_type"
_MODES = {1: PoolingMode.MEAN, 2: PoolingMode.FIRST, 3: PoolingMode.LAST}
_RANKS = 4
_PICTURES = "clip"  # the architecture of every mmproj file
_OPTIONAL = ("q_lora_rank", "n_shared_experts", "sliding_window")  # parts of a model
_NEEDED = (
    "hidden_size num_attention_heads max_position_embeddings rms_norm_eps n_routed_experts num_experts "
    "num_local_experts moe_num_experts"
).split()


def architecture_of(metadata: Metadata, known: tuple[str, ...]) -> Architecture:
    """Returns the rules for reading a GGUF file (its config fields and tensor names), by the architecture in its
    metadata; for a file of an older converter, the rules for such files.

    Args:
        known: the values of `model_type` that kt supports.
    Raises:
        BadCheckpoint: kt does not support the architecture; the hint lists those that it does.
    """
    row = ARCHITECTURES.get(metadata.architecture)
    if metadata.architecture == _PICTURES:
        raise BadCheckpoint(
            f"{metadata.fields.where} contains the part of a model that reads images or audio, which kt does not run",
            hint="give the file of the model itself",
        )
    if row is None or row.model_type not in known:
        readable = sorted(name for name, each in ARCHITECTURES.items() if each.model_type in known)
        name = metadata.architecture[:60]
        raise BadCheckpoint(
            f"{metadata.fields.where} contains a model of the architecture {name!r}, which kt does not support",
            hint=f"kt reads GGUF files of the architectures {', '.join(readable)}",
        )
    older = (each for name, each in row.older.items() if name in metadata.entries)
    return next(older, row)


# Fields of a config with which less than a head is rotated, and with which values are not as wide as keys.
_PARTLY = {"partial_rotary_factor", "rotary_dim", "qk_rope_head_dim", "rope_parameters"}
_OF_VALUES = {"v_head_dim", "qk_rope_head_dim"}


def _check_heads(m: Metadata, text: Mapping[str, Any]) -> None:
    """Checks what a file says of widths of a head that its architecture has no field for.

    Raises:
        BadCheckpoint: it is another width than the head's.
    """
    own = text.get("global_head_dim") or text.get("head_dim")
    said = own or text["hidden_size"] // max(text["num_attention_heads"], 1)
    for key, fields in (("rope.dimension_count", _PARTLY), ("attention.value_length", _OF_VALUES)):
        if not fields & text.keys() and m.whole(key, said) != said:
            raise m.bad(
                f"{m.architecture}.{key} is {m.whole(key)}, but kt supports only heads of {said} "
                "columns for this architecture"
            )


def config_of(m: Metadata, row: Architecture) -> dict[str, Any]:
    """Returns the `config.json` object that the model's makers would have written, made from the metadata of its GGUF
    file by the rules of its architecture. Raises BadCheckpoint for values that are missing or implausible."""
    if row.gating:
        m.gating(row.gating)
    config: dict[str, Any] = {"model_type": row.model_type}
    read: dict[type, Callable[[str], Any]] = {
        int: m.whole,
        float: m.number,
        bool: lambda key: m.flag(key, False),
    }
    for name, (key, kind) in {**_COMMON, **row.rows}.items():
        if name in row.by_layer:
            continue
        if m.has(key) or name in _NEEDED:
            config[name] = read[kind](key)
        elif name in _COMMON or name in _OPTIONAL:  # a null is not filled in as an absent field is
            config[name] = None
    config["num_hidden_layers"] = m.layers
    embedding = m.entries.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BadCheckpoint(f"{m.fields.where} has no token_embd.weight with two dimensions")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in m.entries
    if stretched := scaling(m):
        config["rope_scaling"] = {**stretched, **row.scaling}
    text = {**config, **row.fixed, **row.changes(m)}
    _check_heads(m, text)
    whole = {"model_type": row.model_type, TEXT: text} if row.nested else text
    return {**whole, **_pooling(m)}


def _pooling(m: Metadata) -> dict[str, Any]:
    """Returns how an embedding model pools, see `models.pooling`; nothing for one that generates text. llama.cpp
    normalizes all embeddings.

    Raises:
        BadCheckpoint: it pools otherwise than kt does, or attends to later tokens.
    """
    kind = m.whole(_POOLING, 0)
    if not kind:
        return {}
    if kind not in _MODES:
        known = ", ".join(f"{mode} ({number})" for number, mode in _MODES.items())
        what = "a model that ranks texts" if kind == _RANKS else f"pooling type {kind}"
        raise BadCheckpoint(f"{m.fields.where} is {what}; kt pools with {known}")
    if not m.flag("attention.causal", True):
        raise BadCheckpoint(
            f"{m.fields.where} attends to later tokens, too (attention.causal is false), which kt does not compute"
        )
    return {KEY: {"mode": _MODES[kind].value, "normalize": True}}
