"""MiniMax-Text-01 and M1 (456B-A46B): lightning attention in seven of eight layers, the others grouped-query attention.

The residual is what a part has read, behind its norm, and it has a factor of its own in each sum (postnorm). Only the
first `rotary_dim` columns of a head are rotated, as in the publisher's code; transformers 5.23 rotates whole heads.
Sources: MiniMax-01, arXiv 2501.08313; transformers 5.23 (minimax).
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.layers.decoder import Attention, DecoderLayer, Wiring
from ktcli.layers.lightning import LightningAttention
from ktcli.layers.names import NUMBERED_EXPERTS, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import head_dim, read_gqa
from ktcli.models.config import MAX_HEADS, Defaults, Fields
from ktcli.models.feedforward import read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import FULL, LINEAR, cut_layers, read_types
from ktcli.models.skeleton import Prefixes, assemble

_USUAL = {
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MODEL_TYPES: Defaults = {
    "minimax": {**_USUAL, "postnorm": True},
    "minimax_m1": {**_USUAL, "postnorm": False},
    "minimax_text_01": {**_USUAL, "postnorm": False},
}

cut = cut_layers

_NUMBERED = {1: FULL, 0: LINEAR}
# In transformers' words, and in the publisher's numbers.
_TYPES, _NUMBERS = "layer_types", "attn_type_list"
# The factors in a sum, in transformers' words and the publisher's: of the residual (alpha), of what is added (beta).
_FACTORS = {
    FULL: ("full_attn_{}_factor", "layernorm_full_attention_{}"),
    LINEAR: ("linear_attn_{}_factor", "layernorm_linear_attention_{}"),
    "mlp": ("mlp_{}_factor", "layernorm_mlp_{}"),
}
_PREFIXES = Prefixes(
    mlp="block_sparse_moe",
    ignored=(
        "*.self_attn.slope_rate",
        "*.self_attn.query_decay",
        "*.self_attn.key_decay",
        "*.self_attn.diagonal_decay",
    ),
)
_NAMES = SparseNames(NUMBERED_EXPERTS)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f.require_absent("sliding_window")
    f.only({"shared_intermediate_size": 0})
    kinds, full = _kinds(f), read_gqa(f, partly=True)
    of_kind: dict[str, Attention] = {FULL: full, LINEAR: _lightning(f)}
    routing = read_routing(f, normalize=True)
    sparse = SparseMlp(full.hidden, f.whole("intermediate_size"), routing, names=_NAMES)
    wiring = Wiring(postnorm=f.flag("postnorm", False))
    model = assemble(f, "minimax", lambda i: (of_kind[kinds[i]], sparse), _PREFIXES, wiring=wiring)
    factors = {kind: _factors(f, kind) for kind in _FACTORS}

    def weighed(layer: DecoderLayer) -> DecoderLayer:
        (kept, added), (kept_mlp, added_mlp) = factors[kinds[layer.layer]], factors["mlp"]
        return replace(layer, kept=(kept, kept_mlp), added=(added, added_mlp))

    return model.with_layers(weighed)


def _kinds(f: Fields) -> list[str]:
    """Returns each layer's kind; every second one is linear where the config does not say."""
    if (types := read_types(f, _TYPES, FULL, LINEAR)) is not None:
        return types
    if (numbers := read_types(f, _NUMBERS, *_NUMBERED)) is not None:
        return [_NUMBERED[number] for number in numbers]
    return [(FULL, LINEAR)[i % 2] for i in range(f.n_layers)]


def _lightning(f: Fields) -> LightningAttention:
    """Reads the lightning attention."""
    heads, dim = f.whole("num_attention_heads", high=MAX_HEADS), head_dim(f)
    f.require_width("num_attention_heads x head_dim", 4 * heads * dim)
    return LightningAttention(f.whole("hidden_size"), heads, dim, f.n_layers)


def _factors(f: Fields, kind: str) -> tuple[float, float]:
    """Returns the factors of the residual and of what is added to it, behind the parts of one kind."""
    kept, added = (
        f.number(*(name.format(which) for name in _FACTORS[kind]), high=1e4, default=1.0)
        for which in ("alpha", "beta")
    )
    return kept, added
