"""Trinity (Nano, Mini, Large): norms before and after attention and MLP, gates on each column of the heads.

Only layers with a sliding window have rotary embeddings; the router scores by sigmoid and has a learned correction;
embedded rows may be multiplied by the root of their width. Source: transformers 5.23 (afmoe).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktcli.layers.decoder import Attention, Mlp, Multipliers
from ktcli.layers.gates import OwnGates
from ktcli.layers.grouped_query import QkNorms
from ktcli.layers.names import CorrectionNames, RouterNames, SparseNames
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_LAYERS, Defaults, Fields
from ktcli.models.feedforward import read_dense, read_routing, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_first_dense, read_first_dense, read_windows
from ktcli.models.skeleton import Prefixes, assemble
from ktcli.ops.table.experts import Score

MODEL_TYPES: Defaults = {
    "afmoe": {
        "head_dim": 128,
        "num_dense_layers": 1,
        "n_shared_experts": 2,
        "sliding_window": 1024,
        "global_attn_every_n_layers": 4,
    }
}

_DENSE = "num_dense_layers"
_ONLY = {"attention_bias": False, "route_norm": True, "score_func": "sigmoid"}
_NAMES = SparseNames(
    router=RouterNames("router.gate.weight", correction=CorrectionNames("expert_bias"))
)
_PREFIXES = Prefixes(
    norms=("input_layernorm", "pre_mlp_layernorm"),
    after=("post_attention_layernorm", "post_mlp_layernorm"),
)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f.only(_ONLY)
    for name in ("n_group", "topk_group"):
        f.require(name, f.whole(name, low=0, default=1), 0, 1)
    attention = read_gqa(f, norms=QkNorms())
    attention = replace(attention, gates=OwnGates("gate_proj", per_column=True))
    routing = read_routing(f, normalize=True, score=Score.SIGMOID, scale="route_scale")
    sparse = read_sparse(f, routing, correction=True, names=_NAMES)
    step = f.whole("global_attn_every_n_layers", high=MAX_LAYERS)
    window, dense = (
        read_windows(f, default=lambda i: bool((i + 1) % step)),
        read_first_dense(f, _DENSE),
    )

    def parts(i: int) -> tuple[Attention, Mlp]:
        own = attention.within(window(i)) if window(i) else replace(attention, rope=None)
        return own, read_dense(f) if i < dense else sparse

    wide = f.whole("hidden_size") ** 0.5 if f.flag("mup_enabled", False) else 1.0
    return assemble(f, "afmoe", parts, _PREFIXES, multipliers=Multipliers(embedding=wide))


def cut(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the model's first `layers` layers, at least one of them with routed
    experts.
    """
    return cut_first_dense(f, layers, _DENSE)
