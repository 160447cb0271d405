"""The facts of GGUF files, see `facts`, of the architectures with linear attention, states or convolutions."""

from __future__ import annotations

from typing import Any

from ktcli.models.config import MAX_HEADS
from ktcli.weights.gguf.facts import latent, partly, positions, swiglu_limits
from ktcli.weights.gguf.metadata import Metadata

_FULL = "full_attention"


def kimi_linear(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Kimi-Linear: those of `latent`, and
    `layer_types`, "linear_attention" for layers without kv heads, "full_attention" for the others."""
    heads = m.each("attention.head_count_kv", int)
    return latent(m) | {"layer_types": [_FULL if kv else "linear_attention" for kv in heads]}


def ling3(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Ling 3: those of `kimi_linear`, `head_dim`
    of linear attention, `kda_safe_gate` (a bool), and two lists of limits of activations. Raises BadCheckpoint for
    vision models."""
    if m.has("rope.dimension_sections"):
        raise m.bad(
            f"{m.architecture}.rope.dimension_sections belongs to Ling 3's vision models, which "
            "kt does not support"
        )
    return kimi_linear(m) | {
        "head_dim": m.whole("kda.head_dim"),
        "kda_safe_gate": m.flag("kda.safe_gate", True),
        **swiglu_limits(m, "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"),
    }


def lfm2(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of LFM2: `layer_types`, "conv" for layers
    without kv heads, "full_attention" for the others, and `num_key_value_heads` of these."""
    heads = m.each("attention.head_count_kv", int)
    return {
        "layer_types": [_FULL if kv else "conv" for kv in heads],
        "num_key_value_heads": max(heads),
    }


def lfm2_dense(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of LFM2 without experts: those of `lfm2`, and
    `num_dense_layers`, the number of all layers. Raises BadCheckpoint if there is a sliding window."""
    if m.has("attention.sliding_window"):
        raise m.bad(
            f"{m.architecture}.attention.sliding_window is set, but kt supports LFM2 only without it"
        )
    return lfm2(m) | {"num_dense_layers": m.layers}


def delta(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Qwen3-Next or Qwen3.5:
    `partial_rotary_factor`, `linear_value_head_dim` and, if the file lists them, `layer_types` ("full_attention" or
    "linear_attention" for each layer)."""
    heads = m.whole("ssm.time_step_rank", high=MAX_HEADS)
    given = partly(m) | {"linear_value_head_dim": m.whole("ssm.inner_size") // max(heads, 1)}
    if m.has("attention.recurrent_layers"):
        kinds = (_FULL, "linear_attention")
        given["layer_types"] = [kinds[each] for each in m.each("attention.recurrent_layers", bool)]
    return given


def _mamba(m: Metadata) -> dict[str, Any]:
    """The config fields of layers with Mamba-2, and of the attention of the others."""
    heads = m.whole("ssm.time_step_rank", high=MAX_HEADS)
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": m.whole("ssm.inner_size") // max(heads, 1),
        "num_key_value_heads": m.most("attention.head_count_kv"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in m.entries),
    }


_NEMOTRON_PARTS = (
    ("ssm_in", "linear_attention"),
    ("attn_q", "full_attention"),
    ("ffn_gate_inp", "moe"),
    ("ffn_up", "mlp"),
)


def nemotron(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Nemotron 3 or Nemotron-H:
    `layers_block_type` (for each layer "linear_attention", "full_attention", "moe" or "mlp"), sizes of Mamba-2 layers,
    `num_key_value_heads`, `intermediate_size` of dense MLPs, and `norm_topk_prob`."""
    kinds = []
    for i in range(m.layers):
        found = (kind for of, kind in _NEMOTRON_PARTS if f"blk.{i}.{of}.weight" in m.entries)
        if (kind := next(found, None)) is None:
            raise m.bad(f"layer {i} has no tensors of a part of Nemotron")
        kinds.append(kind)
    return _mamba(m) | {
        "layers_block_type": kinds,
        "intermediate_size": m.most("feed_forward_length"),
        "norm_topk_prob": m.flag("expert_weights_norm", False),
    }


def granite_hybrid(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Granite 4: `layer_types` ("attention" or
    "mamba" for each layer), sizes of Mamba-2 layers (`mamba_…`), `num_key_value_heads`, `num_local_experts`,
    `shared_intermediate_size` of models without experts, and `position_embedding_type`."""
    kinds = ("attention", "mamba")
    given = _mamba(m)
    alone = m.entries.get("blk.0.ffn_up.weight")
    if alone and alone.shape:
        given["shared_intermediate_size"] = alone.shape[0]
    return given | {
        "layer_types": [kinds[each] for each in m.with_tensor("ssm_in")],
        "mamba_d_head": given.pop("mamba_head_dim"),
        "mamba_expand": m.whole("ssm.inner_size") // max(m.whole("embedding_length"), 1),
        "num_local_experts": m.whole("expert_count", 0),
        "position_embedding_type": positions(m),
    }


def glm5_next(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of GLM-5.3: those of `latent`, `model_type`,
    `layer_types` ("linear_attention" for layers without kv heads, else "indexed_attention"), `linear_lower_bound` of
    the decay (None: no bound) and, if listed, `indexer_types` ("full" or "shared")."""
    heads = m.each("attention.head_count_kv", int)
    given: dict[str, Any] = {
        "layer_types": ["indexed_attention" if kv else "linear_attention" for kv in heads],
        "model_type": "glm5_next_text",
        "linear_lower_bound": None,
    }
    if m.has("kda.gate_lower_bound"):
        given["linear_lower_bound"] = m.number("kda.gate_lower_bound")
    if m.has("attention.indexer.types"):
        kinds = ("shared", "full")
        given["indexer_types"] = [kinds[each] for each in m.switches("attention.indexer.types")]
    return latent(m) | given
