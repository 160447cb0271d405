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
from ktcli.engine.contract import Engine
from ktcli.engine.device.adapters import DeviceUpdates, run_by_adapter
from ktcli.engine.device.cache import DeviceCache, PageCopy, cached_parts
from ktcli.engine.device.decode import DecodeStep, DecodeSteps, Sizes
from ktcli.engine.device.experts import ExpertShape, HostExperts
from ktcli.engine.device.fallbacks import NONE_YET, KnownFailures
from ktcli.engine.device.hostparts import load_host, one_count
from ktcli.engine.device.kernelchoice import KernelChoice
from ktcli.engine.device.paging import DeviceMemory, DevicePages
from ktcli.engine.device.pinnedweights import PinnedWeights
from ktcli.engine.device.placement import Placement
from ktcli.engine.device.runners import Coupled, Resident, Streamed, TimedRunner
from ktcli.engine.device.segments import kind_of, layer_devices, running, segments_of
from ktcli.engine.device.slabs import SlabStream, slabs_of, spans_of
from ktcli.engine.device.steps import DeviceSteps, SegmentForward, Ways
from ktcli.engine.device.stream import device_errors
from ktcli.engine.device.weights import load_device
from ktcli.engine.loader import Progress, TensorSource
from ktcli.engine.logits import Logits
from ktcli.engine.pagetable import WindowPages, pages_for
from ktcli.engine.pools import Pools
from ktcli.engine.prefix import facts_of, seed
from ktcli.engine.statepool import before_tail
from ktcli.errors import KernelFails, KtError
from ktcli.models import Model
from ktcli.native import Batch, Pool
from ktcli.ops.kvformat import F32_CACHE, FORMATS
from ktcli.ops.recording import record
from ktcli.ops.state import state_slots
from ktcli.ops.torch.functions import Rows
from ktcli.planner.cost import PieceTimes
from ktcli.planner.deferral import depth_at
from ktcli.planner.device import MOST_CAPTURED
from ktcli.planner.memory import PREFILL_CHUNK, Use
from ktcli.weights.recipe import Recipe

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter

_LOG = logging.getLogger(__name__)


