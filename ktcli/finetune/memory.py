"""What takes memory during a run, before anything is loaded: pure.

Memory is the weights as a chat has them, but for keys that only a chat reads, 16 bytes for each number of the factors
(value, gradient, two moments), the residual before each layer, the graph of the documents that are in one layer
together, the buffers of the native products, and a chunk of logits. The graph is an estimate from measured peaks. With
a GPU, that has the dense weights, their factors, the graph and the logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ktcli.finetune.settings import FinetuneSettings
from ktcli.hardware.machine import Gpu
from ktcli.models import Model
from ktcli.models.model import Spec
from ktcli.ops.part import ModelPart
from ktcli.planner.device import RUNTIME_BYTES, margin_bytes
from ktcli.records import dataclass
from ktcli.training.denselayers import BUFFERS, dense_bytes, is_on_host, is_read
from ktcli.training.deviceproducts import DECODED_ELEMENTS
from ktcli.training.lora import DenseFactors, ExpertFactors, TrainedFactors
from ktcli.training.loss import CHUNK_ELEMENTS
from ktcli.training.model import USUAL
from ktcli.training.recorded import ModelProducts, dense_elements, products_of
from ktcli.weights.recipe import Recipe, stored_bytes

_PER_NUMBER, _HALF_MOMENTS = 16, 4  # of which moments in bf16 save so many
# Numbers in the graph of a layer for each that its dense products give: copies, their gradients, and attention. So
# fitted to measured peaks of steps of 256 to 4,096 tokens through two or three layers of the shapes of qwen3-30b-a3b,
# qwen3-4b, deepseek-v2-lite and gpt-oss-20b; the plan is 6 % below to 2 % above these.
_COPIES = 4.5
_FORWARD_COPIES = 2.5  # likewise in a forward pass alone, which keeps nothing
_THINNED_BYTES = 5  # of a number of which dropout keeps or drops a copy: that, and which
_OTHER_ROWS = 3  # of the residual, for documents that are not in a layer at the moment: in, out, and their gradient
_LOGITS_BYTES = 3 * 4 * CHUNK_ELEMENTS
# Beside a GPU: copies in main memory of what experts read and give, forward and backward, and the bytes that a number
# of a decoded matrix takes on the GPU for a while. Both are counted, not measured.
_CROSSING, _DECODED_BYTES = 4, 24
_FACTORS, _RESIDUALS = "factors, gradients, moments", "residuals of layers"
_EVALUATION, _PRODUCTS = "evaluation, beyond a step", "native products"
# The interpreter with torch, 370 MiB, and what a step of few tokens adds to it.
_PROCESS_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory during a run, and its bytes."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FinetuneSizes:
    """The sizes of a model, on which the memory of any run depends.

    Attributes:
        spec: its shape.
        layer: the elements that the dense products of its widest layer compute for one token.
        products, experts: `program_elements` and `expert_elements`.
        weights: the bytes of all weights; `dense` those of each layer's dense matrices, and last the output head's;
            `others` those of what a GPU never has.
    """

    spec: Spec
    layer: int
    products: int
    experts: int
    weights: int
    dense: tuple[int, ...]
    others: int

    @classmethod
    def of(cls, model: Model, recipe: Recipe) -> FinetuneSizes:
        """Returns the sizes of a model (layers, products, bytes of weights) with weights in the formats of `recipe`, on
        which the memory of a run depends.
        """
        return cls(
            model.spec,
            max(dense_elements(model).values(), default=0),
            program_elements(model),
            expert_elements(model),
            sum(stored_bytes(each, recipe) for each in model.tensors if is_read(each)),
            tuple(dense_bytes(model, recipe)),
            sum(stored_bytes(each, recipe) for each in model.tensors if is_on_host(each)),
        )


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Says what takes memory during a run.

    Attributes:
        factors: what is trained, described.
        most, evaluated: the most tokens of a step, and of an evaluation that go through the model together.
    """

    sizes: FinetuneSizes
    settings: FinetuneSettings
    factors: Sequence[TrainedFactors]
    most: int
    evaluated: int = 0

    def alone(self) -> tuple[MemoryPart, ...]:
        """Returns the uses of main memory during a run, each with its bytes, where the CPU computes everything."""
        return (
            MemoryPart("weights", self.sizes.weights),
            MemoryPart(_FACTORS, self._factor_bytes(DenseFactors, ExpertFactors)),
            MemoryPart(_RESIDUALS, self._residual_bytes),
            MemoryPart(self._graph_name, self._graph_bytes),
            MemoryPart(_EVALUATION, max(0, self._alone_bytes - self._residual_bytes - self._graph_bytes)),
            MemoryPart(_PRODUCTS, self.sizes.products * self._rows * 4),
            MemoryPart("logits", _LOGITS_BYTES),
            MemoryPart("program", _PROCESS_BYTES),
        )  # fmt: skip

    def beside(self, resident: int) -> tuple[MemoryPart, ...]:
        """Returns the uses of main memory during a run, each with its bytes, beside a GPU that has the dense matrices
        of `resident` layers all the time.
        """
        streamed = sum(self.sizes.dense[resident:-1])
        crossing = _CROSSING * max(self.most, self.evaluated) * self.sizes.spec.hidden * 4
        return (
            MemoryPart("weights", self.sizes.others + streamed),
            MemoryPart(_FACTORS, self._factor_bytes(ExpertFactors)),
            MemoryPart(_RESIDUALS, self._residual_bytes),
            MemoryPart("rows of experts", crossing if self.sizes.experts else 0),
            MemoryPart(_PRODUCTS, self.sizes.experts * self._rows * 4),
            MemoryPart("program", _PROCESS_BYTES),
        )

    def on_device(self, resident: int, vram_bytes: int) -> tuple[MemoryPart, ...]:
        """Returns the uses of a GPU's memory of `vram_bytes` during a run, each with its bytes, if it has the dense
        matrices of `resident` layers all the time.
        """
        *layers, head = self.sizes.dense
        rows = 2 * 4 * max(self.most, self.evaluated) * self.sizes.spec.hidden
        return (
            MemoryPart("dense weights", head + sum(layers[:resident])),
            MemoryPart("layers that are copied", BUFFERS * max(layers[resident:], default=0)),
            MemoryPart(_FACTORS, self._factor_bytes(DenseFactors)),
            MemoryPart(self._graph_name, self._graph_bytes + rows),
            MemoryPart(_EVALUATION, max(0, self._alone_bytes - rows - self._graph_bytes)),
            MemoryPart("decoded weights", _DECODED_BYTES * DECODED_ELEMENTS),
            MemoryPart("logits", _LOGITS_BYTES),
            MemoryPart("CUDA", RUNTIME_BYTES),
            MemoryPart("left free", margin_bytes(vram_bytes)),
        )

    def resident(self, gpu: Gpu) -> int:
        """Returns the number of layers whose dense matrices can be on a GPU all the time: as many as fit into its free
        memory.
        """
        count = self.sizes.spec.layers
        while count and total_bytes(self.on_device(count, gpu.vram_bytes)) > gpu.free_bytes:
            count -= 1
        return count

    # --- sizes --------------------------------------------------------------------------------------

    @property
    def _rows(self) -> int:
        """The rows that go through a native product at once."""
        return min(max(self.most, self.evaluated), USUAL.max_rows)

    @property
    def _graph_name(self) -> str:
        retained = "graphs of all layers, retained"
        return retained if self.settings.retains else "graph of a layer"

    @property
    def _graph_bytes(self) -> int:
        a_row = round(_COPIES * self.sizes.layer) * 4
        if self.settings.lora_dropout:
            a_row += _THINNED_BYTES * dropped_elements(self.factors)
        if self.settings.retains:
            return a_row * self.most * self.sizes.spec.layers
        rows = self._together(self.most)
        others = _OTHER_ROWS * 4 * self.sizes.spec.hidden * (self.most - rows)
        return a_row * rows + others

    def _together(self, tokens: int) -> int:
        """The most of so many tokens that go through a layer together: those of one document in any case."""
        return min(tokens, max(USUAL.max_rows, self.settings.cutoff_len))

    @property
    def _residual_bytes(self) -> int:
        return 2 * self.most * self.sizes.spec.hidden * (self.sizes.spec.layers + 2)

    @property
    def _alone_bytes(self) -> int:
        """What an evaluation takes."""
        graph = round(_FORWARD_COPIES * self.sizes.layer)
        rows = self._together(self.evaluated)
        return 4 * (rows * graph + 2 * self.sizes.spec.hidden * self.evaluated)

    def _factor_bytes(self, *kinds: type[TrainedFactors]) -> int:
        """What factors of these kinds take, with gradients and moments."""
        own = (each for each in self.factors if isinstance(each, kinds))
        each_bytes = _PER_NUMBER - _HALF_MOMENTS * self.settings.has_half_moments
        return each_bytes * sum(each.numbers for each in own)


