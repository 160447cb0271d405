"""The routed experts in main memory, and the MLPs there, as work that a device's stream starts and waits for.

One program holds all of them: for each layer a part that computes its experts at once, and one for those that are
deferred (kt.h, "offload"); behind them a part for each MLP (`blocks`), which counts as a layer of its own. Its buffers
are pinned, so the layer's input and routing go straight into them and the result out: of few rows, the kernel that
chooses the experts writes all three, rows of each in their own part of one pinned range, as the program reads them; of
many, they are copied. A thread of the native library runs the parts in between, while the stream goes on with the
device's share.

The stream may overwrite a buffer only when nothing reads it any more. Parts run in the order they were
submitted, so when a layer has been waited for, all of the layer before it is done, deferred experts
included. Hence two inputs, used in turn, are enough; results are copied out before the next layer is
entered; ids and gates of each layer have their own place.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.adapters import ProgramUpdates
from ktcli.engine.device.blocks import HostBlock, SharedBuffers
from ktcli.engine.device.handoff import Handoff, fastest_handoff, fetch, send
from ktcli.engine.device.stream import Stream
from ktcli.errors import DeviceError
from ktcli.native import Offload, PartSpan, Pool, Program, View, Weight
from ktcli.ops.part import LayerPart
from ktcli.ops.torch.merged import Sent
from ktcli.ops.torch.packed import NO_EXTRAS, Extras
from ktcli.planner.memory import AdapterRoom
from ktcli.records import dataclass

Depths = NDArray[np.int32]  # of each token of a step

WATCHDOG_MS = 30_000  # the slowest layer of a prefill chunk takes seconds, a hang for ever
# How long whoever waits for the other side spins: longer than a layer of the largest models takes on either, since to
# sleep and be woken costs tens of microseconds in each of them. The cores are there for nothing else meanwhile.
_SPIN_US = 5000
SENT_ROWS = 16  # of more rows, copies take less of the device's time than the routing kernel
_SPIN_CROWDED_US = 200  # where threads have to share them


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer's experts in main memory: the rows of gate_up and the columns of down of each node.

    Attributes:
        extras: the extras, which lie on the device.
        names: the names of both tensors.
        row: their row of kernels; None: the pool's.
    """

    gate_up: Sequence[Weight]
    down: Sequence[Weight]
    extras: Extras = NO_EXTRAS
    names: tuple[str, str] = ("", "")
    row: str | None = None

    @cached_property
    def slice_extras(self) -> tuple[Extras, ...]:
        """The experts' biases and activation for each NUMA node: one `Extras` for the columns of the node's slice of
        the experts' width. Nodes without columns are left out.
        """
        ends = np.cumsum([down.k for down in self.down]).tolist()
        spans = zip([0, *ends[:-1]], ends, strict=True)
        return tuple(self.extras.columns(first, last) for first, last in spans if last > first)

    @property
    def biases(self) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """The biases of all experts' gate_up and down matrices, [E, rows of gate_up] and [E, hidden], copied to main
        memory; None: they have none.
        """
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


class _HostParts(NamedTuple):
    """The experts of a program: inputs and result, and for each layer that is here the part computed at once, the
    deferred part (-1: none) and the routing."""

    inputs: Sequence[View]
    out: Sequence[View]
    immediate: Sequence[int]
    deferred: Sequence[int]
    routings: Sequence[int]


class _BlockEntry(NamedTuple):
    """An MLP of the offload: its number, stream, rows, output, and the columns of that."""

    number: int
    stream: Stream
    x: Tensor
    out: Tensor
    width: int


