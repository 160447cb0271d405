"""What takes memory during a run, before anything is loaded: pure.

Memory is the weights as a chat has them, 16 bytes for each number of the factors (value, gradient, two moments), the
residual before each layer, the graph of one layer, the buffers of the native products, and a chunk of logits. The graph
is an estimate from measured peaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ktcli.finetune.settings import FinetuneSettings
from ktcli.models import Model
from ktcli.ops.part import ModelPart
from ktcli.ops.recording import record
from ktcli.ops.table.rowwise import Linear
from ktcli.planner.spec import weight_bytes
from ktcli.training.lora import DenseFactors, TrainedFactors
from ktcli.training.loss import CHUNK_ELEMENTS
from ktcli.training.model import USUAL
from ktcli.training.recorded import products_of
from ktcli.weights.recipe import Recipe

_PER_NUMBER = 16
# Numbers in the graph of a layer for each that its dense products give: copies, their gradients, and attention. So
# fitted to measured peaks of steps of 256 to 4,096 tokens through two or three layers of the shapes of qwen3-30b-a3b,
# qwen3-4b, deepseek-v2-lite and gpt-oss-20b; the plan is 6 % below to 2 % above these.
_COPIES = 4.5
_FORWARD_COPIES = 2.5  # likewise in a forward pass alone, which keeps nothing
_THINNED_BYTES = 5  # of a number of which dropout keeps or drops a copy: that, and which
# The interpreter with torch, 370 MiB, and what a step of few tokens adds to it.
_PROCESS_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """What takes memory during a run."""

    name: str
    size_bytes: int


def memory_of(
    about: tuple[Model, Recipe],
    elements: tuple[int, int],
    settings: FinetuneSettings,
    factors: Sequence[TrainedFactors],
    tokens: tuple[int, int],
) -> tuple[MemoryPart, ...]:
    """Returns what takes memory during a run.

    Args:
        elements: `layer_elements` and `program_elements` of the model.
        factors: what is trained, described.
        tokens: the most of a step, and the most of an evaluation that go through the model together.
    """
    model, (most, evaluated) = about[0], tokens
    spec = model.spec
    numbers = sum(each.a.numel() + each.b.numel() for each in factors)
    rows = min(max(most, evaluated), USUAL.max_rows)
    of_layer, of_products = elements
    graph = round(_COPIES * of_layer) * most * 4
    if settings.lora_dropout:
        graph += _THINNED_BYTES * dropped_elements(factors) * most
    residuals = 2 * most * spec.hidden * (spec.layers + 2)
    whole = graph * (spec.layers if settings.retains else 1)
    alone = 4 * evaluated * (round(_FORWARD_COPIES * of_layer) + 2 * spec.hidden)
    layers = "graphs of all layers, retained" if settings.retains else "graph of a layer"
    return (
        MemoryPart("weights", weight_bytes(*about)),
        MemoryPart("factors, gradients, moments", _PER_NUMBER * numbers),
        MemoryPart("residuals of layers", residuals),
        MemoryPart(layers, whole),
        MemoryPart("evaluation, beyond a step", max(0, alone - residuals - whole)),
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
