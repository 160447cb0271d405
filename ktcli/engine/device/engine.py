"""A model loaded onto a device and into main memory: ids in, logits out.

The device has the dense parts, attention with its cache, and the experts that the placement gives it; all
other experts lie in main memory and are the CPU's. Nothing is chosen here: a `Placement` says what goes
where.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.adapters import Adapters
from ktcli.engine.arenas import refusals
from ktcli.engine.device.adapters import DeviceUpdates, run_by_adapter
from ktcli.engine.device.blocks import host_blocks
from ktcli.engine.device.cache import DeviceCache, PageCopy, cached_parts
from ktcli.engine.device.decode import DecodeStep, DecodeSteps, Sizes
from ktcli.engine.device.experts import ExpertShape, HostExperts, LayerWeights
from ktcli.engine.device.fallbacks import NONE_YET, Failures, KnownFailures
from ktcli.engine.device.paging import DeviceMemory, DevicePages
from ktcli.engine.device.pinnedweights import PinnedWeights
from ktcli.engine.device.placement import Placement
from ktcli.engine.device.runners import Coupled, Resident, Runner, Streamed, TimedRunner
from ktcli.engine.device.segments import Segment, layer_devices, running, segments_of
from ktcli.engine.device.slabs import SlabStream, slabs_of, spans_of
from ktcli.engine.device.steps import DeviceSteps, Ways
from ktcli.engine.device.stream import device_errors, device_name
from ktcli.engine.device.weights import DeviceModel, load_device
from ktcli.engine.loader import Progress, Tensors, TensorSource, expert_rows, load
from ktcli.engine.logits import Logits
from ktcli.engine.pagetable import WindowPages, pages_for
from ktcli.engine.pools import Pools
from ktcli.engine.prefix import facts_of, seed
from ktcli.engine.sequence import Sequence
from ktcli.engine.session import Session
from ktcli.engine.states import before_tail
from ktcli.errors import KernelFails, KtError
from ktcli.models import Model, Spec
from ktcli.native import Batch, Pool
from ktcli.ops.kvformat import F32_CACHE, FORMATS, CacheFormat
from ktcli.ops.part import ModelPart
from ktcli.ops.recording import record
from ktcli.ops.state import state_slots
from ktcli.ops.tensors import Role
from ktcli.ops.torch.backend import StepInputs, Weights
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import (
    TORCH,
    Kernels,
    early_starts_fail,
    kernels_fail,
    kernels_for,
    start_late,
    triton_fails,
)
from ktcli.ops.torch.merging import backend_of
from ktcli.planner.cost import PieceTimes
from ktcli.planner.deferral import depth_at
from ktcli.planner.device import MOST_CAPTURED
from ktcli.planner.memory import PREFILL_CHUNK, Use
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe, stored_bytes

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter

_LOG = logging.getLogger(__name__)


class DeviceEngine:
    """A loaded model with experts divided between devices and main memory, see `Engine`.

    Attributes:
        placement: the placement that it follows.
        memory: its pages and states, from which they can be stored.
        segments: its layers in sequence over devices.
        pinned: the experts in main memory, as far as they are pinned.
        adapters: those that are attached; None: there is room for none.

    Args:
        devices: the devices, for which the placement has borders.
        max_outputs: the number of rows of a chunk that can give logits.
        exact: whether activations and cache are f32, to compare with a reference.
        known_failures: what is known to fail on the devices, and who is told of more.
        adapter: the adapter of all sequences that name none; the placement has room for it.
    """

    def __init__(
        self,
        model: Model,
        recipe: Recipe,
        source: TensorSource,
        pool: Pool,
        placement: Placement,
        devices: Several[torch.device],
        *,
        max_outputs: int = 1,
        exact: bool = False,
        progress: Progress | None = None,
        known_failures: KnownFailures = NONE_YET,
        adapter: PackedAdapter | None = None,
    ) -> None:
        self.exact, self._known, self._kept = exact, known_failures, known_failures.known
        # Why steps are not captured; a list, for what makes them refers to no engine.
        self._refused = [known_failures.known.graphs] if known_failures.known.graphs else []
        self.model = model = model.at(placement.context)
        self.recipe, self.pool, self.placement = recipe, pool, placement
        self.spec: Spec = model.spec
        self.context = placement.context
        self.max_tokens = self.max_rows = placement.long_prompts.most_tokens
        self.max_outputs = max_outputs
        self.segments = segments_of(model, devices, placement.borders)
        self._streams = [each.stream for each in self.segments]
        self._paging = [each.paging for each in self.segments]
        # Tensors on a device are made in its stream, too: it does not wait for any other.
        with device_errors("loading"), running(self._streams):
            self._load(source, progress)
            self._prepare()
            self._warn()
        cache = self._cache
        widths = cached_parts(record(model.forward), self.spec.layers, self.cache_format)
        parts = cache.parts(widths)
        self.memory = DeviceMemory(parts, cache.states, self._paging)
        self.pools = Pools(
            cache.pages,
            cache.slots if cache.states else None,
            PageCopy(parts, self._streams),
            seed(self._facts(source.identity)),
            self.context,
            windows=self._window_pages(cache.parts(widths, windowed=True)),
            latent=self.spec.latent,
        )
        if adapter is not None:
            assert self.adapters is not None, "the plan has no room for it"
            self.pools.adapter = self.adapters.attach(adapter)

    def _window_pages(self, parts: Several[Tensor]) -> WindowPages | None:
        """The pages of the layers with a window, whose parts these are."""
        pool = self._cache.windows
        if pool is None:
            return None
        copy, memory = PageCopy(parts, self._streams), DevicePages(parts, self._paging)
        return WindowPages(pool, copy, self.spec.window, memory)

    def _facts(self, weights: str) -> dict[str, object]:
        """What the bytes of pages depend on beside ids and deferral. Not where the experts lie: that changes with what
        is chatted about, and their results by no more than the rounding of what they read."""
        return {
            **facts_of(self.model, self.recipe, weights),
            "exact": self.exact,
            "cache": self.cache_format.name,
            "kernels": self._kernels.name,
            "device": _names(self.segments),
        }

    @property
    def cache_format(self) -> CacheFormat:
        """The number format of the KV cache: f32 for an exact engine, else the placement's."""
        return F32_CACHE if self.exact else FORMATS[self.placement.cache]

    def depth_at(self, position: int) -> int:
        """Returns the number of experts that the token at `position` may defer."""
        return depth_at(self.placement.depths, position)

    def how_at(self, position: int) -> int:
        """Returns the byte that encodes how the token at `position` is computed, see `forms`."""
        return self.pools.how(self.depth_at(position))

    def follow(self, depths: tuple[tuple[int, int], ...]) -> None:
        """Sets the depths of deferral that are used from now on, see `Placement.depths`."""
        self.placement = replace(self.placement, depths=depths)

    @property
    def host(self) -> HostExperts | None:
        """The experts in main memory; None: there are none."""
        return self._ways.host

    def sequence(self) -> Sequence:
        """Returns a new sequence, which allocates pages as it grows; the caller closes it."""
        return Sequence(self.pools)

    def session(self) -> Session:
        """Returns a new session, whose sequence is computed by itself."""
        return Session(self)

    def run(self, batch: Batch) -> list[Logits]:
        """Computes a batch and returns the logits of each output row, see `Engine`.

        Where a kernel fails that no step used before, the batch runs again without such kernels. What failed since the
        last batch is said, and kept when this one has run without it.

        Raises:
            DeviceError: the device failed.
            KtError: the CPU's share failed.
        """
        try:
            logits = self._run(batch)
        except KernelFails as error:
            self._prepare(error)
            self._say()
            logits = self._run(batch)
        if self.failures != self._kept:
            self._say()
            self._kept = self.failures
            self._known.keep(self._kept)
        return logits

    def _run(self, batch: Batch) -> list[Logits]:
        """Computes a batch, the runs of each adapter in a step of their own."""
        most = 0 if self.adapters is None else self.adapters.room.most
        for number in {run.adapter for run in batch.runs}:
            if not 0 <= number <= most:
                raise KtError(f"adapter is {number}, outside 0..{most}")
        if self._updates is None:
            return self._steps.run(batch)
        return run_by_adapter(batch, self._steps.run, self._updates.use)

    def forget_choices(self) -> None:
        """Resets the counts of chosen experts to 0, after steps that only measure."""
        with running(self._streams):
            for counts in self._chosen:
                counts.zero_()

    @property
    def weights_bytes(self) -> int:
        """The bytes of the loaded weights, in main memory and on the devices."""
        return self._host_bytes + self._on_device.size_bytes

    def chosen(self) -> NDArray[np.int64]:
        """Returns the number of times that each expert was chosen since the engine was made, [MoE layers, E]."""
        with device_errors("counting"), running(self._streams):
            found = [counts.cpu().numpy() for counts in self._chosen]
        return np.concatenate(found)

    @property
    def batch_invariant(self) -> bool:
        """Whether logits have the same bits in any batch: False, as kernels of the device round otherwise for other
        numbers of rows."""
        return False

    @property
    def step_times(self) -> None:
        """The times of decode steps by their rows: None, as kernels of the device round otherwise for other numbers
        of rows, so that drafts could change an answer."""
        return None

    @property
    def piece_times(self) -> PieceTimes:
        """The assumed times of steps that read pieces of a prompt: nobody has modelled them for a device."""
        return PieceTimes.assumed(self.max_tokens)

    def chunk_tokens(self, left: int) -> int:
        """Returns the number of tokens of a prompt's next chunk, when `left` are left."""
        size = self.placement.long_prompts.chunk_tokens(left)
        return before_tail(size, left) if self.spec.sequence_elements else size

    def operations(self) -> list[tuple[str, int]]:
        """Returns the (operation of the CPU, nanoseconds so far) pairs, in the order in which they run."""
        return self._ways.runner.operations()

    # -- loading -------------------------------------------------------------------------------------

    def _load(self, source: TensorSource, progress: Progress | None) -> None:
        mask, devices = self.placement.mask, layer_devices(self.segments)
        first, then = _one_count(progress, self.model, self.recipe)
        self._kernels: Kernels = self._choose_kernels(devices)
        # Before a byte is read: where memory is short, that is found out at once.
        use, chunk = Use(streams=self.placement.streams), self.placement.long_prompts.longest
        self._cache = DeviceCache(
            self.spec,
            use.pages(self.context),
            devices,
            windows=use.window_pages(self.spec, self.context, chunk),
            slots=state_slots(use.streams),
            fmt=self.cache_format,
        )
        self._on_device: DeviceModel = load_device(
            self.model, self.recipe, source, mask, devices, first, self.placement.apart
        )
        apart = self.placement.apart
        loaded = load(
            self.model,
            self.recipe,
            source,
            self.pool,
            then,
            skip=mask,
            only=lambda tensor: tensor.role is Role.EXPERTS or tensor.layer_part in apart,
            experts_on=self.placement.experts_on,
        )
        self.warnings = tuple(refusals(self.pool, loaded.unbound))
        found = self._expert_layers(loaded)
        self._blocks = host_blocks(
            self.model,
            apart,
            loaded.by_name,
            self._on_device.weights.vectors,
            {n: each.stream for each in self.segments for n in each.layers},
            self.placement.rows,
        )
        self._layers = [None if mask[i].all() else each for i, each in enumerate(found)]
        self.pinned = self._pinned_weights()
        biases = sum(layer.extras.bias_bytes for layer in self._layers if layer)  # copied back
        self._host_bytes = loaded.size_bytes + biases
        self._make_room_for_adapters()
        self._chosen = [
            torch.zeros((len(each.routed), mask.shape[1]), dtype=torch.int64, device=each.device)
            for each in self.segments
        ]

    def _expert_layers(self, loaded: Tensors) -> list[LayerWeights]:
        """The experts of each layer that has some, as they lie in main memory."""
        # In each layer gate_up comes before down.
        names = [tensor.name for tensor in self.model.tensors if tensor.role is Role.EXPERTS]
        slices = [(name, each) for name in names if isinstance(each := loaded.by_name[name], tuple)]
        pairs = zip(slices[::2], slices[1::2], self._on_device.stacks, strict=True)
        rows = self.placement.rows
        of_experts = [rows.get((n, ModelPart.EXPERTS)) for n in expert_rows(self.model)]
        return [
            LayerWeights(gate_up, down, stack.extras, names=(wide, narrow), row=row)
            for ((wide, gate_up), (narrow, down), stack), row in zip(pairs, of_experts, strict=True)
        ]

    def _make_room_for_adapters(self) -> None:
        self._updates: DeviceUpdates | None = None
        self.adapters: Adapters | None = None
        room, beside = self.placement.adapters, self._on_device.weights
        if room is not None:
            self._updates = DeviceUpdates(self.model, room, beside, self.segments)
            self.adapters = Adapters(self._updates, room)
            self._on_device = replace(self._on_device, weights=self._updates.weights)

    # -- how steps run -------------------------------------------------------------------------------

    def _prepare(self, failed: KernelFails | None = None) -> None:
        """Makes the steps ready; with plain torch operations if a kernel `failed`, or fails now.

        Raises:
            DeviceError: the device failed; so did plain operations.
        """
        with device_errors("loading"), running(self._streams):
            if failed is None:
                try:
                    with device_errors("preparing a step"):
                        self._ways = self._make_ways()
                except KernelFails as error:
                    failed = error
            if failed is not None:
                if self._kernels is TORCH:
                    raise failed
                self._kernels, self._kernels_fail = TORCH, str(failed)
                self._ways = self._make_ways()
        self._steps = DeviceSteps(self._ways)

    def _choose_kernels(self, devices: Several[torch.device]) -> Kernels:
        """Returns the fastest kernels that are not known to fail; the first one is tried."""
        known, self._lacks, self._kernels_fail = self._known.known, "", ""
        if self.exact:
            return kernels_for(devices[0], exact=True)
        if known.kernels:
            self._kernels_fail = known.kernels
            return TORCH
        for device in dict.fromkeys(devices) if known.early else ():
            start_late(device, known.early)
        if devices[0].type == "cuda":
            self._lacks, self._kernels_fail = triton_fails(devices[0]), kernels_fail(devices[0])
        return kernels_for(devices[0])

    @property
    def failures(self) -> Failures:
        """The faster ways that are known to fail here, from the start or found by now."""
        early = self._known.known.early or early_starts_fail(self.segments[0].device)
        return Failures(self._kernels_fail, early, self._refused[0] if self._refused else "")

    def _warn(self) -> tuple[str, ...]:
        """Adds the warnings of what fails that are new, and returns them."""
        said = self._known.sentences(self.failures, self._lacks)
        new = tuple(each for each in said if each not in self.warnings)
        self.warnings += new
        return new

    def _say(self) -> None:
        """Says what fails since the last time."""
        for warning in self._warn():
            _LOG.warning("%s", warning)

    def _make_ways(self) -> Ways:
        placement = self.placement
        host = self._host_experts() if any(self._layers) or self._blocks else None
        if self._updates is not None:
            self._updates.accompany(host)
        resident = Resident(self._kernels, self._on_device.stacks)
        runner = self._runner(host, resident)
        forwards = [
            _Forward(
                self.model,
                self._on_device.weights,
                self._cache.layers,
                self._kernels,
                chosen,
                self._cache.states,
                self._cache.windowed,
                each.layers,
                each.routed.start,
            )
            for each, chosen in zip(self.segments, self._chosen, strict=True)
        ]
        ways = Ways(
            forwards=forwards,
            decode=None,
            runner=runner,
            streamed=self._streamed(resident),
            host=host,
            streams=self._streams,
            table=self._on_device.embedding,
            long_prompts=placement.long_prompts,
        )
        return replace(ways, decode=self._decode_steps(forwards, runner, host))

    def _decode_steps(
        self, forwards: Several[_Forward], runner: TimedRunner, host: HostExperts | None
    ) -> DecodeSteps | None:
        """The captured steps of one token of each sequence; None: each step runs anew."""
        cache, table, streams = self._cache, self._on_device.embedding, self._streams
        pages, width = pages_for(self.context), self.spec.output_width
        summarize = self._kernels.summarize  # not self: device memory is freed with its last user
        slot = cache.scratch_slot if cache.states else None
        window = cache.window_scratch if cache.windowed else None

        def decode(forward: _Forward) -> Callable[[Tensor, Rows], Tensor]:
            return lambda x, rows: forward(x, (rows,), None, runner)

        own, refused = [decode(each) for each in forwards], self._refused

        def make(n: int) -> DecodeStep:
            sizes = Sizes(n, pages, width, cache.scratch, slot, window)
            step = DecodeStep(
                own, table, sizes, streams, host, captured=not refused, summarize=summarize
            )
            if step.refused:
                refused.append(step.refused)
            return step

        steps = DecodeSteps(make, self.placement.streams)
        self.forget_choices()
        return steps

    def _host_experts(self) -> HostExperts:
        spec, placement, room = self.spec, self.placement, self.placement.adapters
        most = max(min(PREFILL_CHUNK, self.context), MOST_CAPTURED)
        shape = ExpertShape(spec.expert_hidden, spec.experts, spec.top_k, most)
        elsewhere = placement.mask.astype(np.uint8)
        return HostExperts(
            self.pool,
            self._layers,
            shape,
            elsewhere,
            [each.stream for each in self.segments for _ in each.routed],
            self._blocks,
            deferral=placement.deferral and spec.deferrable > 0,
            handoff=placement.handoff,
            exact=self.exact,
            adapters=room if room is not None and room.experts_bytes else None,
        )

    def _runner(self, host: HostExperts | None, resident: Resident) -> TimedRunner:
        """The runner of the experts of decode and of short chunks of a prompt."""
        return Coupled(host, resident)

    def _streamed(self, resident: Resident) -> Streamed | None:
        placement = self.placement
        if placement.long_prompts.threshold is None:
            return None
        slabs = slabs_of(self._layers, ~placement.mask, placement.slab_bytes)
        streams = []
        for each in self.segments:
            own = [slab for slab in slabs if slab.layer in each.routed]
            beside = self.pool, each.stream, each.copies
            streams.append(SlabStream(own, *beside, self.spec.experts, self.pinned))
        return Streamed(streams, resident)

    def _pinned_weights(self) -> PinnedWeights:
        """The experts in main memory, which long prompts let be pinned."""
        here = zip(self._layers, ~self.placement.mask, strict=True)
        spans = [span for layer, ids in here if layer for span in spans_of(layer, ids)]
        return PinnedWeights(spans, self._layers, [each.copies for each in self.segments])


