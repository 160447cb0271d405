"""What a run will train, read and need, before anything is loaded: pure, from a model's declarations and its samples.

`memory` says what takes memory, `forecast` predicts how long a step takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil

from ktcli.errors import KtError, NotEnoughMemory, gib
from ktcli.finetune.device_forecast import DeviceForecaster
from ktcli.finetune.forecast import Forecaster, StepLoad
from ktcli.finetune.memory import FinetuneSizes, MemoryPart, RunMemory, total_bytes
from ktcli.finetune.order import StepOrder, units_of
from ktcli.finetune.settings import HALF_MOMENTS, FinetuneSettings
from ktcli.hardware.machine import Gpu
from ktcli.models import Model
from ktcli.ops.part import ModelPart
from ktcli.planner.cost import Rates
from ktcli.planner.device_cost import device_rates
from ktcli.planner.spec import weight_bytes
from ktcli.records import dataclass
from ktcli.samples.sample import DropCount, Sample, SampleSet
from ktcli.training.lora import LoraSettings, TrainedFactors, described_factors
from ktcli.weights.recipe import Recipe

# Bytes of a trained number in a checkpoint: its value, and its two moments in f32.
_VALUE, _MOMENTS = 4, 8
_UNTRIED = "fine-tuning has not run on a GPU yet"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """The adapter's factors in one part of a model.

    Attributes:
        matrices: their number; those of each expert count.
        parameters: the numbers of their factors.
    """

    part: str
    matrices: int
    parameters: int


@dataclass(frozen=True, slots=True)
class GpuShare:
    """What a GPU does of a run: attention and dense parts.

    Attributes:
        index: its number. name: for people.
        memory: what takes its memory, and `available_bytes` of it there are.
        resident: the layers whose dense weights are there all the time, of `layers`; others come when their turn does.
    """

    index: int
    name: str
    memory: tuple[MemoryPart, ...]
    available_bytes: int
    resident: int
    layers: int

    @property
    def need_bytes(self) -> int:
        """The bytes of the GPU's memory that the run takes."""
        return total_bytes(self.memory)

    @property
    def fits(self) -> bool:
        """Whether the GPU has enough free memory for the run."""
        return self.need_bytes <= self.available_bytes


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
        step_s: the predicted seconds of a mean step, without the data of a full one. evaluation_s: those of an
            evaluation, of which there are `evaluations`; None: not known without the data.
        gpu: what a GPU does; None: the CPU does everything.
        assumed: whether the times follow from rates that nobody measured; `basis` says where these come from.
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
    step_s: float | None = None
    evaluation_s: float | None = None
    evaluations: int = 0
    assumed: bool = True
    basis: str = ""
    gpu: GpuShare | None = None

    @property
    def parameters(self) -> int:
        """The number of trained parameters: of the LoRA factors of all parts."""
        return sum(each.parameters for each in self.parts)

    @property
    def need_bytes(self) -> int:
        """The bytes of main memory that the run takes."""
        return total_bytes(self.memory)

    @property
    def run_s(self) -> float | None:
        """The predicted seconds of all optimizer steps and evaluations of the run; None: unknown, as the data was not
        read.
        """
        if self.step_s is None or self.steps is None:
            return None
        return self.steps * self.step_s + self.evaluations * (self.evaluation_s or 0.0)

    @property
    def fits(self) -> bool:
        """Whether main memory, and that of the GPU if one is used, suffice for the run."""
        return self.need_bytes <= self.available_bytes and (self.gpu is None or self.gpu.fits)

    def require(self) -> None:
        """Raises an error if the run does not fit into main memory, or into that of the GPU if one is used.

        Raises:
            NotEnoughMemory: the run does not fit; the hint says what would.
        """
        gpu = self.gpu
        if gpu is not None and not gpu.fits:
            what = f"fine-tuning {self.model} on {gpu.name}"
            raise NotEnoughMemory(what, gpu.need_bytes, gpu.available_bytes, hint=self.advice)
        if not self.fits:
            raise NotEnoughMemory(
                f"fine-tuning {self.model}", self.need_bytes, self.available_bytes, hint=self.advice
            )


