"""What a run will train, read and need, before anything is loaded: pure, from a model's declarations and its samples.

Memory is the weights as a chat has them, 16 bytes for each number of the factors (value, gradient, two moments), the
residual before each layer, the graph of one layer, the buffers of the native products, and a chunk of logits. The graph
is an estimate from measured peaks. How long a step takes is measured, not predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from ktcli.errors import KtError, NotEnoughMemory, gib
from ktcli.finetune.order import StepOrder, units_of
from ktcli.finetune.settings import FinetuneSettings
from ktcli.models import Model
from ktcli.ops.part import ModelPart
from ktcli.ops.recording import record
from ktcli.ops.table.rowwise import Linear
from ktcli.planner.spec import weight_bytes
from ktcli.samples.sample import DropCount, Sample, SampleSet
from ktcli.training.lora import DenseFactors, LoraSettings, TrainedFactors, described_factors
from ktcli.training.loss import CHUNK_ELEMENTS
from ktcli.training.model import USUAL
from ktcli.training.recorded import products_of
from ktcli.weights.recipe import Recipe

_ON_DISK = 12  # bytes of a trained number in a checkpoint: its value and two moments
_PER_NUMBER = 16
# Numbers in the graph of a layer for each that its dense products give: copies, their gradients, and attention. So
# fitted to measured peaks of steps of 256 to 4,096 tokens through two or three layers of the shapes of qwen3-30b-a3b,
# qwen3-4b, deepseek-v2-lite and gpt-oss-20b; the plan is 6 % below to 2 % above these.
_COPIES = 4.5
_THINNED_BYTES = 5  # of a number of which dropout keeps or drops a copy: that, and which
# The interpreter with torch, 370 MiB, and what a step of few tokens adds to it.
_PROCESS_BYTES = 512 << 20
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """What is trained of one part of a model.

    Attributes:
        matrices: their number; those of each expert count.
        parameters: the numbers of their factors.
    """

    part: str
    matrices: int
    parameters: int


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """What takes memory during a run."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FinetunePlan:
    """The plan of a run.

    Attributes:
        model: its name for people, with formats.
        parts: what is trained.
        memory: what takes memory, and `available_bytes` of it there are.
        samples, evaluated: those that are trained, and those held out; None: the data was not read.
        tokens: those of an epoch. trained_tokens: those of them that are trained.
        step_tokens: the most of a step.
        steps, per_epoch: of the whole run, and of an epoch; None: not known without the data.
        documents: of a step.
        dropped: rows that became no sample.
        checkpoint_bytes, kept: the size of a checkpoint, and how many are kept.
    """

    model: str
    rank: int
    parts: tuple[TrainedPart, ...]
    memory: tuple[MemoryPart, ...]
    available_bytes: int
    step_tokens: int
    documents: int
    checkpoint_bytes: int
    kept: int | None
    samples: int | None = None
    evaluated: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    steps: int | None = None
    per_epoch: int | None = None
    dropped: tuple[DropCount, ...] = ()
    advice: str = ""

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        return sum(each.parameters for each in self.parts)

    @property
    def need_bytes(self) -> int:
        """The bytes of memory that the run takes."""
        return sum(each.size_bytes for each in self.memory)

    @property
    def fits(self) -> bool:
        """Whether there is enough memory."""
        return self.need_bytes <= self.available_bytes

    def require(self) -> None:
        """Raises NotEnoughMemory if it does not fit.

        Raises:
            NotEnoughMemory: it does not; the hint has what would fit.
        """
        if not self.fits:
            raise NotEnoughMemory(
                f"fine-tuning {self.model}", self.need_bytes, self.available_bytes, hint=self.advice
            )


@dataclass(frozen=True)
class PlannedModel:
    """A model to be trained, with the memory that there is.

    Attributes:
        name: for people.
    """

    name: str
    model: Model
    recipe: Recipe
    available_bytes: int

    @cached_property
    def elements(self) -> tuple[int, int]:
        """The numbers that a layer and the native products hold, `layer_elements` and `program_elements`."""
        return layer_elements(self.model), program_elements(self.model)


