"""A config is read in the hub's spelling and in transformers' own, and believed in neither."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import pytest
from reference import CASES, Case

from ktcli import models
from ktcli.errors import BadCheckpoint
from ktcli.models import build, cut, model_types


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_spellings_give_the_same_model(case: Case) -> None:
    ours, hub = build(case.own_spelling()), build(case.hub_spelling())
    assert ours == hub
    assert ours.spec == hub.spec and ours.tensors == hub.tensors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_tensor_has_one_name_and_a_layer_in_range(case: Case) -> None:
    model = build(case.own_spelling())
    names = [tensor.name for tensor in model.tensors]
    assert len(set(names)) == len(names)
    assert {t.layer for t in model.tensors} == {None, *range(model.spec.layers)}


def test_whole_numbers_written_as_floats() -> None:
    """As programs write them that know no other numbers: 512.0 is 512."""
    for name in ("qwen3", "deepseek-v3"):
        config = BY_NAME[name].own_spelling()
        floats = {k: float(v) if type(v) is int else v for k, v in config.items()}
        assert any(type(v) is int for v in config.values()) and build(floats) == build(config)


def test_a_config_of_another_family_is_refused_or_built() -> None:
    """Whatever `model_type` stands over the fields of another family: never more than a sentence."""
    refused = 0
    for case in CASES[::3]:
        config = case.own_spelling()
        for other in model_types():
            try:
                build({**config, "model_type": other})
            except BadCheckpoint as error:
                assert "\n" not in str(error) and len(str(error)) < 400
                refused += 1
    assert refused > 100


BY_NAME = {case.name: case for case in CASES}
QWEN3, DEEPSEEK, V2_LITE = (BY_NAME[name] for name in ("qwen3", "deepseek-v3", "deepseek-v2-lite"))
CHOOSING, GLM5, MINIMAX = (BY_NAME[name] for name in ("deepseek-v3.2", "glm-5", "minimax-m3"))
V4, NEXT = BY_NAME["deepseek-v4"], BY_NAME["glm-5.3"]
MIMO, HUNYUAN, GRANITE = (
    BY_NAME[name] for name in ("mimo-v2-flash", "hunyuan-a13b", "granitemoe-swa")
)


LINEAR = BY_NAME["qwen3-next"]
NEMOTRON, HYBRID = BY_NAME["nemotron-3-super"], BY_NAME["granite-4-h"]
DEEP = {"num_hidden_layers": 512, "layer_types": None, "mlp_layer_types": None}
AXK2, LLAMA4 = (BY_NAME[name] for name in ("ax-k2", "llama4-scout"))
LFM2, MISTRAL4, COHERE = (BY_NAME[name] for name in ("lfm2-moe", "mistral4", "command-a-plus"))
PHI, M1 = BY_NAME["phi-3.5-moe"], BY_NAME["minimax-m1"]
PHI_LONG = PHI.values["rope_parameters"]
KIMI, LING_2 = BY_NAME["kimi-linear"], BY_NAME["ling-2"]
OMNI, ERNIE_VL = BY_NAME["qwen3-omni"], BY_NAME["ernie4.5-vl"]
STEP, LAGUNA, TRINITY, LING, AX = (
    BY_NAME[name] for name in ("step3.7", "laguna", "trinity", "ling-3", "ax-k1")
)


def step(**changes: Any) -> dict[str, Any]:
    return {"text_config": {**STEP.own_spelling()["text_config"], **changes}}


def minimax(**changes: Any) -> dict[str, Any]:
    """A change in the part of a config that is about text."""
    return {"text_config": {**MINIMAX.own_spelling()["text_config"], **changes}}


def glm(**changes: Any) -> dict[str, Any]:
    return {"text_config": {**NEXT.own_spelling()["text_config"], **changes}}


def ernie(**changes: Any) -> dict[str, Any]:
    return {"text_config": {**ERNIE_VL.own_spelling()["text_config"], **changes}}


def kimi(**part: Any) -> dict[str, Any]:
    return {"linear_attn_config": part, "layer_types": None}


def pattern(letters: Any) -> dict[str, Any]:
    """Nemotron's layers as the hub lists them, instead of transformers' list."""
    return {"hybrid_override_pattern": letters, "layers_block_type": None}


HOSTILE: list[tuple[Case, dict[str, Any], str]] = [
    (QWEN3, {"hidden_size": -5}, "hidden_size is -5"),
    (QWEN3, {"hidden_size": 10**30}, "hidden_size is 1000"),
    (QWEN3, {"hidden_size": "80"}, "not a whole number"),
    (QWEN3, {"hidden_size": True}, "not a whole number"),
    (QWEN3, {"hidden_size": 80.5}, "hidden_size is 80.5, not a whole number"),
    (QWEN3, {"hidden_size": None}, "hidden_size is missing"),
    (QWEN3, {"num_hidden_layers": 2**31}, "num_hidden_layers"),
    (QWEN3, {"vocab_size": 0}, "vocab_size is 0"),
    (QWEN3, {"num_experts": 0, "num_local_experts": 0}, "num_experts"),
    (QWEN3, {"num_experts_per_tok": 11}, "but there are only 10"),
    (QWEN3, {"num_attention_heads": 3}, "not a multiple of 2"),
    (QWEN3, {"head_dim": 25}, "head_dim is 25"),
    (QWEN3, {"hidden_act": "gelu"}, "gelu"),
    (QWEN3, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
    (QWEN3, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (QWEN3, {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    (QWEN3, {"rope_parameters": [1, 2]}, "not a JSON object"),
    (QWEN3, {"rope_parameters": {"rope_type": "longrope"}}, "short_factor is not a list of 12"),
    (QWEN3, {"rope_parameters": {"rope_type": "proportional"}}, "proportional"),
    (QWEN3, {"rope_parameters": {"rope_type": "dynamic"}}, "factor is missing"),
    (
        QWEN3,
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
        "original_max",
    ),
    (QWEN3, {"rope_parameters": {"rope_type": ["yarn"]}}, "not a string"),
    (QWEN3, {"mlp_only_layers": 7}, "mlp_only_layers"),
    (QWEN3, {"mlp_only_layers": ["0", None, [1]]}, "mlp_only_layers"),
    (QWEN3, {"mlp_only_layers": [7] * 2000}, "mlp_only_layers"),  # compared for every layer
    (
        QWEN3,
        {"num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 4096},
        "too wide",
    ),
    (DEEPSEEK, {"n_group": 5}, "not a multiple of 5"),
    (DEEPSEEK, {"topk_group": 9}, "topk_group"),
    (DEEPSEEK, {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 5}, "num_experts_per_tok"),
    (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
    (DEEPSEEK, {"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15"),
    (DEEPSEEK, {"kv_lora_rank": 0}, "kv_lora_rank"),
    (DEEPSEEK, {"n_shared_experts": 65}, "n_shared_experts"),
    (DEEPSEEK, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    (V2_LITE, {"attention_bias": True}, "attention_bias is true and q_lora_rank null"),
    (CHOOSING, {"index_topk": 0}, "index_topk is 0"),
    (CHOOSING, {"index_topk": 10**9}, "index_topk"),
    (CHOOSING, {"index_head_dim": 27}, "index_head_dim is 27"),
    (CHOOSING, {"index_head_dim": 8}, "index_head_dim is 8"),
    (CHOOSING, {"attention_bias": True}, "attention_bias"),
    (CHOOSING, {"q_lora_rank": None}, "q_lora_rank is missing"),
    (CHOOSING, {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    (GLM5, {"indexer_types": ["shared", "full", "full", "full"]}, "begins with a layer"),
    (GLM5, {"indexer_types": ["full", 3]}, "indexer_types"),
    (GLM5, {"indexer_types": None, "index_topk_pattern": "FX"}, "indexer_types"),
    (MIMO, {"v_head_dim": 0}, "v_head_dim is 0"),
    (MIMO, {"swa_v_head_dim": 26}, "swa_v_head_dim 26"),
    (MIMO, {"swa_num_key_value_heads": 4}, "not a multiple of 4"),
    (MIMO, {"n_shared_experts": 1}, "n_shared_experts is 1"),
    (MIMO, {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias True"),
    (MIMO, {"hybrid_layer_pattern": [0, 0, 0]}, "contradict"),
    (MIMO, {"hybrid_layer_pattern": [0, 7, 0]}, "hybrid_layer_pattern 7"),
    (MIMO, {"hybrid_layer_pattern": [0.0, 1.0, 0.0]}, "contradict"),
    (MIMO, {"head_dim": 10**400, "swa_head_dim": 26}, r"swa_head_dim 26 is not .*\.\.\.\)"),
    (MIMO, {"sliding_window_size": 0}, "sliding_window_size is 0"),
    (MIMO, {"attention_value_scale": "x"}, "not a number"),
    (MIMO, {"rope_parameters": {"full_attention": {}}}, "rope of sliding_attention"),
    (MIMO, {"rope_parameters": {"rope_type": "yarn"}}, "rope of sliding_attention"),
    (HUNYUAN, {"moe_topk": [3, 3, 2]}, "moe_topk differs"),
    (HUNYUAN, {"num_experts": []}, "num_experts differs"),
    (HUNYUAN, {"num_shared_expert": 2}, "num_shared_expert 2"),
    (HUNYUAN, {"moe_intermediate_size": 41}, "moe_intermediate_size 41"),
    (
        HUNYUAN,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": -1.0}},
        "alpha is -1.0",
    ),
    (GRANITE, {"attention_multiplier": 0}, "attention_multiplier is 0"),
    (GRANITE, {"logits_scaling": float("nan")}, "logits_scaling is nan"),
    (GRANITE, {"layer_rope_theta": [1e4]}, "layer_rope_theta is not a list"),
    (GRANITE, {"layer_rope_theta": ["x"] * 5}, "not a number"),
    (GRANITE, {"rope_parameters": [7]}, "not a JSON object"),
    (STEP, step(moe_layers_enum="1,x", mlp_layer_types=None), "not layer numbers"),
    (STEP, step(moe_layers_enum=7, mlp_layer_types=None), "not a short list"),
    (STEP, step(swiglu_limits=[1.0]), "swiglu_limits is not a list"),
    (STEP, step(swiglu_limits_shared=[-1.0] * 4), "swiglu_limits_shared is -1.0"),
    (STEP, step(attention_bias=True), "attention_bias True"),
    (STEP, step(rope_parameters=None, rope_scaling={"rope_type": "llama3"}), "yarn_only_types"),
    (STEP, step(rope_parameters=None, rope_theta=["x"] * 4), "rope_theta"),
    (
        STEP,
        step(num_sliding_attention_heads=None, attention_other_setting={"head_dim": 7}),
        "head_dim 7",
    ),
    (LAGUNA, {"gating": "per-element"}, "gating 'per-element'"),
    (LAGUNA, {"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping 5.0"),
    (LAGUNA, {"num_attention_heads_per_layer": [4]}, "num_attention_heads_per_layer is not a list"),
    (LAGUNA, {"num_attention_heads_per_layer": [3] * 4}, "not a multiple of 2"),
    (LAGUNA, {"rope_parameters": {"full_attention": {}}}, "rope of sliding_attention"),
    (KIMI, kimi(full_attn_layers=[1], kda_layers=[1]), "another list"),
    (KIMI, kimi(full_attn_layers=[9], kda_layers=[1]), "layers 1 to 4"),
    (KIMI, kimi(full_attn_layers=7, kda_layers=[]), "not a list of layers"),
    (LFM2, {"layer_types": None}, "layer_types is missing"),
    (LFM2, {"conv_L_cache": 1}, "conv_L_cache is 1"),
    (LFM2, {"conv_bias": True}, "conv_bias True"),
    (MISTRAL4, {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta is missing"),
    (MISTRAL4, {"num_key_value_heads": 2}, "num_key_value_heads 2"),
    (COHERE, {"expert_selection_fn": "relu"}, "expert_selection_fn"),
    (COHERE, {"shared_expert_combination_strategy": "max"}, "combination_strategy 'max'"),
    (AXK2, {"gated_norm_rank": 0}, "gated_norm_rank is 0"),
    (AXK2, {"n_group": 4, "topk_group": 2}, r"n_group 4 is not supported \(known: 1\)"),
    (AXK2, {"attention_bias": True}, "attention_bias True"),
    (LLAMA4, {"num_experts_per_tok": 2}, r"num_experts_per_tok 2 is not supported \(known: 1\)"),
    (LLAMA4, {"attention_chunk_size": None}, "attention_chunk_size is missing"),
    (LLAMA4, {"no_rope_layers": [1, 0]}, "no_rope_layers is not a list of 4 layers"),
    (LLAMA4, {"moe_layers": ["1"]}, "moe_layers is not a short list"),
    (LLAMA4, {"layer_types": ["sliding_attention"] * 4}, "layer_types 'sliding_attention'"),
    (COHERE, {"logit_scale": 0}, "logit_scale is 0"),
    (M1, {"layer_types": ["lightning"] * 4}, "layer_types 'lightning'"),
    (M1, {"layer_types": None, "attn_type_list": [0, 1, 2, 0]}, "attn_type_list 2"),
    (M1, {"shared_intermediate_size": 9}, "shared_intermediate_size 9"),
    (M1, {"sliding_window": 9}, "sliding_window"),
    (M1, {"mlp_alpha_factor": -1}, "mlp_alpha_factor is -1"),
    (PHI, {"num_experts_per_tok": 3}, "num_experts_per_tok 3"),
    (PHI, {"router_jitter_noise": -1}, "router_jitter_noise is -1"),
    (PHI, {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
    (PHI, {"rope_parameters": {**PHI_LONG, "long_mscale": None}}, "long_mscale is"),
    (KIMI, {"mla_use_nope": False}, "mla_use_nope False"),
    (LING_2, {"norm_head": True}, "norm_head True"),
    (LING_2, {"score_function": "tanh"}, "score_function 'tanh'"),
    (TRINITY, {"score_func": "softmax"}, "score_func 'softmax'"),
    (TRINITY, {"route_norm": False}, "route_norm False"),
    (TRINITY, {"num_dense_layers": -1}, "num_dense_layers is -1"),
    (AX, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
    (AX, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
    (AX, {"mlp_layer_types": ["dense"]}, "mlp_layer_types is not a list of 3"),
    (AX, {"n_group": 5}, "not a multiple of 5"),
    (LING, {"short_conv_kernel_size": None}, "Ling 2.5 and 2.6, which are not supported"),
    (LING, {"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim is 17"),
    (LING, {"kda_lower_bound": 0.5}, "kda_lower_bound is 0.5, outside"),
    (LING, {"layer_types": None, "layer_group_size": 3}, "num_hidden_layers is 4, not a multiple"),
    (LING, {"layer_types": None, "layer_group_size": 0}, "layer_group_size is 0"),
    (LING, {"layer_types": ["linear_attention", "mamba"] * 2}, "layer_types 'mamba'"),
    (LING, {"gated_attention_proj_granularity_type": "element_wise"}, "'element_wise' is not"),
    (LING, {"no_kda_lora": False}, "no_kda_lora False is not supported"),
    (LING, {"attention_bias": True}, "attention_bias True"),
    (LING, {"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported"),
    (LING, {"rotary_dim": 7}, "rotary_dim 7 is not supported"),
    (LING, {"moe_shared_expert_intermediate_size": 41}, "intermediate_size 41 is not supported"),
    (LING, {"expert_swiglu_limit_list": [4.0]}, "expert_swiglu_limit_list is not a list of 4"),
    (LING, {"num_expert_group": 5}, "not a multiple of 5"),
    (MINIMAX, {"text_config": None}, "num_hidden_layers is missing"),
    (OMNI, {"thinker_config": None}, "thinker_config is not a JSON object"),
    (OMNI, {"thinker_config": {"text_config": 7}}, "text_config is not a JSON object"),
    (ERNIE_VL, ernie(moe_num_experts=[]), "moe_num_experts"),
    (ERNIE_VL, ernie(mlp_layer_types=["dense"]), "mlp_layer_types is not a list of 3"),
    (MINIMAX, minimax(index_block_size=96), "not a multiple of 64"),
    (MINIMAX, minimax(index_n_heads=3), "index_n_heads 3"),
    (MINIMAX, minimax(layer_types=["full_attention"]), "layer_types"),
    (MINIMAX, minimax(layer_types=[["x"]] * 3), "layer_types"),
    (MINIMAX, minimax(index_local_blocks=9), "index_local_blocks is 9"),
    (MINIMAX, minimax(sparse_attention_config=[1]), "not a JSON object"),
    (V4, {"layer_types": None, "compress_ratios": [0, 4, 64, 4]}, "compress_ratios 64 is not"),
    (V4, {"layer_types": None, "compress_ratios": [0, 4, [128], 4]}, "compress_ratios"),
    (V4, {"layer_types": None, "compress_ratios": 4}, "not a list of 4"),
    (V4, {"layer_types": ["sliding_attention"]}, "not a list of 4"),
    (V4, {"layer_types": [["x"]] * 4}, "layer_types"),
    (V4, {"mlp_layer_types": ["moe", "dense", "moe", "moe"]}, "mlp_layer_types 'dense'"),
    (V4, {"mlp_layer_types": None, "num_hash_layers": -1}, "num_hash_layers is -1"),
    (V4, {"compress_rates": {"compressed_sparse_attention": 5}}, "rate of 5 positions"),
    (V4, {"compress_rates": [4, 128]}, "not a JSON object"),
    (V4, {"hc_mult": 17}, "hc_mult is 17"),
    (V4, {"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters is 0"),
    (V4, {"hc_eps": -1.0}, "hc_eps"),
    (V4, {"sliding_window": 0}, "sliding_window is 0"),
    (V4, {"sliding_window": None}, "sliding_window is missing"),
    (V4, {"o_groups": 5}, "o_groups is 5"),
    (
        V4,
        {"o_groups": 256, "num_attention_heads": 256, **DEEP},
        "o_groups is 256 in each of 512 layers",
    ),
    (
        LINEAR,
        {"linear_num_key_heads": 64, "linear_num_value_heads": 64, **DEEP},
        "linear_num_key_heads is 64 in each of 512 layers",
    ),
    (
        LINEAR,
        {"num_attention_heads": 64, "num_key_value_heads": 1, **DEEP},
        "num_attention_heads is 64 in each of 512 layers",
    ),
    (V4, {"o_groups": 512, "num_attention_heads": 512}, r"o_groups is 512, outside 1\.\.256"),
    (
        V4,
        {"max_position_embeddings": 1 << 27},
        r"max_position_embeddings is .*outside 1\.\.67108864",
    ),
    (V4, {"num_key_value_heads": 2}, "num_key_value_heads 2"),
    (V4, {"head_dim": 25}, "head_dim is 25"),
    (V4, {"qk_rope_head_dim": 12}, "rotates 8 columns of a head, but qk_rope_head_dim says 12"),
    (V4, {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7"),
    (V4, {"index_topk": 10**9}, "index_topk"),
    (V4, {"index_head_dim": 4}, "index_head_dim is 4"),
    (V4, {"rope_parameters": [1]}, "not a JSON object"),
    (V4, {"scoring_func": "tanh"}, "scoring_func 'tanh'"),
    (V4, {"swiglu_limit": 0}, "swiglu_limit"),
    (V4, {"vocab_size": 0}, "vocab_size is 0"),
    (NEXT, glm(qk_rope_head_dim=8), "qk_rope_head_dim 8 is not supported"),
    (NEXT, glm(index_kpool=12), "index_kpool is 12, which does not divide 64"),
    (NEXT, glm(index_kpool=0), "index_kpool is 0"),
    (NEXT, glm(index_topk=70), "index_topk is 70, not a multiple of 8"),
    (NEXT, glm(index_kpool_always_select_tail=False), "always_select_tail False is not supported"),
    (NEXT, glm(index_head_dim=7), "index_head_dim is 7, not a multiple of 2"),
    (NEXT, glm(kv_lora_rank=43), "kv_lora_rank is 43, not a multiple of 2"),
    (NEXT, glm(num_key_value_heads=2), "num_key_value_heads 2 is not supported"),
    (NEXT, glm(q_lora_rank=None), "q_lora_rank is missing"),
    (NEXT, glm(linear_lower_bound=0.5), "linear_lower_bound is 0.5, outside"),
    (NEXT, glm(linear_lower_bound="low"), "linear_lower_bound is 'low', not a number"),
    (NEXT, glm(linear_conv_kernel_dim=17), "linear_conv_kernel_dim is 17"),
    (NEXT, glm(linear_attn_config=[3]), "linear_attn_config is not a JSON object"),
    (NEXT, glm(layer_types=["linear_attention", "mamba"] * 2), "layer_types 'mamba'"),
    (NEXT, glm(indexer_types=["full", "shared", "full", "full"]), "layer 1 shares .* has none"),
    (NEXT, glm(indexer_types=["full"]), "indexer_types lists 1 layers instead of 4"),
    (NEXT, glm(hc_mult=17), "hc_mult is 17"),
    (NEXT, glm(attention_bias=True), "attention_bias True"),
    (NEXT, glm(model_type="llama"), "model_type 'llama'"),
    (NEMOTRON, {"layers_block_type": ["moe", "mamba", "rwkv"]}, "layers_block_type 'rwkv'"),
    (NEMOTRON, {"layers_block_type": [["moe"]]}, "layers_block_type"),
    (NEMOTRON, {"layers_block_type": []}, "layers_block_type is not a list"),
    (NEMOTRON, {"num_hidden_layers": 9}, "num_hidden_layers is 9, but 6 layers are listed"),
    (NEMOTRON, pattern("MEMQ"), "hybrid_override_pattern is 'MEMQ', not a letter"),
    (NEMOTRON, pattern(""), "hybrid_override_pattern is ''"),
    (NEMOTRON, pattern(["M"]), "hybrid_override_pattern"),
    (NEMOTRON, pattern(None), "layers_block_type and hybrid_override_pattern are missing"),
    (NEMOTRON, {"mamba_num_heads": 7, "n_groups": 2}, "mamba_num_heads is 7, not a multiple of 2"),
    (NEMOTRON, {"time_step_limit": [0.0]}, "time_step_limit is not a list of two numbers"),
    (NEMOTRON, {"time_step_limit": [2.0, 1.0]}, r"time_step_limit is 2\.\.1"),
    (NEMOTRON, {"time_step_limit": [0.0, "all"]}, "time_step_limit.* is 'all', not a number"),
    (NEMOTRON, {"moe_latent_size": 0}, "moe_latent_size is 0"),
    (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
    (NEMOTRON, {"use_bias": True}, "use_bias True"),
    (NEMOTRON, {"n_shared_experts": 2}, "n_shared_experts 2"),
    (HYBRID, {"layer_types": ["mamba", "rwkv"] * 2}, "layer_types 'rwkv'"),
    (HYBRID, {"layer_types": ["mamba"]}, "layer_types is not a list of 4"),
    (HYBRID, {"mamba_d_head": 24}, "mamba_n_heads x mamba_d_head 192 is not supported"),
    (HYBRID, {"mamba_n_heads": 0}, "mamba_n_heads is 0"),
]


@pytest.mark.parametrize(("case", "change", "said"), HOSTILE, ids=lambda value: str(value)[:40])
def test_a_bad_config_is_one_sentence(case: Case, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadCheckpoint, match=said) as caught:
        build({**case.own_spelling(), **change})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("part", "same"),
    [
        ({"gate_lower_bound": -3.0}, {"linear_lower_bound": -3.0}),
        ({"gate_lower_bound": None}, {"linear_lower_bound": -5.0}),
        ({"gate_lower_bound": None, "safe_gate": False}, {"linear_lower_bound": None}),
        ({"head_dim": 24}, {"linear_head_dim": 24}),
    ],
)
def test_glm_with_a_part_for_linear_attention(part: dict[str, Any], same: dict[str, Any]) -> None:
    own = NEXT.own_spelling()
    ours, theirs = glm(linear_attn_config=part), glm(**same)
    assert build({**own, **ours}) == build({**own, **theirs})


def test_glm_without_vision_lies_flat() -> None:
    own = NEXT.own_spelling()
    assert build({**own["text_config"], "model_type": "glm5_next"}) == build(own)


def test_v4_says_once_how_many_columns_turn() -> None:
    """Two of 98: 98 * (2 / 98) is a little less in floating point."""
    own = {"head_dim": 98, "qk_rope_head_dim": 2, "rope_parameters": None}
    model = build({**V4.own_spelling(), **own, "rope_theta": 1e4})
    assert model.spec.layers == 4


def test_step_3_5_is_the_text_of_3_7() -> None:
    text = STEP.hub_spelling()["text_config"]
    assert text["model_type"] == "step3p5"
    assert build(text) == build(STEP.own_spelling())


def test_ling_limits_experts_of_single_layers() -> None:
    """As Ling-3.0-Flash does; transformers' code has no word for it."""
    limits = {
        "expert_swiglu_limit_list": [0, 0, 4, 0, 4],
        "share_expert_swiglu_limit_list": [0, 0, 0, 5, 5],
    }
    plain, model = (build({**LING.own_spelling(), **more}) for more in ({}, limits))
    mlps = [layer.mlp for layer in model.decoder.layers]
    assert mlps[:2] == [layer.mlp for layer in plain.decoder.layers[:2]]
    assert [mlp.glu.limit for mlp in mlps] == [0, 0, 4, 0]
    assert [mlp.shared_glu.limit for mlp in mlps[1:]] == [0, 0, 5]


