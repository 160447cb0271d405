"""Between the stacked weights of training and the tensors of a hub checkpoint.

Owns the names and dtypes in `model.safetensors`: one tensor per expert and projection, bf16, the
correction bias of the router f32. `to_hub` and `from_hub` are inverse up to the rounding to bf16.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from model import Shape, Weights, weight_shapes
from safetensors.torch import load_file, save_file
from torch import Tensor


def hub_name(name: str) -> str:
    """`norm` -> `model.norm.weight`; lm_head has no `model.` in front."""
    return f"{name}.weight" if name == "lm_head" else f"model.{name}.weight"


def to_hub(
    w: Weights, bias: Tensor, s: Shape, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Tensors of the checkpoint: experts unstacked, gate and up apart."""
    out: dict[str, Tensor] = {}
    for name, tensor in w.items():
        t = tensor.detach().to("cpu", dtype)
        base = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up"):
            for e, pair in enumerate(t):
                gate, up = pair.chunk(2)
                out[hub_name(f"{base}.{e}.gate_proj")] = gate.contiguous()
                out[hub_name(f"{base}.{e}.up_proj")] = up.contiguous()
        elif name.endswith("experts.down"):
            out |= {hub_name(f"{base}.{e}.down_proj"): m.contiguous() for e, m in enumerate(t)}
        else:
            out[hub_name(name)] = t.contiguous()
    for n in range(s.first_k_dense_replace, s.num_hidden_layers):
        out[f"model.layers.{n}.mlp.gate.e_score_correction_bias"] = (
            bias[n].detach().cpu().float().clone()
        )
    return out


def from_hub(hub: dict[str, Tensor], s: Shape) -> tuple[Weights, Tensor]:
    """The inverse of `to_hub`: f32 weights and the bias [L, E]."""
    w: Weights = {}
    for name in weight_shapes(s):
        base = name.rsplit(".", 1)[0]
        experts = range(s.n_routed_experts)
        if name.endswith("experts.gate_up"):
            w[name] = torch.stack(
                [
                    torch.cat([hub[hub_name(f"{base}.{e}.{p}_proj")] for p in ("gate", "up")])
                    for e in experts
                ]
            ).float()
        elif name.endswith("experts.down"):
            w[name] = torch.stack([hub[hub_name(f"{base}.{e}.down_proj")] for e in experts]).float()
        else:
            w[name] = hub[hub_name(name)].float()
    bias = torch.zeros(s.num_hidden_layers, s.n_routed_experts)
    for n in range(s.first_k_dense_replace, s.num_hidden_layers):
        bias[n] = hub[f"model.layers.{n}.mlp.gate.e_score_correction_bias"]
    return w, bias


def read_shape(folder: Path) -> Shape:
    """The sizes in a `config.json` written by `Shape.hub_config`."""
    config = json.loads((folder / "config.json").read_text())
    return Shape(**{k: config[k] for k in Shape.__dataclass_fields__})


def load(folder: Path) -> tuple[Weights, Tensor, Shape]:
    """Read a model folder in hub layout."""
    s = read_shape(folder)
    return *from_hub(load_file(folder / "model.safetensors"), s), s


def save(folder: Path, w: Weights, bias: Tensor, s: Shape) -> None:
    """Write `model.safetensors` beside, then rename: a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / "model.safetensors.part"
    save_file(to_hub(w, bias, s), beside, metadata={"format": "pt"})
    beside.replace(folder / "model.safetensors")