@dataclass(frozen=True, slots=True)
class TrainingSplit:
    """The samples of a run.

    Attributes:
        read: those of the data files. order: which of them each step takes.
        held: the numbers of those that are held out. separate: samples for evaluation of files of their own.
    """

    read: SampleSet
    order: StepOrder
    held: tuple[int, ...]
    separate: SampleSet | None = None

    @property
    def evaluated(self) -> list[Sample]:
        """The samples for evaluation."""
        separate = self.separate.samples if self.separate else ()
        return [*(self.read.samples[number] for number in self.held), *separate]


def lora_of(settings: FinetuneSettings) -> LoraSettings:
    """Returns what is trained, as `training` takes it."""
    return LoraSettings(
        settings.lora_rank,
        settings.alpha,
        settings.lora_target,
        settings.use_rslora,
        settings.seed,
        settings.lora_dropout,
    )


def plan_run(
    about: PlannedModel, settings: FinetuneSettings, data: TrainingSplit | None
) -> FinetunePlan:
    """Returns the plan of a run; with advice, if it does not fit.

    Args:
        data: None: every step is taken to have documents of `cutoff_len` tokens.
    Raises:
        UsageError: the settings name no target of the model, or a rank exceeds a dimension.
    """
    tokens = settings.documents * settings.cutoff_len if data is None else most_tokens(data)
    made = _planned(about, settings, tokens)
    if data is not None:
        made = _with_data(made, settings, data)
    return made if made.fits else replace(made, advice=_advice(about, settings, tokens))


def most_tokens(data: TrainingSplit) -> int:
    """Returns the most tokens that a step can have: those of its longest documents."""
    lengths = [len(each.ids) for each in data.read.samples]
    units = sorted((sum(lengths[n] for n in unit) for unit in data.order.units), reverse=True)
    return sum(units[: data.order.per_step])


def _planned(about: PlannedModel, settings: FinetuneSettings, tokens: int) -> FinetunePlan:
    factors = described_factors(about.model, lora_of(settings))
    parts = _parts(factors)
    on_disk = sum(each.parameters for each in parts)
    return FinetunePlan(
        about.name,
        settings.lora_rank,
        parts,
        _memory(about, settings, factors, tokens),
        about.available_bytes,
        tokens,
        settings.documents,
        _ON_DISK * on_disk,
        settings.save_total_limit,
    )


def _memory(
    about: PlannedModel,
    settings: FinetuneSettings,
    factors: Sequence[TrainedFactors],
    tokens: int,
) -> tuple[MemoryPart, ...]:
    spec, model = about.model.spec, about.model
    numbers = sum(each.a.numel() + each.b.numel() for each in factors)
    rows = min(tokens, USUAL.max_rows)
    of_layer, of_products = about.elements
    graph = round(_COPIES * of_layer) * tokens * 4
    if settings.lora_dropout:
        graph += _THINNED_BYTES * dropped_elements(factors) * tokens
    layers = "graphs of all layers, retained" if settings.retains else "graph of a layer"
    return (
        MemoryPart("weights", weight_bytes(model, about.recipe)),
        MemoryPart("factors, gradients, moments", _PER_NUMBER * numbers),
        MemoryPart("residuals of layers", 2 * tokens * spec.hidden * (spec.layers + 2)),
        MemoryPart(layers, graph * (spec.layers if settings.retains else 1)),
        MemoryPart("native products", of_products * rows * 4),
        MemoryPart("logits", 3 * 4 * CHUNK_ELEMENTS),
        MemoryPart("program", _PROCESS_BYTES),
    )


