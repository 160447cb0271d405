"""K-EXAONE (236B-A23B): rotary embeddings only in layers with a sliding window; DeepSeek-V3's experts.

Source: the K-EXAONE report; transformers 5.23. Layers for multi-token prediction are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.grouped_query import QkNorms
from ktcli.layers.names import CorrectionNames, RouterNames, SparseNames
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_LAYERS, Defaults, Fields
from ktcli.models.feedforward import V3_EXPERTS, read_corrected_routing, read_mlps, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_typed_dense, read_typed_dense, read_windows
from ktcli.models.skeleton import assemble

MODEL_TYPES: Defaults = {
    "exaone_moe": {
        **V3_EXPERTS,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
}

cut = cut_typed_dense

_NAMES = SparseNames(router=RouterNames(correction=CorrectionNames("e_score_correction_bias")))


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    attention = read_gqa(f, norms=QkNorms())
    sparse = read_sparse(f, read_corrected_routing(f), correction=True, names=_NAMES)
    mlp = read_mlps(f, sparse, read_typed_dense(f))
    listed = f.has("layer_types")
    window = read_windows(f, default=(lambda _: False) if listed else _is_sliding(f))

    def parts(i: int) -> tuple[Attention, Mlp]:
        own = attention.within(window(i))
        if f.has("sliding_window") and not window(i):
            own = replace(own, rope=None)
        return own, mlp(i)

    return assemble(f, "exaone_moe", parts)


def _is_sliding(f: Fields) -> Any:
    """Returns a function that tells whether a layer has a window: all but every n-th, or those with an L (local) in
    a text of L and G."""
    pattern = f.values.get("sliding_window_pattern")
    if isinstance(pattern, str) and 0 < len(pattern) <= MAX_LAYERS:
        return lambda i: pattern[i % len(pattern)] == "L"
    step = f.whole("sliding_window_pattern", high=MAX_LAYERS)
    return lambda i: bool((i + 1) % step)
