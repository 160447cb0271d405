"""Small random checkpoints written by transformers, and its logits as the reference.

Weights are bf16 values, so that a bf16 pack holds them exactly; transformers runs on them in f32.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import families
import numpy as np
import pytest
import torch
import transformers
from families.case import Case
from numpy.typing import NDArray
from oracle import unpack
from safetensors.torch import load_file, save_file
from stored import chosen, column_factors, view

from ktcli.models import build
from ktcli.native import Numbers, Pool, packed_bytes
from ktcli.ops.tensors import Role, Tensor
from ktcli.weights.recipe import Recipe, format_of

F32Array = NDArray[np.float32]


def known(family: str) -> tuple[Case, ...]:
    """The cases of a family; none that the installed transformers is too old for."""
    try:
        cases: tuple[Case, ...] = tuple(import_module(f"families.{family}").CASES)
    except ImportError as error:
        if error.name != "transformers":
            raise
        return ()
    return tuple(case for case in cases if f"{case.cls}Config" in _CLASSES)


_CLASSES = frozenset(dir(transformers))  # takes a fifth of a second
_NAMES = [module.name for module in iter_modules(families.__path__) if module.name != "case"]
_FAMILIES = {name: known(name) for name in _NAMES}
CASES = tuple(case for cases in _FAMILIES.values() for case in cases)
ONE_OF_EACH = tuple(cases[0] for cases in _FAMILIES.values() if cases)
UNKNOWN = tuple(name for name, cases in _FAMILIES.items() if not cases)


def case_named(name: str) -> Case:
    """The case of this name; without it the test is skipped."""
    found = next((case for case in CASES if case.name == name), None)
    if found is None:
        pytest.skip(f"transformers {transformers.__version__} does not know all of {UNKNOWN}")
    return found


_COMPUTED = "inv_freq", "freqs_ci", "position_ids", "embed_scale", "slope_rate", "_decay"
_FACTORS = "layer_scalar", "router.scale", "per_expert_scale"  # of about 1


def write_checkpoint(case: Case, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random checkpoint in the hub's on-disk names."""
    torch.manual_seed(case.seed)
    model = case.model_class(case.config())
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if any(each in name for each in _COMPUTED):
                continue
            if not value.is_floating_point():  # a table of experts: some of them, each once
                chances = torch.rand(value.shape[0], case.config().n_routed_experts)
                value.copy_(chances.argsort(-1)[:, : value.shape[1]])
                continue
            if "norm" in name or name.endswith(_FACTORS):
                value.uniform_(0.5, 1.5)
            elif name.endswith("router.proj.weight"):  # of an input divided by that root
                value.normal_(0, 0.3 * value.shape[-1] ** 0.5)
            elif name.endswith(("bias", "gate.weight")):
                value.normal_(0, 0.3)  # routers that decide, biases that matter
            else:  # a layer adds less than it reads, as in trained models
                scale = 0.5 if name.endswith(("o_proj.weight", "down_proj")) else 1.0
                value.normal_(0, scale * value.shape[-1] ** -0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values")  # of an encoder of images
        model.to(dtype)
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model_type": case.model_type}))
    if case.publish:
        case.publish(folder)
    return folder


@dataclass(frozen=True)
class Judged:
    """What the reference says of one sequence.

    Attributes:
        logits: [T, vocab].
        chosen: per MoE layer the experts of each token, [T, top_k], sorted.
        margin: [T] smallest gap of choice scores between chosen and refused experts (and groups; or what the case
            calls an edge), over the layers.
    """

    logits: F32Array
    chosen: list[NDArray[np.int64]]
    margin: F32Array


def judge(
    case: Case, folder: Path, ids: list[int], on_router: Callable[..., Any] | None = None
) -> Judged:
    """Run transformers in f32 on the checkpoint.

    Args:
        on_router: a forward hook of every router, which may replace what it says.
    """
    model = case.model_class.from_pretrained(
        folder, config=case.config(), dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    margins: list[F32Array] = []
    chosen: list[NDArray[np.int64]] = []

    def see(router: Any, inputs: tuple[Any, ...], out: tuple[torch.Tensor, ...]) -> None:
        logits, best = (each.reshape(len(ids), -1) for each in case.said(out))
        logits = logits.float()
        margins.append(_margin(router, case.choice(router, inputs, logits), best))
        if case.edges:
            margins.append(case.edges(router, logits, best).numpy())
        chosen.append(np.sort(best.numpy(), axis=1))

    for name, module in model.named_modules():
        if name.endswith(case.router) and type(module) is not torch.nn.Linear:
            if on_router:
                module.register_forward_hook(on_router)
            module.register_forward_hook(see)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    margin = np.min(margins, axis=0) if margins else np.full(len(ids), np.inf)
    return Judged(logits.numpy(), chosen, margin)


def _margin(module: Any, scores: torch.Tensor, chosen: torch.Tensor) -> F32Array:
    """[T] gap of choice scores between chosen and refused experts, and between groups."""
    sigmoid = hasattr(module, "e_score_correction_bias")
    n_group = getattr(module, "num_group", None) or 1
    group_gap = torch.full((scores.shape[0],), float("inf"))
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if n_group > 1:
        grouped = scores.reshape(scores.shape[0], n_group, -1)
        value = grouped.topk(2, -1).values.sum(-1) if sigmoid else grouped.max(-1).values
        ranked = value.sort(-1, descending=True)
        group_gap = ranked.values[:, module.topk_group - 1] - ranked.values[:, module.topk_group]
        best = torch.zeros_like(value, dtype=torch.bool).scatter(
            1, ranked.indices[:, : module.topk_group], True
        )
        allowed = best.unsqueeze(-1).expand_as(grouped).reshape(scores.shape)
    lowest = scores.gather(1, chosen).min(1).values
    refused = scores.masked_fill(~allowed, float("-inf")).scatter(1, chosen, float("-inf"))
    gap = torch.minimum(lowest - refused.max(1).values, group_gap)
    return gap.numpy().astype(np.float32)


def gain_of(tensor: Tensor, tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Values of the vector before a matrix; of a matrix without one, nothing."""
    if tensor.gain is None:
        return np.empty(0, np.float32)
    (stored,) = tensor.gain.sources[0]
    return tensors[stored.name].float().numpy() + np.float32(stored.plus)


def requantised(folder: Path, out: Path, recipe: Recipe) -> Path:
    """The checkpoint with every weight replaced by what the recipe's formats make of it, as f32.

    The library encodes, as its bytes are the oracle's (tests/weights/test_oracle.py), which takes seconds;
    the oracle decodes.
    """
    pool = Pool(1)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for tensor in build(config).tensors:
        fmt = format_of(tensor, recipe)
        for index in (
            range(tensor.count) if fmt and tensor.role in (Role.EXPERTS, Role.DENSE) else ()
        ):
            for piece in dict.fromkeys(chosen(tensor, tensors)):  # rows that are stored twice, once
                name = piece.at(index)
                tensors[name] = tensors[name].float()
                rows = view(tensors[name], piece, index)
                matrix = rows.contiguous().numpy()
                packed = np.zeros(packed_bytes(fmt, *matrix.shape), dtype=np.uint8)
                factors = column_factors(tensor, fmt, matrix, gain_of(tensor, tensors))
                pool.pack(fmt, Numbers.of(matrix / factors).whole, packed)
                rows.copy_(torch.from_numpy(unpack(fmt, packed, *matrix.shape) * factors))
    out.mkdir()
    save_file(
        {name: value.float().contiguous() for name, value in tensors.items()},
        out / "model.safetensors",
    )
    (out / "config.json").write_text(json.dumps(config))
    return out
