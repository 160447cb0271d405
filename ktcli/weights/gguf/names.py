"""Tensor names of GGUF files, and the names the same tensors have on the hub.

A file stores the experts of a layer as one tensor; on the hub each has its own. A tensor that holds several in a file
is therefore shown as these, each a range of its bytes, so that a model's declarations fit both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ktcli.weights.header import TensorEntry

# Outside layers, below the body; the head is beside it.
_OUTER = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
_HEAD = "output.weight"
# Inside a layer, without ".weight" or ".bias"; "{e}" is the number of an expert.
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"nextn.{of}": of for of in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"nextn.shared_head_{of}": f"shared_head.{of}" for of in ("head", "norm")},
}
_IN_LAYER = re.compile(
    r"blk\.([0-9]{1,5})\.((?:indexer\.|nextn\.|shortconv\.)?[a-z0-9_]+)(?:\.([0-9]{1,5}))?(?:\.(weight|bias|scale))?"
)
_BODY = re.compile(r".*?layers\.[0-9]+\.")
SCALE = ".scale"  # ends the name of the number that a matrix, or each expert's, is multiplied by (NVFP4)
IN_SCALE = ".input_scale"  # of activations, which kt rounds in its own way
Names = Mapping[str, str | tuple[str, ...]]
_GATE_UP = "ffn_gate_up_exps"  # [E, 2 * I, H]: the rows of gate, then those of up


def hub_tensors(
    entries: Mapping[str, TensorEntry],
    differing: Names,
    body: tuple[str, str] = ("model.", "lm_head"),
) -> Iterator[tuple[str, str, TensorEntry]]:
    """Yields (name on the hub, name in the file, entry) for each tensor of a GGUF file; one that holds all experts of a
    layer is split into one for each expert, whose entry has its own shape and bytes.

    A tensor without a name on the hub keeps its name in the file.

    Args:
        entries: the tensors of a GGUF file by name.
        differing: hub names, by the name in the file, that an architecture has instead of the usual ones; where there
            are several for one tensor, each stands for an equal part of its rows.
        body: the prefix of hub names, and the hub name of the output head.
    """
    names: dict[str, str | tuple[str, ...]] = {**_OUTER, **LAYER, **differing}
    prefix, head = body
    for name, entry in entries.items():
        found = _IN_LAYER.fullmatch(name)
        if found is None:
            outer = names.get(name)
            own = f"{head}.weight" if name == _HEAD else name
            yield f"{prefix}{outer}" if isinstance(outer, str) else own, name, entry
            continue
        layer, stem, expert, suffix = found.groups()
        if stem == _GATE_UP and len(entry.shape) == 3:
            for half, part in enumerate(("ffn_gate_exps", "ffn_up_exps")):
                hub_name = f"{prefix}layers.{layer}.{names[part]}.{suffix}"
                yield from _experts(hub_name, name, entry, half, 2)
            continue
        exact = names.get(f"{stem}.{suffix}")
        inner = exact or names.get(f"{stem}_exps" if expert else stem)
        end = "" if exact or not suffix else f".{suffix}"
        below = f"{prefix}layers.{layer}."
        if isinstance(inner, tuple):
            yield from _parts([f"{below}{each}{end}" for each in inner], name, entry)
        elif inner is None:
            yield name, name, entry
        elif expert or "{e}" not in inner:
            yield f"{below}{inner.replace('{e}', expert or '')}{end}", name, entry
        else:
            yield from _experts(f"{below}{inner}{end}", name, entry)


def layer_of(name: str) -> int:
    """Returns the number of the layer that a tensor belongs to, by its name in a GGUF file; -1: to none."""
    found = _IN_LAYER.fullmatch(name)
    return int(found[1]) if found else -1


def below_layer(hub_name: str) -> str:
    """Returns a tensor's name on the hub without the prefix of its layer, such as "self_attn.q_proj.weight"; a tensor
    outside of layers keeps its whole name."""
    return _BODY.sub("", hub_name, count=1)


def _parts(
    hub_names: list[str], name: str, entry: TensorEntry
) -> Iterator[tuple[str, str, TensorEntry]]:
    """Yields a tensor under several names, each with as many of its rows; these may lie anywhere in it."""
    rows, *columns = entry.shape or (1,)
    if rows % len(hub_names):
        yield name, name, entry
        return
    for each in hub_names:
        yield each, name, replace(entry, shape=(rows // len(hub_names), *columns))


def _experts(
    hub_name: str, name: str, entry: TensorEntry, half: int = 0, halves: int = 1
) -> Iterator[tuple[str, str, TensorEntry]]:
    """Yields the matrices of a tensor [E, ...], or the part `half` of `halves` equal ones of each."""
    count, *shape = entry.shape
    if not shape and hub_name.endswith(SCALE):
        shape = [1]
    if not shape or shape[0] % halves:  # no tensor of experts: under its own name nobody takes it
        yield name, name, entry
        return
    shape[0] //= halves
    size = entry.size_bytes // (count * halves)
    for e in range(count):
        offset = entry.offset + (e * halves + half) * size
        yield (
            hub_name.replace("{e}", str(e)),
            name,
            TensorEntry(entry.dtype, tuple(shape), offset, size),
        )
