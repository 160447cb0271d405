"""Reads the kind of each layer of a model (windows, experts or neither), and shortens configs to their first layers.

Configs list the kinds, or say from which layer on, or in which steps. A cut leaves at least one layer with experts.
Every reader raises BadCheckpoint where a field is missing, of the wrong type, out of bounds or not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models.config import MAX_CONTEXT, MAX_LAYERS, Fields

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# The lists, of any family, that have one item for each layer.
_LISTS = (
    "attn_type_list",
    "compress_ratios",
    "indexer_types",
    "layer_rope_theta",
    "layer_types",
    "mlp_layer_types",
    "no_rope_layers",
)


def read_types(f: Fields, name: str, *kinds: str | int) -> list[Any] | None:
    """Returns each layer's kind, one of `kinds`, from the list in field `name`, without entries after the last layer;
    None: the config has no such field.
    """
    types = f.values.get(name)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) < f.n_layers:
        raise BadCheckpoint(f"{f.where}: {name} is not a list of {f.n_layers} layers")
    for kind in types[: f.n_layers]:
        f.require(name, kind, *kinds)
    return types[: f.n_layers]


def read_windows(f: Fields, *, default: Callable[[int], bool]) -> Callable[[int], int]:
    """Returns a function from a layer's number to the size of its sliding window: the number of last positions that a
    token attends to, or 0 if it attends to all.

    Args:
        default: returns whether a layer has a window, by its number; used if the config does not list the layers'
            types.
    """
    window = f.whole("sliding_window", high=MAX_CONTEXT) if f.has("sliding_window") else 0
    types = read_types(f, "layer_types", FULL, SLIDING)
    if types is None:
        return lambda i: window if default(i) else 0
    if not window and SLIDING in types:
        raise BadCheckpoint(f"{f.where}: sliding_window is missing, but layer_types has windows")
    return lambda i: window if types[i] == SLIDING else 0


def read_upper_windows(f: Fields) -> Callable[[int], int]:
    """Returns a function from a layer's number to the size of its sliding window in positions, 0: none. Layers have one
    from number `max_window_layers` on, unless the config lists the layers' types.
    """
    first = f.whole("max_window_layers", low=0, high=MAX_LAYERS)
    return read_windows(f, default=lambda i: i >= first)


def read_first_dense(f: Fields, name: str = "first_k_dense_replace") -> int:
    """Returns the number of dense layers (without experts) that a model begins with, the value of field `name`."""
    return f.whole(name, low=0, high=MAX_LAYERS)


def read_typed_dense(f: Fields) -> Callable[[int], bool]:
    """Returns a function that tells from a layer's number whether its MLP is dense (without experts): by the config's
    `mlp_layer_types`, or else by `first_k_dense_replace`.
    """
    types = read_mlp_types(f)
    if types is not None:
        return lambda i: types[i] == "dense"
    first = read_first_dense(f)
    return lambda i: i < first


def read_mlp_types(f: Fields) -> list[str] | None:
    """Returns the type of each layer's MLP, "dense" or "sparse" (with experts); None: the config has no
    `mlp_layer_types`.
    """
    return read_types(f, "mlp_layer_types", "dense", "sparse")


def read_listed_dense(f: Fields) -> Callable[[int], bool]:
    """Returns a function that tells from a layer's number whether its MLP is dense (without experts): those in
    `mlp_only_layers`, and all but every `decoder_sparse_step`-th.
    """
    listed, step = _listed_dense(f), _sparse_step(f)
    return lambda i: i in listed or bool((i + 1) % step)


def read_numbers(f: Fields, name: str) -> list[int] | None:
    """Returns the layer numbers listed in field `name` of the config; None: it has no such field."""
    listed = f.values.get(name)
    if listed is None:
        return None
    short = isinstance(listed, list) and len(listed) <= MAX_LAYERS
    if not short or any(type(each) is not int for each in listed):
        raise BadCheckpoint(f"{f.where}: {name} is not a short list of layers")
    return list(listed)


def _listed_dense(f: Fields) -> list[int]:
    name = "mlp_only_layers"
    return (read_numbers(f, name) if f.values.get(name) else None) or []


def _sparse_step(f: Fields) -> int:
    return f.whole("decoder_sparse_step", high=MAX_LAYERS, default=1)


def cut_layers(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the first `layers` layers, with its lists of layers shortened, too.
    For models in which all layers have routed experts, or none.
    """
    lists = {n: each[:layers] for n in _LISTS if isinstance(each := f.values.get(n), list)}
    return {**f.values, "num_hidden_layers": layers, **lists}


def cut_first_dense(f: Fields, layers: int, name: str = "first_k_dense_replace") -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the first `layers` layers, with field `name`, the number of leading
    dense layers, reduced so that at least one layer has routed experts.
    """
    return {**cut_layers(f, layers), name: min(read_first_dense(f, name), layers - 1)}


def cut_typed_dense(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the first `layers` layers, at least one of them with routed
    experts.
    """
    types = read_mlp_types(f)
    if types is None:
        return cut_first_dense(f, layers)
    kept = types[:layers]
    if "sparse" not in kept:
        kept = [*kept[:-1], "sparse"]
    return {**cut_layers(f, layers), "mlp_layer_types": kept}


def cut_listed_dense(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the first `layers` layers, at least one of them with routed
    experts: the last one, where there would be none.
    """
    listed = [i for i in _listed_dense(f) if i < layers - 1]
    step = min(_sparse_step(f), layers)
    if all(i in listed or (i + 1) % step for i in range(layers)):
        step = 1
    return {**cut_layers(f, layers), "mlp_only_layers": listed, "decoder_sparse_step": step}
