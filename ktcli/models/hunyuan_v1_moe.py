"""Hunyuan-A13B (80B-A13B): q and k normalised after the rotation, one shared expert as wide as the others.

The hub's config may list sizes layer by layer; all layers are alike. Its rotation of type "dynamic" has an alpha,
which stretches the base once and for all. Source: the Hunyuan-A13B report; transformers 5.23.
"""

from __future__ import annotations

import math
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.grouped_query import NormedQk, QkNorms
from ktcli.layers.names import RouterNames, SharedNames, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import head_dim, read_gqa
from ktcli.models.config import MAX_LAYERS, Defaults, Fields
from ktcli.models.feedforward import read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import cut_layers
from ktcli.models.rotation import read_theta, rope_fields, rope_type
from ktcli.models.skeleton import assemble

MODEL_TYPES: Defaults = {"hunyuan_v1_moe": {}}

_NAMES = SparseNames(router=RouterNames("gate.wg.weight"), shared=SharedNames("shared_mlp"))
_NORMS = QkNorms(NormedQk.ROTATED, ("query_layernorm", "key_layernorm"))
_LISTED = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f = _own(f)
    attention = read_gqa(f, norms=_NORMS, biased=True)
    width = f.whole("intermediate_size")
    routing = read_routing(f, normalize=True)
    sparse = SparseMlp(attention.hidden, width, routing, shared_width=width, names=_NAMES)
    return assemble(f, "hunyuan_v1_moe", lambda _: (attention, sparse))


def cut(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the model's first `layers` layers, each of which has routed
    experts.
    """
    return cut_layers(_own(f), layers)


def _own(f: Fields) -> Fields:
    """Returns the config with one number where a list says the same of every layer."""
    values = dict(f.values)
    for name in _LISTED:
        listed = values.get(name)
        if not isinstance(listed, list):
            continue
        if not 0 < len(listed) <= MAX_LAYERS or any(each != listed[0] for each in listed):
            raise BadCheckpoint(f"{f.where}: {name} differs between layers")
        values[name] = listed[0]
    same = Fields(values, f.where)
    for name, usual in (("num_shared_expert", 1), ("moe_intermediate_size", None)):
        if same.has(name):
            same.require(name, values[name], usual or values.get("intermediate_size"))
    same.only({"use_cla": False, "use_qk_norm": True})
    return _stretched(same)


def _stretched(f: Fields) -> Fields:
    """Returns the config with a plain rotation where one of type "dynamic" has an alpha."""
    rope = rope_fields(f)
    if rope_type(rope) != "dynamic" or not rope.has("alpha"):
        return f
    rope.number("factor", low=1.0, high=1e4)  # which the alpha overrules, and transformers wants
    dim = head_dim(f)
    if dim < 4:
        raise BadCheckpoint(f"{rope.where}: alpha requires heads of at least 4 columns")
    by = math.pow(rope.number("alpha", low=1e-3, high=1e9), dim / (dim - 2))
    plain = {"rope_type": "default", "rope_theta": read_theta(f) * by}
    return Fields({**f.values, "rope_parameters": plain}, f.where)
