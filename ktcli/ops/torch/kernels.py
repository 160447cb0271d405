"""The table of rows of operations on a device: plain torch, exact torch, and Triton kernels on a GPU.

All rows have the same signatures, which `functions` describes; a row is data, and the backend runs the one
it is given. Inputs may be column ranges of wider rows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from ktcli.native import Glu
from ktcli.ops.backend import ChooseShape, GqaShape, MlaShape, Routing
from ktcli.ops.torch import attention, chosen, functions, mqa
from ktcli.ops.torch.chosen import Chosen
from ktcli.ops.torch.functions import KvPages, RopeTable, Rows
from ktcli.ops.torch.packed import Extras, Matrix, Packed
from ktcli.ops.torch.recurrent import States
from ktcli.ops.windows import MqaShape

Absorbed = tuple[Packed, Packed, Packed]  # uk_in, uk_out, uv


@dataclass(frozen=True, slots=True)
class Kernels:
    """One row: what each operation is, see `functions` for arguments and results."""

    name: str
    norm: Callable[[Tensor, Tensor, float], Tensor]
    linear: Callable[[Tensor, Matrix, Tensor | None], Tensor]
    swiglu: Callable[[Tensor, int, Glu], Tensor]
    rope: Callable[[Tensor, Rows, RopeTable, int, int, bool], Tensor]
    route: Callable[[Tensor, Routing, Tensor | None], tuple[Tensor, Tensor]]
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Packed, Packed, Extras], Tensor]
    gqa: Callable[[Tensor, Tensor, Tensor, KvPages, Rows, GqaShape, Tensor | None], Tensor]
    mla: Callable[[Tensor, Tensor, Tensor, Absorbed, Rows, MlaShape], Tensor]
    choose: Callable[[Tensor, Tensor, Tensor | None, Tensor, Rows, ChooseShape], Chosen | None]
    mla_chosen: Callable[[Tensor, Tensor, Tensor, Absorbed, Chosen, Rows, MlaShape], Tensor]
    gqa_chosen: Callable[[Tensor, Tensor, Tensor, KvPages, Chosen, Rows, GqaShape], Tensor]
    mqa: Callable[
        [
            Tensor,
            Tensor,
            Tensor | None,
            Tensor,
            Rows,
            MqaShape,
            tuple[States, int],
            Tensor | None,
            Chosen | None,
        ],
        Tensor,
    ]
    unpack_all: Callable[[Packed, Tensor], Tensor]


def _torch_row(name: str, *, exact: bool) -> Kernels:
    f = functions
    return Kernels(
        name=name,
        norm=f.norm,
        linear=partial(f.linear, exact=exact),
        swiglu=f.swiglu,
        rope=f.rope,
        route=f.route,
        experts=partial(f.experts, exact=exact),
        gqa=partial(attention.gqa, exact=exact),
        mla=partial(attention.mla, exact=exact),
        choose=partial(chosen.choose, exact=exact),
        mla_chosen=partial(chosen.mla, exact=exact),
        gqa_chosen=partial(chosen.gqa, exact=exact),
        mqa=partial(mqa.mqa, exact=exact),
        unpack_all=partial(f.unpack_all, exact=exact),
    )


TORCH = _torch_row("torch", exact=False)
EXACT = _torch_row("exact", exact=True)


def kernels_for(device: torch.device, *, exact: bool = False) -> Kernels:
    """The row for a device: Triton kernels on an NVIDIA GPU, unless `triton_missing`.

    Args:
        exact: f32 in every product and in the cache, to compare with a reference.
    """
    if exact:
        return EXACT
    return triton_row() if device.type == "cuda" and not triton_missing() else TORCH


def triton_missing() -> str:
    """What Triton kernels lack here, a clause; "" if nothing."""
    if not find_spec("triton"):  # torch for CUDA brings it
        return "triton is not installed"
    # Triton compiles a little C for every kernel that it launches.
    compilers = (os.environ.get("CC"), "gcc", "clang")
    if not any(name and shutil.which(name) for name in compilers):
        return "there is no C compiler, which triton needs (gcc, clang, or CC)"
    return ""


def triton_row() -> Kernels:
    """The row of Triton kernels, which only imports them now."""
    from ktcli.ops.triton import row as f

    return Kernels(
        name="triton",
        norm=f.norm,
        linear=f.linear,
        swiglu=f.swiglu,
        rope=f.rope,
        route=f.route,
        experts=f.experts,
        gqa=f.gqa,
        mla=f.mla,
        choose=chosen.choose,
        mla_chosen=chosen.mla,
        gqa_chosen=chosen.gqa,
        mqa=mqa.mqa,
        unpack_all=f.unpack_all,
    )
