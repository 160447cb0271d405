"""Segments: the layers of a model in sequence over devices, each with its own stream, cache and weights.

One device is one segment. Between two of them the residual of a step passes through a border: captured steps hand it
over in pinned memory, which needs no way from one device to the other; others copy it from device to device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from ktcli.engine.device.stream import Stream, device_name, stream_on
from ktcli.engine.loader import expert_rows
from ktcli.models import Model
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive layers on one device.

    Attributes:
        layers: their numbers.
        routed: the numbers of those with experts, counted among all that have some.
        stream: the stream in which steps run.
        copies: another stream of the device, for what is copied beside them.
        paging: another one, for pages on their way to a store.
    """

    layers: range
    routed: range
    stream: Stream
    copies: Stream
    paging: Stream

    @property
    def device(self) -> torch.device:
        """The device that holds the segment's layers."""
        return self.stream.device


def segments_of(
    model: Model, devices: Sequence[torch.device], borders: Sequence[int] = ()
) -> tuple[Segment, ...]:
    """Returns the segments of a model, each of consecutive layers on one device with its streams, in the order of the
    devices.

    Args:
        borders: the first layer of each device but the first.
    """
    rows, ends = expert_rows(model), (0, *borders, model.spec.layers)
    assert len(ends) == len(devices) + 1 and sorted(set(ends)) == list(ends), (devices, borders)
    assert set(borders) <= set(model.borders), (borders, model.borders)
    found = []
    for device, (first, last) in zip(devices, pairwise(ends), strict=True):
        before, within = (sum(layer < end for layer in rows) for end in (first, last))
        streams = (stream_on(_numbered(device), n) for n in range(3))
        found.append(Segment(range(first, last), range(before, within), *streams))
    return tuple(found)


def layer_devices(segments: Sequence[Segment]) -> list[torch.device]:
    """Returns the device that holds each layer of the model, in the order of the layers."""
    return [each.device for each in segments for _ in each.layers]


@contextmanager
def running(streams: Iterable[Stream]) -> Iterator[None]:
    """Opens a context in which torch's own operations go to the streams of their devices; the last stream is
    current.
    """
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(stream.running())
        yield


def by_device(streams: Iterable[Stream]) -> Mapping[torch.device, Stream]:
    """Returns a mapping from each stream's device to the stream; of several on one device, to the last one."""
    return {each.device: each for each in streams}


class Border:
    """Passes the rows of a captured step from one stream's device to another's, through pinned memory."""

    def __init__(self, before: Stream, behind: Stream) -> None:
        self._before, self._behind = before, behind
        self._there: Tensor | None = None

    def leave(self, x: Tensor) -> None:
        """Enqueues, in the first stream, a copy of the rows x to pinned host memory; x must have the same shape in all
        steps.
        """
        if self._there is None:
            self._host = self._before.pinned(x.nbytes).view(x.dtype).view(x.shape)
            with self._behind.running():
                self._there = torch.empty(x.shape, dtype=x.dtype, device=self._behind.device)
        self._before.copy(self._host, x.contiguous())

    def cross(self) -> None:
        """Makes the second device's stream wait for the work enqueued so far in the first device's stream."""
        self._behind.after(self._before.mark())

    def enter(self) -> Tensor:
        """Enqueues, in the second stream, a copy of the rows from pinned host memory to the second device; returns the
        tensor there, the same one in each step.
        """
        assert self._there is not None
        self._behind.copy(self._there, self._host)
        return self._there


def brought(x: Tensor, before: Stream, behind: Stream) -> Tensor:
    """Returns a copy of the rows x, which the stream `before` computes, on the device of the stream `behind`, which
    waits until they are computed.
    """
    behind.after(before.mark())
    with before.running(), behind.running():
        return x.to(behind.device, non_blocking=True)


def _numbered(device: torch.device) -> torch.device:
    """The device with its number, as tensors name it."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def kind_of(segments: Sequence[Segment]) -> str:
    """Returns the model name of the devices if it is the same for all; else a text like "24 x A, 24 x B": for each
    segment, the number of its layers and the model name of its device.
    """
    names = [device_name(each.device) for each in segments]
    if len(set(names)) == 1:
        return names[0]
    return ", ".join(
        f"{len(each.layers)} x {name}" for each, name in zip(segments, names, strict=True)
    )
