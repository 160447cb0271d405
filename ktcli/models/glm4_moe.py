"""Grouped-query attention with DeepSeek-V3's experts: GLM-4.5 to 4.7, the text of GLM-4.5V and 4.6V, dots.llm1,
Solar-Open and Hy3.

They differ in biases, norms of q and k, how much of a head is rotated, and which layers are dense. Sources:
arXiv 2508.06471 (GLM-4.5), 2506.05767 (dots.llm1); transformers 5.23. Layers for multi-token prediction
are not read.
"""

from __future__ import annotations

from collections.abc import Callable

from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.grouped_query import QkNorms
from ktcli.layers.names import USUAL_SPARSE, CorrectionNames, RouterNames, SharedNames, SparseNames
from ktcli.models.attention import read_gqa
from ktcli.models.config import TEXT, Defaults, Fields
from ktcli.models.feedforward import V3_EXPERTS, read_corrected_routing, read_dense, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_typed_dense, read_typed_dense, read_upper_windows
from ktcli.models.skeleton import BESIDE_VISION, USUAL_PREFIXES, assemble, text_part

_USUAL = {**V3_EXPERTS, "routed_scaling_factor": 1.0, "num_key_value_heads": 8}
_GLM, _VISION = "glm4_moe", "glm4v_moe"
_GLM_USUAL = {**_USUAL, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1}
MODEL_TYPES: Defaults = {
    _GLM: _GLM_USUAL,
    _VISION: {TEXT: {**_GLM_USUAL, "attention_bias": True}},
    "dots1": {
        **_USUAL,
        "n_shared_experts": None,
        "norm_topk_prob": False,
        "num_key_value_heads": 32,
        "first_k_dense_replace": 0,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    "solar_open": {**_USUAL, "head_dim": 128, "rope_theta": 1e6, "first_k_dense_replace": 0},
    "hy_v3": {
        **_USUAL,
        "head_dim": 128,
        "rope_theta": 11_158_840.0,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.826,
    },
}

cut = cut_typed_dense

_HY3 = SparseNames(
    router=RouterNames("router.gate.weight", correction=CorrectionNames("expert_bias")),
    shared=SharedNames("shared_mlp"),
)
_NORMED = _O_BIASED = ("dots1", "hy_v3")  # attention_bias includes o


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    kind = str(f.values["model_type"])
    f = text_part(f, f"{_VISION}_text") if kind == _VISION else f
    f.only({"mlp_bias": False})
    norm = kind in _NORMED or (kind == _GLM and f.flag("use_qk_norm", False))
    bias = f.flag("attention_bias", False)
    attention = read_gqa(
        f,
        norms=QkNorms() if norm else None,
        qkv_bias=bias,
        o_bias=bias and kind in _O_BIASED,
        partly=kind in (_GLM, _VISION),
    )
    names = _HY3 if kind == "hy_v3" else USUAL_SPARSE
    sparse = read_sparse(f, read_corrected_routing(f), correction=True, names=names)
    is_dense, window = read_typed_dense(f), _windows(f, kind)

    def parts(i: int) -> tuple[Attention, Mlp]:
        # All layers of Solar-Open have experts, whatever the config says.
        dense = is_dense(i) and kind != "solar_open"
        return attention.within(window(i)), read_dense(f) if dense else sparse

    return assemble(f, "glm4_moe", parts, BESIDE_VISION if kind == _VISION else USUAL_PREFIXES)


def _windows(f: Fields, kind: str) -> Callable[[int], int]:
    """Returns the window of each layer: those of dots.llm1 from a number on have one; the other models have none."""
    if kind == "dots1":
        return read_upper_windows(f)
    f.require_no_windows()
    return lambda _: 0