@pytest.mark.parametrize("layers", range(1, 5))
def test_a_cut_ling_keeps_its_pattern(layers: int) -> None:
    whole, model = build(LING.hub_spelling()), build(cut(LING.hub_spelling(), layers))
    assert model.spec.layers == layers and model.spec.moe_layers >= 1
    assert model.spec.states == whole.spec.states[:layers]


def test_minimax_in_the_older_spelling_is_the_same_model() -> None:
    text = MINIMAX.own_spelling()["text_config"]
    older = {name: value for name, value in text.items() if not name.startswith("index_")}
    older["sparse_attention_config"] = {
        "sparse_num_index_heads": text["index_n_heads"],
        "sparse_index_dim": text["index_head_dim"],
        "sparse_block_size": text["index_block_size"],
        "sparse_topk_blocks": text["index_topk_blocks"],
        "sparse_local_block": text["index_local_blocks"],
        "sparse_attention_freq": [0, 1, 1],
    }
    older |= {"layer_types": None, "mlp_layer_types": None, "moe_layer_freq": [0, 1, 1]}
    own = MINIMAX.own_spelling()
    assert build({**own, "text_config": older}) == build(own)


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "gpt2"}, {"model_type": ["x"]}, {"model_type": 3}]
)
def test_an_unknown_architecture_names_the_known_ones(config: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint, match="unknown architecture") as caught:
        build(config)
    assert all(name in caught.value.hint for name in model_types())


