"""The routed experts in main memory, as work that a device's stream starts and waits for.

One program holds all of them: for each layer a part that computes its experts at once, and one for those that are
deferred (kt.h, "offload"). Its buffers are pinned, so the layer's input and routing go straight into them and the
result out: of few rows, the kernel that chooses the experts writes all three, rows of each in their own part of one
pinned range, as the program reads them; of many, they are copied. A thread of the native library runs the parts in
between, while the stream goes on with the device's share.

The stream may overwrite a buffer only when nothing reads it any more. Parts run in the order they were
submitted, so when a layer has been waited for, all of the layer before it is done, deferred experts
included. Hence two inputs, used in turn, are enough; results are copied out before the next layer is
entered; ids and gates of each layer have their own place.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ktcli.engine.device.stream import Stream, stream_on
from ktcli.errors import DeviceError
from ktcli.native import Offload, PartSpan, Pool, Program, View, Weight
from ktcli.ops.torch.merged import Sent
from ktcli.ops.torch.packed import NO_EXTRAS, Extras

Depths = NDArray[np.int32]  # of each token of a step

WATCHDOG_MS = 30_000  # the slowest layer of a prefill chunk takes seconds, a hang for ever
# How long whoever waits for the other side spins: longer than a layer of the largest models takes on either, since to
# sleep and be woken costs tens of microseconds in each of them. The cores are there for nothing else meanwhile.
_SPIN_US = 5000
SENT_ROWS = 16  # of more rows, copies take less of the device's time than the routing kernel
_SPIN_CROWDED_US = 200  # where threads have to share them


class Handoff(Enum):
    """The way in which a stream tells the CPU to begin, and waits for it."""

    CALLS = "calls"  # host functions in the stream
    FLAGS = "flags"  # words in pinned memory: the stream writes and waits, the CPU polls


def fastest_handoff(devices: Sequence[torch.device]) -> Handoff:
    """Returns flags where the streams of all devices can write and await words of main memory, else calls.

    On an H200 beside 15 cores a step of 48 layers took 14.9 ms by flags and 17.9 ms by calls: the launch of a graph
    with host functions keeps a core busy for half the step.
    """
    return Handoff.FLAGS if all(map(_can_flag, dict.fromkeys(devices))) else Handoff.CALLS


@cache
def _can_flag(device: torch.device) -> bool:
    """Tells whether a GPU's stream wrote and awaited a word when it was tried."""
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


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer's experts in main memory: the rows of gate_up and the columns of down of each node.

    Attributes:
        extras: the extras, which lie on the device.
    """

    gate_up: Sequence[Weight]
    down: Sequence[Weight]
    extras: Extras = NO_EXTRAS

    @cached_property
    def slice_extras(self) -> tuple[Extras, ...]:
        """The biases and activation for the columns of each node that has some."""
        ends = np.cumsum([down.k for down in self.down]).tolist()
        spans = zip([0, *ends[:-1]], ends, strict=True)
        return tuple(self.extras.columns(first, last) for first, last in spans if last > first)

    @property
    def biases(self) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """The biases of gate_up and down, copied to main memory."""
        wide, narrow = self.extras.gate_up_bias, self.extras.down_bias
        if wide is None or narrow is None:
            return None
        return wide.cpu().numpy().copy(), narrow.cpu().numpy().copy()


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The shape that all layers with experts share."""

    hidden: int
    experts: int
    top_k: int
    max_tokens: int


