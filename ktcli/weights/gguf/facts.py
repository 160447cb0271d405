"""Facts that are derived from several keys of a GGUF file or from its tensors, with one function per architecture.

What a file leaves out because llama.cpp knows it of the architecture is from llama.cpp's converters and loaders.
"""

from __future__ import annotations

from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models.config import MAX_HEADS, MAX_LAYERS
from ktcli.weights.gguf.metadata import SIGMOID, SOFTMAX, Metadata, scaling

_FULL, _SLIDING = "full_attention", "sliding_attention"


def llama(m: Metadata) -> dict[str, Any]:
    """The facts of Llama, Mistral and, with experts, Mixtral."""
    width = m.whole("rope.dimension_count", 0)
    given: dict[str, Any] = {"attention_bias": "blk.0.attn_q.bias" in m.entries}
    if width and not m.has("attention.key_length"):
        given["head_dim"] = width
    experts = m.whole("expert_count", 0)
    return given | ({"model_type": "mixtral", "num_local_experts": experts} if experts else {})


def partly(m: Metadata) -> dict[str, Any]:
    """The part of a head that is rotated."""
    width = m.whole("attention.key_length")
    return {"partial_rotary_factor": m.whole("rope.dimension_count", width) / max(width, 1)}


def glm(m: Metadata) -> dict[str, Any]:
    """The facts of GLM-4.5; the Air models have no norms of q and k."""
    return partly(m) | {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in m.entries,
        "attention_bias": "blk.0.attn_q.bias" in m.entries,
    }


def gpt_oss(m: Metadata) -> dict[str, Any]:
    """The facts of gpt-oss. Published files stretch the context; the family assumes it where nothing is said."""
    m.whole("attention.sliding_window")  # without it every layer would see everything
    plain = not m.has("rope.scaling.type") and not m.has("rope.scaling.factor")
    return {"rope_scaling": {"rope_type": "default"}} if plain else {}


def latent(m: Metadata) -> dict[str, Any]:
    """The facts of latent attention. Files of today store the key and value widths of the latent form, and those of
    the heads as `_mla`."""
    mla = "_mla" if m.has("attention.key_length_mla") else ""
    rope = m.whole("rope.dimension_count")
    heads = m.whole("attention.head_count")
    return {
        "head_dim": rope,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": m.whole(f"attention.key_length{mla}") - rope,
        "v_head_dim": m.whole(f"attention.value_length{mla}"),
        "num_key_value_heads": heads,
        "n_group": m.whole("expert_group_count", 1),
        "topk_group": m.whole("expert_group_used_count", 1),
    }


def deepseek(m: Metadata) -> dict[str, Any]:
    """The facts of DeepSeek and Kimi-K2: V2 scores by softmax, V3 and Kimi-K2 by sigmoid. Queries that grow with their
    position are Mistral's, some of whose files have this architecture."""
    if m.number("attention.temperature_scale", 0.0):
        return mistral4(m)
    given = latent(m)
    if m.gating(SOFTMAX, SIGMOID) == SOFTMAX:
        method = "group_limited_greedy" if given["n_group"] > 1 else "greedy"
        return given | {"model_type": "deepseek_v2", "topk_method": method}
    return given | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def mistral4(m: Metadata) -> dict[str, Any]:
    """The facts of Mistral Small 4, whose queries grow with their position: by a step for each context of the length
    that the rotation is stretched from."""
    m.gating(SOFTMAX)
    rope, original = scaling(m) or {}, "original_max_position_embeddings"
    step = m.whole("attention.temperature_length", rope.get(original, m.whole("context_length")))
    if rope.setdefault(original, step) != step:
        raise BadCheckpoint(
            f"{m.fields.where}: {m.architecture}.attention.temperature_length is {step}, but kt supports only that of "
            f"rope.scaling.original_context_length, {rope[original]}"
        )
    return latent(m) | {
        "model_type": "mistral4",
        "rope_scaling": {
            **rope,
            "llama_4_scaling_beta": m.number("attention.temperature_scale", 0.0),
        },
        "norm_topk_prob": m.flag("expert_weights_norm", False),
    }