def total_bytes(parts: Sequence[MemoryPart]) -> int:
    """Returns the sum of the bytes of all uses of a memory."""
    return sum(each.size_bytes for each in parts)


def program_elements(model: Model) -> int:
    """Returns the number of f32 elements that the buffers of the native products hold for one row (token) in the
    forward and backward pass.
    """
    found = products_of(model)
    body = [each.weight for each in found.linear if each.weight.part is not ModelPart.HEAD]
    widest = max((each.k for each in body), default=0) + max((each.n for each in body), default=0)
    rows = max((each.down.n for each in found.experts), default=0)
    return widest + rows + found.top_k * _slot_elements(found)


def expert_elements(model: Model) -> int:
    """Returns the number of f32 elements that the buffers of the native products hold for one row (token) if the CPU
    computes experts alone.
    """
    found = products_of(model)
    hidden = max((each.down.n for each in found.experts), default=0)
    return 3 * hidden + found.top_k * _slot_elements(found)


def _slot_elements(found: ModelProducts) -> int:
    """The numbers of what the experts of a row have in one slot, forward and backward."""
    return max(
        (2 * each.gate_up.n + 2 * each.down.k + each.down.n for each in found.experts), default=0
    )


def dropped_elements(factors: Sequence[TrainedFactors]) -> int:
    """Returns the number of input elements that the trained factors of dense matrices read for one row (token), in the
    layer where they are most. With dropout each factor reads its own copy.
    """
    found = Counter[int | None]()
    for each in factors:
        if isinstance(each, DenseFactors):
            found[each.layer] += each.target.k
    return max(found.values(), default=0)