@dataclass(frozen=True, slots=True)
class _Forward:
    """The forward of a segment, without a reference to the engine: device memory is freed with its last user.

    Attributes:
        caches: the pages of each layer.
        chosen: the counts of chosen experts, int64 [MoE layers of the segment, E].
        states: the states of each layer.
        windowed: the layers whose pages are window pages.
        layers: the layers of the segment.
        routed: the number of layers with experts before it.
    """

    model: Model
    weights: Weights
    caches: Several[Tensor]
    kernels: Kernels
    chosen: Tensor
    states: Several[Tensor] = ()
    windowed: frozenset[int] = frozenset()
    layers: range = range(0)
    routed: int = 0

    def __call__(
        self, embedded: Tensor, parts: Several[Rows], outputs: Tensor | None, runner: Runner
    ) -> Tensor:
        """The residual behind the segment, or the logits [outputs, vocab], of embedded rows or the residual before it,
        see `StepInputs`; counts the experts they chose."""
        inputs = StepInputs(
            embedded, parts, self.caches, outputs, self.states, self.windowed, self.routed
        )
        first, last = self.layers.start, self.layers.stop
        x = embedded if first else None
        backend = backend_of(self.weights, inputs, self.kernels, runner)
        with torch.inference_mode():  # nothing is noted for a way back: that costs each launch
            logits: Tensor = backend.run(lambda b: self.model.part(b, x, first, last))
            if backend.routings:
                count(self.chosen, [ids for ids, _ in backend.routings])
        return logits


