"""The architectures of GGUF files that combine attention with linear attention, states or convolutions: one row each,
with facts, names and views."""

from __future__ import annotations

from dataclasses import replace

from ktcli.weights.gguf import hybrid_facts, views
from ktcli.weights.gguf.metadata import SIGMOID, SOFTMAX
from ktcli.weights.gguf.names import LAYER, Names
from ktcli.weights.gguf.rules import (
    BAILING_NAMES,
    BLOCK_SPARSE,
    DEEPSEEK,
    EXPERTS,
    GRANITE,
    GRANITE_NAMES,
    INDEXER,
    INDEXER_NAMES,
    LATENT,
    PARTS,
    QWEN3_MOE,
    QWEN_MOE,
    SHARED_EXPERT,
    STREAM_NAMES,
    STREAMS,
    Architecture,
    Rows,
)

_DELTA: Rows = {
    "linear_conv_kernel_dim": ("ssm.conv_kernel", int),
    "linear_key_head_dim": ("ssm.state_size", int),
    "linear_num_key_heads": ("ssm.group_count", int),
    "linear_num_value_heads": ("ssm.time_step_rank", int),
    "full_attention_interval": ("full_attention_interval", int),
}
_DELTA_NAMES = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **SHARED_EXPERT,
}
_MAMBA: Rows = {
    "conv_kernel": ("ssm.conv_kernel", int),
    "ssm_state_size": ("ssm.state_size", int),
    "n_groups": ("ssm.group_count", int),
}


def _mamba_names(layer: str) -> Names:
    return {
        "ssm_in": f"{layer}.in_proj",
        "ssm_conv1d": f"{layer}.conv1d",
        "ssm_dt.bias": f"{layer}.dt_bias",
        "ssm_a": f"{layer}.A_log",
        "ssm_d": f"{layer}.D",
        "ssm_norm": f"{layer}.norm",
        "ssm_out": f"{layer}.out_proj",
    }


_NEMOTRON = Architecture(
    "nemotron_h",
    {**_MAMBA, "layer_norm_epsilon": ("attention.layer_norm_rms_epsilon", float)},
    changes=hybrid_facts.nemotron,
    by_layer=("num_key_value_heads", "intermediate_size"),
    gating=SIGMOID,
    body=("backbone.", "lm_head"),
    names={
        "token_embd.weight": "embeddings.weight",
        "output_norm.weight": "norm_f.weight",
        "attn_norm": "norm",
        **_mamba_names("mixer"),
        **{f"attn_{of}": f"mixer.{of}_proj" for of in "qkv"},
        "attn_output": "mixer.o_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
        **{
            f"ffn_{part}{end}": f"mixer.{of}{part}_proj"
            for part in ("up", "down")
            for end, of in (("", ""), ("_exps", "experts.{e}."), ("_shexp", "shared_experts."))
        },
    },
    views=lambda config: views.RATES_AND_RUNS,
)
_NEMOTRON_EXPERTS: Rows = {
    **EXPERTS,
    **DEEPSEEK,
    "moe_shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int),
    "moe_latent_size": ("moe_latent_size", int),
}
_LFM2: Rows = {
    "norm_eps": ("attention.layer_norm_rms_epsilon", float),
    "conv_L_cache": ("shortconv.l_cache", int),
}
_LFM2_NAMES = {
    "token_embd_norm.weight": "embedding_norm.weight",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **{f"shortconv.{of}": f"conv.{of}" for of in ("conv", "in_proj", "out_proj")},
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    **{
        f"ffn_{part}{end}": f"feed_forward.{of}{number}"
        for part, number in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        for end, of in (("", ""), ("_exps", "experts.{e}."))
    },
}
_KIMI_DELTA: Rows = {
    "linear_head_dim": ("kda.head_dim", int),
    "linear_num_heads": ("attention.head_count", int),
    "linear_conv_kernel_dim": ("ssm.conv_kernel", int),
}
_KIMI_DELTA_NAMES = {
    **{f"ssm_conv1d_{of}": f"self_attn.{of}_conv1d" for of in "qkv"},
    **{f"ssm_{of}_{part}": f"self_attn.{of}_{part}_proj" for of in "fg" for part in "ab"},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}

