"""The products of a model, read from its recorded forward pass, and the operations without a gradient.

A model is refused by the operations that it records, in one sentence that names the part: a family that is added later
is trained if its operations are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from ktcli.errors import UsageError
from ktcli.models import Model
from ktcli.ops.operation import Operation
from ktcli.ops.part import ModelPart
from ktcli.ops.recording import Record, record
from ktcli.ops.table.attention import Choose, Mqa
from ktcli.ops.table.experts import Experts, Route, Score
from ktcli.ops.table.recurrent import Pooling
from ktcli.ops.table.rowwise import Add, Linear, ScaleRows
from ktcli.ops.table.streams import Collapse, Expand, Mix, SpreadStreams
from ktcli.planner.spec import PartWork, StepShape, Unit, step_work
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe

_IN_LAYERS = frozenset(ModelPart) - {ModelPart.EMBEDDING, ModelPart.HEAD, ModelPart.VECTORS}
_NOT_PRODUCTS = (Unit.ATTENTION, Unit.CODES, Unit.RECURRENT)
# The operations that have no gradient yet, each as the end of a sentence.
_MISSING: dict[type[Operation], str] = {
    Choose: "a sparse choice of positions",
    Mqa: "attention over pooled rows",
    Pooling: "pooled rows",
    SpreadStreams: "hyper-connections",
    Mix: "hyper-connections",
    Collapse: "hyper-connections",
    Expand: "hyper-connections",
}


@dataclass(frozen=True, slots=True)
class ModelProducts:
    """The products of a model.

    Attributes:
        linear: those with dense matrices.
        experts: those of each layer with experts, in their order.
        added: of each of these, whether their sum is only added to other rows within its layer: then no gradient there
            depends on its values.
        top_k: the experts of a token.
    """

    linear: tuple[Linear, ...]
    experts: tuple[Experts, ...]
    added: tuple[bool, ...]
    top_k: int


def missing_part(model: Model) -> str:
    """Returns the part of a model that has no gradient yet, as the end of a sentence "it has ..."; "" if the model can
    be trained.
    """
    if model.spec.embeds:
        return "no output head: it is an embedding model"
    for each in record(model.forward).records:
        operation = each.operation
        if (what := _MISSING.get(type(operation))) is not None:
            return what if each.layer is None else f"{what} in layer {each.layer}"
        if isinstance(operation, Route) and operation.routing.score is Score.SPARSEMIXER:
            return f"a router by SparseMixer in layer {each.layer}"
    return ""


def products_of(model: Model) -> ModelProducts:
    """Returns the matrix products in a model's forward pass: those with dense matrices, and the experts of each layer.

    Raises:
        UsageError: the model has a part that has no gradient yet.
    """
    if what := missing_part(model):
        raise UsageError(
            f"kt cannot fine-tune models of the family {model.spec.family} yet: this one has {what}",
            hint="docs/training.md lists the families that kt can fine-tune",
        )
    records = record(model.forward).records
    operations = [each.operation for each in records]
    sums = [i for i, each in enumerate(operations) if isinstance(each, Experts)]
    return ModelProducts(
        tuple(each for each in operations if isinstance(each, Linear)),
        tuple(each for each in operations if isinstance(each, Experts)),
        tuple(_is_only_added(records[i:]) for i in sums),
        model.spec.top_k,
    )


def layer_works(model: Model, recipe: Recipe, tokens: int) -> list[PartWork]:
    """Returns for each part of the model the bytes read and operations of its matrix products, over all layers, in a
    forward pass of `tokens` tokens.
    """
    works = step_work(model, recipe, StepShape(tokens, outputs=0))
    return [each for each in works if each.part in _IN_LAYERS and each.unit not in _NOT_PRODUCTS]


def dense_elements(model: Model) -> Counter[int]:
    """Returns, by the number of each layer, how many elements its dense products compute for one token."""
    found = Counter[int]()
    for each in record(model.forward).records:
        if isinstance(each.operation, Linear) and each.layer is not None:
            found[each.layer] += each.operation.weight.n
    return found


def _is_only_added(records: Sequence[Record]) -> bool:
    """Returns whether the results of the first record go into sums and constant multiples alone, within its layer."""
    of_sum = {view.buffer for view in records[0].outs}
    for each in takewhile(lambda other: other.layer == records[0].layer, records[1:]):
        if not any(view is not None and view.buffer in of_sum for view in each.operands):
            continue
        is_scaled = isinstance(each.operation, ScaleRows) and not each.operation.limit
        if not isinstance(each.operation, Add) and not is_scaled:
            return False
        of_sum |= {view.buffer for view in each.outs}
    return True
