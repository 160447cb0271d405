"""The architectures of GGUF files: one row each, of facts, names and views.

Keys of the metadata begin with the architecture's name ("qwen3moe.block_count"). What they mean is from the
specification of GGUF and from llama.cpp's converters and loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ktcli.models.config import Fields
from ktcli.weights.gguf import facts
from ktcli.weights.gguf.metadata import SIGMOID, SOFTMAX, SQRT_SOFTPLUS, Metadata
from ktcli.weights.gguf.names import Names
from ktcli.weights.gguf.types import TensorView

# Field of `config.json` -> (key without the architecture, kind).
Rows = Mapping[str, tuple[str, type]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The rules by which the files of one architecture are read.

    Attributes:
        model_type: the `model_type` of `config.json`.
        rows: facts beside the common ones.
        fixed: facts that hold for every file.
        scaling: fields of `rope_scaling` that hold for every file.
        changes: returns the facts that follow from several keys or from the tensors.
        by_layer: facts that `changes` reads because layers may differ in them.
        gating: how the family's router scores; a file that says otherwise is refused. 0: `changes` sees to it.
        body: what the hub's names of tensors begin with, and its name of the head.
        nested: whether the hub has the text model's config within another.
        names: tensor names that differ from the usual ones, see `names`.
        views: returns the views of the tensors that converters rearrange, by their names on the hub below the layer,
            from the config.
        older: rules for files of older converters, by a tensor that only they have.
    """

    model_type: str
    rows: Rows = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    scaling: Mapping[str, Any] = field(default_factory=dict)
    changes: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    by_layer: tuple[str, ...] = ()
    gating: int = 0
    body: tuple[str, str] = ("model.", "lm_head")
    nested: bool = False
    names: Names = field(default_factory=dict)
    views: Callable[[Fields], Mapping[str, TensorView]] = lambda config: {}
    older: Mapping[str, Architecture] = field(default_factory=dict)


_EXPERTS: Rows = {
    "num_experts_per_tok": ("expert_used_count", int),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
}
_DEEPSEEK: Rows = {
    "n_routed_experts": ("expert_count", int),
    "n_shared_experts": ("expert_shared_count", int),
    "first_k_dense_replace": ("leading_dense_block_count", int),
    "routed_scaling_factor": ("expert_weights_scale", float),
    "norm_topk_prob": ("expert_weights_norm", bool),
    "n_group": ("expert_group_count", int),
    "topk_group": ("expert_group_used_count", int),
}
_BLOCK_SPARSE = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
_PARTS = ("gate", "up", "down")
_SHARED_EXPERT = {f"ffn_{p}_shexp": f"mlp.shared_expert.{p}_proj" for p in _PARTS}

_SHARED_WIDTH = {"shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int)}
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
    **_SHARED_EXPERT,
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
    changes=facts.nemotron,
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
    views=lambda config: facts.RATES_AND_RUNS,
)
_NEMOTRON_EXPERTS: Rows = {
    **_EXPERTS,
    **_DEEPSEEK,
    "moe_shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int),
    "moe_latent_size": ("moe_latent_size", int),
}
_GRANITE: Rows = {
    "num_experts_per_tok": ("expert_used_count", int),
    "shared_intermediate_size": ("expert_shared_feed_forward_length", int),
    "embedding_multiplier": ("embedding_scale", float),
    "attention_multiplier": ("attention.scale", float),
    "residual_multiplier": ("residual_scale", float),
    "logits_scaling": ("logit_scale", float),
}
_GRANITE_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{p}_exps": f"block_sparse_moe.experts.{{e}}.{p}_proj" for p in _PARTS},
    **{f"ffn_{p}_shexp": f"shared_mlp.{p}_proj" for p in ("gate", "up")},
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_QWEN3_MOE: Rows = {**_EXPERTS, "num_experts": ("expert_count", int)}
_QWEN_MOE: Rows = {**_QWEN3_MOE, **_SHARED_WIDTH}

