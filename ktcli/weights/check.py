"""Checks a checkpoint before its conversion: it has all tensors of the model, in the right shapes, and no more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ktcli.errors import BadCheckpoint
from ktcli.models import Model
from ktcli.native import Format
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role, Tensor
from ktcli.weights.changed import stored_as
from ktcli.weights.checkpoint import HINT
from ktcli.weights.formats import FORMATS
from ktcli.weights.ranges import Ranges, union
from ktcli.weights.storage import PLAIN, Reader
from ktcli.weights.strips import pieces_of
from ktcli.weights.unread import left_over

LEFT_OVER = (
    "kt would ignore these weights: check that config.json, or a GGUF file's architecture, belongs to this "
    "checkpoint, and that kt supports the model"
)
LISTED = 5  # names in an error
COUNTED = 10_000  # names that are missing; a small config.json can ask for millions


def check(model: Model, checkpoint: Reader) -> int:
    """Returns the bytes of a model's tensors in a checkpoint; raises unless it has exactly these, in the right shapes.

    Raises:
        BadCheckpoint: something is missing, left over or of another shape; up to five names are listed.
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
    """Returns the byte ranges, by file, from which some tensors are made, with those of the factors that they take
    over.

    Raises:
        BadCheckpoint: the checkpoint does not have them.
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
    """Returns the smallest format that holds the routed experts of a checkpoint exactly; None: only f32 does, or
    there are no experts.

    Raises:
        BadCheckpoint: the checkpoint does not have them.
    """
    experts = (tensor for tensor in model.tensors if tensor.role is Role.EXPERTS)
    pieces = (piece for tensor in experts for piece in pieces_of(tensor, checkpoint))
    found = {checkpoint.find(piece.at(0), piece.shape).storage.lossless for piece in pieces}
    name = found.pop() if len(found) == 1 else None
    return None if name is None else FORMATS[name]


def kept_in_f32(model: Model, checkpoint: Reader) -> tuple[ModelPart, ...]:
    """Returns the parts of a model with tables, or tensors that no format is chosen for, whose numbers the
    checkpoint has as f32 or f16, which bf16 does not hold: see `Recipe.in_f32`.

    Raises:
        BadCheckpoint: the checkpoint does not have them.
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
