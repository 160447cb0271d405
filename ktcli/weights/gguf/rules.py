"""The rules for reading the files of an architecture, and the facts and names that several architectures share.

Keys of the metadata begin with the architecture's name ("qwen3moe.block_count"). What they mean is from the
specification of GGUF and from llama.cpp's converters and loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from ktcli.models.config import Fields
from ktcli.records import dataclass
from ktcli.weights.gguf.metadata import Metadata
from ktcli.weights.gguf.names import Names
from ktcli.weights.gguf.types import TensorView

# Field of `config.json` -> (key without the architecture, kind).
Rows = Mapping[str, tuple[str, type]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The rules for reading the files of one architecture.

    Attributes:
        model_type: the `model_type` of `config.json`.
        rows: facts beside the common ones.
        fixed: facts that hold for every file.
        scaling: fields of `rope_scaling` that hold for every file.
        changes: returns the facts that follow from several keys or from the tensors.
        by_layer: facts that `changes` reads because layers, or files, may differ in them.
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


EXPERTS: Rows = {
    "num_experts_per_tok": ("expert_used_count", int),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
}
LOCAL_EXPERTS: Rows = {
    "num_local_experts": ("expert_count", int),
    "num_experts_per_tok": ("expert_used_count", int),
}
DEEPSEEK: Rows = {
    "n_routed_experts": ("expert_count", int),
    "n_shared_experts": ("expert_shared_count", int),
    "first_k_dense_replace": ("leading_dense_block_count", int),
    "routed_scaling_factor": ("expert_weights_scale", float),
    "norm_topk_prob": ("expert_weights_norm", bool),
    "n_group": ("expert_group_count", int),
    "topk_group": ("expert_group_used_count", int),
}
BLOCK_SPARSE = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
PARTS = ("gate", "up", "down")
SHARED_EXPERT = {f"ffn_{p}_shexp": f"mlp.shared_expert.{p}_proj" for p in PARTS}

SHARED_WIDTH = {"shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int)}
GRANITE: Rows = {
    "num_experts_per_tok": ("expert_used_count", int),
    "shared_intermediate_size": ("expert_shared_feed_forward_length", int),
    "embedding_multiplier": ("embedding_scale", float),
    "attention_multiplier": ("attention.scale", float),
    "residual_multiplier": ("residual_scale", float),
    "logits_scaling": ("logit_scale", float),
}
GRANITE_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{p}_exps": f"block_sparse_moe.experts.{{e}}.{p}_proj" for p in PARTS},
    **{f"ffn_{p}_shexp": f"shared_mlp.{p}_proj" for p in ("gate", "up")},
    "ffn_down_shexp": "shared_mlp.output_linear",
    # The shared expert alone.
    **{f"ffn_{p}": f"shared_mlp.{p}_proj" for p in ("gate", "up")},
    "ffn_down": "shared_mlp.output_linear",
}
QWEN3_MOE: Rows = {**EXPERTS, "num_experts": ("expert_count", int)}
QWEN_MOE: Rows = {**QWEN3_MOE, **SHARED_WIDTH}

LATENT: Rows = {
    "q_lora_rank": ("attention.q_lora_rank", int),
    "kv_lora_rank": ("attention.kv_lora_rank", int),
}
INDEXER: Rows = {
    "index_n_heads": ("attention.indexer.head_count", int),
    "index_head_dim": ("attention.indexer.key_length", int),
    "index_topk": ("attention.indexer.top_k", int),
}
INDEXER_NAMES = {
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
STREAMS: Rows = {
    "hc_mult": ("hyper_connection.count", int),
    "hc_sinkhorn_iters": ("hyper_connection.sinkhorn_iterations", int),
    "hc_eps": ("hyper_connection.epsilon", float),
    "swiglu_limit": ("swiglu_clamp_exp", float),
}
STREAM_NAMES = {
    f"hc_{at}_{of}.weight": f"hc_{at}_{of}"
    for at in ("attn", "ffn")
    for of in ("fn", "base", "scale")
}
BAILING_NAMES = {
    "token_embd.weight": "word_embeddings.weight",
    "attn_qkv": "attention.query_key_value",
    **{f"attn_{of}": f"attention.{of}_proj" for of in "qkv"},
    "attn_output": "attention.dense",
    "attn_q_norm": "attention.query_layernorm",
    "attn_k_norm": "attention.key_layernorm",
    "exp_probs_b.bias": "mlp.gate.expert_bias",
    "layer_output_norm": "final_layernorm",  # of layers that guess further tokens
}
DEEPSEEK4_NAMES = {
    "token_embd.weight": "embed.weight",
    **{f"output_hc_{of}.weight": f"hc_head_{of}" for of in ("fn", "base", "scale")},
    **STREAM_NAMES,
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