@dataclass(frozen=True)
class PlannedModel:
    """A model to be trained, and the memory of the machine.

    Attributes:
        name: for people.
        rates, isa: of the machine's threads, and their row of kernels.
        gpu: what computes attention and dense parts; None: the CPU.
    """

    name: str
    model: Model
    recipe: Recipe
    available_bytes: int
    rates: Rates
    isa: str
    gpu: Gpu | None = None

    @cached_property
    def sizes(self) -> FinetuneSizes:
        """The sizes of the model and of its weights in bytes, on which the memory of a run depends."""
        return FinetuneSizes.of(self.model, self.recipe)


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
        """The samples for evaluation: those of the data that are held out, then those of separate files."""
        separate = self.separate.samples if self.separate else ()
        return [*(self.read.samples[number] for number in self.held), *separate]


def lora_of(settings: FinetuneSettings) -> LoraSettings:
    """Returns the LoRA options (rank, alpha, targets, rsLoRA, seed, dropout) of fine-tuning settings."""
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
    """Returns the plan of a fine-tuning run: trained parameters, memory, steps and predicted times; with advice on what
    would fit if it does not.

    Args:
        data: the samples of the run; None: every step is taken to have documents of `cutoff_len` tokens.
    Raises:
        UsageError: the settings name no target of the model, or a rank exceeds a dimension.
    """
    tokens = settings.documents * settings.cutoff_len if data is None else most_tokens(data)
    evaluated = 0 if data is None else most_evaluated(data, settings)
    made = _planned(about, settings, tokens, evaluated)
    if data is not None:
        made = _with_data(made, settings, data)
    made = _with_times(made, about, settings, data)
    return made if made.fits else replace(made, advice=_advice(about, settings, tokens))


def most_tokens(data: TrainingSplit) -> int:
    """Returns the most tokens of an optimizer step: the sum over as many of the longest units (samples, or packed rows
    of samples) as it has."""
    lengths = [len(each.ids) for each in data.read.samples]
    units = sorted((sum(lengths[n] for n in unit) for unit in data.order.units), reverse=True)
    return sum(units[: data.order.per_step])


def evaluation_size(settings: FinetuneSettings) -> int:
    """Returns the number of held-out samples whose loss is computed together: at most the units of a step."""
    return min(settings.per_device_eval_batch_size, settings.documents)


def most_evaluated(data: TrainingSplit, settings: FinetuneSettings) -> int:
    """Returns the most tokens of held-out samples whose loss is computed together; 0 if there are none."""
    lengths, size = [len(each.ids) for each in data.evaluated], evaluation_size(settings)
    return max(
        (sum(lengths[first : first + size]) for first in range(0, len(lengths), size)), default=0
    )


def evaluations(settings: FinetuneSettings, steps: int, per_epoch: int) -> int:
    """Returns the number of evaluations in a run of `steps` steps that has held-out samples, the one after the last
    step included; 0 if the settings ask for none.
    """
    each = settings.evaluated_each(per_epoch)
    return 0 if each is None else ceil(steps / each)


