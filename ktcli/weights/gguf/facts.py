"""Facts that are derived from several keys of a GGUF file or from its tensors, with one function per architecture.

What a file leaves out because llama.cpp knows it of the architecture is from llama.cpp's converters and loaders.
"""

from __future__ import annotations

from typing import Any

from ktcli.models.config import MAX_LAYERS
from ktcli.weights.gguf.metadata import SIGMOID, SOFTMAX, Metadata, scaling

_FULL, _SLIDING = "full_attention", "sliding_attention"


def llama(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Llama, Mistral or Mixtral: `attention_bias`
    (a bool); `head_dim` where the file has no length of a key; with experts also `model_type` and `num_local_experts`.
    """
    width = m.whole("rope.dimension_count", 0)
    given: dict[str, Any] = {"attention_bias": "blk.0.attn_q.bias" in m.entries}
    if width and not m.has("attention.key_length"):
        given["head_dim"] = width
    experts = m.whole("expert_count", 0)
    return given | ({"model_type": "mixtral", "num_local_experts": experts} if experts else {})


def partly(m: Metadata) -> dict[str, Any]:
    """Returns {`partial_rotary_factor`: share}, derived from a GGUF file: the share of each head's columns that are
    rotated."""
    width = m.whole("attention.key_length")
    return {"partial_rotary_factor": m.whole("rope.dimension_count", width) / max(width, 1)}


def glm(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of GLM-4.5: `partial_rotary_factor` (as
    `partly`) and two bools, `use_qk_norm` (whether q and k have norms) and `attention_bias`."""
    return partly(m) | {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in m.entries,
        "attention_bias": "blk.0.attn_q.bias" in m.entries,
    }


def gpt_oss(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of gpt-oss: `rope_scaling` {"rope_type":
    "default"} if the file does not stretch the context; otherwise {}."""
    m.whole("attention.sliding_window")  # without it every layer would see everything
    plain = not m.has("rope.scaling.type") and not m.has("rope.scaling.factor")
    return {"rope_scaling": {"rope_type": "default"}} if plain else {}


def latent(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of a model with latent attention: widths of a
    head (`head_dim`, `qk_rope_head_dim`, `qk_nope_head_dim`, `v_head_dim`), `num_key_value_heads`, and the router's
    `n_group` and `topk_group`; all integers."""
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
    """Returns the `config.json` fields that kt derives from a GGUF file of DeepSeek or Kimi-K2: those of `latent`, and
    how the router scores (`topk_method`, with `model_type` for V2 or `scoring_func` for V3 and Kimi-K2). Some files of
    Mistral Small 4 have this architecture, too: then those of `mistral4`."""
    if m.number("attention.temperature_scale", 0.0):
        return mistral4(m)
    given = latent(m)
    if m.gating(SOFTMAX, SIGMOID) == SOFTMAX:
        method = "group_limited_greedy" if given["n_group"] > 1 else "greedy"
        return given | {"model_type": "deepseek_v2", "topk_method": method}
    return given | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def mistral4(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Mistral Small 4: those of `latent`,
    `model_type`, `rope_scaling` with the `llama_4_scaling_beta` by which queries grow with their position, and
    `norm_topk_prob`."""
    m.gating(SOFTMAX)
    rope, original = scaling(m) or {}, "original_max_position_embeddings"
    step = m.whole("attention.temperature_length", rope.get(original, m.whole("context_length")))
    if rope.setdefault(original, step) != step:
        raise m.bad(
            f"{m.architecture}.attention.temperature_length is {step}, but kt supports only that of "
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
    """Returns {`use_qk_norm`: bool}, derived from a GGUF file of Llama 4: false for Maverick, recognised by its 128
    experts as in llama.cpp. Raises BadCheckpoint for a sliding window of 0, which kt does not support."""
    if not m.whole("attention.sliding_window", 1):
        raise m.bad(
            f"{m.architecture}.attention.sliding_window is 0, but kt supports Llama 4 only with "
            "attention in chunks"
        )
    return {"use_qk_norm": m.whole("expert_count") != _UNNORMED}


def swiglu_limits(m: Metadata, experts: str, shared: str) -> dict[str, list[float]]:
    """Returns the limits that a GGUF file has for activations, under the field names `experts` (routed experts) and
    `shared` (the shared expert): a list of one float for each layer; limits that the file lacks are left out."""
    keys = {experts: "swiglu_clamp_exp", shared: "swiglu_clamp_shexp"}
    return {name: m.each(key, float) for name, key in keys.items() if m.has(key)}


def bailing(m: Metadata) -> dict[str, Any]:
    """Returns {`head_dim`: columns}, derived from a GGUF file of Ling 1.5: the width of a head, whose columns are all
    rotated."""
    return {"head_dim": m.whole("rope.dimension_count")}


def cohere2_moe(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Cohere 2 with experts: `layer_types` (as
    `windows`), and `rms_norm_eps` if its norms are RMSNorms; otherwise `layer_norm_eps`, with `rms_norm_eps` None."""
    if m.number("attention.layer_norm_rms_epsilon", 0.0):
        return windows(m) | {"rms_norm_eps": m.number("attention.layer_norm_rms_epsilon")}
    return windows(m) | {
        "rms_norm_eps": None,
        "layer_norm_eps": m.number("attention.layer_norm_epsilon"),
    }


def glm_dsa(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of GLM-5: those of `latent`, and
    `indexer_types` ("full" for a layer with an indexer of its own, else "shared"). For older files without that list:
    `index_topk_freq` and, from a context of 2^20 on (GLM-5.2), `index_skip_topk_offset`, as in llama.cpp."""
    given = latent(m)
    if m.has("attention.indexer.types"):
        kinds = ("shared", "full")
        own = m.each("attention.indexer.types", bool)
        return given | {"indexer_types": [kinds[each] for each in own]}
    if m.whole("context_length") < 1 << 20:
        return given | {"index_topk_freq": 1}
    return given | {"index_topk_freq": 4, "index_skip_topk_offset": 3}


def deepseek4(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of DeepSeek-V4: `compress_ratios` (one integer
    for each layer) and `scoring_func` ("sqrtsoftplus")."""
    ratios = m.each("attention.compress_ratios", int)
    return {"compress_ratios": ratios, "scoring_func": "sqrtsoftplus"}


def minimax_m3(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of MiniMax-M3: widths (`intermediate_size` of
    experts, `shared_intermediate_size`, `dense_intermediate_size`), `mlp_layer_types` as `types` returns it, and
    `layer_types`, "minimax_m3_sparse" for layers that choose blocks with an indexer."""
    kinds = (_FULL, "minimax_m3_sparse")
    dense = m.entries.get("blk.0.ffn_gate.weight")
    width = m.whole("expert_feed_forward_length")
    return types(m) | {
        "intermediate_size": width,
        "shared_intermediate_size": m.whole("expert_shared_count", 1) * width,
        "dense_intermediate_size": dense.shape[0] if dense and dense.shape else width,
        "layer_types": [kinds[each] for each in m.with_tensor("indexer.q_proj")],
    }


def step(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Step-3.5: those of `types` and `rotations`,
    the limits `swiglu_limits` and `swiglu_limits_shared` of activations, and the numbers of heads of layers without and
    with a sliding window, `num_attention_heads` and `num_sliding_attention_heads`."""
    given = types(m) | rotations(m)
    kinds = given.get("layer_types") or [_FULL] * m.layers
    counts = m.each("attention.head_count", int)
    heads = _by_kind(m, "attention.head_count", kinds, counts)
    full = given["rope_parameters"][_FULL]
    full["partial_rotary_factor"] = 0.5
    if m.factors:  # one for each pair of all columns, of which the first are rotated
        full["factors"] = m.factors[: m.whole("attention.key_length") // 4]
    limits = swiglu_limits(m, "swiglu_limits", "swiglu_limits_shared")
    own = {
        "num_attention_heads": heads.get(_FULL, counts[0]),
        "num_sliding_attention_heads": heads.get(_SLIDING, counts[0]),
    }
    return given | limits | own


def _by_kind(m: Metadata, name: str, kinds: list[Any], counts: list[int]) -> dict[Any, int]:
    """Returns the count of each kind of layers. Raises: BadCheckpoint: layers of one kind differ."""
    own = dict(zip(kinds, counts, strict=True))
    if any(own[kind] != count for kind, count in zip(kinds, counts, strict=True)):
        raise m.bad(f"{name} differs between layers of one kind")
    return own


def windows(m: Metadata) -> dict[str, Any]:
    """Returns {`layer_types`: names}, derived from a GGUF file: "sliding_attention" for each layer with a sliding
    window, "full_attention" for the others; {} where the file does not list them."""
    key, kinds = "attention.sliding_window_pattern", (_FULL, _SLIDING)
    if not m.has("attention.sliding_window") or not m.has(key):
        return {}
    return {"layer_types": [kinds[each] for each in m.each(key, bool)]}


def types(m: Metadata) -> dict[str, Any]:
    """Returns {`mlp_layer_types`: names}, derived from a GGUF file: "sparse" for each layer with experts, "dense" for
    the others; and `layer_types`, as `windows` returns it."""
    kinds = ("dense", "sparse")
    return windows(m) | {"mlp_layer_types": [kinds[each] for each in m.with_tensor("ffn_gate_inp")]}


def rotations(m: Metadata) -> dict[str, Any]:
    """Returns {`rope_parameters`: {"full_attention": …, "sliding_attention": …}, `rope_scaling`: None}, derived from a
    GGUF file: `rope_theta` and `partial_rotary_factor` for layers without and with a sliding window, and for the former
    how the rotation is stretched."""
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
    """Returns the `config.json` fields that kt derives from a GGUF file of MiMo-V2: `hybrid_layer_pattern` (1 for a
    layer with a sliding window) and `moe_layer_freq` (1 for one with experts), lists of 0 and 1; numbers of kv heads
    without and with a window (`num_key_value_heads`, `swa_num_key_value_heads`), `swa_rope_theta`,
    `partial_rotary_factor` and `norm_topk_prob`."""
    # Older files lack it, and their values are larger than the model's.
    m.number("attention.value_scale")
    pattern = m.switches("attention.sliding_window_pattern")
    heads = m.each("attention.head_count_kv", int)
    own = _by_kind(m, f"{m.architecture}.attention.head_count_kv", pattern, heads)
    theta = m.number("rope.freq_base", 10_000.0)
    usual = heads[0]
    return partly(m) | {
        "num_key_value_heads": own.get(0, usual),
        "swa_num_key_value_heads": own.get(1, usual),
        "hybrid_layer_pattern": pattern,
        "moe_layer_freq": [int(each) for each in m.with_tensor("ffn_gate_inp")],
        "swa_rope_theta": m.number("rope.freq_base_swa", theta),
        "norm_topk_prob": True,
    }


def mellum(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Mellum 2: those of `types` (which layers
    have experts, which a sliding window) and `rotations`."""
    return types(m) | rotations(m)


def hunyuan(m: Metadata) -> dict[str, Any]:
    """Returns {`moe_intermediate_size`: columns}, derived from a GGUF file of Hunyuan-A13B: the width of an expert,
    which equals that of the shared one."""
    return {"moe_intermediate_size": m.whole("expert_shared_feed_forward_length")}


def granite(m: Metadata) -> dict[str, Any]:
    """Returns {`model_type`: "granitemoeshared"} for a GGUF file of Granite-MoE with a shared expert; otherwise {}."""
    shared = m.has("expert_shared_feed_forward_length")
    return {"model_type": "granitemoeshared"} if shared else {}


def granite_dense(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Granite without experts, which kt reads as
    Granite 4 with only the shared expert: `layer_types` (all "attention"), `num_local_experts` 0, and
    `position_embedding_type`."""
    return {
        "layer_types": ["attention"] * m.layers,
        "num_local_experts": 0,
        "position_embedding_type": positions(m),
    }


def granite_windows(m: Metadata) -> dict[str, Any]:
    """Returns {`layer_types`: names, `layer_rope_theta`: numbers}, derived from a GGUF file of Granite-MoE with sliding
    windows: the former as `windows` returns it, the latter the rotary base of each layer, 0.0 for a layer without
    positions."""
    pattern, theta = "attention.rope_pattern", m.number("rope.freq_base", 10_000.0)
    turned = m.switches(pattern) if m.has(pattern) else [1] * m.layers
    return windows(m) | {"layer_rope_theta": [theta * each for each in turned]}


def positions(m: Metadata) -> str:
    """Returns the `position_embedding_type` of Granite's `config.json`, derived from a GGUF file: "rope", or "nope" if
    attention does not use positions."""
    return "rope" if m.flag("rope.scaling.finetuned", True) else "nope"


def hy3(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Hy3: those of `types` (which layers have
    experts, which a sliding window) and `n_shared_experts`, the number of shared experts."""
    width = max(m.whole("expert_feed_forward_length"), 1)
    shared = m.whole("expert_shared_feed_forward_length", width)
    return types(m) | {"n_shared_experts": shared // width}


def laguna(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Laguna: those of `mellum`,
    `num_attention_heads_per_layer`, and `num_attention_heads` of the first layer. Of every four layers, or as many as
    the file says, the first has no sliding window."""
    heads = m.each("attention.head_count", int)
    given = mellum(m) | {"num_attention_heads": heads[0], "num_attention_heads_per_layer": heads}
    if m.has("attention.sliding_window"):
        every = m.whole("attention.sliding_window_pattern", 4, MAX_LAYERS) or 1
        kinds = (_SLIDING, _FULL)
        given["layer_types"] = [kinds[i % every == 0] for i in range(m.layers)]
    return given


def gemma3(m: Metadata) -> dict[str, Any]:
    """Returns the `config.json` fields that kt derives from a GGUF file of Gemma 3: `query_pre_attn_scalar`, by whose
    root scores are divided (with 62 layers, as in llama.cpp, the hidden width over the number of heads);
    `rope_local_base_freq`, the rotation base of layers with a sliding window; and which layers these are: `layer_types`
    or, if all are spaced evenly, `sliding_window_pattern`."""
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
    """Returns the `config.json` fields that kt derives from a GGUF file of Gemma 4: `layer_types` (which have a sliding
    window), widths and numbers of heads of both kinds of layers, their rotations (`rope_parameters`), and which parts
    the model has (such as `enable_moe_block`)."""
    given, key_heads = windows(m), "attention.head_count_kv"
    kinds = given.get("layer_types") or [_SLIDING] * m.layers
    heads = m.each(key_heads, int) if m.lists(key_heads) else [m.whole(key_heads)] * m.layers
    own = _by_kind(m, key_heads, kinds, heads)
    turning = sum(factor == 1 for factor in m.factors)
    if any(factor < _STILL for factor in m.factors[turning:]):
        raise m.bad("rope_freqs.weight must be 1s followed by 1e30s")
    full: dict[str, Any] = {"rope_theta": m.number("rope.freq_base", 1e6)}
    if m.factors:
        part = turning / len(m.factors)
        full |= {"rope_type": "proportional", "partial_rotary_factor": part}
    return given | {
        "num_key_value_heads": own.get(_SLIDING, heads[0]),
        "num_global_key_value_heads": own.get(_FULL, heads[0]),
        "head_dim": m.whole("attention.key_length_swa"),
        "global_head_dim": m.whole("attention.key_length"),
        "attention_k_eq_v": not all(m.with_tensor("attn_v")),
        "enable_moe_block": "blk.0.ffn_gate_inp.weight" in m.entries,
        "hidden_size_per_layer_input": m.whole("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": m.whole("attention.shared_kv_layers", 0),
        "rope_scaling": None,
        "rope_parameters": {
            _FULL: full,
            _SLIDING: {"rope_theta": m.number("rope.freq_base_swa", 1e4)},
        },
    }
