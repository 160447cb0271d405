"""Predicts how long an optimizer step takes: pure, from a model's declarations, a machine's rates, and what a step has.

The products of layers and of the head do their operations at shares of the arithmetic peaks; all else but attention
passes over the numbers of rows at the speed of memory. These shares were measured once, as seconds of one core: an
Intel Xeon (Emerald Rapids, row `avx512`), a layer of qwen3-30b-a3b, 256 to 2,048 tokens, rank 8, 2026-11-28. Elsewhere
they are assumed to be the same; with tiles, those of `planner.cost` are, which nobody has measured for training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ktcli.models import Model
from ktcli.ops.part import ModelPart
from ktcli.planner.cost import READ_SHARE, TILE_GAIN, TILE_SHARE, Rates
from ktcli.planner.spec import PartWork, StepShape, Unit, cache_work, step_work
from ktcli.records import dataclass
from ktcli.training.lora import TrainedFactors
from ktcli.training.loss import chunk_rows
from ktcli.training.model import USUAL
from ktcli.training.recorded import dense_elements, layer_works, products_of
from ktcli.weights.recipe import Recipe

_FORWARD = {Unit.INT8: 0.40, Unit.BF16: 0.55, Unit.F32: 0.05}  # of the peak of each
# A block of weights is decoded and turned once for all rows of its product: that costs as much as so many rows do.
_BACKWARD, _TURNED_ROWS = 0.48, 9.0
_FACTORS = 0.07 / 8  # what a rank adds to the backward pass of experts
_ATTENTION = 0.25  # of the peak in f32, which is torch's
_ATTENDED = 3.5  # the operations of attention forward and backward, of those forward
_BYTES = 420  # that pass through memory for each number of a row and layer, in all three passes
_FORWARD_BYTES = 80  # of these in a forward pass
HEAD_BYTES = 40  # for each logit
NUMBER_BYTES = 170  # for each trained number: AdamW, its norm, whether it is finite
_OPERATION_S = 450e-6  # of an operation in each pass, however few rows it has
_PASSES = 3  # over a layer: forward, again, backward
_WIDE = {"amx": 2.0 * TILE_GAIN, "avx512bf16": 2.0}  # operations in bf16 for one in f32, by rows


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The documents of a step: the sizes that its time depends on.

    Attributes:
        lengths: the tokens of documents, with their number, which may be a fraction: of a mean step.
        trained: the tokens whose logits are computed.
    """

    lengths: tuple[tuple[int, float], ...]
    trained: float

    @property
    def tokens(self) -> float:
        """The number of tokens of all documents of the step; a fraction for a mean step."""
        return sum(length * count for length, count in self.lengths)

    @classmethod
    def of(cls, lengths: Iterable[int], trained: int, steps: int) -> StepLoad:
        """Returns the load of the mean step of `steps` steps that together have documents of these lengths (tokens
        each) and `trained` trained tokens.
        """
        counted = Counter(lengths)
        return cls(
            tuple((length, n / steps) for length, n in sorted(counted.items())), trained / steps
        )

    def shared(self, parts: int) -> StepLoad:
        """Returns the load of one of `parts` equal parts of the step."""
        lengths = tuple((length, count / parts) for length, count in self.lengths)
        return StepLoad(lengths, self.trained / parts)


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The predicted seconds of a step.

    Attributes:
        layers_s, head_s: those of the forward and backward pass. optimizer_s: those of AdamW.
    """

    layers_s: float
    head_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """The predicted seconds of the whole step: layers, output head and optimizer."""
        return self.layers_s + self.head_s + self.optimizer_s


@dataclass(frozen=True)
class Forecaster:
    """A model on a machine, whose steps are predicted.

    Attributes:
        rates: of all threads.
        isa: the row of kernels.
        factors: what is trained.
    """

    model: Model
    recipe: Recipe
    rates: Rates
    isa: str
    factors: Sequence[TrainedFactors]

    def step(self, load: StepLoad, *, retain: bool) -> StepForecast:
        """Returns the predicted seconds of an optimizer step with these documents: of the layers, the output head and
        the optimizer.

        Args:
            retain: whether the activations inside layers are kept, so that no layer is computed again in the backward
                pass.
        """
        works = self._works(load.tokens)
        forward = sum(self._forward_s(each, load.tokens) for each in works)
        added = products_of(self.model).added
        kept = added.count(False) / len(added) if added else 1.0  # sums that are computed again
        again = sum(
            self._forward_s(each, load.tokens) * (kept if each.part is ModelPart.EXPERTS else 1.0)
            for each in works
        )
        backward = sum(self._backward_s(each, load.tokens) for each in works)
        attention = self._attention_s(load, _ATTENDED + (0.0 if retain else 1.0))
        passes = _PASSES - retain
        layers = forward + (0.0 if retain else again) + backward + attention
        layers += self._rows_s(load.tokens, _BYTES * passes / _PASSES, passes)
        return StepForecast(layers, self._head_s(load.trained, backward=True), self._optimizer_s())

    def evaluation_s(self, load: StepLoad) -> float:
        """Returns the predicted seconds of a forward pass with its loss, without gradients, over these documents."""
        layers = sum(self._forward_s(each, load.tokens) for each in self._works(load.tokens))
        layers += self._rows_s(load.tokens, _FORWARD_BYTES, 1)
        layers += self._attention_s(load, 1.0)
        return layers + self._head_s(load.trained, backward=False)

    # --- products -----------------------------------------------------------------------------------

    def _works(self, tokens: float) -> list[PartWork]:
        """The products of all layers."""
        return layer_works(self.model, self.recipe, max(1, round(tokens)))

    def _forward_s(self, work: PartWork, tokens: float) -> float:
        pieces = -(-tokens // USUAL.max_rows)
        reading = pieces * work.read_bytes / (self.rates.read_bps * READ_SHARE)
        return reading + work.ops / self._reached(work.unit, _FORWARD[work.unit])

    def _backward_s(self, work: PartWork, tokens: float) -> float:
        rows, ops, again = min(tokens, USUAL.max_rows), float(work.ops), 0.0
        if work.part is ModelPart.EXPERTS:
            spec = self.model.spec
            rows *= spec.top_k / spec.experts
            again = 2 / 3 * ops / self._reached(work.unit, _FORWARD[work.unit])  # gate and up
            ranks = max((each.rank for each in self.factors if each.target.count > 1), default=0)
            ops *= 1 + _FACTORS * ranks
        turned = 1 + _TURNED_ROWS / rows
        pieces = -(-tokens // USUAL.max_rows)
        reading = pieces * work.read_bytes / (self.rates.read_bps * READ_SHARE)
        return reading + again + turned * ops / self._reached(Unit.BF16, _BACKWARD)

    def _reached(self, unit: Unit, share: float) -> float:
        """The operations per second of native products that reach this share of a peak without tiles."""
        peak = self.rates.int8_ops if unit is Unit.INT8 else self.rates.bf16_ops
        return peak * (TILE_SHARE.get(unit, share) if self.rates.tiles else share)

    @property
    def _head(self) -> PartWork | None:
        """The work of the head for one token; None: it has none."""
        whole = step_work(self.model, self.recipe, StepShape(1, outputs=1))
        return next((each for each in whole if each.part is ModelPart.HEAD), None)

    def _head_s(self, trained: float, *, backward: bool) -> float:
        spec, one = self.model.spec, self._head
        if one is None:
            return 0.0
        chunk = min(trained, chunk_rows(spec.vocab)) or 1.0
        pieces = -(-trained // chunk)
        reading = pieces * one.read_bytes / (self.rates.read_bps * READ_SHARE)
        ops = one.ops * trained
        found = reading + ops / self._reached(one.unit, _FORWARD[one.unit])
        if backward:
            turned = 1 + _TURNED_ROWS / chunk
            found += reading + turned * ops / self._reached(Unit.BF16, _BACKWARD)
        return found + self._moved_s(HEAD_BYTES * trained * spec.vocab)

    # --- all else -----------------------------------------------------------------------------------

    def _attention_s(self, load: StepLoad, times: float) -> float:
        states = self.model.spec.states
        ops = sum(count * cache_work(states, 0, length)[1] for length, count in load.lengths)
        peak = self.rates.bf16_ops / _WIDE.get(self.isa, 1.0)
        return times * ops / (peak * _ATTENTION)

    def _rows_s(self, tokens: float, each_bytes: float, passes: float) -> float:
        operations = passes * self.model.operations * _OPERATION_S
        return operations + self._moved_s(each_bytes * tokens * row_elements(self.model))

    def _optimizer_s(self) -> float:
        return self._moved_s(NUMBER_BYTES * sum(each.numbers for each in self.factors))

    def _moved_s(self, size_bytes: float) -> float:
        return size_bytes / self.rates.read_bps


def row_elements(model: Model) -> int:
    """Returns the number of elements of one token in the results of all dense products and in three residuals of each
    layer, as a measure of what a step moves through memory.
    """
    return dense_elements(model).total() + 3 * model.spec.hidden * model.spec.layers
