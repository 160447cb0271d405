"""Starts a kernel while the previous one ends: programmatic dependent launch, if GPU and Triton support it.

A step is hundreds of kernels of a few microseconds. Started early, the programs of one are placed while those of the
one before are still at work, and wait there. It is decided here, once for a device, and asked for with each launch.

No bit can change. The first thing that each of our kernels does is `enter`: it waits until the kernel before it is
complete and what that wrote is visible, and no load or store of memory stands in front of it, not even of weights. The
kernel before waited alike, in all of its programs, and could not be complete before all in front of it were: what holds
for one holds for the whole chain. Whatever else is in the stream, a kernel of torch, a copy, a call of the host, a word
in memory, is not launched like this and begins after all that stands before it is complete, as ever; what follows it,
too. A kernel lets the next one begin when it has waited itself, and that takes effect when all of its programs are
placed: none that waits keeps a place from one that is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda
from triton.runtime.jit import JITFunction

_CAPABILITY = 9, 0  # Hopper and later
_USUAL: Mapping[str, bool] = {"EARLY": False}
_EARLY: Mapping[str, bool] = {"EARLY": True, "launch_pdl": True}
_of_devices: dict[int, bool] = {}


@triton.jit
def enter(EARLY: tl.constexpr):
    """Waits for the kernel before this one, and lets the next one begin: the first line of every kernel."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def early(of: Tensor) -> Mapping[str, bool]:
    """Returns the options, by name, with which to launch a kernel on the device of the tensor `of`: EARLY, whether it
    starts before the previous kernel ends, and if so Triton's `launch_pdl`.
    """
    return _EARLY if starts_early(of.device) else _USUAL


def starts_early(device: torch.device) -> bool:
    """Returns whether kernels on a device are launched so that they start while the kernel before still ends
    (programmatic dependent launch).
    """
    if device.type != "cuda":
        return False
    number = torch.cuda.current_device() if device.index is None else device.index
    if number not in _of_devices:
        known = hasattr(cuda, "gdc_wait") and isinstance(enter, JITFunction)  # no interpreter
        _of_devices[number] = known and torch.cuda.get_device_capability(number) >= _CAPABILITY
    return _of_devices[number]


def start_early(device: torch.device, on: bool) -> None:
    """Sets whether later kernels on a device are launched so that they start while the kernel before still ends."""
    number = torch.cuda.current_device() if device.index is None else device.index
    _of_devices[number] = on
