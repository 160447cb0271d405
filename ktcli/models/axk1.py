"""A.X K1 (519B-A33B): DeepSeek-V3 with a norm of the sum of routed and shared experts.

Published checkpoints have no correction of the router, those that transformers writes do; the norms that they have in
layers without experts are not used. Source: transformers 5.23 (axk1).
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.layers.names import CorrectionNames, RouterNames, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_mla
from ktcli.models.config import Defaults, Fields
from ktcli.models.feedforward import V3_EXPERTS, read_corrected_routing, read_mlps, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_typed_dense, read_typed_dense
from ktcli.models.skeleton import Prefixes, assemble

_USUAL = {
    **V3_EXPERTS,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 1,
    "rope_interleave": True,
}
MODEL_TYPES: Defaults = {
    "axk1": _USUAL,
    "AXK1": _USUAL,  # in older releases
}

cut = cut_typed_dense

_NORM = "post_mlp_layernorm"
_PREFIXES = Prefixes(ignored=(f"*.{_NORM}.weight",))
_NAMES = SparseNames(router=RouterNames(correction=CorrectionNames(may_lack=True)))


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f.only({"moe_layer_freq": 1, "scoring_func": "sigmoid"})
    attention, routing = read_mla(f), read_corrected_routing(f)
    sparse = read_sparse(f, routing, correction=True, names=_NAMES)
    mlp = read_mlps(f, sparse, read_typed_dense(f))
    model = assemble(f, "axk1", lambda i: (attention, mlp(i)), _PREFIXES)
    return model.with_layers(
        lambda each: replace(each, after=("", _NORM)) if isinstance(each.mlp, SparseMlp) else each
    )
