"""Small models of the architectures whose layers differ from one another, or whose converters rearrange tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gguf_cases import CASES, CONTEXT, EXPERTS, HIDDEN, VOCAB, WIDTH
from gguf_models import GgufCase

Shapes = dict[str, tuple[int, ...]]
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 4, 2, 64
_COMMON: dict[str, Any] = {
    "block_count": LAYERS,
    "context_length": CONTEXT,
    "embedding_length": HIDDEN,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10_000.0,
    "rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.model": "no_vocab",
    "vocab_size": VOCAB,
}
_SPARSE: dict[str, Any] = {
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": WIDTH,
}


def family(
    architecture: str, seed: int, layer: Callable[[int], Shapes], **metadata: Any
) -> GgufCase:
    """A model by the tensors of each layer, whose names lack ".weight"; metadata has "__" for a dot."""

    def tensors(case: GgufCase) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "token_embd.weight", (VOCAB, HIDDEN)
        yield "output_norm.weight", (HIDDEN,)
        yield "output.weight", (VOCAB, HIDDEN)
        for i in range(case.metadata["block_count"]):
            for name, shape in layer(i).items():
                end = "" if name.endswith(".bias") or name == "ssm_a" else ".weight"
                yield f"blk.{i}.{name}{end}", shape

    given = {key.replace("__", "."): value for key, value in metadata.items()}
    return GgufCase(architecture, architecture, "wide", tensors, {**_COMMON, **given}, seed)


def attention(
    heads: int = HEADS, *, dim: int = HEAD_DIM, gated: bool = False, **more: Any
) -> Shapes:
    """Grouped-query attention; gated: the queries' projection has the gates too."""
    return {
        "attn_norm": (HIDDEN,),
        "attn_q": ((1 + gated) * heads * dim, HIDDEN),
        "attn_k": (KV_HEADS * dim, HIDDEN),
        "attn_v": (KV_HEADS * dim, HIDDEN),
        "attn_output": (HIDDEN, heads * dim),
        **more,
    }


QK_NORMS: Shapes = {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}


def dense(width: int = WIDTH, end: str = "") -> Shapes:
    return {
        f"ffn_gate{end}": (width, HIDDEN),
        f"ffn_up{end}": (width, HIDDEN),
        f"ffn_down{end}": (HIDDEN, width),
    }


def sparse(*, shared: int = 0, correction: bool = False, gate: bool = False) -> Shapes:
    """Experts, and a shared one of a width."""
    return {
        "ffn_gate_inp": (EXPERTS, HIDDEN),
        **{name: (EXPERTS, *shape) for name, shape in dense(end="_exps").items()},
        **(dense(shared, "_shexp") if shared else {}),
        **({"exp_probs_b.bias": (EXPERTS,)} if correction else {}),
        **({"ffn_gate_inp_shexp": (HIDDEN,)} if gate else {}),
    }


# ---- linear attention ----------------------------------------------------------------------------

_KEY_HEADS, _VALUE_HEADS, _STATE = 2, 4, 64
_VALUES = _VALUE_HEADS * _STATE
_QKV = 2 * _KEY_HEADS * _STATE + _VALUES
_SSM: dict[str, Any] = {
    "ssm__conv_kernel": 4,
    "ssm__state_size": _STATE,
    "ssm__group_count": _KEY_HEADS,
    "ssm__time_step_rank": _VALUE_HEADS,
    "ssm__inner_size": _VALUES,
    "full_attention_interval": 4,
    "rope__dimension_count": HEAD_DIM // 4,
}


def _delta(i: int, gates: Shapes, mlp: Shapes) -> Shapes:
    """Three layers of linear attention, then a full one."""
    linear: Shapes = {
        "attn_norm": (HIDDEN,),
        "attn_qkv": (_QKV, HIDDEN),
        "attn_gate": (_VALUES, HIDDEN),
        "ssm_conv1d": (_QKV, 4),
        "ssm_dt.bias": (_VALUE_HEADS,),
        "ssm_a": (_VALUE_HEADS,),
        "ssm_norm": (_STATE,),
        "ssm_out": (HIDDEN, _VALUES),
        **gates,
    }
    full = attention(gated=True, **QK_NORMS)
    return {**(full if i % 4 == 3 else linear), "post_attention_norm": (HIDDEN,), **mlp}


_TWO = {"ssm_beta": (_VALUE_HEADS, HIDDEN), "ssm_alpha": (_VALUE_HEADS, HIDDEN)}
_ONE = {"ssm_ba": (2 * _VALUE_HEADS, HIDDEN)}
_SHARED = {**_SPARSE, "expert_shared_feed_forward_length": 128}
_QWEN_MLP = sparse(shared=128, gate=True)
_SECTIONS = {"rope__dimension_sections": [4, 2, 2, 0]}

FAMILIES = (
    family("qwen3next", 1, lambda i: _delta(i, _ONE, _QWEN_MLP), **_SSM, **_SHARED),
    family("qwen35", 6, lambda i: _delta(i, _TWO, dense()), **_SSM, **_SECTIONS),
    family("qwen35moe", 10, lambda i: _delta(i, _TWO, _QWEN_MLP), **_SSM, **_SECTIONS, **_SHARED),
)
ALL_CASES = (*CASES, *FAMILIES)
