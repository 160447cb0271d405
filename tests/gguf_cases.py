"""The models that kt and llama.cpp are compared on: one small one per architecture and number format.

llama.cpp wants widths of whole blocks, which are 256 wide in its K formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf_models import F32, GgufCase
from gguf_vocabularies import mini_vocabulary

from ktcli.resources import data_path
from ktcli.weights.header import read_header

HIDDEN, WIDTH, VOCAB, LAYERS, EXPERTS, CONTEXT = 256, 256, 300, 2, 4, 256
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 64
_DECODER: dict[str, Any] = {
    "block_count": LAYERS,
    "context_length": CONTEXT,
    "embedding_length": HIDDEN,
    "feed_forward_length": WIDTH,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _KV_HEADS,
    "attention.key_length": _HEAD_DIM,
    "attention.value_length": _HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10_000.0,
    "rope.dimension_count": _HEAD_DIM,
}
_MOE: dict[str, Any] = {
    **_DECODER,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": WIDTH,
}


def _outer() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (VOCAB, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)
    yield "output.weight", (VOCAB, HIDDEN)


@dataclass(frozen=True)
class Parts:
    """What a model with grouped-query attention has beside the usual.

    Attributes:
        qk_norm: widths of the norms of q and k.
        post_norm: name of the second norm of a layer.
        biases: projections with a bias, "gate_inp" and "exps" among them.
        correction: of the router's choice.
        shared: width of the shared expert.
        dense: layers before the first with experts.
        factors: of the rotation, given outright.
    """

    experts: bool = True
    qk_norm: tuple[int, int] | None = None
    post_norm: str = "ffn_norm"
    biases: tuple[str, ...] = ()
    correction: bool = False
    shared: int = 0
    shared_gate: bool = False
    sinks: bool = False
    dense: int = 0
    factors: bool = False


_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _grouped(parts: Parts) -> Callable[[GgufCase], Iterator[Any]]:
    """Tensors of a model with grouped-query attention."""

    def tensors(case: GgufCase) -> _Shapes:
        yield from _outer()
        if parts.factors:
            yield "rope_freqs.weight", (_HEAD_DIM // 2,)
        for i in range(LAYERS):
            blk = f"blk.{i}"
            for name, shape in (*_attention(parts), *_mlp(parts, i)):
                yield f"{blk}.{name}", shape

    return tensors


def _attention(parts: Parts) -> _Shapes:
    q, kv = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    yield "attn_norm.weight", (HIDDEN,)
    for name, n, k in (
        ("q", q, HIDDEN),
        ("k", kv, HIDDEN),
        ("v", kv, HIDDEN),
        ("output", HIDDEN, q),
    ):
        yield f"attn_{name}.weight", (n, k)
        if name in parts.biases:
            yield f"attn_{name}.bias", (n,)
    if parts.qk_norm:
        yield "attn_q_norm.weight", (parts.qk_norm[0],)
        yield "attn_k_norm.weight", (parts.qk_norm[1],)
    if parts.sinks:
        yield "attn_sinks.weight", (_HEADS,)
    yield f"{parts.post_norm}.weight", (HIDDEN,)


def _mlp(parts: Parts, layer: int) -> _Shapes:
    if not parts.experts or layer < parts.dense:
        yield from _three("", WIDTH)
        return
    yield "ffn_gate_inp.weight", (EXPERTS, HIDDEN)
    if "gate_inp" in parts.biases:
        yield "ffn_gate_inp.bias", (EXPERTS,)
    if parts.correction:
        yield "exp_probs_b.bias", (EXPERTS,)
    for name, shape in _three("_exps", WIDTH):
        yield name, (EXPERTS, *shape)
        if "exps" in parts.biases:
            yield name.replace("weight", "bias"), (EXPERTS, shape[0])
    if parts.shared:
        yield from _three("_shexp", parts.shared)
    if parts.shared_gate:
        yield "ffn_gate_inp_shexp.weight", (HIDDEN,)


def _three(suffix: str, width: int) -> _Shapes:
    yield f"ffn_gate{suffix}.weight", (width, HIDDEN)
    yield f"ffn_up{suffix}.weight", (width, HIDDEN)
    yield f"ffn_down{suffix}.weight", (HIDDEN, width)


_LORA, _ROPE, _NOPE, _V = 64, 32, 64, 64


def _latent(case: GgufCase) -> _Shapes:
    """DeepSeek-V2: latent attention, one dense layer, shared experts."""
    yield from _outer()
    for i in range(LAYERS):
        blk, q_width = f"blk.{i}", _HEADS * (_NOPE + _ROPE)
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q_a": (_LORA, HIDDEN),
            "attn_q_a_norm": (_LORA,),
            "attn_q_b": (q_width, _LORA),
            "attn_kv_a_mqa": (_LORA + _ROPE, HIDDEN),
            "attn_kv_a_norm": (_LORA,),
            "attn_k_b": (_HEADS, _LORA, _NOPE),
            "attn_v_b": (_HEADS, _V, _LORA),
            "attn_output": (HIDDEN, _HEADS * _V),
            "ffn_norm": (HIDDEN,),
        }.items():
            yield f"{blk}.{name}.weight", shape
        for name, shape in _mlp(Parts(shared=2 * WIDTH, dense=1), i):
            yield f"{blk}.{name}", shape


_LATENT: dict[str, Any] = {
    **_MOE,
    "attention.head_count_kv": 1,
    "attention.key_length": _LORA + _ROPE,
    "attention.value_length": _LORA,
    "attention.key_length_mla": _NOPE + _ROPE,
    "attention.value_length_mla": _V,
    "attention.q_lora_rank": _LORA,
    "attention.kv_lora_rank": _LORA,
    "rope.dimension_count": _ROPE,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_log_multiplier": 0.0707,
    "leading_dense_block_count": 1,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 1,
}


def _mini(case: GgufCase) -> Iterator[tuple[str, F32]]:
    """The built-in model, a trained DeepSeek-V3, its kv_b split as converters do."""
    config, get = _mini_config(), _mini_tensors()
    for ours, theirs in _MINI_OUTER.items():
        yield f"{ours}.weight", get[f"{theirs}.weight"]
    for i in range(config["num_hidden_layers"]):
        blk, layer = f"blk.{i}", f"model.layers.{i}"
        for ours, theirs in _MINI_LAYER.items():
            yield f"{blk}.{ours}.weight", get[f"{layer}.{theirs}.weight"]
        heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
        kv_b = get[f"{layer}.self_attn.kv_b_proj.weight"].reshape(heads, -1, config["kv_lora_rank"])
        yield f"{blk}.attn_k_b.weight", np.ascontiguousarray(kv_b[:, :nope].transpose(0, 2, 1))
        yield f"{blk}.attn_v_b.weight", np.ascontiguousarray(kv_b[:, nope:])
        if i < config["first_k_dense_replace"]:
            for p in _PARTS:
                yield f"{blk}.ffn_{p}.weight", get[f"{layer}.mlp.{p}_proj.weight"]
            continue
        yield f"{blk}.ffn_gate_inp.weight", get[f"{layer}.mlp.gate.weight"]
        yield f"{blk}.exp_probs_b.bias", get[f"{layer}.mlp.gate.e_score_correction_bias"]
        for p in _PARTS:
            experts = range(config["n_routed_experts"])
            names = [f"{layer}.mlp.experts.{e}.{p}_proj.weight" for e in experts]
            yield f"{blk}.ffn_{p}_exps.weight", np.stack([get[name] for name in names])
            yield f"{blk}.ffn_{p}_shexp.weight", get[f"{layer}.mlp.shared_experts.{p}_proj.weight"]


_PARTS = ("gate", "up", "down")
_MINI_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_MINI_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_output": "self_attn.o_proj",
}


def _mini_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(
        (data_path("profiles", "kt-mini") / "config.json").read_text()
    )
    return config


def _mini_tensors() -> dict[str, F32]:
    path = data_path("profiles", "kt-mini") / "model.safetensors"
    found = {}
    for name, entry in read_header(path).entries.items():
        kind = "<u2" if entry.dtype == "BF16" else "<f4"
        raw = np.fromfile(path, kind, entry.elements, offset=entry.offset)
        wide = (raw.astype("<u4") << 16).view("<f4") if entry.dtype == "BF16" else raw
        found[name] = wide.reshape(entry.shape)
    return found


def _mini_metadata() -> dict[str, Any]:
    c = _mini_config()
    lora, rope = c["kv_lora_rank"], c["qk_rope_head_dim"]
    return {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": 1,
        "attention.key_length": lora + rope,
        "attention.value_length": lora,
        "attention.key_length_mla": c["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": c["v_head_dim"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "attention.q_lora_rank": c["q_lora_rank"],
        "attention.kv_lora_rank": lora,
        "rope.freq_base": c["rope_theta"],
        "rope.dimension_count": rope,
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_count": c["n_routed_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_weights_scale": c["routed_scaling_factor"],
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_gating_func": 2,
        "expert_group_count": c["n_group"],
        "expert_group_used_count": c["topk_group"],
        "vocab_size": c["vocab_size"],
        **mini_vocabulary("qwen2"),
    }


# "Tell me a story about a fox." as the built-in model's chat template frames it.
_STORY = (0, 2, 1430, 310, 264, 392, 414, 464, 264, 289, 84, 93, 19, 4, 3)
_HALF = {"rope.dimension_count": _HEAD_DIM // 2}
_NO_VOCAB = {"tokenizer.ggml.model": "no_vocab", "vocab_size": VOCAB}


def _case(architecture: str, kind: str, seed: int, parts: Parts, **metadata: Any) -> GgufCase:
    """A random model; metadata has "__" for a dot."""
    base = _MOE if parts.experts else _DECODER
    given = {key.replace("__", "."): value for key, value in metadata.items()}
    name = f"{architecture}{'' if parts.experts else '-dense'}-{kind.lower()}"
    values = {**base, **_NO_VOCAB, **given}
    return GgufCase(name, architecture, kind, _grouped(parts), values, seed)


_QWEN3 = Parts(qk_norm=(_HEAD_DIM, _HEAD_DIM))
_QWEN3_SEEDS = {"Q8_0": 1, "F16": 10, "Q4_0": 13, "Q4_K": 12, "Q6_K": 4, "mixed": 9}
_SIGMOID = {
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
}


# Seeds are ones where the best token always has a lead over the next, else rounding would choose.
def with_numbers(case: GgufCase) -> GgufCase:
    """A model in NVFP4 as llama.cpp's converter leaves it: a number for each matrix beside the bytes of its blocks, and
    one for its activations."""

    def tensors(own: GgufCase) -> Iterator[tuple[str, F32 | tuple[int, ...]]]:
        for name, shape in case.tensors(own):
            yield name, shape
            stem = name.removesuffix(".weight")
            if "_exps" in name or "attn_q." in name or "attn_output" in name:
                count = EXPERTS if "_exps" in name else 1
                yield f"{stem}.scale", 0.75 + np.arange(count, dtype=np.float32) / 8
                yield f"{stem}.input_scale", np.full(count, 0.01, np.float32)

    return replace(case, tensors=tensors)


CASES = (
    with_numbers(_case("qwen3moe", "NVFP4", 3, _QWEN3)),
    *(_case("qwen3moe", kind, seed, _QWEN3) for kind, seed in _QWEN3_SEEDS.items()),
    _case("llama", "Q8_0", 36, Parts()),
    _case("llama", "mixed", 6, Parts()),
    _case("llama", "Q8_0", 33, Parts(experts=False, factors=True)),
    _case("qwen3", "Q8_0", 10, Parts(experts=False, qk_norm=(_HEAD_DIM, _HEAD_DIM))),
    _case("qwen2", "Q8_0", 0, Parts(experts=False, biases=("q", "k", "v"))),
    _case(
        "qwen2moe",
        "Q8_0",
        34,
        Parts(biases=("q", "k", "v"), shared=128, shared_gate=True),
        expert_shared_feed_forward_length=128,
    ),
    _case(
        "glm4moe",
        "Q8_0",
        11,
        Parts(
            biases=("q", "k", "v"),
            post_norm="post_attention_norm",
            correction=True,
            shared=WIDTH,
            dense=1,
        ),
        **_SIGMOID,
        **_HALF,
    ),
    _case(
        "minimax-m2",
        "Q8_0",
        10,
        Parts(qk_norm=(_HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM), correction=True),
        expert_gating_func=2,
        **_HALF,
    ),
    _case(
        "gpt-oss",
        "MXFP4",
        2,
        Parts(
            biases=("q", "k", "v", "output", "gate_inp", "exps"),
            post_norm="post_attention_norm",
            sinks=True,
        ),
        attention__sliding_window=8,
    ),
    GgufCase("deepseek2-q8_0", "deepseek2", "Q8_0", _latent, {**_LATENT, **_NO_VOCAB}, 4),
    GgufCase("kt-mini-q8_0", "deepseek2", "Q8_0", _mini, _mini_metadata(), prompt=_STORY),
)
