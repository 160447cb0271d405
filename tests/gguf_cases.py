"""The models that kt and llama.cpp are compared on: one small one per architecture and number format.

llama.cpp wants widths of whole blocks, which are 256 wide in its K formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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


def _grouped(qk_norm: bool, experts: bool) -> Callable[[GgufCase], Iterator[Any]]:
    """Tensors of a model with grouped-query attention."""

    def tensors(case: GgufCase) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from _outer()
        for i in range(LAYERS):
            blk = f"blk.{i}"
            yield f"{blk}.attn_norm.weight", (HIDDEN,)
            yield f"{blk}.attn_q.weight", (_HEADS * _HEAD_DIM, HIDDEN)
            yield f"{blk}.attn_k.weight", (_KV_HEADS * _HEAD_DIM, HIDDEN)
            yield f"{blk}.attn_v.weight", (_KV_HEADS * _HEAD_DIM, HIDDEN)
            yield f"{blk}.attn_output.weight", (HIDDEN, _HEADS * _HEAD_DIM)
            if qk_norm:
                yield f"{blk}.attn_q_norm.weight", (_HEAD_DIM,)
                yield f"{blk}.attn_k_norm.weight", (_HEAD_DIM,)
            yield f"{blk}.ffn_norm.weight", (HIDDEN,)
            yield from _mlp(blk, experts)

    return tensors


def _mlp(blk: str, experts: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not experts:
        yield f"{blk}.ffn_gate.weight", (WIDTH, HIDDEN)
        yield f"{blk}.ffn_up.weight", (WIDTH, HIDDEN)
        yield f"{blk}.ffn_down.weight", (HIDDEN, WIDTH)
        return
    yield f"{blk}.ffn_gate_inp.weight", (EXPERTS, HIDDEN)
    yield f"{blk}.ffn_gate_exps.weight", (EXPERTS, WIDTH, HIDDEN)
    yield f"{blk}.ffn_up_exps.weight", (EXPERTS, WIDTH, HIDDEN)
    yield f"{blk}.ffn_down_exps.weight", (EXPERTS, HIDDEN, WIDTH)


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


_QWEN3, _MIXTRAL = _grouped(qk_norm=True, experts=True), _grouped(qk_norm=False, experts=True)
# "Tell me a story about a fox." as the built-in model's chat template frames it.
_STORY = (0, 2, 1430, 310, 264, 392, 414, 464, 264, 289, 84, 93, 19, 4, 3)
_NO_VOCAB = {"tokenizer.ggml.model": "no_vocab", "vocab_size": VOCAB}
# Seeds are ones where the best token always has a lead over the next, else rounding would choose.
CASES = (
    *(
        GgufCase(f"qwen3moe-{kind.lower()}", "qwen3moe", kind, _QWEN3, {**_MOE, **_NO_VOCAB}, seed)
        for kind, seed in {
            "Q8_0": 1,
            "F16": 10,
            "Q4_0": 13,
            "Q4_K": 12,
            "Q6_K": 4,
            "mixed": 9,
        }.items()
    ),
    *(
        GgufCase(f"mixtral-{kind.lower()}", "llama", kind, _MIXTRAL, {**_MOE, **_NO_VOCAB}, seed)
        for kind, seed in {"Q8_0": 3, "mixed": 6}.items()
    ),
    GgufCase("kt-mini-q8_0", "deepseek2", "Q8_0", _mini, _mini_metadata(), prompt=_STORY),
)