_UNNORMED = 128  # experts of Maverick


def llama4(m: Metadata) -> dict[str, Any]:
    """The facts of Llama 4: Maverick, which llama.cpp tells by its 128 experts, has no norms of q and k. A window of 0
    means neither chunks nor layers without positions."""
    if not m.whole("attention.sliding_window", 1):
        raise BadCheckpoint(
            f"{m.fields.where}: {m.architecture}.attention.sliding_window is 0, but kt supports Llama 4 only with "
            "attention in chunks"
        )
    return {"use_qk_norm": m.whole("expert_count") != _UNNORMED}


def kimi_linear(m: Metadata) -> dict[str, Any]:
    """The facts of Kimi-Linear, whose layers without kv heads have linear attention."""
    heads = m.each("attention.head_count_kv", int)
    return latent(m) | {"layer_types": [_FULL if kv else "linear_attention" for kv in heads]}


def ling3(m: Metadata) -> dict[str, Any]:
    """The facts of Ling 3. Of the model that sees, positions are turned otherwise than kt knows."""
    if m.has("rope.dimension_sections"):
        raise BadCheckpoint(
            f"{m.fields.where}: {m.architecture}.rope.dimension_sections belongs to Ling 3's vision models, which "
            "kt does not support"
        )
    return kimi_linear(m) | {
        "head_dim": m.whole("kda.head_dim"),
        "kda_safe_gate": m.flag("kda.safe_gate", True),
        **_limits(m, "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"),
    }


def _limits(m: Metadata, experts: str, shared: str) -> dict[str, list[float]]:
    """The limits of each layer's experts and of its shared one, by their names in the config."""
    keys = {experts: "swiglu_clamp_exp", shared: "swiglu_clamp_shexp"}
    return {name: m.each(key, float) for name, key in keys.items() if m.has(key)}


def lfm2(m: Metadata) -> dict[str, Any]:
    """The facts of LFM2, whose layers without kv heads are convolutions."""
    heads = m.each("attention.head_count_kv", int)
    return {
        "layer_types": [_FULL if kv else "conv" for kv in heads],
        "num_key_value_heads": max(heads),
    }


def lfm2_dense(m: Metadata) -> dict[str, Any]:
    """The facts of LFM2 without experts."""
    if m.has("attention.sliding_window"):
        raise BadCheckpoint(
            f"{m.fields.where}: {m.architecture}.attention.sliding_window is set, but kt supports LFM2 only without it"
        )
    return lfm2(m) | {"num_dense_layers": m.layers}


def bailing(m: Metadata) -> dict[str, Any]:
    """The facts of Ling 1.5, all columns of whose heads are rotated."""
    return {"head_dim": m.whole("rope.dimension_count")}


def cohere2_moe(m: Metadata) -> dict[str, Any]:
    """The facts of Cohere 2 with experts, whose norms are LayerNorms unless the file has the other kind's epsilon."""
    if m.number("attention.layer_norm_rms_epsilon", 0.0):
        return windows(m) | {"rms_norm_eps": m.number("attention.layer_norm_rms_epsilon")}
    return windows(m) | {
        "rms_norm_eps": None,
        "layer_norm_eps": m.number("attention.layer_norm_epsilon"),
    }


def glm_dsa(m: Metadata) -> dict[str, Any]:
    """The facts of GLM-5, in which layers may attend to what an earlier one's indexer chose. Older files of GLM-5.2 do
    not say which: then only the context tells it from GLM-5, as in llama.cpp."""
    given = latent(m)
    if m.has("attention.indexer.types"):
        kinds = ("shared", "full")
        own = m.each("attention.indexer.types", bool)
        return given | {"indexer_types": [kinds[each] for each in own]}
    if m.whole("context_length") < 1 << 20:
        return given | {"index_topk_freq": 1}
    return given | {"index_topk_freq": 4, "index_skip_topk_offset": 3}