def _planned(
    about: PlannedModel, settings: FinetuneSettings, tokens: int, evaluated: int = 0
) -> FinetunePlan:
    factors = described_factors(about.model, lora_of(settings))
    parts = _parts(factors)
    on_disk = sum(each.parameters for each in parts)
    memory = RunMemory(about.sizes, settings, factors, tokens, evaluated)
    gpu = None if about.gpu is None else _gpu_share(about.gpu, memory)
    return FinetunePlan(
        about.name,
        settings.lora_rank,
        parts,
        memory.alone() if gpu is None else memory.beside(gpu.resident),
        about.available_bytes,
        tokens,
        settings.documents,
        (_VALUE + _MOMENTS // (1 + settings.has_half_moments)) * on_disk,
        settings.save_total_limit,
        gpu=gpu,
    )


def _gpu_share(gpu: Gpu, memory: RunMemory) -> GpuShare:
    resident = memory.resident(gpu)
    parts = memory.on_device(resident, gpu.vram_bytes)
    name = f"{gpu.name} (cuda:{gpu.index})"
    return GpuShare(gpu.index, name, parts, gpu.free_bytes, resident, memory.sizes.spec.layers)


def _parts(factors: Sequence[TrainedFactors]) -> tuple[TrainedPart, ...]:
    """What is trained, in the order of the parts of a model."""
    parameters, matrices = Counter[ModelPart](), Counter[ModelPart]()
    for each in factors:
        parameters[each.target.part] += each.parameters
        matrices[each.target.part] += each.target.count
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
        trained_tokens=sum(each.trained_tokens for each in chosen),
        steps=order.steps(settings),
        per_epoch=order.steps_per_epoch,
        dropped=data.read.dropped,
    )


def _with_times(
    made: FinetunePlan,
    about: PlannedModel,
    settings: FinetuneSettings,
    data: TrainingSplit | None,
) -> FinetunePlan:
    """The plan with the predicted times."""
    factors = described_factors(about.model, lora_of(settings))
    forecast = _forecaster(about, factors, made)
    length, count = settings.cutoff_len, settings.documents
    load, held, times = StepLoad(((length, count),), length * count), None, 0
    if data is not None and made.steps is not None and made.per_epoch is not None:
        chosen = (data.read.samples[number] for unit in data.order.units for number in unit)
        load = StepLoad.of((len(each.ids) for each in chosen), made.trained_tokens, made.per_epoch)
        if data.evaluated:
            trained = sum(each.trained_tokens for each in data.evaluated)
            whole = StepLoad.of((len(each.ids) for each in data.evaluated), trained, 1)
            batches = ceil(len(data.evaluated) / evaluation_size(settings))
            held = batches * forecast.evaluation_s(whole.shared(batches))
            times = evaluations(settings, made.steps, made.per_epoch)
    rates = about.rates
    return replace(
        made,
        step_s=forecast.step(load, retain=settings.retains).step_s,
        evaluation_s=held,
        evaluations=times,
        assumed=not rates.measured or about.gpu is not None,
        basis=rates.basis
        if about.gpu is None
        else f"{rates.basis}; {device_rates(about.gpu).basis}; {_UNTRIED}",
    )


def _forecaster(
    about: PlannedModel, factors: Sequence[TrainedFactors], made: FinetunePlan
) -> Forecaster:
    given = about.model, about.recipe, about.rates, about.isa, factors
    if about.gpu is None or made.gpu is None:
        return Forecaster(*given)
    streamed = sum(about.sizes.dense[made.gpu.resident : -1])
    return DeviceForecaster(*given, device_rates(about.gpu), streamed)


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
    if fits(replace(settings, optim=HALF_MOMENTS), tokens):
        found.append(f"optim={HALF_MOMENTS}")
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
    if about.gpu is not None and _planned(replace(about, gpu=None), settings, tokens).fits:
        found.append("--device cpu")
    if not found:
        return f"its weights alone take {gib(weight_bytes(about.model, about.recipe))}: kt convert MODEL --experts int4"
    return f"this would fit: {'; or '.join(found)}"


def order_of(read: SampleSet, settings: FinetuneSettings, numbers: Sequence[int]) -> StepOrder:
    """Returns the order in which the samples with the indices `numbers` are trained: in units of one sample or, with
    `settings.packs`, of several packed together. An optimizer step gets `settings.documents` units; they are shuffled
    anew for each epoch.
    """
    lengths = [len(each.ids) for each in read.samples]
    units = units_of(lengths, numbers, settings.cutoff_len, packs=settings.packs)
    return StepOrder(units, settings.documents, settings.seed)
