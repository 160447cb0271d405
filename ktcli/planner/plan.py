"""The question to the planner and its answer, as frozen data.

A plan explains itself: each line carries its bytes, its reason and its predicted time; a plan that does not
fit says what would; what somebody forced says what it costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field

import numpy as np

from ktcli.errors import NotEnoughMemory, predicted
from ktcli.hardware.gpu import AUTO
from ktcli.hardware.machine import Gpu
from ktcli.ops.part import LayerPart, RowOf
from ktcli.planner.deferral import Times
from ktcli.planner.device_cost import DeviceRates
from ktcli.planner.experts import ExpertChoice, Heat, Mask
from ktcli.planner.host import Host
from ktcli.planner.memory import TALK, Use
from ktcli.planner.nodes import NodeNeed
from ktcli.planner.prefill import NEVER
from ktcli.planner.rules import PlacementRules
from ktcli.planner.slices import ExpertTeams
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe

ON_GPU = "GPU"  # where a line lies: on the GPUs in use, together
EARLY_TOKENS = 512  # where in a chat the first predicted decode speed is taken


def early_position(context: int) -> int:
    """Returns the position in a context at which the decode speed early in a chat is predicted: EARLY_TOKENS, or the
    last position if the context is shorter.
    """
    return min(EARLY_TOKENS, context - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The wishes of the user; None: the plan decides.

    Attributes:
        recipe: the number formats.
        context: the positions to reserve; None: `memory.default_context`.
        device: "auto" (GPUs if that is faster), "cpu", "cuda" or "cuda:N".
        gpus: the numbers of the GPUs that may be used, in the order in which they take layers; None: all, those with
            most memory free first.
        gpu_experts: the experts on the GPU: a number per layer, "uniform", "front", "hot", or a mask.
        defer: the depth of deferral.
        prefill_threshold: the tokens from which on a chunk of a prompt is streamed; `prefill.NEVER`: none.
        heat: how often each expert was chosen, [MoE layers, E]; None: nobody counted.
        limits: the most bytes of a GPU's memory that the plan may take, by its number; of others, all that are free.
        times: t_e and T_g at `device_cost.MEASURED_AT` positions, measured with this machine.
        use: what the engine is used for; with a GPU all but `streams` is as in TALK.
        rules: what somebody placed; the plan decides the rest. None: everything.
    """

    recipe: Recipe = field(default_factory=Recipe)
    context: int | None = None
    device: str = AUTO
    gpus: tuple[int, ...] | None = None
    gpu_experts: ExpertChoice = None
    defer: int | None = None
    prefill_threshold: int | None = None
    heat: Heat | None = None
    limits: Mapping[int, int] = field(default_factory=dict)
    times: Times | None = None
    use: Use = TALK
    rules: PlacementRules | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the plan: a part of the model, its place and its bytes.

    Attributes:
        where: the memory it lies in: "GPU", "memory" (anywhere), or which nodes and how they share it.
        decode_bytes: the bytes read for one token at EARLY_TOKENS.
        decode_s, prefill_s: the predicted seconds in one decode step, and for one token of a prefill chunk.
    """

    part: str
    format: str
    where: str
    size_bytes: int
    decode_bytes: int
    decode_s: float
    prefill_s: float
    reason: str

    @classmethod
    def reserved(cls, name: str, fmt: str, where: str, size_bytes: int, reason: str) -> Line:
        """Returns a plan's line for memory that is not part of the model, such as scratch: no bytes are read and no
        time is taken.
        """
        return cls(name, fmt, where, size_bytes, 0, 0.0, 0.0, reason)


@dataclass(frozen=True, slots=True)
class Speed:
    """The predicted tokens per second: decode early in a chat and at the full context, and prefill."""

    decode: float
    decode_full: float
    prefill: float

    @classmethod
    def of(
        cls,
        context: int,
        chunk: int,
        decode_s: Callable[[int], float],
        prefill_s: Callable[[int], float],
    ) -> Speed:
        """Returns the predicted tokens per second: decode at `early_position` (EARLY_TOKENS, if the context is that
        long) and at the end of a context of `context` positions, and prefill of one chunk of a prompt.

        Args:
            chunk: the most tokens of a chunk of a prompt.
            decode_s: returns the seconds of one token at a position.
            prefill_s: returns the seconds of a prompt of so many tokens.
        """
        tokens = min(chunk, context)
        return cls(
            decode=1 / decode_s(early_position(context)),
            decode_full=1 / decode_s(context - 1),
            prefill=tokens / prefill_s(tokens),
        )


@dataclass(frozen=True, slots=True)
class Vram:
    """The bytes of a GPU's memory by use, or of that of several.

    Attributes:
        weights: the weights but the embedding and the routed experts.
        cache: the cache of the whole context.
        workspace: the activations of a chunk.
        stream: both buffers that streamed experts pass through.
        graph: captured graphs and workspaces of libraries.
        runtime: the CUDA context with its kernels.
        margin: the memory left free.
        experts: the resident experts.
    """

    weights: int
    cache: int
    workspace: int
    stream: int
    graph: int
    runtime: int
    margin: int
    experts: int

    @property
    def total(self) -> int:
        """The bytes of a GPU's memory for all uses together."""
        return sum(getattr(self, name) for name in self.__slots__)

    @classmethod
    def together(cls, each: Iterable[Vram]) -> Vram:
        """Returns the bytes of several GPUs' memories added up, use by use."""
        rows = list(each)
        return cls(*(sum(getattr(row, name) for row in rows) for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Consecutive layers, and the GPU that they are on.

    Attributes:
        layers: their numbers.
        need: the bytes of the GPU's memory, part by part.
        budget_bytes: the bytes of it that the plan may take.
    """

    gpu: Gpu
    layers: range
    need: Vram
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The work of the GPUs in use: of one, or of several with consecutive layers.

    Attributes:
        segments: the GPUs with their layers, in the order of these.
        resident: the ids of the experts on a GPU, for each MoE layer.
        experts: E, the experts of a layer.
        rule: how the resident experts were chosen: "all", "uniform", "front", "hot" or "mask".
        hit_rate: the share of all chosen experts that lie there.
        k_cpu: the expected experts per token on the CPU, for each MoE layer.
        depths: pairs (position, depth of deferral from there on); positions ascend from 0.
        prefill_threshold: the tokens from which on a chunk of a prompt is streamed; NEVER: none is.
        chunk: the most tokens of a chunk that stays on the GPU; with experts on the CPU it is PREFILL_CHUNK.
        stream_experts: the experts that one of a GPU's two stream buffers holds; 0: nothing is streamed.
        times: t_e, T_g and T_s of an average layer at the beginning of a chat.
        rates: the rates of the slowest GPU.
        cpu_busy, gpu_busy: the share of a predicted decode step that the CPU and any GPU is at work.
        reasons: the reasons of the decisions, a sentence each.
        undeferred: the predicted tokens per second early in a chat without deferral; None: nothing is deferred.
        apart: the MLPs of layers that rules keep in main memory, where the CPU computes them.
    """

    segments: tuple[SegmentPlan, ...]
    resident: tuple[tuple[int, ...], ...]
    experts: int
    rule: str
    hit_rate: float
    k_cpu: tuple[float, ...]
    depths: tuple[tuple[int, int], ...]
    prefill_threshold: int
    chunk: int
    stream_experts: int
    times: Times
    rates: DeviceRates
    cpu_busy: float
    gpu_busy: float
    reasons: tuple[str, ...]
    undeferred: float | None = None
    apart: frozenset[LayerPart] = frozenset()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs in use, in the order of their layers."""
        return tuple(each.gpu for each in self.segments)

    @property
    def names(self) -> str:
        """The names of the GPUs, for people: "NVIDIA L20", "2 x NVIDIA L20"."""
        counts = Counter(gpu.name for gpu in self.gpus)
        return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())

    @property
    def need(self) -> Vram:
        """The bytes of the memories of all GPUs in use added up, use by use."""
        return Vram.together(each.need for each in self.segments)

    @property
    def borders(self) -> tuple[int, ...]:
        """For each GPU in use but the first, the number of its first layer."""
        return tuple(each.layers.start for each in self.segments[1:])

    @property
    def mask(self) -> Mask:
        """The experts on a GPU as a mask, [MoE layers, E] bool; True: on a GPU."""
        mask = np.zeros((len(self.resident), self.experts), np.bool_)
        for row, ids in zip(mask, self.resident, strict=True):
            row[list(ids)] = True
        return mask

    @property
    def n_experts(self) -> tuple[int, ...]:
        """The number of routed experts that are on a GPU, for each MoE layer."""
        return tuple(map(len, self.resident))

    @property
    def streams(self) -> bool:
        """Whether experts are streamed to the GPU for prompts that are long enough."""
        return self.prefill_threshold != NEVER and self.stream_experts > 0

    @property
    def depth(self) -> int:
        """The number of a token's experts that are deferred by one layer at the beginning of a chat."""
        return self.depths[0][1]


@dataclass(frozen=True, slots=True)
class Cost:
    """The effect of a forced option on the speed.

    Attributes:
        option: the option as typed, e.g. "--defer 0".
        what: the speed: "decode" or "prefill".
        own, forced: the predicted tokens per second as the plan would choose, and as it was forced.
        memory_bytes, device_bytes: by how much it changes the bytes of main memory and of all GPUs; None: not said.
    """

    option: str
    what: str
    own: float
    forced: float
    memory_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Lever:
    """A change of the request, and its effect on the plan.

    Attributes:
        options: as typed: "--experts int4-row-had"; "": nothing that can be typed.
        text: the clause for people, with the figures of its plan.
        plan: the plan that it gives; None: there is none.
    """

    options: str
    text: str
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of `place`: whether a model fits a machine, the place of each part, and the predicted speed.

    Attributes:
        need_bytes: the bytes of memory that the plan takes.
        advice: what would make a refused plan fit, the smallest sacrifice first; of one that fits what would be better,
            where that was asked (`placement.advised`).
        nodes: the bytes that each node must hold; (): no memory is bound to a node.
        traffic_bytes: the bytes of activations that pass between the teams per decoded token
            (`nodes.traffic_bytes`); 0 with one team.
        device: the work of the GPU; None: every layer runs on the CPU.
        notes: what the user should know, a sentence each.
        costs: the effects of the forced options.
        use: what the engine is used for.
        defer: the depth of deferral where every layer runs on the CPU.
        experts_on: the teams that have the experts of some layers in main memory; of the others all teams have a share.
        rows: the rows of kernels of some parts that the CPU computes.
    """

    host: Host
    recipe: Recipe
    context: int
    lines: tuple[Line, ...]
    need_bytes: int
    speed: Speed
    advice: tuple[Lever, ...]
    nodes: tuple[NodeNeed, ...] = ()
    traffic_bytes: int = 0
    device: DevicePlan | None = None
    notes: tuple[str, ...] = ()
    costs: tuple[Cost, ...] = ()
    use: Use = TALK
    defer: int = 0
    experts_on: ExpertTeams = field(default_factory=dict)
    rows: RowOf = field(default_factory=dict)

    @property
    def depths(self) -> tuple[tuple[int, int], ...]:
        """The pairs (position, number of a token's experts that are deferred from there on); positions ascend from
        0.
        """
        return ((0, self.defer),) if self.device is None else self.device.depths

    @property
    def fits(self) -> bool:
        """Whether the main memory that is available holds the plan's bytes, in all and on each NUMA node."""
        return self.need_bytes <= self.host.available_bytes and all(n.fits for n in self.nodes)

    @property
    def measured(self) -> bool:
        """Whether the predicted speeds follow from measured rates of the machine alone; else some rates are assumed."""
        return self.host.rates.measured and (self.device is None or self.device.rates.measured)

    def rate(self, tok_s: float) -> str:
        """Returns a predicted speed in tokens per second as text for people: "41", or "~41" where it follows from
        assumed rates.
        """
        return f"{'' if self.measured else '~'}{predicted(tok_s)}"

    @property
    def speed_words(self) -> str:
        """The predicted decode speed as text for people: "~41 tokens/s (~28 with --defer 0)"; one figure where both are
        alike or nothing is deferred.
        """
        plain = self.device.undeferred if self.device is not None else None
        said = self.rate(self.speed.decode)
        without = "" if plain is None or self.rate(plain) == said else self.rate(plain)
        return f"{said} tokens/s{f' ({without} with --defer 0)' if without else ''}"

    def require(self, what: str) -> None:
        """Raises an error if the plan does not fit into main memory.

        Args:
            what: what does not fit, for the message.
        Raises:
            NotEnoughMemory: the plan does not fit; the hint says what would make it fit.
        """
        hint = "; ".join(lever.text for lever in self.advice)
        if self.need_bytes > self.host.available_bytes:
            raise NotEnoughMemory(what, self.need_bytes, self.host.available_bytes, hint=hint)
        for each in self.nodes:
            if not each.fits:
                raise NotEnoughMemory(
                    what, each.need_bytes, each.free_bytes, node=each.node, hint=hint
                )
