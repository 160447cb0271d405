"""Kimi-Linear (48B-A3B): of four layers, three have Kimi Delta Attention and one latent attention without positions;
DeepSeek-V3's experts.

The hub keeps the sizes of linear attention, and the numbers of the layers of each kind (from 1 on), in a part of their
own. Sources: arXiv 2510.26692; transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.kimi_delta import KimiDelta
from ktcli.layers.latent import LatentAttention
from ktcli.layers.names import NUMBERED_EXPERTS, SparseNames
from ktcli.models.attention import read_mla, require_own_keys
from ktcli.models.config import MAX_HEADS, Defaults, Fields, read_eps
from ktcli.models.feedforward import V3_EXPERTS, read_corrected_routing, read_mlps, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import FULL, LINEAR, cut_typed_dense, read_typed_dense, read_types
from ktcli.models.skeleton import assemble
from ktcli.ops.table.recurrent import DeltaShape

MODEL_TYPES: Defaults = {
    "kimi_linear": {
        **V3_EXPERTS,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 32,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    }
}

LINEAR_PART = "linear_attn_config"  # of a config on the hub
_IN_PART = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
_LISTS = {"full_attn_layers": FULL, "kda_layers": LINEAR}
_ONLY = {"attention_bias": False, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
_NAMES = SparseNames(NUMBERED_EXPERTS)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f = _own(f)
    f.only(_ONLY)
    linear, full, is_linear = read_delta(f), _latent(f), _linear_layers(f)
    routed = read_sparse(f, read_corrected_routing(f), correction=True, names=_NAMES)
    sparse = replace(routed, source="block_sparse_moe")
    mlp = read_mlps(f, sparse, read_typed_dense(f))
    return assemble(f, "kimi_linear", lambda i: (linear if is_linear[i] else full, mlp(i)))


def cut(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the model's first `layers` layers, at least one of them with routed
    experts.
    """
    f = _own(f)
    kinds = [LINEAR if linear else FULL for linear in _linear_layers(f)]
    return cut_typed_dense(Fields({**f.values, "layer_types": kinds}), layers)


def _own(f: Fields) -> Fields:
    """Returns the fields of a config, with what is in the part of linear attention under transformers' names."""
    if not f.has(LINEAR_PART):
        return f
    part, found = read_linear_part(f)
    if not f.has("layer_types") and all(part.has(name) for name in _LISTS):
        found["layer_types"] = _listed(part, f.n_layers)
    return Fields({**f.values, **found}, f.where)


def read_linear_part(f: Fields) -> tuple[Fields, dict[str, Any]]:
    """Returns the nested config `linear_attn_config`, and those of its sizes that are given, by their names at the top
    level of transformers' configs: `linear_head_dim`, `linear_num_heads` and `linear_conv_kernel_dim`.
    """
    part = Fields(f.values[LINEAR_PART], f"{f.where}: {LINEAR_PART}")
    return part, {name: part.values[old] for name, old in _IN_PART.items() if part.has(old)}


def _listed(part: Fields, n_layers: int) -> list[str]:
    """Returns the kind of each layer from the lists of the layers of each kind, whose numbers begin with 1."""
    kinds: dict[int, str] = {}
    for name, kind in _LISTS.items():
        numbers = part.values[name]
        if not isinstance(numbers, list) or any(type(each) is not int for each in numbers):
            raise BadCheckpoint(f"{part.where}: {name} is not a list of layers")
        if any(each in kinds for each in numbers):
            raise BadCheckpoint(f"{part.where}: {name} has a layer that is also in another list")
        kinds |= dict.fromkeys(numbers, kind)
    if sorted(kinds) != list(range(1, n_layers + 1)):
        raise BadCheckpoint(
            f"{part.where}: {' and '.join(_LISTS)} together are not layers 1 to {n_layers}"
        )
    return [kinds[i + 1] for i in range(n_layers)]


def _linear_layers(f: Fields) -> list[bool]:
    """Returns for each layer whether its attention is linear."""
    kinds = read_types(f, "layer_types", LINEAR, FULL)
    if kinds is not None:
        return [kind == LINEAR for kind in kinds]
    return [i == 0 or i % 4 > 0 for i in range(f.n_layers)]


def read_delta(f: Fields, lowest: float = 0.0) -> KimiDelta:
    """Returns the linear attention layer (Kimi Delta Attention) that a config describes; `lowest` is the lower bound of
    the logarithm of its decay, 0: none.
    """
    heads = f.whole("linear_num_heads", high=MAX_HEADS)
    dim = f.whole("linear_head_dim", high=4096)
    f.require_width("width of linear attention", 3 * heads * dim)
    width = f.whole("linear_conv_kernel_dim", low=2, high=16)
    shape = DeltaShape(heads, heads, dim, dim, by_channel=True, lowest=lowest)
    return KimiDelta(f.whole("hidden_size"), shape, width, read_eps(f))


def _latent(f: Fields) -> LatentAttention:
    """Reads the latent attention, whose last columns are not rotated although they are shared by the heads."""
    require_own_keys(f)
    unrotated = {k: v for k, v in f.values.items() if k not in ("rope_parameters", "rope_scaling")}
    return replace(read_mla(Fields(unrotated, f.where)), rope=None)