class HostExperts:
    """The experts of all layers in main memory, computed by the CPU beside a device's stream.

    Args:
        layers: the weights of each layer in order; None: all its experts are on the device.
        elsewhere: 1 for an expert that the CPU leaves to the device, uint8 [layers, experts]; may be changed between
            steps.
        streams: the stream in which each layer runs.
        blocks: the MLPs in main memory.
        deferral: whether layers may defer experts to the next one.
        handoff: None: the fastest that works here.
        exact: whether the products read f32 activations.
        adapters: the room for adapters that change experts; None: there is none.
    Attributes:
        updates: what adapters add to the products; None: there is no room for any.
    """

    def __init__(
        self,
        pool: Pool,
        layers: Sequence[LayerWeights | None],
        shape: ExpertShape,
        elsewhere: NDArray[np.uint8],
        streams: Sequence[Stream],
        blocks: Sequence[HostBlock] = (),
        *,
        deferral: bool = False,
        handoff: Handoff | None = None,
        exact: bool = False,
        adapters: AdapterRoom | None = None,
    ) -> None:
        self.shape, self.elsewhere, self._of_layer = shape, elsewhere, streams
        self._streams = tuple(dict.fromkeys([*streams, *(block.stream for block in blocks)]))
        self._rehearses = False
        present = [layer for layer, weights in enumerate(layers) if weights is not None]
        self._numbers = {layer: i for i, layer in enumerate(present)}
        self._program = Program(pool, max_tokens=shape.max_tokens, max_outputs=1, exact=exact)
        if adapters is not None:
            self._program.take_adapters(adapters.most, adapters.ranks)
        self._products: dict[str, list[tuple[int, int]]] = {}
        recorded = self._record(layers, deferral)
        views = self._record_blocks(blocks)
        self._program.finish()
        self.updates: ProgramUpdates | None = None
        if adapters is not None:
            self.updates = ProgramUpdates(self._program, self._products, {}, adapters.ranks)
        self._inputs = [self._rows(view) for view in recorded.inputs]
        self._out = [self._rows(view) for view in recorded.out]
        self._ids, self._gate = self._routings(recorded.routings)
        self._blocks = {
            block.part: _BlockEntry(
                len(present) + i, block.stream, self._rows(x), self._rows(y), y.width
            )
            for i, (block, (_, x, y)) in enumerate(zip(blocks, views, strict=True))
        }
        self._pin()
        self.handoff = handoff or fastest_handoff([stream.device for stream in self._streams])
        immediate = [*recorded.immediate, *(part for part, *_ in views)]
        deferred = [*recorded.deferred, *(-1 for _ in views)]
        self._flags = self._pinned_flags(2 * len(immediate))
        self._offload = Offload(
            self._program,
            immediate,
            deferred,
            timeout_ms=WATCHDOG_MS,
            spin_us=spin_us(self._streams[0].device, pool.threads),
            flags=self._flags,
        )

    def _pinned_flags(self, count: int) -> NDArray[np.int32] | None:
        """The flags by which the device and the CPU wait for each other, all 0; None: they need none."""
        if self.handoff is not Handoff.FLAGS:
            return None
        flags: NDArray[np.int32] = self._streams[0].pinned(4 * count).view(torch.int32).numpy()
        flags[:] = 0
        return flags

    def use_adapter(self, number: int) -> None:
        """Makes the CPU's experts compute the tokens of the following steps with the updates of adapter `number`; 0:
        without an adapter.
        """
        self._offload.use_adapter(number)

    def has(self, layer: int) -> bool:
        """Returns whether the CPU computes some experts of a layer; `layer` counts the layers with experts."""
        return layer in self._numbers

    # -- of a step -----------------------------------------------------------------------------------

    def begin(self, n_tokens: int, defer: Depths | None = None) -> None:
        """Prepares the CPU for a step of `n_tokens` tokens; to be called before the step's work is enqueued on the
        device.

        Args:
            defer: the most experts of each token that may be deferred; None: none.
        """
        self._offload.begin(n_tokens, defer)

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Opens a context in which steps run without the CPU, which is neither started nor awaited: for compiling
        kernels, which takes longer than the watchdog allows a step to take.
        """
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def outbox(self, layer: int, n_tokens: int) -> Sent | None:
        """Returns the pinned buffers (x f32, ids int32 and gate f32, each of `n_tokens` rows) into which a kernel may
        write a layer's input and routing for the CPU; None: the CPU has no experts of the layer, or there are more than
        SENT_ROWS rows, which `enter` copies.
        """
        if not self.has(layer) or n_tokens > SENT_ROWS:
            return None
        i = self._numbers[layer]
        return self._inputs[i % 2][:n_tokens], self._ids[i][:n_tokens], self._gate[i][:n_tokens]

    def enter(
        self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool = False
    ) -> None:
        """Enqueues the start of the CPU's work on its experts of a layer, and first a copy of their inputs from the
        device: x [T, hidden] f32, ids and gate [T, top_k]. If `sent`, the inputs are in the buffers of `outbox`
        already.
        """
        i, stream = self._numbers[layer], self._of_layer[layer]
        if not sent:
            self._copy(i, stream, x, ids, gate)
        self._submit(i, stream)

    def _copy(self, i: int, stream: Stream, x: Tensor, ids: Tensor, gate: Tensor) -> None:
        n = x.shape[0]
        send(stream, x, self._inputs[i % 2])
        stream.copy(self._ids[i][:n], ids)
        stream.copy(self._gate[i][:n], gate)

    def leave(self, layer: int, n_tokens: int) -> Tensor:
        """Makes the layer's stream wait for the CPU, and returns the weighted sum of the CPU's experts that are not
        deferred, with those that the layer before deferred, [T, hidden] f32, on the device.
        """
        stream = self._of_layer[layer]
        self._await(self._numbers[layer], stream)
        return fetch(stream, self._out[0], n_tokens, self.shape.hidden)

    def has_block(self, part: LayerPart) -> bool:
        """Returns whether the MLP `part` lies in main memory and is computed by the CPU."""
        return part in self._blocks

    def compute(self, part: LayerPart, x: Tensor, meanwhile: Callable[[], object]) -> Tensor:
        """Returns the output of an MLP in main memory for x [T, hidden] f32, which the CPU computes; `x` and the output
        are on the device.

        Args:
            meanwhile: called to enqueue work that the device does while the CPU computes.
        """
        block = self._blocks[part]
        send(block.stream, x, block.x)
        self._submit(block.number, block.stream)
        meanwhile()
        self._await(block.number, block.stream)
        return fetch(block.stream, block.out, x.shape[0], block.width)

    def _submit(self, i: int, stream: Stream) -> None:
        """Tells the CPU to begin with a layer, or an MLP, when the stream comes to it."""
        if self._rehearses:
            return
        if self._flags is None:
            stream.call(self._offload.submit, self._offload.ticket(i))
        else:
            stream.write_flag(self._flags[i:].ctypes.data)

    def _await(self, i: int, stream: Stream) -> None:
        """Lets the stream wait for the CPU to be done with a layer, or an MLP."""
        if self._rehearses:
            return
        if self._flags is None:
            stream.call(self._offload.wait, self._offload.ticket(i))
        else:
            stream.await_flag(self._flags[self._offload.layers + i :].ctypes.data)

    def check(self) -> None:
        """Raises the error that the CPU had in a step; call it after the stream was synchronized.

        Raises:
            KtError: with the sentence of the native library.
        """
        self._offload.result()

    def spans(self) -> Sequence[PartSpan]:
        """Returns the start and end times of the CPU's work on experts in the last step: for each layer one span, and
        one more if it computed deferred experts. A span's `layer` is an index into `numbers`.
        """
        return [span for span in self._offload.spans() if span.layer < len(self._numbers)]

    def block_spans(self) -> Sequence[tuple[LayerPart, PartSpan]]:
        """Returns (MLP, start and end times) pairs for the MLPs that the CPU computed in the last step."""
        parts, first = tuple(self._blocks), len(self._numbers)
        spans = self._offload.spans()
        return [(parts[span.layer - first], span) for span in spans if span.layer >= first]

    @property
    def has_blocks(self) -> bool:
        """Whether the CPU computes any MLP that is not routed experts."""
        return bool(self._blocks)

    @property
    def numbers(self) -> tuple[int, ...]:
        """For each layer with experts in main memory, its index among all layers with experts; the `layer` of `spans`
        is an index into this tuple.
        """
        return tuple(self._numbers)

    def operations(self) -> list[tuple[str, int]]:
        """Returns (operation, nanoseconds) pairs: the time that each operation of the CPU has taken in all steps so
        far, in the order in which they run.
        """
        return self._program.profile()

    def hits(self, n_tokens: int) -> dict[int, int]:
        """Returns, for each layer with experts in main memory, by its index among all layers with experts, the number
        of (token, expert) pairs that the CPU computed in the last step, which had `n_tokens` tokens.
        """
        ids = {layer: self._ids[i][:n_tokens].numpy() for layer, i in self._numbers.items()}
        return {
            layer: int((self.elsewhere[layer][chosen[chosen >= 0]] == 0).sum())
            for layer, chosen in ids.items()
        }

    # -- recording -----------------------------------------------------------------------------------

    def _record(self, layers: Sequence[LayerWeights | None], deferral: bool) -> _HostParts:
        """Records the experts of the layers that are here."""
        p, shape = self._program, self.shape
        immediate: list[int] = []
        deferred: list[int] = []
        routings: list[int] = []
        if not self._numbers:
            return _HostParts((), (), (), (), ())
        inputs = p.buffer(shape.hidden), p.buffer(shape.hidden)
        out, kept = p.buffer(shape.hidden), p.buffer(shape.hidden)
        for layer, i in self._numbers.items():
            weights, x = layers[layer], inputs[i % 2]
            assert weights is not None
            # Deferred experts are added by the very next layer, so that one must come here too.
            defers = deferral and self.has(layer + 1)
            immediate.append(p.part() if i else 0)
            p.use_row(weights.row)
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
            self._append(weights, (out, x), routing=at_once, **experts)
            if i and deferred[-1] >= 0:
                p.append("carry", (out, kept))
            deferred.append(p.part() if defers else -1)
            if defers:
                self._append(weights, (kept, x), routing=at_once + 1, **experts)
        return _HostParts(inputs, (out,), immediate, deferred, routings)

    def _append(self, weights: LayerWeights, views: tuple[View, View], **experts: Any) -> None:
        """Appends the experts of a layer, and notes where their products are."""
        for part, name in enumerate(weights.names):
            self._products.setdefault(name, []).append((len(self._program.labels), part))
        self._program.append("experts", views, **experts)

    def _record_blocks(self, blocks: Sequence[HostBlock]) -> list[tuple[int, View, View]]:
        """Records the MLPs; returns the part of each with the views of its rows and its output."""
        buffers, found = SharedBuffers(self._program), []
        for block in blocks:
            part = self._program.part() if self._program.labels else 0
            found.append((part, *buffers.append(block)))
        return found

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
        of_blocks = chain.from_iterable((each.x, each.out) for each in self._blocks.values())
        tensors = [*self._inputs, *self._out, *self._ids, *self._gate, *of_blocks]
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
    """Returns the microseconds for which the CPU's threads spin before they sleep: 5000 beside a GPU if this
    process may run on more logical CPUs than `threads`, else 200.
    """
    usable = len(os.sched_getaffinity(0))
    return _SPIN_US if device.type == "cuda" and threads < usable else _SPIN_CROWDED_US
