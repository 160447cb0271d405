"""Checks a checkpoint before its conversion: its tensors are those of the model in the right shapes, and some values.

Values are those of tables of experts, which are indexed by a token's id, and of an output head that config.json ties
to the embedding although the checkpoint has a separate tensor for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from ktcli.errors import BadCheckpoint
from ktcli.models import Model
from ktcli.native import Format, Pool
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role, Tensor
from ktcli.weights.changed import stored_as
from ktcli.weights.checkpoint import HINT
from ktcli.weights.formats import FORMATS
from ktcli.weights.ids import first_outside
from ktcli.weights.ranges import Ranges, union
from ktcli.weights.storage import PLAIN, Reader, StorageSource, read_rows
from ktcli.weights.strips import pieces_of
from ktcli.weights.unread import left_over

LEFT_OVER = (
    "kt would ignore these weights: check that config.json, or a GGUF file's architecture, belongs to this "
    "checkpoint, and that kt supports the model"
)
LISTED = 5  # names in an error
COUNTED = 10_000  # names that are missing; a small config.json can ask for millions


def check(model: Model, checkpoint: Reader) -> int:
    """Returns the total bytes of a model's tensors in a checkpoint, after checking that the checkpoint has exactly
    these tensors, in the right shapes.

    Raises:
        BadCheckpoint: a tensor is missing, left over or of another shape; up to five names are listed.
    """
    sizes: dict[str, int] = {}
    missing: dict[str, None] = {}
    for name, shape in _asked(model.tensors, checkpoint):
        if name in checkpoint.names:
            parts = checkpoint.find(name, shape).parts
            sizes.update((part.name, part.entry.size_bytes) for part in parts)
        elif len(missing) < COUNTED:
            missing[name] = None
        else:
            break
    if missing:
        what = f"the checkpoint in {checkpoint.path} has no tensor {_listed(list(missing))}"
        hint = _renamed(next(iter(missing)), checkpoint.unused(sizes.keys())) or HINT
        raise BadCheckpoint(f"{what}, which its {checkpoint.description} requires", hint=hint)
    if over := left_over(model, checkpoint.unused(sizes.keys())):
        what = f"the checkpoint in {checkpoint.path} has tensors that its {checkpoint.description} does not mention"
        raise BadCheckpoint(f"{what}: {_listed(sorted(over))}", hint=LEFT_OVER)
    return sum(sizes.values())


def _renamed(name: str, unused: Iterable[str]) -> str:
    """What helps where a missing tensor lies there under a longer name, as training tools leave it; "": it does not."""
    ends = (f".{name}", f".{name.partition('.')[2]}")
    found = next((n for n in unused for end in ends if n.endswith(end)), None)
    return (
        f"it has {found!r}: save it again under the names of the published model" if found else ""
    )


def needed(tensors: Iterable[Tensor], checkpoint: Reader) -> dict[str, Ranges]:
    """Returns the byte ranges of the checkpoint from which some tensors of a model are made, by the name of the
    checkpoint file; those of the norm gains that a pack rescales together with the tensors are included.

    Raises:
        BadCheckpoint: the checkpoint lacks a tensor, or has it in another shape.
    """
    both = (each for tensor in tensors for each in (tensor, tensor.gain) if each is not None)
    sources = (checkpoint.find(name, shape) for name, shape in _asked(both, checkpoint))
    found = defaultdict[str, list[tuple[int, int]]](list)
    for source in sources:
        for part in source.parts:
            start = part.entry.offset
            found[part.file].append((start, start + part.entry.size_bytes))
    return {file: union(pairs) for file, pairs in found.items()}


def _asked(tensors: Iterable[Tensor], checkpoint: Reader) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and the expected shape of every checkpoint tensor of some of a model; some more than once."""
    for tensor in tensors:
        for piece in pieces_of(tensor, checkpoint):
            for index in range(tensor.count if "{e}" in piece.name else 1):
                yield piece.at(index), piece.shape


def lossless_format(model: Model, checkpoint: Reader) -> Format | None:
    """Returns the smallest of kt's number formats that holds the routed experts of a checkpoint exactly; None: only f32
    does, they are stored in different ways, or there are no experts.

    Raises:
        BadCheckpoint: the checkpoint lacks the experts.
    """
    experts = (tensor for tensor in model.tensors if tensor.role is Role.EXPERTS)
    pieces = (piece for tensor in experts for piece in pieces_of(tensor, checkpoint))
    found = {checkpoint.find(piece.at(0), piece.shape).storage.lossless for piece in pieces}
    name = found.pop() if len(found) == 1 else None
    return None if name is None else FORMATS[name]


def kept_in_f32(model: Model, checkpoint: Reader) -> tuple[ModelPart, ...]:
    """Returns the parts of a model whose embeddings, or other tensors that no format is chosen for, a pack has to store
    as f32, because the checkpoint stores them as f32 or f16, which bf16 cannot hold exactly; sorted by name.

    Raises:
        BadCheckpoint: the checkpoint lacks one of these tensors.
    """
    wide = PLAIN["F32"], PLAIN["F16"]
    kept = (tensor for tensor in model.tensors if tensor.role in (Role.KEPT, Role.TABLE))
    found = {
        tensor.part
        for tensor in kept
        for piece in pieces_of(tensor, checkpoint)
        if stored_as(checkpoint.find(piece.at(0), piece.shape)) in wide
    }
    return tuple(sorted(found, key=lambda part: part.value))


def _listed(names: list[str]) -> str:
    """The first five of many names."""
    least = "at least " if len(names) == COUNTED else ""
    more = f" and {least}{len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(repr(name) for name in names[:LISTED]) + more


# --- values --------------------------------------------------------------------------------------------------------


def check_tables(tensors: Iterable[Tensor], checkpoint: Reader, pool: Pool) -> None:
    """Checks that the tables among some tensors of a model that give the experts of each token id hold only numbers of
    existing experts.

    Raises:
        BadCheckpoint: a table holds something else or is missing, or a file cannot be read.
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


def head_remark(tensors: Iterable[Tensor], checkpoint: Reader, pool: Pool) -> str | None:
    """Returns a sentence for the user if config.json ties the output head to the embedding, but the checkpoint has both
    with different weights; otherwise None.

    Raises:
        BadCheckpoint: a file cannot be read.
    """
    heads = [
        tensor for tensor in tensors if tensor.part is ModelPart.HEAD and len(tensor.sources) > 1
    ]
    for head in heads:
        names = [piece.name for pieces in head.sources for piece in pieces]
        if not all(name in checkpoint.names for name in names):
            continue
        first, second = (checkpoint.find(name, head.sources[0][0].shape) for name in names)
        if _differ(first, second, checkpoint, pool):
            return (
                f"config.json says tie_word_embeddings, but {first.name} differs from {second.name}; "
                "both are stored"
            )
    return None


def _differ(first: StorageSource, second: StorageSource, checkpoint: Reader, pool: Pool) -> bool:
    """Returns whether any number differs; reading ends at the first piece in which one does."""
    pieces = zip(*(read_rows(each, checkpoint, pool) for each in (first, second)), strict=True)
    return any(not np.array_equal(ours, theirs) for (_, ours), (_, theirs) in pieces)