_LATENT: Rows = {
    "q_lora_rank": ("attention.q_lora_rank", int),
    "kv_lora_rank": ("attention.kv_lora_rank", int),
}
_INDEXER: Rows = {
    "index_n_heads": ("attention.indexer.head_count", int),
    "index_head_dim": ("attention.indexer.key_length", int),
    "index_topk": ("attention.indexer.top_k", int),
}
_INDEXER_NAMES = {
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_STREAMS: Rows = {
    "hc_mult": ("hyper_connection.count", int),
    "hc_sinkhorn_iters": ("hyper_connection.sinkhorn_iterations", int),
    "hc_eps": ("hyper_connection.epsilon", float),
    "swiglu_limit": ("swiglu_clamp_exp", float),
}
_STREAM_NAMES = {
    f"hc_{at}_{of}.weight": f"hc_{at}_{of}"
    for at in ("attn", "ffn")
    for of in ("fn", "base", "scale")
}
_KIMI_DELTA_NAMES = {
    **{f"ssm_conv1d_{of}": f"self_attn.{of}_conv1d" for of in "qkv"},
    **{f"ssm_{of}_{part}": f"self_attn.{of}_{part}_proj" for of in "fg" for part in "ab"},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
_DEEPSEEK4_NAMES = {
    "token_embd.weight": "embed.weight",
    **{f"output_hc_{of}.weight": f"hc_head_{of}" for of in ("fn", "base", "scale")},
    **_STREAM_NAMES,
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn_sinks.weight": "attn.attn_sink",
    "attn_q_a": "attn.wq_a",
    "attn_q_a_norm": "attn.q_norm",
    "attn_q_b": "attn.wq_b",
    "attn_kv": "attn.wkv",
    "attn_kv_a_norm": "attn.kv_norm",
    "attn_output_a": "attn.wo_a",
    "attn_output_b": "attn.wo_b",
    **{
        f"{ours}_compressor_{part}": f"{theirs}.compressor.{name}"
        for ours, theirs in (("attn", "attn"), ("indexer", "attn.indexer"))
        for part, name in (("kv", "wkv"), ("gate", "wgate"), ("norm", "norm"))
    },
    "attn_compressor_ape.weight": "attn.compressor.ape",
    "indexer_compressor_ape.weight": "attn.indexer.compressor.ape",
    "indexer.attn_q_b": "attn.indexer.wq_b",
    "indexer.proj": "attn.indexer.weights_proj",
    "ffn_gate_inp": "ffn.gate",
    "ffn_gate_tid2eid.weight": "ffn.gate.tid2eid",
    "exp_probs_b.bias": "ffn.gate.bias",
    **{
        f"ffn_{part}{end}": f"ffn.{of}.{number}"
        for part, number in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        for end, of in (("_exps", "experts.{e}"), ("_shexp", "shared_experts"))
    },
}

# The architectures by general.architecture.
ARCHITECTURES: dict[str, Architecture] = {
    # The rows of q and k are reordered so that the pairs that are rotated together are neighbours.
    "llama": Architecture(
        "llama",
        {"num_experts_per_tok": ("expert_used_count", int)},
        {"rope_interleave": True},
        changes=facts.llama,
        names=_BLOCK_SPARSE,
    ),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _QWEN_MOE,
        {"norm_topk_prob": False},
        names=_SHARED_EXPERT,
    ),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _QWEN3_MOE, {"norm_topk_prob": True}),
    "qwen3next": Architecture(
        "qwen3_5_moe_text",
        {**_QWEN_MOE, **_DELTA},
        changes=facts.delta,
        names={
            **_DELTA_NAMES,
            "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        },
        views=facts.next_views,
        older={
            "blk.0.ssm_in.weight": Architecture(
                "qwen3_next",
                {**_QWEN_MOE, **_DELTA},
                changes=facts.delta,
                names={
                    **_DELTA_NAMES,
                    "ssm_in": "linear_attn.in_proj_qkvz",
                    "ssm_ba": "linear_attn.in_proj_ba",
                },
                views=lambda config: facts.DELTA_BY_HEAD,
            )
        },
    ),
    "qwen35": Architecture(
        "qwen3_5_text", _DELTA, changes=facts.delta, names=_DELTA_NAMES, views=facts.tiled_views
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {**_QWEN_MOE, **_DELTA},
        changes=facts.delta,
        names=_DELTA_NAMES,
        views=facts.tiled_views,
    ),
    # Text alone: the positions of pictures play no part.
    "qwen3vl": Architecture("qwen3"),
    "qwen3vlmoe": Architecture("qwen3_moe", _QWEN3_MOE, {"norm_topk_prob": True}, gating=SOFTMAX),
    "olmoe": Architecture("olmoe", _QWEN3_MOE, {"norm_topk_prob": False}, gating=SOFTMAX),
    "dots1": Architecture(
        "dots1",
        {**_EXPERTS, **_DEEPSEEK},
        {"sliding_window": None},
        changes=facts.types,
        gating=SIGMOID,
    ),
    "hy_v3": Architecture(
        "hy_v3",
        {**_EXPERTS, **_DEEPSEEK},
        changes=facts.hy3,
        gating=SIGMOID,
        names={
            "ffn_gate_inp": "mlp.router.gate",
            **dict.fromkeys(("exp_probs_b", "exp_probs_b.bias"), "mlp.expert_bias"),
            **{f"ffn_{p}_shexp": f"mlp.shared_mlp.{p}_proj" for p in _PARTS},
        },
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {
            **_EXPERTS,
            "moe_num_experts": ("expert_count", int),
            "n_shared_experts": ("expert_shared_count", int),
            "moe_layer_start_index": ("leading_dense_block_count", int),
            "moe_layer_interval": ("interleave_moe_layer_step", int),
        },
        gating=SOFTMAX,
        names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        _QWEN3_MOE,
        changes=facts.hunyuan,
        gating=SOFTMAX,
        names={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
            **{f"ffn_{p}_shexp": f"mlp.shared_mlp.{p}_proj" for p in _PARTS},
        },
    ),
    "granitemoe": Architecture(
        "granitemoe",
        {**_GRANITE, "num_local_experts": ("expert_count", int)},
        {"rope_interleave": True},
        changes=facts.granite,
        gating=SOFTMAX,
        names=_GRANITE_NAMES,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {**_GRANITE, **_MAMBA},
        {"rope_interleave": True},
        changes=facts.granite_hybrid,
        by_layer=("num_key_value_heads",),
        gating=SOFTMAX,
        names={
            **_GRANITE_NAMES,
            **_mamba_names("mamba"),
            **{f"ffn_{p}": f"shared_mlp.{p}_proj" for p in ("gate", "up")},
            "ffn_down": "shared_mlp.output_linear",
        },
        views=lambda config: facts.RATES_AND_RUNS,
    ),
    # Without experts (Nemotron-H, Nemotron Nano 2), and with them (Nemotron 3).
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(_NEMOTRON, rows={**_NEMOTRON.rows, **_NEMOTRON_EXPERTS}),
    "exaone-moe": Architecture(
        "exaone_moe",
        {**_EXPERTS, **_DEEPSEEK, "sliding_window": ("attention.sliding_window", int)},
        changes=facts.types,
        gating=SIGMOID,
        names={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    ),
    "afmoe": Architecture(
        "afmoe",
        {
            **_QWEN3_MOE,
            "n_shared_experts": ("expert_shared_count", int),
            "num_dense_layers": ("leading_dense_block_count", int),
            "route_norm": ("expert_weights_norm", bool),
            "route_scale": ("expert_weights_scale", float),
            "sliding_window": ("attention.sliding_window", int),
        },
        {"mup_enabled": True, "global_attn_every_n_layers": 4},
        gating=SIGMOID,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "attn_gate": "self_attn.gate_proj",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
    ),
    "mellum": Architecture(
        "mellum",
        {**_QWEN3_MOE, "sliding_window": ("attention.sliding_window", int)},
        {"norm_topk_prob": True},
        changes=facts.mellum,
        gating=SOFTMAX,
    ),
    "laguna": Architecture(
        "laguna",
        {
            **_QWEN_MOE,
            "moe_routed_scaling_factor": ("expert_weights_scale", float),
            "sliding_window": ("attention.sliding_window", int),
        },
        changes=facts.laguna,
        by_layer=("num_attention_heads",),
        gating=SIGMOID,
        names={
            **_SHARED_EXPERT,
            "attn_gate": "self_attn.g_proj",
            "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
        },
    ),
    "mimo2": Architecture(
        "mimo_v2_flash",
        {
            **_EXPERTS,
            "n_routed_experts": ("expert_count", int),
            "v_head_dim": ("attention.value_length", int),
            "attention_value_scale": ("attention.value_scale", float),
            # The token's own position is one of them, as in llama.cpp; transformers has one more of the same number.
            "sliding_window": ("attention.sliding_window", int),
        },
        changes=facts.mimo,
        by_layer=("num_key_value_heads",),
        gating=SIGMOID,
        names={"attn_sinks.weight": "self_attn.attention_sink_bias"},
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        {
            **_EXPERTS,
            **_DEEPSEEK,
            **_LATENT,
        },
        {"rope_interleave": True},
        changes=facts.deepseek,
    ),
    "deepseek32": Architecture(
        "deepseek_v32",
        {**_EXPERTS, **_DEEPSEEK, **_LATENT, **_INDEXER},
        {"rope_interleave": True},
        changes=facts.latent,
        gating=SIGMOID,
        names=_INDEXER_NAMES,
    ),
    "glm-dsa": Architecture(
        "glm_moe_dsa",
        {**_EXPERTS, **_DEEPSEEK, **_LATENT, **_INDEXER},
        {"rope_interleave": True},
        changes=facts.glm_dsa,
        gating=SIGMOID,
        names=_INDEXER_NAMES,
    ),
    "glm5-next": Architecture(
        "glm5_next",
        {
            **_EXPERTS,
            **_DEEPSEEK,
            **_LATENT,
            **_INDEXER,
            **_STREAMS,
            "index_kpool": ("attention.indexer.kpool", int),
            "index_kpool_always_select_tail": ("attention.indexer.kpool_select_tail", bool),
            "linear_head_dim": ("kda.head_dim", int),
            "linear_num_heads": ("attention.head_count", int),
            "linear_conv_kernel_dim": ("ssm.conv_kernel", int),
        },
        changes=facts.glm5_next,
        by_layer=("num_key_value_heads",),
        gating=SIGMOID,
        body=("model.language_model.", "lm_head"),
        nested=True,
        names={
            **_INDEXER_NAMES,
            **_STREAM_NAMES,
            **_KIMI_DELTA_NAMES,
            "indexer_compressor_gate.weight": "self_attn.indexer.index_kpool_compress_gate",
            "indexer_compressor_ape.weight": "self_attn.indexer.index_kpool_compress_ape",
        },
        views=lambda config: facts.RATES_AS_LOGS,
    ),
    "deepseek4": Architecture(
        "deepseek_v4",
        {
            **_EXPERTS,
            **_DEEPSEEK,
            **_INDEXER,
            "q_lora_rank": ("attention.q_lora_rank", int),
            "o_lora_rank": ("attention.output_lora_rank", int),
            "o_groups": ("attention.output_group_count", int),
            "qk_rope_head_dim": ("rope.dimension_count", int),
            "sliding_window": ("attention.sliding_window", int),
            "compress_rope_theta": ("attention.compress_rope_freq_base", float),
            "num_hash_layers": ("hash_layer_count", int),
            **_STREAMS,
        },
        changes=facts.deepseek4,
        gating=SQRT_SOFTPLUS,
        body=("", "head"),
        names=_DEEPSEEK4_NAMES,
    ),
    "minimax-m3": Architecture(
        "minimax_m3_vl",
        {
            **_EXPERTS,
            "n_routed_experts": ("expert_count", int),
            "routed_scaling_factor": ("expert_weights_scale", float),
            "rotary_dim": ("rope.dimension_count", int),
            "index_n_heads": ("attention.indexer.head_count", int),
            "index_head_dim": ("attention.indexer.key_length", int),
            "index_topk_blocks": ("attention.indexer.top_k", int),
            "index_block_size": ("attention.indexer.block_size", int),
            "index_local_blocks": ("attention.indexer.local_blocks", int),
        },
        changes=facts.minimax_m3,
        gating=SIGMOID,
        body=("language_model.model.", "language_model.lm_head"),
        nested=True,
        names={
            **_BLOCK_SPARSE,
            **{f"ffn_{p}_shexp": f"block_sparse_moe.shared_experts.{p}_proj" for p in _PARTS},
            **{
                f"indexer.{of}": f"self_attn.index_{of}"
                for of in ("q_proj", "k_proj", "q_norm", "k_norm")
            },
        },
        views=lambda config: facts.NORMS_LESS_ONE,
    ),
    "step35": Architecture(
        "step3p5",
        {
            **_EXPERTS,
            "n_routed_experts": ("expert_count", int),
            "share_expert_dim": ("expert_shared_feed_forward_length", int),
            "moe_router_scaling_factor": ("expert_weights_scale", float),
            "norm_expert_weight": ("expert_weights_norm", bool),
            "sliding_window": ("attention.sliding_window", int),
        },
        changes=facts.step,
        by_layer=("num_attention_heads",),
        gating=SIGMOID,
        names={
            "attn_gate": "self_attn.g_proj",
            "ffn_gate_inp": "moe.gate",
            "exp_probs_b.bias": "moe.router_bias",
            **{f"ffn_{p}_exps": f"moe.{p}_proj" for p in _PARTS},
            **{f"ffn_{p}_shexp": f"share_expert.{p}_proj" for p in _PARTS},
        },
        views=lambda config: facts.NORMS_LESS_ONE,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {
            "sliding_window": ("attention.sliding_window", int),
            "final_logit_softcapping": ("final_logit_softcapping", float),
        },
        changes=facts.gemma3,
        names={
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        views=lambda config: facts.NORMS_LESS_ONE,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {
            **_QWEN3_MOE,
            "sliding_window": ("attention.sliding_window", int),
            "final_logit_softcapping": ("final_logit_softcapping", float),
        },
        changes=facts.gemma4,
        by_layer=("num_key_value_heads", "head_dim"),
        gating=SOFTMAX,
        names={
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            **{f"ffn_{p}_exps": f"experts.{{e}}.{p}_proj" for p in _PARTS},
        },
    ),
    "glm4moe": Architecture("glm4_moe", {**_EXPERTS, **_DEEPSEEK}, changes=facts.glm),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            "num_local_experts": ("expert_count", int),
            "num_experts_per_tok": ("expert_used_count", int),
            "intermediate_size": ("expert_feed_forward_length", int),
            "sliding_window": ("attention.sliding_window", int),
        },
        scaling={"truncate": False},
        changes=facts.gpt_oss,
        names={"ffn_gate_inp": "mlp.router"},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {
            "num_local_experts": ("expert_count", int),
            "num_experts_per_tok": ("expert_used_count", int),
            "rotary_dim": ("rope.dimension_count", int),
        },
        names=_BLOCK_SPARSE,
    ),
}