def program_elements(model: Model) -> int:
    """Returns the numbers that the native products hold of one row: the widest input, output and row of experts, and
    what the slots of its experts have forward and backward."""
    found = products_of(model)
    body = [each.weight for each in found.linear if each.weight.part is not ModelPart.HEAD]
    widest = max((each.k for each in body), default=0) + max((each.n for each in body), default=0)
    slots = max(
        (2 * each.gate_up.n + 2 * each.down.k + each.down.n for each in found.experts), default=0
    )
    rows = max((each.down.n for each in found.experts), default=0)
    return widest + rows + found.top_k * slots


def dropped_elements(factors: Sequence[TrainedFactors]) -> int:
    """Returns the numbers that the dense factors of a layer read of one row: each drops others of them."""
    found = Counter[int | None]()
    for each in factors:
        if isinstance(each, DenseFactors):
            found[each.layer] += each.target.k
    return max(found.values(), default=0)


def layer_elements(model: Model) -> int:
    """Returns the numbers that the dense products of a model's widest layer give for one token."""
    found = Counter[int]()
    for each in record(model.forward).records:
        if isinstance(each.operation, Linear) and each.layer is not None:
            found[each.layer] += each.operation.weight.n
    return max(found.values(), default=0)


def _parts(factors: Sequence[TrainedFactors]) -> tuple[TrainedPart, ...]:
    """What is trained, in the order of the parts of a model."""
    parameters, matrices = Counter[ModelPart](), Counter[ModelPart]()
    for each in factors:
        t = each.target
        parameters[t.part] += t.count * each.rank * (t.n + t.k)
        matrices[t.part] += t.count
    return tuple(
        TrainedPart(part.value, matrices[part], parameters[part])
        for part in ModelPart
        if matrices[part]
    )


def _with_data(made: FinetunePlan, settings: FinetuneSettings, data: TrainingSplit) -> FinetunePlan:
    order, samples = data.order, data.read.samples
    chosen = [samples[number] for unit in order.units for number in unit]
    return replace(
        made,
        samples=len(chosen),
        evaluated=len(data.evaluated),
        tokens=sum(len(each.ids) for each in chosen),
        trained_tokens=sum(sum(each.trained[1:]) for each in chosen),
        steps=order.steps(settings),
        per_epoch=order.steps_per_epoch,
        dropped=data.read.dropped,
    )


def _advice(about: PlannedModel, settings: FinetuneSettings, tokens: int) -> str:
    """What would fit: each of these alone."""

    def fits(changed: FinetuneSettings, tokens: int) -> bool:
        try:
            return _planned(about, changed, tokens).fits
        except KtError:
            return False

    found = []
    ranks = (settings.lora_rank >> shift for shift in range(1, 13))
    rank = next((r for r in ranks if r and fits(replace(settings, lora_rank=r), tokens)), None)
    if rank:
        found.append(f"lora_rank={rank}")
    if fits(replace(settings, lora_target=_ATTENTION), tokens):
        found.append(f"lora_target={','.join(_ATTENTION)}")
    shares = (2**-shift for shift in range(1, 12))
    share = next((s for s in shares if fits(settings, ceil(tokens * s))), None)
    if share:
        documents = max(1, int(settings.documents * share))
        if settings.documents * share >= 1:
            found.append(
                f"{documents} documents per step (gradient_accumulation_steps={documents} "
                "per_device_train_batch_size=1)"
            )
        found.append(f"cutoff_len={int(settings.cutoff_len * share)}")
    if settings.retains and fits(
        replace(settings, disable_gradient_checkpointing=False, kt_cpu_activation=None), tokens
    ):
        found.append("kt_cpu_activation=recompute")
    if not found:
        return f"its weights alone take {gib(weight_bytes(about.model, about.recipe))}: kt convert MODEL --experts int4"
    return f"this would fit: {'; or '.join(found)}"


def order_of(read: SampleSet, settings: FinetuneSettings, numbers: Sequence[int]) -> StepOrder:
    """Returns which of the samples with these numbers each step takes."""
    lengths = [len(each.ids) for each in read.samples]
    units = units_of(lengths, numbers, settings.cutoff_len, packs=settings.packs)
    return StepOrder(units, settings.documents, settings.seed)
