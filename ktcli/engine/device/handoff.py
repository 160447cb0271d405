"""The ways between a device's stream and the CPU: how one tells the other to begin, and how rows are copied."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ktcli.engine.device.stream import Stream, stream_on
from ktcli.errors import DeviceError


class Handoff(Enum):
    """The mechanism by which a stream starts the CPU's work, and waits for it."""

    CALLS = "calls"  # host functions in the stream
    FLAGS = "flags"  # words in pinned memory: the stream writes and waits, the CPU polls


def fastest_handoff(devices: Sequence[torch.device]) -> Handoff:
    """Returns FLAGS where the streams of all devices can write and wait for words of main memory, else CALLS.

    On an H200 beside 15 cores a step of 48 layers took 14.9 ms by flags and 17.9 ms by calls: the launch of a graph
    with host functions keeps a core busy for half the step.
    """
    return Handoff.FLAGS if all(map(_can_flag, dict.fromkeys(devices))) else Handoff.CALLS


@cache
def _can_flag(device: torch.device) -> bool:
    """Returns whether a GPU's stream wrote and awaited a word when it was tried."""
    if device.type != "cuda":
        return False
    stream = stream_on(device)
    word = stream.pinned(4).view(torch.int32)
    word[0] = 0
    try:
        stream.write_flag(word.data_ptr())
        stream.await_flag(word.data_ptr())
        stream.synchronize()
    except DeviceError:
        return False
    return int(word[0]) == 0


def send(stream: Stream, x: Tensor, rows: Tensor) -> None:
    """Enqueues a copy of x [T, width] from the device to the first T rows of `rows`, a pinned buffer of the CPU's
    program, whose rows may have gaps between them.
    """
    n, width = x.shape
    target = _copied_part(rows, n, width)
    with stream.running():
        x = pad(x, (0, gap)) if (gap := target.shape[1] - width) else x.contiguous()
    stream.copy(target, x)


def fetch(stream: Stream, rows: Tensor, n: int, width: int) -> Tensor:
    """Enqueues a copy of the first `n` rows of `rows`, a pinned buffer of the CPU's program, to the device; returns the
    copy, f32 [n, width].
    """
    source = _copied_part(rows, n, width)
    with stream.running():
        result = torch.empty(source.shape, device=stream.device)
    stream.copy(result, source)
    return result[:, :width]


def _copied_part(rows: Tensor, n: int, width: int) -> Tensor:
    """The part of an n-row buffer to copy, in one piece: with the gaps between rows if there are several."""
    return rows[:1, :width] if n == 1 else rows[:n]
