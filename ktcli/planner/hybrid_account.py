"""Builds the lines and sentences of a plan with a GPU: the place and the cost of each part.

All of it follows from decisions that `hybrid` has taken; nothing is decided here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import field

import numpy as np

from ktcli.errors import gib
from ktcli.models.model import Model
from ktcli.ops.part import LayerPart, ModelPart
from ktcli.planner.device import captured_sizes, states_bytes
from ktcli.planner.experts import ResidentChoice
from ktcli.planner.host import Host
from ktcli.planner.memory import PREFILL_CHUNK, PROCESS_BYTES, Use
from ktcli.planner.nodes import extra_bytes
from ktcli.planner.plan import ON_GPU, DevicePlan, Line, Request, early_position
from ktcli.planner.prefill import Prefill
from ktcli.planner.slices import ExpertTeams
from ktcli.planner.spec import (
    STATES_REASON,
    PartSize,
    PartWork,
    Share,
    StepShape,
    Unit,
    parts,
    step_work,
    tensor_work,
)
from ktcli.planner.stack import ModelLoads, bytes_on_device, share_apart
from ktcli.records import dataclass

# Of main memory, assumed, not yet measured: torch with its CUDA libraries loaded.
TORCH_BYTES = 3 << 30
# The parts that main memory holds beside experts; the GPU has all others.
_HOST_REASONS = {ModelPart.EMBEDDING: "one row per token", ModelPart.VECTORS: "biases of experts"}


@dataclass(frozen=True, slots=True)
class HybridAccount:
    """The decisions of a plan, and the lines and sentences that follow.

    Attributes:
        here, there: the tensors in main memory, and those in the GPU's memory.
        experts_on: the teams that have the experts of some layers in main memory.
    """

    model: Model
    host: Host
    request: Request
    stack: ModelLoads
    context: int
    device: DevicePlan
    prefill: Prefill
    choice: ResidentChoice
    here: Share
    there: Share
    experts_on: ExpertTeams = field(default_factory=dict)

    @property
    def _chunk(self) -> int:
        return min(PREFILL_CHUNK, self.context)

    # --- main memory, beside weights ---

    @property
    def scratch_bytes(self) -> int:
        """The bytes of main memory for buffers of the experts and MLPs that the CPU computes; 0 where all are on the
        GPU.
        """
        spec = self.model.spec
        columns = 3 * spec.hidden + 2 * spec.scratch.experts if any(self.device.k_cpu) else 0
        widths: Counter[LayerPart | None] = Counter()
        for tensor in self.here.tensors:
            if tensor.part.is_mlp:
                widths[tensor.layer_part] += tensor.n + tensor.k
        return 4 * PREFILL_CHUNK * (columns + 2 * max(widths.values(), default=0))

    @property
    def pinned_bytes(self) -> int:
        """The bytes of the pinned buffers in main memory that copies to and from the GPU go through."""
        spec = self.model.spec
        answers = sum(captured_sizes(self.request.use.streams))
        logits = 4 * answers * spec.output_width
        return self.device.need.stream + 8 * PREFILL_CHUNK * spec.hidden + logits

    @property
    def extra_bytes(self) -> int:
        """The bytes by which the weights in main memory grow when they are cut between teams of threads."""
        return sum(self._extra.values())

    @property
    def _extra(self) -> Counter[ModelPart]:
        teams, recipe = self.host.teams, self.request.recipe
        return Counter(extra_bytes(self.here, recipe, teams, self.experts_on))

    @property
    def other_bytes(self) -> int:
        """The bytes of main memory that the plan counts for everything but weights, those left free included."""
        process = PROCESS_BYTES + TORCH_BYTES
        beside = self.scratch_bytes + self.pinned_bytes + self.adapter_bytes
        return beside + process + self.host.margin_bytes

    @property
    def adapter_bytes(self) -> int:
        """The bytes of main memory for the factors of LoRA adapters; 0 without adapters."""
        use = self.request.use
        return (
            0 if use.adapters is None else use.adapters.beside_bytes(self.model.spec, use.streams)
        )

    # --- lines ---

    def lines(self) -> Iterator[Line]:
        """Yields the lines of the plan (part, place, bytes, predicted seconds), first those of the GPU's memory, then
        those of main memory.
        """
        yield from self._device_parts()
        yield from self._device_others()
        yield from self._main_parts()
        yield from self._main_others()

    def _device_parts(self) -> Iterator[Line]:
        """Yields the parts on the GPU; predicted times are those of its own work, part by part."""
        model, recipe, need = self.model, self.request.recipe, self.device.need
        cache = self.stack.cache
        early = early_position(self.context)
        steps = StepShape(1, early, cache=cache), StepShape(self._chunk, cache=cache)
        one, many = (
            {w.part: w for w in step_work(model, recipe, s, bytes_on_device)} for s in steps
        )
        hybrid = self.prefill.hybrid

        def line(part: ModelPart, fmt: str, size: int, reason: str, share: float = 1.0) -> Line:
            nothing = PartWork(part, Unit.BF16, 0, 0)
            first, chunked = one.get(part, nothing), many.get(part, nothing)
            return Line(
                part.value,
                fmt,
                ON_GPU,
                size,
                round(first.read_bytes * share),
                hybrid.part_s(first) * share,
                hybrid.part_s(chunked) * share / self._chunk,
                reason,
            )

        sizes: defaultdict[ModelPart, int] = defaultdict(int)
        for tensor in self.there.tensors:
            sizes[tensor.part] += bytes_on_device(tensor, recipe)
        for part in parts(self.there, recipe):
            routed, size = part.part is ModelPart.EXPERTS, sizes[part.part]
            away = share_apart(model, part.part, self.device.apart)
            share = self.device.hit_rate if routed else 1 - away
            reason = _resident_words(self.device) if routed else "every token needs it"
            fmt = "f32" if size > part.size_bytes else part.format
            yield line(part.part, fmt, size, reason, share)
        use = Use(streams=self.request.use.streams, cache=cache.name)
        kept = use.cache_words(model.spec, self.context, self.device.chunk)
        states = states_bytes(model.spec, use.streams)
        yield line(ModelPart.CACHE, cache.name, need.cache - states, kept)
        if states:
            yield line(ModelPart.STATES, "f32", states, STATES_REASON)
        if (room := self.request.use.adapters) is not None and room.products:
            yield self._updates(room.device_bytes)

    def _updates(self, size: int) -> Line:
        """The line of the buffers for adapters beside the GPU's products."""
        work = PartWork(ModelPart.ADAPTERS, Unit.LOW_RANK, size, 0)
        seconds = self.prefill.hybrid.part_s(work)
        name, words = ModelPart.ADAPTERS.value, "those of one, beside the products that they change"
        return Line(name, "f32", ON_GPU, size, size, seconds, seconds / self._chunk, words)

    def _device_others(self) -> Iterator[Line]:
        device, need = self.device, self.device.need
        words = f"activations of {device.chunk} tokens"
        yield Line.reserved("workspace", "f32", ON_GPU, need.workspace, words)
        if need.stream:
            words = f"two buffers of {device.stream_experts} experts for long prompts"
            name = self.request.recipe.experts_name
            yield Line.reserved("stream buffers", name, ON_GPU, need.stream, words)
        runtime = f"CUDA, graphs; {gib(need.margin)} left free"
        rest = need.runtime + need.graph + need.margin
        yield Line.reserved("runtime, margin", "", ON_GPU, rest, runtime)

    def _main_parts(self) -> Iterator[Line]:
        for part in parts(self.here, self.request.recipe):
            if part.part is ModelPart.EXPERTS:
                yield self._routed(part)
            else:
                yield self._mlps(part) if part.part.is_mlp else self._looked_up(part)

    def _routed(self, part: PartSize) -> Line:
        """The line of the CPU's experts."""
        spec, hybrid = self.model.spec, self.prefill.hybrid
        hits, moe, extra = hybrid.hits.k_cpu, self.stack.moe, self._extra[part.part]
        sizes, each = self.stack.expert.size_bytes[moe], np.array(hybrid.expert_s)[moe]
        mean = sum(hits) / len(hits)
        return Line(
            part.part.value,
            part.format,
            self.host.cut_words if extra else self._spread,
            part.size_bytes + extra,
            round(float(np.dot(sizes, hits))),
            float(np.dot(each, hits)),
            self.prefill.cpu_experts_s(self._chunk) / self._chunk,
            f"{mean:.1f} of {spec.top_k} per token in {spec.moe_layers} layers",
        )

    def _mlps(self, part: PartSize) -> Line:
        """The line of shared experts or dense MLPs that the CPU computes."""
        hybrid, stack = self.prefill.hybrid, self.stack
        of_it = [each.layer for each in self.device.apart if each.part is part.part]
        extra = self._extra[part.part]
        return Line(
            part.part.value,
            part.format,
            self.host.cut_words if extra else self._spread,
            part.size_bytes + extra,
            round(float(stack.apart.size_bytes[of_it].sum())),
            float(hybrid.apart_s(1)[of_it].sum()),
            float(hybrid.apart_s(self._chunk)[of_it].sum()) / self._chunk,
            f"by rule, in {len(of_it)} layers",
        )

    def _looked_up(self, part: PartSize) -> Line:
        """The line of a table of which a token reads some rows, in no time that counts."""
        spec, recipe = self.model.spec, self.request.recipe
        of_it = (tensor for tensor in self.here.tensors if tensor.part is part.part)
        read = sum(tensor_work(tensor, spec, recipe, StepShape(1)).read_bytes for tensor in of_it)
        name, words = part.part.value, _HOST_REASONS[part.part]
        return Line(name, part.format, self._spread, part.size_bytes, read, 0.0, 0.0, words)

    def _main_others(self) -> Iterator[Line]:
        if self.scratch_bytes:
            words = f"the CPU's part of a step of {PREFILL_CHUNK} tokens"
            yield Line.reserved("scratch", "f32", self._spread, self.scratch_bytes, words)
        ways = sum(rate > 0 for rate in self.device.k_cpu) + len(self.device.apart)
        if ways:
            hybrid = self.prefill.hybrid
            passed = ways * 2 * self.model.spec.hidden * 3  # bf16 inputs, f32 sums
            layers = {each.layer for each in self.device.apart}
            layers |= set(self.stack.moe[np.array(self.device.k_cpu) > 0].tolist())
            words = f"to the CPU and back in {len(layers)} layers"
            each, many = hybrid.handover_s(1), hybrid.handover_s(self._chunk) / self._chunk
            yield Line("hand-overs", "", "link", 0, passed, ways * each, ways * many, words)
        if self.adapter_bytes:
            words, name = "all that are loaded", ModelPart.ADAPTERS.value
            yield Line.reserved(name, "bf16", self._spread, self.adapter_bytes, words)
        passing = "what passes to and from the GPU"
        yield Line.reserved("pinned buffers", "", self._spread, self.pinned_bytes, passing)
        others = f"the program, torch; {gib(self.host.margin_bytes)} for other programs"
        rest = PROCESS_BYTES + TORCH_BYTES + self.host.margin_bytes
        yield Line.reserved("process, margin", "", self._spread, rest, others)

    @property
    def _spread(self) -> str:
        return self.host.spread_words

    # --- sentences ---

    def reasons(self) -> Iterator[str]:
        """Yields sentences with the reasons for the placement of experts, the depth of deferral and the streaming of
        prompts.
        """
        device, request = self.device, self.request
        if self.choice.reason:
            yield self.choice.reason
        if (room := request.use.adapters) is not None and room.experts_bytes:
            yield "the adapter changes routed experts, so all of them stay in main memory"
        if device.apart:
            yield (
                f"no prompt is streamed: in {len({each.layer for each in device.apart})} layers, every token waits for"
                f" the CPU; deferral {_depth_words(device)}"
            )
            return
        if not device.times.expert_s:
            yield "all experts are on the GPU: nothing is deferred or streamed"
            return
        asked = " as requested" if request.defer is not None else ""
        yield (
            f"deferral {_depth_words(device)}{asked}: the GPU needs {device.times.device_s * 1e6:.0f} µs per layer"
            f" before experts, the CPU {device.times.expert_s * 1e6:.0f} µs per expert"
        )
        copied = sum(
            (self.stack.experts - n) * size
            for n, size in zip(device.n_experts, self.stack.room(0).sizes, strict=True)
        )
        once = f"a pass copies {gib(copied)} in {copied / self.prefill.copy_bps:.1f} s"
        if device.streams:
            yield f"prompts from {device.prefill_threshold} tokens on are streamed: {once}"
        else:
            yield f"no prompt is streamed: {once}"


def _resident_words(device: DevicePlan) -> str:
    counts = device.n_experts
    least, most = min(counts), max(counts)
    each = f"{most}" if least == most else f"{least} to {most}"
    return f"{device.rule}: {each} of {device.experts} per layer, {device.hit_rate:.0%} of the hits"


def _depth_words(device: DevicePlan) -> str:
    first, *later = device.depths
    return ", ".join([str(first[1]), *(f"{depth} from {start} on" for start, depth in later)])
