"""Mistral Small 4 (119B-A6B; the text part without vision): DeepSeek-V3's attention, whose queries grow with the
logarithm of their position, and experts chosen by softmax.

Source: transformers 5.23 (mistral4, within mistral3).
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.layers.latent import LatentAttention
from ktcli.models.attention import read_mla, require_own_keys
from ktcli.models.config import MAX_CONTEXT, TEXT, Defaults, Fields
from ktcli.models.feedforward import V3_EXPERTS, read_corrected_routing, read_mlps, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_first_dense, read_first_dense
from ktcli.models.rotation import rope_fields, rotated_part
from ktcli.models.skeleton import USUAL_PREFIXES, Prefixes, assemble, text_part
from ktcli.ops.table.experts import Score
from ktcli.ops.table.rowwise import Temper

_PLAIN, _VISION = "mistral4", "mistral3"
_USUAL = {
    **V3_EXPERTS,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "num_key_value_heads": 32,
    "q_lora_rank": 1024,
    "rope_interleave": True,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
MODEL_TYPES: Defaults = {
    _PLAIN: _USUAL,
    _VISION: {"tie_word_embeddings": True, TEXT: _USUAL},
}

cut = cut_first_dense

_PREFIXES = Prefixes(
    "language_model.model",
    "language_model.lm_head",
    ignored=("vision_tower.*", "multi_modal_projector.*"),
)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    sees = f.values["model_type"] == _VISION
    f = text_part(f, _PLAIN) if sees else f
    attention, first = _latent(f), read_first_dense(f)
    routing = replace(read_corrected_routing(f), score=Score.SOFTMAX)
    mlp = read_mlps(f, read_sparse(f, routing), lambda i: i < first)
    prefixes = _PREFIXES if sees else USUAL_PREFIXES
    return assemble(f, "mistral4", lambda i: (attention, mlp(i)), prefixes)


def _latent(f: Fields) -> LatentAttention:
    """Reads the latent attention, with the temperature of its queries."""
    require_own_keys(f)
    made, rope = read_mla(f), rope_fields(f)
    s = made.shape
    part = rotated_part(f)
    if part is not None:
        f.require("partial_rotary_factor", part * (s.nope + s.rope), s.rope)
    beta = rope.number("llama_4_scaling_beta", low=0.0, high=1e3)
    every = rope.whole("original_max_position_embeddings", high=MAX_CONTEXT)
    return replace(made, temper=Temper(beta, every))
