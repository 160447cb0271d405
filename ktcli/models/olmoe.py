"""OLMoE (1B-7B) and FlexOlmo (7x7B): experts in every layer, q and k normalised over all heads together.

FlexOlmo has norms of the outputs of attention and experts instead of norms before them.

Source: arXiv 2409.02060; transformers 5.23.
"""

from __future__ import annotations

from ktcli.layers.decoder import NO_NORMS
from ktcli.layers.grouped_query import NormedQk, QkNorms
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_gqa
from ktcli.models.config import Defaults, Fields
from ktcli.models.feedforward import read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import cut_layers
from ktcli.models.skeleton import USUAL_PREFIXES, Prefixes, assemble

_FLEX = "flex_olmo"
_AFTER = Prefixes(norms=NO_NORMS, after=("post_attention_layernorm", "post_feedforward_layernorm"))
MODEL_TYPES: Defaults = {"olmoe": {}, _FLEX: {"rope_theta": 500_000.0}}

cut = cut_layers


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f.require_absent("clip_qkv")
    attention = read_gqa(f, norms=QkNorms(NormedQk.ROWS), biased=True)
    routing = read_routing(f, normalize=f.flag("norm_topk_prob", False))
    sparse = SparseMlp(attention.hidden, f.whole("intermediate_size"), routing)
    prefixes = _AFTER if f.text("model_type", "") == _FLEX else USUAL_PREFIXES
    return assemble(f, "olmoe", lambda _: (attention, sparse), prefixes)