def test_the_table_of_families_is_what_their_files_say() -> None:
    names = (each.name for each in pkgutil.iter_modules(models.__path__))
    files = {name: import_module(f"ktcli.models.{name}") for name in names}
    families = {name: set(f.MODEL_TYPES) for name, f in files.items() if hasattr(f, "MODEL_TYPES")}
    assert families == {name: set(kinds.split()) for name, kinds in models._FAMILIES.items()}


def test_minimax_in_its_publishers_words() -> None:
    """Layers by number, and factors under other names; what is added to is what was read, where the config says so."""
    own = M1.own_spelling()
    renamed = {
        "full_attn_alpha_factor": "layernorm_full_attention_alpha",
        "full_attn_beta_factor": "layernorm_full_attention_beta",
        "linear_attn_alpha_factor": "layernorm_linear_attention_alpha",
        "linear_attn_beta_factor": "layernorm_linear_attention_beta",
        "mlp_alpha_factor": "layernorm_mlp_alpha",
        "mlp_beta_factor": "layernorm_mlp_beta",
    }
    published = {renamed.get(name, name): value for name, value in own.items()}
    published |= {"model_type": "minimax_m1", "attn_type_list": [0, 0, 1, 0], "postnorm": True}
    assert build({**published, "layer_types": None}) == build(own)
    assert build({**published, "postnorm": False}) != build(own)
