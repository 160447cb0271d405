"""Phi-3.5-MoE: SparseMixer chooses two of 16 experts, norms are LayerNorms with biases, and the head may have one.

The weight of a chosen expert is its softmax among those whose logits are near it, of what was not chosen before: mostly
1. LongRoPE has a factor of cos and sin for each of its two rotations. transformers 5.23 takes the factor of long texts,
but always the wavelengths of short ones; the publisher's own code takes both of the same, as kt does. Sources: arXiv
2409.12136; transformers 5.23 (phimoe).
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.layers.decoder import Wiring
from ktcli.layers.names import NUMBERED_EXPERTS, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_gqa
from ktcli.models.config import Defaults, Fields
from ktcli.models.feedforward import read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import cut_layers, read_windows
from ktcli.models.rotation import MSCALES, rope_fields, rope_type
from ktcli.models.skeleton import Prefixes, assemble
from ktcli.ops.table.experts import Routing, Score

MODEL_TYPES: Defaults = {
    "phimoe": {
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
    }
}

_CHOSEN = 2  # transformers and the publisher's code choose two, whatever the config says
_PREFIXES = Prefixes(mlp="block_sparse_moe")
_NAMES = SparseNames(NUMBERED_EXPERTS)
_WIRING = Wiring(centred=True, shifted=True)

cut = cut_layers


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    _require_known_rope(f)
    attention, window = read_gqa(f, biased=True), read_windows(f, default=lambda _: True)
    sparse = SparseMlp(attention.hidden, f.whole("intermediate_size"), _routing(f), names=_NAMES)
    model = assemble(
        f, "phimoe", lambda i: (attention.within(window(i)), sparse), _PREFIXES, wiring=_WIRING
    )
    head_bias = f.flag("lm_head_bias", False)
    return replace(model, decoder=replace(model.decoder, head_bias=head_bias))


def _routing(f: Fields) -> Routing:
    """Reads SparseMixer: others share a chosen expert's weight up to twice the jitter of training away."""
    f.require("num_experts_per_tok", f.whole("num_experts_per_tok"), _CHOSEN)
    band = 2 * f.number("router_jitter_noise", high=1e3)
    return replace(read_routing(f, normalize=False), score=Score.SPARSEMIXER, band=band)


def _require_known_rope(f: Fields) -> None:
    """Refuses rotations that the family does not have, and LongRoPE without its factors of cos and sin."""
    rope = rope_fields(f)
    kind = rope_type(rope)
    rope.require("type", kind, "default", "longrope")
    for name in MSCALES if kind == "longrope" else ():
        rope.number(name, high=1e3)