class HostExperts:
    """The experts of all layers in main memory, computed by the CPU beside a device's stream.

    Args:
        layers: the weights of each layer in order; None: all its experts are on the device.
        elsewhere: 1 for an expert that the CPU leaves to the device, uint8 [layers, experts]; may be changed between
            steps.
        streams: the stream in which each layer runs.
        deferral: whether layers may defer experts to the next one.
        handoff: None: the fastest that works here.
        exact: whether the products read f32 activations.
    """

    def __init__(
        self,
        pool: Pool,
        layers: Sequence[LayerWeights | None],
        shape: ExpertShape,
        elsewhere: NDArray[np.uint8],
        streams: Sequence[Stream],
        *,
        deferral: bool = False,
        handoff: Handoff | None = None,
        exact: bool = False,
    ) -> None:
        self.shape, self.elsewhere, self._streams = shape, elsewhere, streams
        self._rehearses = False
        present = [layer for layer, weights in enumerate(layers) if weights is not None]
        self._numbers = {layer: i for i, layer in enumerate(present)}
        self._program = Program(pool, max_tokens=shape.max_tokens, max_outputs=1, exact=exact)
        inputs, out, immediate, deferred, routings = self._record(layers, deferral)
        self._program.finish()
        self._inputs = [self._rows(view) for view in inputs]
        self._out = self._rows(out)
        self._ids, self._gate = self._routings(routings)
        self._pin()
        self.handoff = handoff or fastest_handoff([stream.device for stream in streams])
        self._flags: NDArray[np.int32] | None = None
        if self.handoff is Handoff.FLAGS:
            self._flags = streams[0].pinned(2 * len(present) * 4).view(torch.int32).numpy()
            self._flags[:] = 0
        self._offload = Offload(
            self._program,
            immediate,
            deferred,
            timeout_ms=WATCHDOG_MS,
            spin_us=spin_us(streams[0].device, pool.threads),
            flags=self._flags,
        )

    def has(self, layer: int) -> bool:
        """Tells whether the CPU has experts of a layer."""
        return layer in self._numbers

    # -- of a step -----------------------------------------------------------------------------------

    def begin(self, n_tokens: int, defer: Depths | None = None) -> None:
        """Prepares a step; call it before the step's work is given to the stream.

        Args:
            defer: the most experts of each token that may be deferred; None: none.
        """
        self._offload.begin(n_tokens, defer)

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Keeps the CPU out of the block: it is neither told nor awaited, while kernels are compiled, longer than
        the watchdog allows a step to take."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def outbox(self, layer: int, n_tokens: int) -> Sent | None:
        """Returns the pinned buffers into which a kernel may write x, ids and gate of a few rows of a layer; None:
        there are none, and `enter` copies them."""
        if not self.has(layer) or n_tokens > SENT_ROWS:
            return None
        i = self._numbers[layer]
        return self._inputs[i % 2][:n_tokens], self._ids[i][:n_tokens], self._gate[i][:n_tokens]

    def enter(
        self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool = False
    ) -> None:
        """Starts the CPU on a layer's experts of x [T, hidden] f32, ids and gate [T, top_k], all on the device, or
        already written to the outbox if `sent`."""
        i, stream = self._numbers[layer], self._streams[layer]
        if not sent:
            self._copy(i, stream, x, ids, gate)
        if self._rehearses:
            return
        if self._flags is None:
            stream.call(self._offload.submit, self._offload.ticket(i))
        else:
            stream.write_flag(self._flags[i:].ctypes.data)

    def _copy(self, i: int, stream: Stream, x: Tensor, ids: Tensor, gate: Tensor) -> None:
        n, copy = x.shape[0], stream.copy
        target = self._copied_part(self._inputs[i % 2], n)
        with stream.running():
            x = pad(x, (0, gap)) if (gap := target.shape[1] - x.shape[1]) else x.contiguous()
        copy(target, x)
        copy(self._ids[i][:n], ids)
        copy(self._gate[i][:n], gate)

    def leave(self, layer: int, n_tokens: int) -> Tensor:
        """Waits for the CPU and returns its sum of the experts [T, hidden] f32, on the device."""
        i, stream = self._numbers[layer], self._streams[layer]
        if self._rehearses:
            pass
        elif self._flags is None:
            stream.call(self._offload.wait, self._offload.ticket(i))
        else:
            done = self._offload.layers + i
            stream.await_flag(self._flags[done:].ctypes.data)
        source = self._copied_part(self._out, n_tokens)
        with stream.running():
            result = torch.empty(source.shape, device=stream.device)
        stream.copy(result, source)
        return result[:, : self.shape.hidden]

    def check(self) -> None:
        """Raises the error that the CPU had in a step; call it after the stream was synchronized.

        Raises:
            KtError: with the sentence of the native library.
        """
        self._offload.result()

    def spans(self) -> Sequence[PartSpan]:
        """Returns the times of the last step's parts; their layers are counted among those of `layers` that are not
        None."""
        return self._offload.spans()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The index in `layers` of each layer that `spans` counts."""
        return tuple(self._numbers)

    def operations(self) -> list[tuple[str, int]]:
        """Returns the (operation, nanoseconds so far) pairs, over all steps, in the order in which they run."""
        return self._program.profile()

    def hits(self, n_tokens: int) -> dict[int, int]:
        """Returns the number of experts that the CPU computed in the last step, for each layer that has some there."""
        ids = {layer: self._ids[i][:n_tokens].numpy() for layer, i in self._numbers.items()}
        return {
            layer: int((self.elsewhere[layer][chosen[chosen >= 0]] == 0).sum())
            for layer, chosen in ids.items()
        }

    # -- recording -----------------------------------------------------------------------------------

    def _record(
        self, layers: Sequence[LayerWeights | None], deferral: bool
    ) -> tuple[tuple[View, View], View, list[int], list[int], list[int]]:
        """Records the program; returns inputs, result, and for each layer that is here the part computed at once,
        the deferred part (-1: none) and the routing."""
        p, shape = self._program, self.shape
        inputs = p.buffer(shape.hidden), p.buffer(shape.hidden)
        out, kept = p.buffer(shape.hidden), p.buffer(shape.hidden)
        immediate: list[int] = []
        deferred: list[int] = []
        routings: list[int] = []
        for layer, i in self._numbers.items():
            weights, x = layers[layer], inputs[i % 2]
            assert weights is not None
            # Deferred experts are added by the very next layer, so that one must come here too.
            defers = deferral and self.has(layer + 1)
            immediate.append(p.part() if i else 0)
            p.input(x)
            routings.append(p.given(shape.experts, shape.top_k))
            mask = self.elsewhere[layer]
            at_once = p.append(
                "split", routing=routings[i], elsewhere=mask, experts=mask.size, defers=defers
            )
            gate_up_bias, down_bias = weights.biases or (None, None)
            experts = {
                "gate_up": weights.gate_up,
                "down": weights.down,
                "glu": weights.extras.glu,
                "gate_up_bias": gate_up_bias,
                "down_bias": down_bias,
            }
            p.append("experts", (out, x), routing=at_once, **experts)
            if i and deferred[-1] >= 0:
                p.append("carry", (out, kept))
            deferred.append(p.part() if defers else -1)
            if defers:
                p.append("experts", (kept, x), routing=at_once + 1, **experts)
        return inputs, out, immediate, deferred, routings

    def _copied_part(self, rows: Tensor, n: int) -> Tensor:
        """The part of an n-row buffer to copy, in one piece: with the gaps between rows if there are several."""
        return rows[:1, : self.shape.hidden] if n == 1 else rows[:n]

    def _rows(self, view: View) -> Tensor:
        """The rows of a buffer, with the gaps that the program leaves between them."""
        rows = self._program.rows(view, self.shape.max_tokens)
        whole = np.lib.stride_tricks.as_strided(rows, (len(rows), rows.strides[0] // rows.itemsize))
        return torch.from_numpy(whole)

    def _routings(self, numbers: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        shape = self.shape
        found = [self._program.routing(n, shape.max_tokens, shape.top_k) for n in numbers]
        return [torch.from_numpy(ids) for ids, _ in found], [
            torch.from_numpy(gate) for _, gate in found
        ]

    def _pin(self) -> None:
        """Pins one range around everything the stream copies: ranges that share a page cannot both be pinned."""
        tensors = [*self._inputs, self._out, *self._ids, *self._gate]
        first = min(t.data_ptr() for t in tensors)
        last = max(t.data_ptr() + t.untyped_storage().nbytes() for t in tensors)
        self._streams[0].pin(first, last - first)
        # Called when this object is freed, but before the offload and the memory itself are.
        weakref.finalize(self, _unpin, self._streams, first)


def _unpin(streams: Sequence[Stream], address: int) -> None:
    for stream in dict.fromkeys(streams[1:]):
        with suppress(DeviceError):
            stream.synchronize()
    streams[0].unpin(address)


def spin_us(device: torch.device, threads: int) -> int:
    """Returns the microseconds that the CPU's threads spin before they sleep, beside a device: one thread of its
    stream waits, too."""
    usable = len(os.sched_getaffinity(0))
    return _SPIN_US if device.type == "cuda" and threads < usable else _SPIN_CROWDED_US