HYBRIDS: dict[str, Architecture] = {
    "qwen3next": Architecture(
        "qwen3_5_moe_text",
        {**QWEN_MOE, **_DELTA},
        changes=hybrid_facts.delta,
        names={
            **_DELTA_NAMES,
            "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        },
        views=views.next_views,
        older={
            "blk.0.ssm_in.weight": Architecture(
                "qwen3_next",
                {**QWEN_MOE, **_DELTA},
                changes=hybrid_facts.delta,
                names={
                    **_DELTA_NAMES,
                    "ssm_in": "linear_attn.in_proj_qkvz",
                    "ssm_ba": "linear_attn.in_proj_ba",
                },
                views=lambda config: views.DELTA_BY_HEAD,
            )
        },
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        _DELTA,
        changes=hybrid_facts.delta,
        names=_DELTA_NAMES,
        views=views.tiled_views,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {**QWEN_MOE, **_DELTA},
        changes=hybrid_facts.delta,
        names=_DELTA_NAMES,
        views=views.tiled_views,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {**GRANITE, **_MAMBA},
        {"rope_interleave": True},
        changes=hybrid_facts.granite_hybrid,
        by_layer=("num_key_value_heads",),
        gating=SOFTMAX,
        names={**GRANITE_NAMES, **_mamba_names("mamba")},
        views=lambda config: views.RATES_AND_RUNS,
    ),
    # Without experts (Nemotron-H, Nemotron Nano 2), and with them (Nemotron 3).
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(_NEMOTRON, rows={**_NEMOTRON.rows, **_NEMOTRON_EXPERTS}),
    "kimi-linear": Architecture(
        "kimi_linear",
        {**EXPERTS, **DEEPSEEK, **LATENT, **_KIMI_DELTA},
        {"norm_topk_prob": True},
        changes=hybrid_facts.kimi_linear,
        by_layer=("num_key_value_heads",),
        gating=SIGMOID,
        names={
            **BLOCK_SPARSE,
            **_KIMI_DELTA_NAMES,
            "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
            **{f"ffn_{p}_shexp": f"block_sparse_moe.shared_experts.{p}_proj" for p in PARTS},
        },
        views=lambda config: views.RATES_AS_LOGS,
    ),
    "bailingmoe3": Architecture(
        "bailing_hybrid",
        {
            **EXPERTS,
            **DEEPSEEK,
            **LATENT,
            "short_conv_kernel_size": ("ssm.conv_kernel", int),
            "kda_lower_bound": ("kda.gate_lower_bound", float),
        },
        {"rope_interleave": True},
        changes=hybrid_facts.ling3,
        by_layer=("num_key_value_heads",),
        gating=SIGMOID,
        names={
            **{
                of: name.replace("self_attn.", "attention.")
                for of, name in {**LAYER, **_KIMI_DELTA_NAMES}.items()
                if name.startswith("self_attn.")
            },
            **BAILING_NAMES,
            "ssm_f_a": "attention.f_proj",
            "ssm_g_a": "attention.g_proj",
            "attn_gate": "attention.g_proj",
        },
        views=lambda config: views.RATES_AS_LOGS,
    ),
    "glm5-next": Architecture(
        "glm5_next",
        {
            **EXPERTS,
            **DEEPSEEK,
            **LATENT,
            **INDEXER,
            **STREAMS,
            "index_kpool": ("attention.indexer.kpool", int),
            "index_kpool_always_select_tail": ("attention.indexer.kpool_select_tail", bool),
            **_KIMI_DELTA,
        },
        changes=hybrid_facts.glm5_next,
        by_layer=("num_key_value_heads",),
        gating=SIGMOID,
        body=("model.language_model.", "lm_head"),
        nested=True,
        names={
            **INDEXER_NAMES,
            **STREAM_NAMES,
            **_KIMI_DELTA_NAMES,
            "indexer_compressor_gate.weight": "self_attn.indexer.index_kpool_compress_gate",
            "indexer_compressor_ape.weight": "self_attn.indexer.index_kpool_compress_ape",
        },
        views=lambda config: views.RATES_AS_LOGS,
    ),
    "lfm2": Architecture(
        "lfm2_moe",
        _LFM2,
        changes=hybrid_facts.lfm2_dense,
        by_layer=("num_key_value_heads",),
        names=_LFM2_NAMES,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {**QWEN3_MOE, **_LFM2, "num_dense_layers": ("leading_dense_block_count", int)},
        {"norm_topk_prob": True},
        changes=hybrid_facts.lfm2,
        by_layer=("num_key_value_heads",),
        gating=SIGMOID,
        names=_LFM2_NAMES,
    ),
}
