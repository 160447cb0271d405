"""Checks tables of experts, which are indexed by a token's id, before a conversion writes anything.

A number that names no expert would otherwise be found when the model is loaded, long after its conversion.
"""

from __future__ import annotations

from collections.abc import Iterable

from ktcli.errors import BadCheckpoint
from ktcli.native import Pool
from ktcli.ops.tensors import Tensor
from ktcli.weights.checkpoint import HINT
from ktcli.weights.ids import first_outside
from ktcli.weights.storage import Reader, read_rows
from ktcli.weights.strips import pieces_of


def check_tables(tensors: Iterable[Tensor], checkpoint: Reader, pool: Pool) -> None:
    """Raises BadCheckpoint if one of the tensors that hold ids of experts holds anything else.

    Raises:
        BadCheckpoint: one does not, is missing, or a file cannot be read.
    """
    for tensor in tensors:
        for piece in pieces_of(tensor, checkpoint) if tensor.below else ():
            source = checkpoint.find(piece.name, piece.shape)
            for start, values in read_rows(source, checkpoint, pool):
                if (at := first_outside(values, tensor.below)) is not None:
                    row, value = start + at // source.columns, values.reshape(-1)[at]
                    raise BadCheckpoint(
                        f"{source.name} in {source.file} assigns token {row} to expert {value:g}, but there are only "
                        f"{tensor.below}",
                        hint=HINT,
                    )