def deepseek4(m: Metadata) -> dict[str, Any]:
    """The facts of DeepSeek-V4."""
    ratios = m.each("attention.compress_ratios", int)
    return {"compress_ratios": ratios, "scoring_func": "sqrtsoftplus"}


def minimax_m3(m: Metadata) -> dict[str, Any]:
    """The facts of MiniMax-M3, whose dense layers are as wide as they are in the file."""
    kinds = (_FULL, "minimax_m3_sparse")
    chosen = (f"blk.{i}.indexer.q_proj.weight" in m.entries for i in range(m.layers))
    dense = m.entries.get("blk.0.ffn_gate.weight")
    width = m.whole("expert_feed_forward_length")
    return types(m) | {
        "intermediate_size": width,
        "shared_intermediate_size": m.whole("expert_shared_count", 1) * width,
        "dense_intermediate_size": dense.shape[0] if dense and dense.shape else width,
        "layer_types": [kinds[each] for each in chosen],
    }


def step(m: Metadata) -> dict[str, Any]:
    """The facts of Step-3.5: layers with a window have more heads, and rotate all columns of them; the others half."""
    given = types(m) | rotations(m)
    kinds = given.get("layer_types") or [_FULL] * m.layers
    heads: dict[str, int] = {}
    for count, kind in zip(m.each("attention.head_count", int), kinds, strict=True):
        if heads.setdefault(kind, count) != count:
            raise BadCheckpoint(
                f"{m.fields.where}: attention.head_count differs between layers of one kind"
            )
    full = given["rope_parameters"][_FULL]
    full["partial_rotary_factor"] = 0.5
    if m.factors:  # one for each pair of all columns, of which the first are rotated
        full["factors"] = m.factors[: m.whole("attention.key_length") // 4]
    limits = _limits(m, "swiglu_limits", "swiglu_limits_shared")
    usual = next(iter(heads.values()))
    own = {"num_attention_heads": _FULL, "num_sliding_attention_heads": _SLIDING}
    return given | limits | {name: heads.get(kind, usual) for name, kind in own.items()}


def delta(m: Metadata) -> dict[str, Any]:
    """The facts of Qwen3-Next and Qwen3.5."""
    heads = m.whole("ssm.time_step_rank", high=MAX_HEADS)
    given = partly(m) | {"linear_value_head_dim": m.whole("ssm.inner_size") // max(heads, 1)}
    if m.has("attention.recurrent_layers"):
        kinds = (_FULL, "linear_attention")
        given["layer_types"] = [kinds[each] for each in m.each("attention.recurrent_layers", bool)]
    return given


def _mamba(m: Metadata) -> dict[str, Any]:
    """The facts of layers with Mamba-2, and of the attention of the others."""
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
    """The facts of Nemotron 3 and Nemotron-H, each of whose layers is what its tensors are."""
    kinds = []
    for i in range(m.layers):
        found = (kind for of, kind in _NEMOTRON_PARTS if f"blk.{i}.{of}.weight" in m.entries)
        if (kind := next(found, None)) is None:
            raise BadCheckpoint(f"{m.fields.where}: layer {i} has no tensors of a part of Nemotron")
        kinds.append(kind)
    return _mamba(m) | {
        "layers_block_type": kinds,
        "intermediate_size": m.most("feed_forward_length"),
        "norm_topk_prob": m.flag("expert_weights_norm", False),
    }


def granite_hybrid(m: Metadata) -> dict[str, Any]:
    """The facts of Granite 4, some of which have no experts but the shared one."""
    kinds = ("attention", "mamba")
    mamba = (f"blk.{i}.ssm_in.weight" in m.entries for i in range(m.layers))
    given = _mamba(m)
    alone = m.entries.get("blk.0.ffn_up.weight")
    if alone and alone.shape:
        given["shared_intermediate_size"] = alone.shape[0]
    return given | {
        "layer_types": [kinds[each] for each in mamba],
        "mamba_d_head": given.pop("mamba_head_dim"),
        "mamba_expand": m.whole("ssm.inner_size") // max(m.whole("embedding_length"), 1),
        "num_local_experts": m.whole("expert_count", 0),
        "position_embedding_type": _positions(m),
    }


def windows(m: Metadata) -> dict[str, Any]:
    """The layers that have a window, where the file lists them."""
    key, kinds = "attention.sliding_window_pattern", (_FULL, _SLIDING)
    if not m.has("attention.sliding_window") or not m.has(key):
        return {}
    return {"layer_types": [kinds[each] for each in m.each(key, bool)]}


def types(m: Metadata) -> dict[str, Any]:
    """The layers that have experts, and those that have a window."""
    kinds = ("dense", "sparse")
    sparse = (f"blk.{i}.ffn_gate_inp.weight" in m.entries for i in range(m.layers))
    return windows(m) | {"mlp_layer_types": [kinds[each] for each in sparse]}


def rotations(m: Metadata) -> dict[str, Any]:
    """The rotation of each kind of layers; only that of layers without a window is stretched."""
    width = max(m.whole("attention.key_length"), 1)
    theta = m.number("rope.freq_base", 10_000.0)
    full = {
        "rope_theta": theta,
        "partial_rotary_factor": m.whole("rope.dimension_count", width) / width,
        **(scaling(m) or {}),
    }
    sliding = {
        "rope_theta": m.number("rope.freq_base_swa", theta),
        "partial_rotary_factor": m.whole("rope.dimension_count_swa", width) / width,
    }
    return {"rope_parameters": {_FULL: full, _SLIDING: sliding}, "rope_scaling": None}


def mimo(m: Metadata) -> dict[str, Any]:
    """The facts of MiMo-V2, whose layers with a window have kv heads and a rotation of their own."""
    m.number(
        "attention.value_scale"
    )  # older files lack it, and their values are larger than the model's
    pattern = m.switches("attention.sliding_window_pattern")
    heads = m.each("attention.head_count_kv", int)
    own = dict(zip(pattern, heads, strict=True))
    if any(own[is_window] != kv for is_window, kv in zip(pattern, heads, strict=True)):
        raise BadCheckpoint(
            f"{m.fields.where}: {m.architecture}.attention.head_count_kv differs between layers of one kind"
        )
    theta = m.number("rope.freq_base", 10_000.0)
    usual = heads[0]
    return partly(m) | {
        "num_key_value_heads": own.get(0, usual),
        "swa_num_key_value_heads": own.get(1, usual),
        "hybrid_layer_pattern": pattern,
        "moe_layer_freq": [
            int(f"blk.{i}.ffn_gate_inp.weight" in m.entries) for i in range(m.layers)
        ],
        "swa_rope_theta": m.number("rope.freq_base_swa", theta),
        "norm_topk_prob": True,
    }


def glm5_next(m: Metadata) -> dict[str, Any]:
    """The facts of GLM-5.3, whose layers without kv heads have linear attention."""
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


def mellum(m: Metadata) -> dict[str, Any]:
    """The facts of Mellum 2."""
    return types(m) | rotations(m)


def hunyuan(m: Metadata) -> dict[str, Any]:
    """The facts of Hunyuan-A13B, whose shared expert is as wide as the others."""
    return {"moe_intermediate_size": m.whole("expert_shared_feed_forward_length")}


def granite(m: Metadata) -> dict[str, Any]:
    """The facts of Granite-MoE, some of which have a shared expert."""
    shared = m.has("expert_shared_feed_forward_length")
    return {"model_type": "granitemoeshared"} if shared else {}


def granite_dense(m: Metadata) -> dict[str, Any]:
    """The facts of Granite without experts, which is Granite 4 with attention and the shared expert alone."""
    return {
        "layer_types": ["attention"] * m.layers,
        "num_local_experts": 0,
        "position_embedding_type": _positions(m),
    }


def granite_windows(m: Metadata) -> dict[str, Any]:
    """The facts of Granite-MoE with windows, some of whose layers may have no positions."""
    pattern, theta = "attention.rope_pattern", m.number("rope.freq_base", 10_000.0)
    turned = m.switches(pattern) if m.has(pattern) else [1] * m.layers
    return windows(m) | {"layer_rope_theta": [theta * each for each in turned]}


def _positions(m: Metadata) -> str:
    """Whether Granite's attention has positions, as its config says it."""
    return "rope" if m.flag("rope.scaling.finetuned", True) else "nope"


def hy3(m: Metadata) -> dict[str, Any]:
    """The facts of Hy3, whose files say how wide all shared experts are together."""
    width = max(m.whole("expert_feed_forward_length"), 1)
    shared = m.whole("expert_shared_feed_forward_length", width)
    return types(m) | {"n_shared_experts": shared // width}


def laguna(m: Metadata) -> dict[str, Any]:
    """The facts of Laguna: of four layers with windows the first has none, and layers differ in heads."""
    heads = m.each("attention.head_count", int)
    given = mellum(m) | {
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
    }
    if m.has("attention.sliding_window"):
        every = m.whole("attention.sliding_window_pattern", 4, MAX_LAYERS) or 1
        kinds = (_SLIDING, _FULL)
        given["layer_types"] = [kinds[i % every == 0] for i in range(m.layers)]
    return given


def gemma3(m: Metadata) -> dict[str, Any]:
    """The facts of Gemma 3. Of the largest, which llama.cpp tells by its 62 layers, scores are divided by the root of
    the width over the number of heads."""
    heads, width = m.whole("attention.head_count"), m.whole("attention.key_length")
    if m.layers == 62:
        width = m.whole("embedding_length") // max(heads, 1)
    given = {
        "query_pre_attn_scalar": width,
        "rope_local_base_freq": m.number("rope.freq_base_swa", 1e4),
    }
    every = "attention.sliding_window_pattern"
    if m.lists(every):
        return given | windows(m)
    return given | {"sliding_window_pattern": m.whole(every, 6, MAX_LAYERS)}


_STILL = 1e20  # the least divisor of a frequency that means none; converters write 1e30


def gemma4(m: Metadata) -> dict[str, Any]:
    """The facts of Gemma 4. The length of a key is that of layers without a window, which have no tensor of values
    where keys are the values; and they turn only those pairs of columns whose frequency is divided by 1."""
    given, key_heads = windows(m), "attention.head_count_kv"
    kinds = given.get("layer_types") or [_SLIDING] * m.layers
    heads = m.each(key_heads, int) if m.lists(key_heads) else [m.whole(key_heads)] * m.layers
    own = dict(zip(kinds, heads, strict=True))
    if any(own[kind] != count for kind, count in zip(kinds, heads, strict=True)):
        raise BadCheckpoint(f"{m.fields.where}: {key_heads} differs between layers of one kind")
    turning = sum(factor == 1 for factor in m.factors)
    if any(factor < _STILL for factor in m.factors[turning:]):
        raise BadCheckpoint(f"{m.fields.where}: rope_freqs.weight must be 1s followed by 1e30s")
    full: dict[str, Any] = {"rope_theta": m.number("rope.freq_base", 1e6)}
    if m.factors:
        part = turning / len(m.factors)
        full |= {"rope_type": "proportional", "partial_rotary_factor": part}
    without = (f"blk.{i}.attn_v.weight" not in m.entries for i in range(m.layers))
    return given | {
        "num_key_value_heads": own.get(_SLIDING, heads[0]),
        "num_global_key_value_heads": own.get(_FULL, heads[0]),
        "head_dim": m.whole("attention.key_length_swa"),
        "global_head_dim": m.whole("attention.key_length"),
        "attention_k_eq_v": any(without),
        "enable_moe_block": "blk.0.ffn_gate_inp.weight" in m.entries,
        "hidden_size_per_layer_input": m.whole("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": m.whole("attention.shared_kv_layers", 0),
        "rope_scaling": None,
        "rope_parameters": {
            _FULL: full,
            _SLIDING: {"rope_theta": m.number("rope.freq_base_swa", 1e4)},
        },
    }