class DeviceEngine(Engine):
    """A loaded model with experts divided between devices and main memory, see `Engine`.

    Attributes:
        placement: the placement that it follows.
        segments: its layers in sequence over devices.
        pinned: the experts in main memory, as far as they are pinned.

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
        self.exact = exact
        self.model = model = model.at(placement.context)
        self.recipe, self.pool, self.placement = recipe, pool, placement
        self.spec, self.context = model.spec, placement.context
        self.cache_format = F32_CACHE if exact else FORMATS[placement.cache]
        self.max_tokens = self.max_rows = placement.long_prompts.most_tokens
        self.max_outputs = max_outputs
        self.segments = segments_of(model, devices, placement.borders)
        self._streams = [each.stream for each in self.segments]
        self._paging = [each.paging for each in self.segments]
        # Tensors on a device are made in its stream, too: it does not wait for any other.
        with device_errors("loading"), running(self._streams):
            found = layer_devices(self.segments)
            self._choice = KernelChoice(known_failures, found, exact=exact)
            self._load(source, progress)
            self._prepare()
            self._warn()
        self._make_pools(source.identity)
        self._set_default_adapter(adapter)

    def _make_pools(self, weights: str) -> None:
        """Makes the pools of pages and states; `weights` is the identity of the source."""
        cache = self._cache
        widths = cached_parts(record(self.model.forward), self.spec.layers, self.cache_format)
        parts = cache.parts(widths)
        self.memory = DeviceMemory(parts, cache.states, self._paging)
        self.pools = Pools(
            cache.pages,
            cache.slots if cache.states else None,
            PageCopy(parts, self._streams),
            seed(self._facts(weights)),
            self.context,
            windows=self._window_pages(cache.parts(widths, windowed=True)),
            latent=self.spec.latent,
        )

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
            "kernels": self._choice.kernels.name,
            "device": kind_of(self.segments),
        }

    def depth_at(self, position: int) -> int:
        """Returns the number of routed experts that the answer's token at `position` may defer: their results are added
        one MoE layer later.
        """
        return depth_at(self.placement.depths, position)

    def follow(self, depths: tuple[tuple[int, int], ...]) -> None:
        """Sets the depths of deferral that are used from now on: for each pair (position, n), tokens from that position
        on may defer n experts, see `Placement.depths`.
        """
        self.placement = replace(self.placement, depths=depths)

    @property
    def host(self) -> HostExperts | None:
        """The routed experts and MLPs that lie in main memory and are computed by the CPU; None: there are none."""
        return self._ways.host

    def run(self, batch: Batch) -> list[Logits]:
        """Computes one step for a batch of runs; returns the logits of each row that gives some, in the order of the
        rows, valid until the next step.

        Where a kernel fails that no step used before, the batch runs again without such kernels. What failed since the
        last batch is logged as a warning, and recorded for later engines once this batch has run without it.

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
        if self._choice.has_news:
            self._say()
            self._choice.keep()
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
        """Resets the counts of how often each expert was chosen to 0, after steps that only measure."""
        with running(self._streams):
            for counts in self._chosen:
                counts.zero_()

    def chosen(self) -> NDArray[np.int64]:
        """Returns the number of times that the routers chose each expert since the engine was made or the counts were
        reset, [MoE layers, E].
        """
        with device_errors("counting"), running(self._streams):
            found = [counts.cpu().numpy() for counts in self._chosen]
        return np.concatenate(found)

    @property
    def batch_invariant(self) -> bool:
        """Whether logits have the same bits in any batch: always False, as kernels of the device round differently for
        other numbers of rows.
        """
        return False

    @property
    def step_times(self) -> None:
        """The expected seconds of decode steps by their number of rows: always None, as kernels of the device round
        differently for other numbers of rows, so that drafts could change an answer.
        """
        return None

    @property
    def piece_times(self) -> PieceTimes:
        """The assumed seconds of steps that read pieces of a prompt, by their tokens; they are not modelled for
        devices.
        """
        return PieceTimes.assumed(self.max_tokens)

    def chunk_tokens(self, left: int) -> int:
        """Returns the number of tokens of a prompt's next chunk, which one step computes, when `left` tokens are still
        to be computed.
        """
        size = self.placement.long_prompts.chunk_tokens(left)
        return before_tail(size, left) if self.spec.sequence_elements else size

    def operations(self) -> list[tuple[str, int]]:
        """Returns (operation, nanoseconds) pairs: the time that each operation of the CPU has taken in all steps so
        far, in the order in which they run.
        """
        return self._ways.runner.operations()

    # -- loading -------------------------------------------------------------------------------------

    def _load(self, source: TensorSource, progress: Progress | None) -> None:
        mask, devices = self.placement.mask, layer_devices(self.segments)
        first, then = one_count(progress, self.model, self.recipe)
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
        self._on_device = load_device(
            self.model, self.recipe, source, mask, devices, first, self.placement.apart
        )
        host = load_host(
            self.model,
            self.recipe,
            source,
            self.pool,
            self.placement,
            self._on_device,
            self.segments,
            then,
        )
        self._layers, self._blocks = host.layers, host.blocks
        self.weights_bytes = host.size_bytes + self._on_device.size_bytes
        self.warnings = host.warnings
        self.pinned = self._pinned_weights()
        self._make_room_for_adapters()
        self._chosen = [
            torch.zeros((len(each.routed), mask.shape[1]), dtype=torch.int64, device=each.device)
            for each in self.segments
        ]

    def _make_room_for_adapters(self) -> None:
        self._updates: DeviceUpdates | None = None
        self.adapters = None
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
                self._choice.do_without(failed)
                self._ways = self._make_ways()
        self._steps = DeviceSteps(self._ways)

    def _warn(self) -> tuple[str, ...]:
        """Adds the warnings of what fails that are new, and returns them."""
        said = self._choice.sentences()
        new = tuple(each for each in said if each not in self.warnings)
        self.warnings += new
        return new

    def _say(self) -> None:
        """Says what fails since the last time."""
        for warning in self._warn():
            _LOG.warning("%s", warning)

    def _make_ways(self) -> Ways:
        host = self._host_experts() if any(self._layers) or self._blocks else None
        if self._updates is not None:
            self._updates.accompany(host)
        resident = Resident(self._choice.kernels, self._on_device.stacks)
        runner = self._runner(host, resident)
        forwards = [
            SegmentForward(
                self.model,
                self._on_device.weights,
                self._cache.layers,
                self._choice.kernels,
                chosen,
                self._cache.states,
                self._cache.windowed,
                each.layers,
                each.routed.start,
            )
            for each, chosen in zip(self.segments, self._chosen, strict=True)
        ]
        return Ways(
            forwards=forwards,
            runner=runner,
            streamed=self._streamed(resident),  # its buffers are taken before steps are captured
            decode=self._decode_steps(forwards, runner, host),
            host=host,
            streams=self._streams,
            table=self._on_device.embedding,
            long_prompts=self.placement.long_prompts,
        )

    def _decode_steps(
        self, forwards: Several[SegmentForward], runner: TimedRunner, host: HostExperts | None
    ) -> DecodeSteps | None:
        """The captured steps of one token of each sequence; None: each step runs anew."""
        cache, table, streams = self._cache, self._on_device.embedding, self._streams
        pages, width = pages_for(self.context), self.spec.output_width
        # Not self: device memory is freed with its last user.
        summarize = self._choice.kernels.summarize
        slot = cache.scratch_slot if cache.states else None
        window = cache.window_scratch if cache.windowed else None

        def decode(forward: SegmentForward) -> Callable[[Tensor, Rows], Tensor]:
            return lambda x, rows: forward(x, (rows,), None, runner)

        own, refused = [decode(each) for each in forwards], self._choice.refused

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
