"""Finds the part of a model that each recorded operation belongs to, where parts have rows of kernels of their own.

An operation belongs to the part of the matrix that it reads; a norm to the norms, attention to the cache that it reads.
All others, which read no tensor of a part, follow the operation before them in their layer.
"""

from __future__ import annotations

from ktcli.ops.layout import layout_of
from ktcli.ops.part import ModelPart, RowOf
from ktcli.ops.recording import Record, Recording
from ktcli.ops.table.rowwise import LayerNorm, Norm
from ktcli.ops.tensors import Role


def record_rows(recording: Recording, rows: RowOf) -> list[str | None]:
    """Returns the row of kernels of each record; None: the pool's."""
    found: list[str | None] = []
    part: ModelPart | None = None
    layer: int | None = None
    for record in recording.records:
        if record.layer != layer:
            part, layer = None, record.layer
        part = _own_part(record) or part
        found.append(None if part is None else rows.get((layer, part)))
    return found


def _own_part(record: Record) -> ModelPart | None:
    """The part that a record names itself."""
    operation = record.operation
    layout = layout_of(type(operation))
    tensors = [each for name in layout.weights if (each := getattr(operation, name)) is not None]
    matrix = next((each for each in tensors if each.role is not Role.VECTOR), None)
    if matrix is not None:
        return ModelPart(matrix.part)
    if isinstance(operation, Norm | LayerNorm):
        return ModelPart.VECTORS if tensors else None
    return ModelPart.CACHE if layout.pages else None
