"""Small models of the architectures whose layers differ from one another, or whose converters rearrange tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from gguf_cases import CASES, CONTEXT, EXPERTS, HIDDEN, VOCAB, WIDTH
from gguf_models import GgufCase, uniform

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


_BARE = (".bias", ".scale", "ssm_a", "ssm_d", "exp_probs_b")


def family(
    architecture: str,
    seed: int,
    layer: Callable[[int], Shapes],
    outer: dict[str, Any] | None = None,
    **metadata: Any,
) -> GgufCase:
    """A model by the tensors of each layer, whose names lack ".weight"; metadata has "__" for a dot.

    Args:
        outer: further tensors by shape, or by their numbers.
    """
    last = "token_embd_norm" if architecture.startswith("lfm2") else "output_norm"

    def tensors(case: GgufCase) -> Iterator[tuple[str, Any]]:
        yield "token_embd.weight", (VOCAB, HIDDEN)
        yield f"{last}.weight", (HIDDEN,)
        yield "output.weight", (VOCAB, HIDDEN)
        yield from ((f"{name}.weight", shape) for name, shape in (outer or {}).items())
        for i in range(case.metadata["block_count"]):
            for name, shape in layer(i).items():
                end = "" if name.endswith(_BARE) else ".weight"
                yield f"blk.{i}.{name}{end}", shape

    given = {key.replace("__", "."): value for key, value in metadata.items()}
    return GgufCase(architecture, architecture, "wide", tensors, {**_COMMON, **given}, seed)


def attention(
    heads: int = HEADS, kv_heads: int = KV_HEADS, *, gated: bool = False, **more: Any
) -> Shapes:
    """Grouped-query attention; gated: the queries' projection has the gates too."""
    return {
        "attn_norm": (HIDDEN,),
        "attn_q": ((1 + gated) * heads * HEAD_DIM, HIDDEN),
        "attn_k": (kv_heads * HEAD_DIM, HIDDEN),
        "attn_v": (kv_heads * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, heads * HEAD_DIM),
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


def _older(layer: Shapes) -> Shapes:
    """The layer as the first converters of Qwen3-Next wrote it: queries, keys, values and gates by key head."""
    if "attn_qkv" not in layer:
        return layer
    kept = {k: v for k, v in layer.items() if k not in ("attn_qkv", "attn_gate")}
    return {**kept, "ssm_in": (_QKV + _VALUES, HIDDEN)}


FAMILIES = (
    family("qwen3next", 1, lambda i: _delta(i, _ONE, _QWEN_MLP), **_SSM, **_SHARED),
    replace(
        family("qwen3next", 0, lambda i: _older(_delta(i, _ONE, _QWEN_MLP)), **_SSM, **_SHARED),
        name="qwen3next-older",
    ),
    family("qwen35", 6, lambda i: _delta(i, _TWO, dense()), **_SSM, **_SECTIONS),
    family("qwen35moe", 10, lambda i: _delta(i, _TWO, _QWEN_MLP), **_SSM, **_SECTIONS, **_SHARED),
)
_WINDOWS: dict[str, Any] = {
    "attention__sliding_window": 8,
    "attention__sliding_window_pattern": [True, True, True, False],
}
_SECTIONS_VL = {"rope__dimension_sections": [12, 10, 10, 0], "n_deepstack_layers": 0}
_YARN: dict[str, Any] = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 8.0,
    "rope__scaling__original_context_length": 32,
}
_LAGUNA = [2, 4, 4, 4]
_SIGMOID: dict[str, Any] = {
    **_SPARSE,
    "expert_gating_func": 2,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": WIDTH,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "leading_dense_block_count": 1,
}


def _usual(i: int, mlp: Shapes, first: int = 0, kv_heads: int = KV_HEADS) -> Shapes:
    """Norms of q and k, and dense layers before the first with experts."""
    return {
        **attention(HEADS, kv_heads, **QK_NORMS),
        "ffn_norm": (HIDDEN,),
        **(dense() if i < first else mlp),
    }


