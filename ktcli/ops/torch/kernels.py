"""The tables of kernels on a device: plain torch, exact torch, and Triton on a GPU.

A kernel has the name of its operation, and as parameters the fields of its row: values and weights are tensors, facts
are as they are. Instead of a layer it is given that layer's `cache` (the operation's own parts of the pages) or
`state`, and where the row says that it reads the step, `rows`. Inputs may be column ranges of wider rows. A table is
data, and the backend runs the one it is given.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktcli.ops.torch import chosen, functions, hyper, mqa, pooling, recurrent
from ktcli.ops.torch.functions import Summarize
from ktcli.ops.torch.merged import Merged
from ktcli.ops.torch.packed import PackedStack
from ktcli.records import dataclass

Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Kernels:
    """A table of kernels: a function for each operation, and those that compute experts.

    Attributes:
        operations: a kernel for each operation that the backend does not do by itself.
        experts: the function that runners of experts use, see `functions`.
        merged: kernels that do several operations at once; None: there are none.
        summarize: what the choice of a token reads of its logits.
    """

    name: str
    operations: Mapping[str, Kernel]
    experts: Callable[[Tensor, Tensor, Tensor, PackedStack], Tensor]
    merged: Merged | None = None
    summarize: Summarize = functions.summarize

    def __getitem__(self, operation: str) -> Kernel:
        return self.operations[operation]


_TORCH: Mapping[str, Kernel] = {
    "norm": functions.norm,
    "layer_norm": functions.layer_norm,
    "linear": functions.linear,
    "rope": functions.rope,
    "gqa": chosen.gqa,
    "choose": chosen.choose,
    "mla": chosen.mla,
    "mqa": mqa.mqa,
    "conv": recurrent.conv,
    "pooling": pooling.pooling,
    "delta": recurrent.delta,
    "scan": recurrent.scan,
    "lightning": recurrent.lightning,
    "route": functions.route,
    "swiglu": functions.swiglu,
    "gate": functions.gate,
    "add": functions.add,
    "spread": hyper.spread,
    "mix": hyper.mix,
    "collapse": hyper.collapse,
    "expand": hyper.expand,
    "scale": functions.scale,
    "temper": functions.temper,
    "greatest": functions.greatest,
}


def _torch_table(name: str, *, exact: bool) -> Kernels:
    def bound(kernel: Kernel) -> Kernel:
        return partial(kernel, exact=exact) if "exact" in signature(kernel).parameters else kernel

    return Kernels(
        name,
        {operation: bound(kernel) for operation, kernel in _TORCH.items()},
        partial(functions.experts, exact=exact),
    )


TORCH = _torch_table("torch", exact=False)
EXACT = _torch_table("exact", exact=True)


def kernels_for(device: torch.device, *, exact: bool = False) -> Kernels:
    """Returns the table of kernels (functions by operation name) for a device: Triton's on an NVIDIA GPU unless
    `triton_fails`, else torch's.

    Args:
        exact: f32 in every product and in the cache, to compare with a reference.
    Raises:
        torch.OutOfMemoryError: the device's memory is full.
    """
    if exact:
        return EXACT
    return triton_kernels() if device.type == "cuda" and not triton_fails(device) else TORCH


# Why the first kernel failed on a device, where nothing was seen that the system lacks.
_failed: dict[torch.device, str] = {}
# Why kernels begin only when the one before has ended, on devices that could start them early.
_late: dict[torch.device, str] = {}


@cache
def triton_fails(device: torch.device) -> str:
    """Returns the reason why Triton kernels cannot run on a device, as a clause; "" if they can. The first call for a
    device runs some to find out.

    Raises:
        torch.OutOfMemoryError: the device's memory is full.
    """
    if missing := _triton_lacks():
        return missing
    try:
        try:
            _run_kernels(device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not _give_up_early_starts(device):
                raise
            _run_kernels(device)
            _late[device] = _first_words(error)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's own, a compiler's, the driver's
        reason = f"triton's kernels fail here: {_first_words(error)}"
        # A full disk, or a header that is not installed: that may change with no version of anything.
        if not isinstance(error, OSError | subprocess.SubprocessError):
            _failed[device] = reason
        return reason
    return ""


def kernels_fail(device: torch.device) -> str:
    """Returns the reason why the first Triton kernel failed on a device, as a clause; "" if it did not, or for a lack
    that can be mended without another version, such as a full disk or a missing header.
    """
    return _failed.get(device, "") if triton_fails(device) else ""


def start_late(device: torch.device, reason: str) -> None:
    """Disables early starts on a device, so that each kernel begins only when the one before has ended; records
    `reason` if they were enabled.
    """
    if not _triton_lacks() and _give_up_early_starts(device):
        _late[device] = reason


def early_starts_fail(device: torch.device) -> str:
    """Returns why early starts, which overlap a kernel with the one before, were disabled on a device; "" otherwise."""
    return _late.get(device, "")


def _give_up_early_starts(device: torch.device) -> bool:
    """Lets kernels begin only when the one before has ended; tells whether that is new."""
    from ktcli.ops.triton import early

    was = early.starts_early(device)
    early.start_early(device, False)
    return was


def _first_words(error: Exception) -> str:
    words = str(error).strip().splitlines() or [type(error).__name__]
    return words[0][:160]


def compiled_before() -> bool:
    """Returns whether Triton's cache on disk holds kernels of steps that were compiled earlier, or Triton cannot be
    used at all.
    """
    if _triton_lacks():
        return True
    folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return any(Path(folder).glob("*/_product_kernel.cubin"))


def _run_kernels(device: torch.device) -> None:
    """Runs two, of which the second may start early."""
    from ktcli.ops.triton import small

    with torch.cuda.device(device):  # Triton launches on the thread's current one
        small.norm(small.norm(torch.ones(1, 16, device=device), None, 1e-6), None, 1e-6).cpu()


def _triton_lacks() -> str:
    """Returns what Triton kernels lack here, as a clause; "" if nothing that is seen at once."""
    if not find_spec("triton"):  # torch for CUDA brings it
        return "triton is not installed"
    # Triton compiles a little C for every kernel that it launches.
    compilers = (os.environ.get("CC"), "gcc", "clang")
    if not any(name and shutil.which(name) for name in compilers):
        return "there is no C compiler, which triton needs (gcc, clang, or CC)"
    return ""


def triton_kernels() -> Kernels:
    """Returns the table of kernels (functions by operation name) for an NVIDIA GPU: Triton's, with those of torch for
    operations that have none. Imports Triton only now.
    """
    from ktcli.ops.triton import attention, merged, operations, router, small, summary, sums

    kernels: dict[str, Kernel] = {**TORCH.operations, **operations.OPERATIONS}
    together = Merged(
        product=operations.product,
        experts=operations.few_experts,
        total=sums.sum_parts,
        add_norm=merged.add_norm,
        swiglu=small.swiglu_of,
        gqa=merged.gqa,
        mla=attention.attend_latent,
        route=small.route_all,
        router=router.choose,
    )
    return Kernels("triton", kernels, operations.experts, together, summary.summarize)