def _names(segments: Several[Segment]) -> str:
    """The name of the devices' kind; of several kinds, that of each layer's."""
    names = [device_name(each.device) for each in segments]
    if len(set(names)) == 1:
        return names[0]
    return ", ".join(
        f"{len(each.layers)} x {name}" for each, name in zip(segments, names, strict=True)
    )


def _one_count(
    progress: Progress | None, model: Model, recipe: Recipe
) -> tuple[Progress, Progress] | tuple[None, None]:
    """The progress functions of two loads that run one after the other and together read every tensor once."""
    if progress is None:
        return None, None
    total = sum(stored_bytes(tensor, recipe) for tensor in model.tensors)
    return (
        lambda done, of: progress(done, total),
        lambda done, of: progress(total - of + done, total),
    )


def count(chosen: Tensor, ids: Several[Tensor]) -> None:
    """Adds to chosen [layers, experts] the number of times that each layer's ids [T, top_k] name each expert;
    negative ids name none."""
    layers, experts = chosen.shape
    first = torch.arange(0, layers * experts, experts, device=chosen.device)
    numbers = torch.stack(list(ids)).long()
    places = (numbers.clamp(min=0) + first[:, None, None]).flatten()
    chosen.view(-1).index_add_(0, places, (numbers >= 0).long().flatten())