_V3 = sparse(shared=WIDTH, correction=True)
_ROWS = {"attn_q_norm": (HEADS * HEAD_DIM,), "attn_k_norm": (HEADS * HEAD_DIM,)}
_ALL_HEADS = {"attention__head_count_kv": HEADS}
_MIMO = [KV_HEADS, 2 * KV_HEADS, 2 * KV_HEADS, KV_HEADS]  # kv heads; more where there is a window
_HY3 = {name.removesuffix(".bias"): shape for name, shape in _V3.items()}
FAMILIES += (
    family("qwen3vl", 1, lambda i: _usual(i, dense()), **_SECTIONS_VL),
    family("qwen3vlmoe", 6, lambda i: _usual(i, sparse()), **_SPARSE, **_SECTIONS_VL),
    family(
        "olmoe",
        3,
        lambda i: {**attention(HEADS, HEADS, **_ROWS), "ffn_norm": (HIDDEN,), **sparse()},
        **_SPARSE,
        **_ALL_HEADS,
    ),
    family("dots1", 2, lambda i: _usual(i, _V3, 1, HEADS), **_SIGMOID, **_ALL_HEADS),
    family("hy_v3", 0, lambda i: _usual(i, _HY3, 1), **_SIGMOID),
    family(
        "ernie4_5-moe",
        2,
        lambda i: {**attention(), "ffn_norm": (HIDDEN,), **(dense() if i < 1 else _V3)},
        **(_SIGMOID | {"expert_gating_func": 1}),
        interleave_moe_layer_step=1,
    ),
    family(
        "hunyuan-moe",
        0,
        lambda i: _usual(i, sparse(shared=WIDTH)),
        **_SHARED | {"expert_shared_feed_forward_length": WIDTH},
    ),
    family(
        "granitemoe",
        7,
        lambda i: {**attention(), "ffn_norm": (HIDDEN,), **sparse(shared=128)},
        **_SHARED,
        embedding_scale=3.0,
        attention__scale=0.05,
        residual_scale=0.5,
        logit_scale=2.0,
    ),
    family("exaone-moe", 1, lambda i: _usual(i, _V3, 1), **_SIGMOID, **_WINDOWS),
    family(
        "afmoe",
        0,
        lambda i: {
            **_usual(i, _V3, 1),
            "attn_gate": (HEADS * HEAD_DIM, HIDDEN),
            "post_attention_norm": (HIDDEN,),
            "post_ffw_norm": (HIDDEN,),
        },
        **_SIGMOID,
        attention__sliding_window=8,
    ),
    family("mellum", 0, lambda i: _usual(i, sparse()), **_SPARSE, **_WINDOWS, **_YARN),
    family(
        "laguna",
        0,
        lambda i: {
            **_usual(i, _V3, 1),
            **attention(_LAGUNA[i], **QK_NORMS),
            "attn_gate": (_LAGUNA[i], HIDDEN),
        },
        **_SIGMOID,
        **_YARN,
        attention__head_count=_LAGUNA,
        attention__sliding_window=8,
        rope__freq_base_swa=5000.0,
        rope__dimension_count=HEAD_DIM // 2,
        rope__dimension_count_swa=HEAD_DIM,
    ),
    family(
        "mimo2",
        2,
        lambda i: {
            **attention(HEADS, _MIMO[i]),
            "ffn_norm": (HIDDEN,),
            **(sparse(correction=True) if i else dense()),
            "attn_v": (_MIMO[i] * HEAD_DIM // 2, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM // 2),
            **({"attn_sinks": (HEADS,)} if _MIMO[i] > KV_HEADS else {}),
        },
        **_SIGMOID,
        attention__head_count_kv=_MIMO,
        attention__value_length=HEAD_DIM // 2,
        attention__value_scale=0.75,
        attention__sliding_window=8,
        attention__sliding_window_pattern=[int(kv > KV_HEADS) for kv in _MIMO],
        rope__freq_base_swa=5000.0,
        rope__dimension_count=HEAD_DIM // 4,
    ),
)


# ---- Gemma ---------------------------------------------------------------------------------------

_AROUND: Shapes = dict.fromkeys(("ffn_norm", "post_attention_norm", "post_ffw_norm"), (HIDDEN,))
_WIDE_DIM = 2 * HEAD_DIM  # of heads in layers without a window
_TURNING = np.where(np.arange(_WIDE_DIM // 2) < _WIDE_DIM // 8, 1, 1e30).astype(np.float32)


def _gemma4(i: int) -> Shapes:
    """A dense MLP and experts side by side; the last layer's keys are its values."""
    own: Shapes = {}
    if i == LAYERS - 1:
        own = {
            "attn_q": (HEADS * _WIDE_DIM, HIDDEN),
            "attn_k": (_WIDE_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * _WIDE_DIM),
            "attn_q_norm": (_WIDE_DIM,),
            "attn_k_norm": (_WIDE_DIM,),
        }
    norms = "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2", "ffn_gate_inp.scale"
    made = {
        **_usual(i, {**dense(), **sparse()}),
        **_AROUND,
        **own,
        **dict.fromkeys(norms, (HIDDEN,)),
        "ffn_down_exps.scale": (EXPERTS,),
        "layer_output_scale": (1,),
    }
    if own:
        del made["attn_v"]
    return made


FAMILIES += (
    family(
        "gemma3",
        3,
        lambda i: {**_usual(i, dense()), **_AROUND},
        attention__sliding_window=8,
        attention__sliding_window_pattern=4,
        rope__freq_base_swa=5000.0,
        rope__scaling__type="linear",
        rope__scaling__factor=4.0,
        final_logit_softcapping=20.0,
    ),
    family(
        "gemma4",
        2,
        _gemma4,
        {"rope_freqs": _TURNING},
        **_SPARSE,
        **_WINDOWS,
        attention__head_count_kv=[KV_HEADS] * (LAYERS - 1) + [1],
        attention__key_length=_WIDE_DIM,
        attention__value_length=_WIDE_DIM,
        attention__key_length_swa=HEAD_DIM,
        attention__value_length_swa=HEAD_DIM,
        rope__dimension_count=_WIDE_DIM,
        rope__dimension_count_swa=HEAD_DIM,
        rope__freq_base_swa=5000.0,
        embedding_length_per_layer_input=0,
        attention__shared_kv_layers=0,
        final_logit_softcapping=20.0,
    ),
)
_LORA, _ROPE, _NOPE, _V = 64, 32, 64, 64
_INDEX_HEADS, _INDEX_DIM = 4, 64
_DSA: dict[str, Any] = {
    **_SIGMOID,
    "attention__head_count_kv": 1,
    "attention__key_length": _LORA + _ROPE,
    "attention__value_length": _LORA,
    "attention__key_length_mla": _NOPE + _ROPE,
    "attention__value_length_mla": _V,
    "attention__q_lora_rank": _LORA,
    "attention__kv_lora_rank": _LORA,
    "attention__indexer__head_count": _INDEX_HEADS,
    "attention__indexer__key_length": _INDEX_DIM,
    "attention__indexer__top_k": 8,
    "rope__dimension_count": _ROPE,
}


def _dsa(i: int, own: bool = True) -> Shapes:
    """Latent attention to the positions that an indexer chose; own: the layer has one."""
    indexer: Shapes = {
        "indexer.attn_k": (_INDEX_DIM, HIDDEN),
        "indexer.attn_q_b": (_INDEX_HEADS * _INDEX_DIM, _LORA),
        "indexer.k_norm": (_INDEX_DIM,),
        "indexer.k_norm.bias": (_INDEX_DIM,),
        "indexer.proj": (_INDEX_HEADS, HIDDEN),
    }
    return {
        "attn_norm": (HIDDEN,),
        "attn_q_a": (_LORA, HIDDEN),
        "attn_q_a_norm": (_LORA,),
        "attn_q_b": (HEADS * (_NOPE + _ROPE), _LORA),
        "attn_kv_a_mqa": (_LORA + _ROPE, HIDDEN),
        "attn_kv_a_norm": (_LORA,),
        "attn_k_b": (HEADS, _LORA, _NOPE),
        "attn_v_b": (HEADS, _V, _LORA),
        "attn_output": (HIDDEN, HEADS * _V),
        "ffn_norm": (HIDDEN,),
        **(indexer if own else {}),
        **(_V3 if i else dense()),
    }


_KPOOL = 4
_HYPER: dict[str, Any] = {
    "hyper_connection__count": 4,
    "hyper_connection__sinkhorn_iterations": 4,
    "hyper_connection__epsilon": 1e-6,
}


def _glm5(i: int) -> Shapes:
    """Linear attention with a decay for each channel, and latent attention over pools of positions."""
    inner, mixes = HEADS * HEAD_DIM, 24
    streams: Shapes = {
        name: shape
        for at in ("attn", "ffn")
        for name, shape in (
            (f"hc_{at}_fn", (mixes, 4 * HIDDEN)), (f"hc_{at}_base", (mixes,)), (f"hc_{at}_scale", (3,)),
        )
    }  # fmt: skip
    linear: Shapes = {
        **{f"ssm_conv1d_{of}": (inner, 1, 4) for of in "qkv"},
        **{f"attn_{of}": (inner, HIDDEN) for of in "qkv"},
        "ssm_f_a": (HEAD_DIM, HIDDEN),
        "ssm_f_b": (inner, HEAD_DIM),
        "ssm_g_a": (HEAD_DIM, HIDDEN),
        "ssm_g_b": (inner, HEAD_DIM),
        "ssm_beta": (HEADS, HIDDEN),
        "ssm_a": (HEADS,),
        "ssm_dt.bias": (inner,),
        "ssm_norm": (HEAD_DIM,),
        "attn_output": (HIDDEN, inner),
    }
    full: Shapes = {
        **{
            name: shape
            for name, shape in _dsa(i, i != 2).items()
            if "ffn" not in name and "exp" not in name
        },
        "attn_q_b": (HEADS * _NOPE, _LORA),
        "attn_kv_a_mqa": (_LORA, HIDDEN),
        **(
            {
                "indexer_compressor_gate": (_INDEX_DIM, HIDDEN),
                "indexer_compressor_ape": (_KPOOL, _INDEX_DIM),
            }
            if i != 2
            else {}
        ),
    }
    own = full if i in (1, 2, 5) else linear
    return {
        "attn_norm": (HIDDEN,),
        **streams,
        **own,
        "ffn_norm": (HIDDEN,),
        **(_V3 if i else dense()),
    }


_STEP_HEADS = [2, 4, 4, 4]


def _m3(i: int) -> Shapes:
    indexer: Shapes = {
        "indexer.q_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "indexer.k_proj": (HEAD_DIM, HIDDEN),
        "indexer.q_norm": (HEAD_DIM,),
        "indexer.k_norm": (HEAD_DIM,),
    }
    return {**_usual(i, _V3, 1), **(indexer if i else {})}


_STREAMS, _GROUPS, _O_LORA = 4, 2, 64
_RATIOS = [0, 4, 128, 4]


def _v4(i: int) -> Shapes:
    """DeepSeek-V4: a window alone, then with pooled rows that an indexer chooses, or all of them."""
    mixes = (2 + _STREAMS) * _STREAMS

    def pool(of: str, dim: int, twice: int) -> Shapes:
        return {
            f"{of}_compressor_kv": (twice * dim, HIDDEN),
            f"{of}_compressor_gate": (twice * dim, HIDDEN),
            f"{of}_compressor_ape": (_RATIOS[i], twice * dim),
            f"{of}_compressor_norm": (dim,),
        }

    pooled = pool("attn", HEAD_DIM, 1 + (_RATIOS[i] == 4)) if _RATIOS[i] else {}
    chosen: Shapes = {
        "indexer.attn_q_b": (_INDEX_HEADS * _INDEX_DIM, _LORA),
        "indexer.proj": (_INDEX_HEADS, HIDDEN),
        **(pool("indexer", _INDEX_DIM, 2) if _RATIOS[i] == 4 else {}),
    }
    return {
        "attn_norm": (HIDDEN,),
        "attn_sinks": (HEADS,),
        "attn_q_a": (_LORA, HIDDEN),
        "attn_q_a_norm": (_LORA,),
        "attn_q_b": (HEADS * HEAD_DIM, _LORA),
        "attn_kv": (HEAD_DIM, HIDDEN),
        "attn_kv_a_norm": (HEAD_DIM,),
        "attn_output_a": (_GROUPS * _O_LORA, HEADS * HEAD_DIM // _GROUPS),
        "attn_output_b": (HIDDEN, _GROUPS * _O_LORA),
        "ffn_norm": (HIDDEN,),
        **{f"hc_{at}_fn": (mixes, _STREAMS * HIDDEN) for at in ("attn", "ffn")},
        **{f"hc_{at}_base": (mixes,) for at in ("attn", "ffn")},
        **{f"hc_{at}_scale": (3,) for at in ("attn", "ffn")},
        **pooled,
        **(chosen if _RATIOS[i] == 4 else {}),
        **(_V3 if i else sparse(shared=WIDTH) | {"ffn_gate_tid2eid": (VOCAB, 2)}),
    }


_OUTER_V4: Shapes = {
    "output_hc_fn": (_STREAMS, _STREAMS * HIDDEN),
    "output_hc_base": (_STREAMS,),
    "output_hc_scale": (1,),
}
FAMILIES += (
    family("deepseek32", 4, _dsa, **_DSA),
    family(
        "glm-dsa",
        3,
        lambda i: _dsa(i, i != 1),
        **_DSA,
        attention__indexer__types=[True, False, True, True],
    ),
    family(
        "minimax-m3",
        3,
        _m3,
        **_SIGMOID,
        rope__dimension_count=HEAD_DIM // 2,
        attention__indexer__head_count=KV_HEADS,
        attention__indexer__key_length=HEAD_DIM,
        attention__indexer__top_k=2,
        attention__indexer__block_size=128,
        attention__indexer__local_blocks=1,
    ),
    family(
        "step35",
        6,
        lambda i: {
            **_usual(i, _V3, 1),
            **attention(_STEP_HEADS[i], **QK_NORMS),
            "attn_gate": (_STEP_HEADS[i], HIDDEN),
        },
        **_SIGMOID,
        attention__head_count=_STEP_HEADS,
        attention__sliding_window=8,
        attention__sliding_window_pattern=[False, True, True, True],
        rope__freq_base_swa=5000.0,
        swiglu_clamp_exp=[0.0, 0.0, 0.0, 0.5],
        swiglu_clamp_shexp=[0.0, 0.0, 0.5, 0.0],
    ),
    family(
        "glm5-next",
        1,
        _glm5,
        **(
            _DSA
            | _HYPER
            | {
                "block_count": 6,
                "attention__head_count_kv": [0, 1, 1, 0, 0, 1],
                "attention__indexer__types": [True, True, False, True, True, True],
                "attention__indexer__kpool": _KPOOL,
                "attention__indexer__kpool_select_tail": True,
                "attention__key_length": _LORA,
                "attention__key_length_mla": _NOPE,
                "rope__dimension_count": 0,
                "kda__head_dim": HEAD_DIM,
                "kda__gate_lower_bound": -5.0,
                "ssm__conv_kernel": 4,
                "swiglu_clamp_exp": [10.0] * 6,
            }
        ),
    ),
)
# ---- Mamba-2 -------------------------------------------------------------------------------------

_SSM_HEADS, _SSM_GROUPS = 8, 2
_INNER = 2 * HIDDEN
_SSM_DIM = _INNER + 2 * _SSM_GROUPS * _STATE
_SSM2: dict[str, Any] = {
    "ssm__conv_kernel": 4,
    "ssm__state_size": _STATE,
    "ssm__group_count": _SSM_GROUPS,
    "ssm__time_step_rank": _SSM_HEADS,
    "ssm__inner_size": _INNER,
}
_MAMBA: Shapes = {
    "attn_norm": (HIDDEN,),
    "ssm_in": (_INNER + _SSM_DIM + _SSM_HEADS, HIDDEN),
    "ssm_conv1d": (_SSM_DIM, 4),
    "ssm_conv1d.bias": (_SSM_DIM,),
    "ssm_dt.bias": (_SSM_HEADS,),
    "ssm_a": (_SSM_HEADS, 1),
    "ssm_d": (_SSM_HEADS, 1),
    "ssm_norm": (_SSM_GROUPS, _INNER // _SSM_GROUPS),
    "ssm_out": (HIDDEN, _INNER),
}
_LATENT = 128


def _ungated(width: int, end: str = "", hidden: int = HIDDEN) -> Shapes:
    return {f"ffn_up{end}": (width, hidden), f"ffn_down{end}": (hidden, width)}


def _ungated_experts(latent: int) -> Shapes:
    """Experts without gates, which read and give rows of a latent space; 0: of the residual."""
    through = {"ffn_latent_down": (latent, HIDDEN), "ffn_latent_up": (HIDDEN, latent)}
    own = _ungated(WIDTH, "_exps", latent or HIDDEN)
    return {
        "attn_norm": (HIDDEN,),
        "ffn_gate_inp": (EXPERTS, HIDDEN),
        "exp_probs_b.bias": (EXPERTS,),
        **{name: (EXPERTS, *shape) for name, shape in own.items()},
        **_ungated(WIDTH, "_shexp"),
        **(through if latent else {}),
    }


_NEMOTRON: dict[str, Any] = {
    **_SSM2,
    "attention__head_count_kv": [0, 0, KV_HEADS, 0],
    "attention__layer_norm_epsilon": 1e-6,  # as beside the same of RMS norms in published files
}
_NEMOTRON_MOE: dict[str, Any] = {
    **_NEMOTRON,
    **{name: value for name, value in _SIGMOID.items() if name != "leading_dense_block_count"},
    "feed_forward_length": [0, WIDTH, 0, WIDTH],
    "expert_group_count": 1,
}


def _nemotron(mlp: Shapes) -> Callable[[int], Shapes]:
    return lambda i: (_MAMBA, mlp, attention(), mlp)[i]


def _granite_hybrid(i: int) -> Shapes:
    own = attention() if i == 2 else _MAMBA
    return {**own, "ffn_norm": (HIDDEN,), **sparse(shared=128)}


FAMILIES += (
    family("nemotron_h_moe", 12, _nemotron(_ungated_experts(0)), **_NEMOTRON_MOE),
    replace(
        family(
            "nemotron_h_moe",
            2,
            _nemotron(_ungated_experts(_LATENT)),
            **_NEMOTRON_MOE,
            moe_latent_size=_LATENT,
        ),
        name="nemotron_h_moe-latent",
    ),
    family(
        "nemotron_h",
        16,
        _nemotron({"attn_norm": (HIDDEN,), **_ungated(WIDTH)}),
        **_NEMOTRON,
        feed_forward_length=[0, WIDTH, 0, WIDTH],
    ),
    family(
        "granitehybrid",
        1,
        _granite_hybrid,
        **_SSM2,
        **_SHARED,
        attention__head_count_kv=[0, 0, KV_HEADS, 0],
        rope__scaling__finetuned=False,
        embedding_scale=3.0,
        attention__scale=0.05,
        residual_scale=0.5,
        logit_scale=2.0,
    ),
)
# ---- Ling, LFM2, Kimi-Linear, Mistral Small 4, Cohere 2 ------------------------------------------

_CONVS = [0, KV_HEADS, 0, KV_HEADS]  # kv heads; none where there is a convolution
_UNSHARED = {name: value for name, value in _SIGMOID.items() if "shared" not in name}


def _fused(layer: Shapes) -> Shapes:
    """The layer with one projection to q, k and v."""
    rows = sum(layer[f"attn_{of}"][0] for of in "qkv")
    kept = {name: shape for name, shape in layer.items() if name[5:] not in ("q", "k", "v")}
    return {**kept, "attn_qkv": (rows, HIDDEN)}


def _ling2(i: int) -> Shapes:
    """The last layer guesses further tokens, and is not run."""
    own = _fused(_usual(i, _V3, 1))
    norms = "nextn.enorm", "nextn.hnorm", "layer_output_norm"
    further: Shapes = {"nextn.eh_proj": (HIDDEN, 2 * HIDDEN), **dict.fromkeys(norms, (HIDDEN,))}
    return own | (further if i == LAYERS else {})


def _lfm2(i: int, mlp: Shapes) -> Shapes:
    conv: Shapes = {
        "attn_norm": (HIDDEN,),
        "shortconv.conv": (HIDDEN, 3),
        "shortconv.in_proj": (3 * HIDDEN, HIDDEN),
        "shortconv.out_proj": (HIDDEN, HIDDEN),
    }
    full = attention(**QK_NORMS)
    return {**(full if _CONVS[i] else conv), "ffn_norm": (HIDDEN,), **mlp}


def _kimi(i: int) -> Shapes:
    """Linear attention as GLM-5.3's, and latent attention whose queries are projected directly."""
    if i % 2 == 0:
        own = {name: shape for name, shape in _glm5(0).items() if name.startswith(("attn", "ssm"))}
        own |= {f"ssm_conv1d_{of}": (1, *own[f"ssm_conv1d_{of}"]) for of in "qkv"}
        own |= {"ssm_a": (1, 1, HEADS, 1)}
    else:
        own = {name: shape for name, shape in _dsa(i, False).items() if name.startswith("attn")}
        own = {name: shape for name, shape in own.items() if "_q_" not in name}
        own |= {"attn_q": (HEADS * (_NOPE + _ROPE), HIDDEN)}
    return {**own, "ffn_norm": (HIDDEN,), **(_V3 if i else dense())}


def _ling3(i: int) -> Shapes:
    """Linear attention with whole projections of decay and gate, and latent attention with a gate for each head."""
    own = _kimi(i)
    if i % 2 == 0:
        for of in "fg":
            del own[f"ssm_{of}_b"]
            own[f"ssm_{of}_a"] = (HEADS * HEAD_DIM, HIDDEN)
        rates = 1 + uniform(f"rates {i}", (HEADS, 1), 0.5)
        return {**own, "ssm_a": rates}  # type: ignore[dict-item]
    return {**own, "attn_gate": (HEADS, HIDDEN)}


def _granite_swa(i: int) -> Shapes:
    """Sinks, and a shared expert whose gate and up are one tensor."""
    own = {**attention(), "attn_sinks": (HEADS,), "ffn_norm": (HIDDEN,), **sparse(shared=128)}
    del own["ffn_gate_shexp"]
    return {**own, "ffn_up_shexp": (2 * 128, HIDDEN)}


_QKV_BIASES: Shapes = {
    f"attn_{of}.bias": (heads * HEAD_DIM,)
    for of, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
}
_GROWING: dict[str, Any] = {
    "attention__temperature_scale": 0.5,
    "attention__temperature_length": 8,
    "rope__scaling__original_context_length": 8,
    "rope__scaling__yarn_log_multiplier": 0.1,
}
_LATENT_ONLY = {name: value for name, value in _DSA.items() if "indexer" not in name}
_MISTRAL4 = family(
    "mistral4",
    0,
    lambda i: {name: shape for name, shape in _dsa(i, False).items() if "exp_probs" not in name},
    **_LATENT_ONLY | _YARN | _GROWING | {"expert_gating_func": 1},
)
FAMILIES += (
    family(
        "bailingmoe",
        3,
        lambda i: {**attention(), "ffn_norm": (HIDDEN,), **sparse(shared=WIDTH)},
        **_SIGMOID
        | {"expert_gating_func": 1, "expert_weights_scale": 1.0, "leading_dense_block_count": 0},
    ),
    # Weights of chosen experts are divided by their sum, in llama.cpp by 2^-14 at least; no sum is less with this seed.
    family(
        "bailingmoe2",
        5,
        _ling2,
        **_SIGMOID,
        block_count=LAYERS + 1,
        nextn_predict_layers=1,
        expert_group_count=2,
        expert_group_used_count=1,
        rope__dimension_count=HEAD_DIM // 2,
    ),
    family(
        "lfm2moe",
        6,
        lambda i: _lfm2(i, sparse(correction=True) if i else dense()),
        **_UNSHARED | {"expert_weights_scale": 1.0},
        attention__head_count_kv=_CONVS,
        shortconv__l_cache=3,
    ),
    family(
        "lfm2",
        6,
        lambda i: _lfm2(i, dense()),
        attention__head_count_kv=_CONVS,
        shortconv__l_cache=3,
    ),
    family(
        "kimi-linear",
        2,
        _kimi,
        **{name: value for name, value in _LATENT_ONLY.items() if "q_lora" not in name}
        | {"attention__head_count_kv": [0, 1, 0, 1]},
        kda__head_dim=HEAD_DIM,
        ssm__conv_kernel=4,
    ),
    family(
        "bailingmoe3",
        2,
        _ling3,
        **{name: value for name, value in _LATENT_ONLY.items() if "q_lora" not in name}
        | {"attention__head_count_kv": [0, 1, 0, 1]},
        kda__head_dim=HEAD_DIM,
        kda__gate_lower_bound=-5.0,
        kda__safe_gate=True,
        ssm__conv_kernel=4,
        swiglu_clamp_exp=[0.0, 0.0, 0.0, 0.5],
        swiglu_clamp_shexp=[0.0, 0.0, 0.5, 0.0],
    ),
    _MISTRAL4,
    # As of Mistral Large 3.
    replace(_MISTRAL4, name="deepseek2-mistral", architecture="deepseek2", seed=5),
    family(
        "cohere2moe",
        5,
        lambda i: {**attention(), **(sparse(shared=WIDTH) if i else dense())},
        **_SIGMOID | {"expert_weights_scale": 1.0},
        # The first layer, without experts, has positions although it has no window; the last has none.
        attention__sliding_window=8,
        attention__sliding_window_pattern=[False, True, True, False],
        attention__layer_norm_rms_epsilon=0.0,
        attention__layer_norm_epsilon=1e-5,
        logit_scale=0.25,
    ),
    family(
        "granite",
        4,
        lambda i: {**attention(), "ffn_norm": (HIDDEN,), **dense()},
        embedding_scale=3.0,
        attention__scale=0.5,
        residual_scale=0.5,
        logit_scale=2.0,
    ),
    family(
        "granite_swa",
        2,
        _granite_swa,
        **_SHARED,
        **_WINDOWS,
        attention__rope_pattern=[False, True, True, True],
        embedding_scale=3.0,
        attention__scale=0.5,
        residual_scale=0.5,
        logit_scale=2.0,
    ),
    # Contexts of these tests are within the first chunk, as llama.cpp has its width in its code.
    family(
        "llama4",
        18,
        lambda i: {
            **attention(),
            "ffn_norm": (HIDDEN,),
            **(sparse(shared=WIDTH) if i % 2 else dense(128)),
        },
        outer={"rope_freqs": (HEAD_DIM // 2,)},
        **_SPARSE | {"expert_used_count": 1},
        feed_forward_length=128,
        interleave_moe_layer_step=2,
    ),
    family("ernie4_5", 2, lambda i: {**attention(), "ffn_norm": (HIDDEN,), **dense()}),
    family(
        "seed_oss",
        6,
        lambda i: {**attention(), **_QKV_BIASES, "post_attention_norm": (HIDDEN,), **dense()},
    ),
    family(
        "deepseek4",
        26,
        _v4,
        outer=_OUTER_V4,
        **_SIGMOID | {"expert_gating_func": 4, "attention__head_count_kv": 1},
        attention__q_lora_rank=_LORA,
        attention__indexer__head_count=_INDEX_HEADS,
        attention__indexer__key_length=_INDEX_DIM,
        attention__indexer__top_k=8,
        rope__dimension_count=_ROPE,
        attention__sliding_window=8,
        attention__output_group_count=_GROUPS,
        attention__output_lora_rank=_O_LORA,
        attention__compress_ratios=_RATIOS,
        attention__compress_rope_freq_base=5000.0,
        hyper_connection__count=_STREAMS,
        hyper_connection__sinkhorn_iterations=4,
        hyper_connection__epsilon=1e-6,
        hash_layer_count=1,
        swiglu_clamp_exp=[2.0] * LAYERS,
    ),
)
ALL_CASES = (*CASES, *FAMILIES)
