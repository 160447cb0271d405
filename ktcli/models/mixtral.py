"""Mixtral (8x7B, 8x22B) and MiniMax-M2: experts named w1, w2, w3 in every layer.

Mixtral chooses by softmax. MiniMax-M2 (.1, .5, .7) chooses by sigmoid with a learned correction, normalises
q and k over all heads together and rotates half of each. Sources: arXiv 2401.04088; transformers 5.23.
"""

from __future__ import annotations

from ktcli.layers.grouped_query import NormedQk, QkNorms
from ktcli.layers.names import NUMBERED_EXPERTS, CorrectionNames, RouterNames, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_gqa
from ktcli.models.config import Defaults, Fields
from ktcli.models.feedforward import read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import cut_layers, read_windows
from ktcli.models.skeleton import Prefixes, assemble
from ktcli.ops.table.experts import Score

MODEL_TYPES: Defaults = {
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1e6},
    "minimax_m2": {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6},
}

cut = cut_layers

_NAMES = SparseNames(
    NUMBERED_EXPERTS, RouterNames(correction=CorrectionNames("e_score_correction_bias"))
)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    minimax = f.text("model_type", "") == "minimax_m2"
    if minimax:
        _require_known(f)
        attention = read_gqa(f, norms=QkNorms(NormedQk.ROWS), partly=True)
    else:
        attention = read_gqa(f)
    score = Score.SIGMOID if minimax else Score.SOFTMAX
    routing, width = read_routing(f, normalize=True, score=score), f.whole("intermediate_size")
    sparse = SparseMlp(attention.hidden, width, routing, correction=minimax, names=_NAMES)
    prefixes = Prefixes(mlp="block_sparse_moe")
    window = read_windows(f, default=lambda _: True) if not minimax else lambda _: 0
    return assemble(f, "mixtral", lambda i: (attention.within(window(i)), sparse), prefixes)


def _require_known(f: Fields) -> None:
    """Refuses what MiniMax's config could say and transformers does not compute."""
    f.only(
        {
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
        }
    )
