"""Reads llama.cpp's imatrix in GGUF as the importance of a model's columns.

For a tensor NAME of the model's GGUF file, the imatrix has NAME.in_sum2 [E, k], the sums of the squares of its inputs,
and NAME.counts [E, 1], how many inputs these were; E is the number of experts, or 1. It does not say which architecture
it is of: the rules of that one apply whose names fit most of the model's tensors. Source: llama.cpp's tools/imatrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ktcli.errors import BadCheckpoint, UsageError, hinted
from ktcli.models import Model, with_defaults
from ktcli.models.config import Fields, text_part
from ktcli.ops.tensors import Tensor
from ktcli.records import dataclass
from ktcli.weights.gguf.architectures import ARCHITECTURES
from ktcli.weights.gguf.file import Gguf
from ktcli.weights.gguf.header import GgufHeader, read_gguf_header
from ktcli.weights.gguf.names import below_layer, hub_tensors, layer_of
from ktcli.weights.gguf.rules import Architecture
from ktcli.weights.header import TensorEntry
from ktcli.weights.importance import Doubles, Importance, StepArray, measured, steps_of
from ktcli.weights.storage import Reader

METHOD = "1"  # of what is here; another one gives other bytes
SUMS, COUNTS = ".in_sum2", ".counts"
HINT = (
    "give the imatrix of this model, in GGUF as llama-imatrix writes it, or leave out --calibrate"
)
_EXPERTS = "_exps"  # in the names of tensors that hold the matrices of all experts
# Shapes for which `names` gives one name to each tensor, or each half or part of one: of one expert, and of rows that
# are a multiple of every number of parts.
_ONE_EXPERT, _PARTS = (1, 2, 1), (12, 1)


@dataclass(frozen=True, slots=True)
class ReadImatrix:
    """The importance of a model's columns from an imatrix file.

    Attributes:
        missing: the names of the model's tensors that it has nothing of.
        unchosen: the number of matrices of experts that no token chose; they have the mean of their layer.
    """

    importance: Importance
    missing: tuple[str, ...]
    unchosen: int


def read_imatrix(path: Path, model: Model, checkpoint: Reader, shown: str) -> ReadImatrix:
    """Returns the importance of a model's columns from the imatrix file of llama.cpp at `path`, with the names of the
    tensors that the file lacks and the number of experts that no token chose.

    Args:
        shown: the name of the model for messages.
    Raises:
        BadCheckpoint: the file is damaged, hostile, or no imatrix.
        UsageError: the file is that of another model.
    """
    with hinted(HINT):
        header = read_gguf_header(path)
        names = _names(path, header)
        row = _architecture(names, model, checkpoint)
        found = _by_hub_name(names, row)
        config = text_part(with_defaults(checkpoint.config))
        _check_layers(path, names, model, config, shown)
        views = row.views(Fields(config, path.name))
        steps: dict[str, StepArray] = {}
        missing, unchosen = [], 0
        for tensor in measured(model):
            hub_name = next((name for name in _sources(tensor) if name in found), None)
            if hub_name is None:
                missing.append(tensor.name)
                continue
            squares, rows = _sums(path, header, found[hub_name], tensor, shown)
            view = views.get(below_layer(hub_name))
            if view is not None and view.columns is not None:
                squares = squares[:, view.columns.places(0, tensor.k)]
            if not rows.any():
                missing.append(tensor.name)
                continue
            unchosen += int((rows == 0).sum())
            steps[tensor.name] = steps_of(tensor, squares, rows)
        if not steps:
            raise UsageError(f"{path.name} has nothing of the tensors of {shown}")
    return ReadImatrix(Importance(steps), tuple(missing), unchosen)


def _names(path: Path, header: GgufHeader) -> list[str]:
    """The names of the tensors that an imatrix has sums of.

    Raises:
        BadCheckpoint: it is no imatrix, or lacks a sum or a count.
    """
    sums = [name.removesuffix(SUMS) for name in header.entries if name.endswith(SUMS)]
    counts = {name.removesuffix(COUNTS) for name in header.entries if name.endswith(COUNTS)}
    if not sums:
        what = "a GGUF file of a model" if header.entries else "a GGUF file without tensors"
        raise BadCheckpoint(f"{path.name} is {what}, not an imatrix")
    if alone := counts ^ set(sums):
        name = min(alone)
        ends = (SUMS, COUNTS) if name in counts else (COUNTS, SUMS)
        raise BadCheckpoint(f"{path.name} has {name}{ends[1]}, but no {name}{ends[0]}")
    return sums


def _architecture(names: Iterable[str], model: Model, checkpoint: Reader) -> Architecture:
    """The rules by which most of a model's tensors are found; of equal ones those of the model's type, then those named
    like it, then those with the fewest exceptions."""
    if isinstance(checkpoint, Gguf):
        return checkpoint.rules
    kind = text_part(checkpoint.config).get("model_type")
    said = _squeezed(kind)
    wanted = {name for tensor in measured(model) for name in _sources(tensor)}
    rows = [
        (name, each) for name, row in ARCHITECTURES.items() for each in (row, *row.older.values())
    ]

    def fits(named: tuple[str, Architecture]) -> tuple[int, bool, int, int]:
        name, row = _squeezed(named[0]), named[1]
        covered = len(wanted & _by_hub_name(names, row).keys())
        alike = len(name) if said.startswith(name) else 0
        return covered, row.model_type == kind, alike, -len(row.names)

    return max(rows, key=fits)[1]


def _squeezed(name: Any) -> str:
    return str(name).replace("_", "").replace("-", "").lower()


def _by_hub_name(names: Iterable[str], row: Architecture) -> Mapping[str, str]:
    """The tensors of an imatrix by the names that they, or the first of their experts, have on the hub."""
    entries = {
        name: TensorEntry("F32", _ONE_EXPERT if _EXPERTS in name else _PARTS, 0, 0)
        for name in names
    }
    return {hub: name for hub, name, _ in hub_tensors(entries, row.names, row.body)}


def _sources(tensor: Tensor) -> list[str]:
    """The names of all checkpoint tensors, or of those of the first expert, that a tensor may be made from. All of
    them have the same inputs."""
    return [piece.at(0) for pieces in tensor.sources for piece in pieces]


def _check_layers(
    path: Path, names: Iterable[str], model: Model, config: Mapping[str, Any], shown: str
) -> None:
    """Raises UsageError if an imatrix is of a model with more or fewer layers, but for those that guess further
    tokens."""
    layers = 1 + max((layer_of(name) for name in names), default=-1)
    further = config.get("num_nextn_predict_layers")
    most = model.spec.layers + (further if isinstance(further, int) else 0)
    if not model.spec.layers <= layers <= most:
        raise UsageError(
            f"{path.name} is the imatrix of another model: it has {layers} layers, {shown} {model.spec.layers}"
        )


def _sums(
    path: Path, header: GgufHeader, name: str, tensor: Tensor, shown: str
) -> tuple[Doubles, Doubles]:
    """The sums [count, k] and the counts [count] of a tensor.

    Raises:
        BadCheckpoint: they are no such numbers.
        UsageError: they are of another shape.
    """
    sums, counts = header.entries[f"{name}{SUMS}"], header.entries[f"{name}{COUNTS}"]
    for end, entry in ((SUMS, sums), (COUNTS, counts)):
        if entry.dtype != "F32":
            raise BadCheckpoint(f"{name}{end} in {path.name} is {entry.dtype} instead of F32")
    shape = (counts.elements, sums.shape[-1])
    if sums.elements != shape[0] * shape[1]:
        raise BadCheckpoint(
            f"{name}{SUMS} in {path.name} is {list(sums.shape)}, but has {counts.elements} counts"
        )
    if shape != (tensor.count, tensor.k):
        raise UsageError(
            f"{path.name} is the imatrix of another model: {name} has {shape[0]} x {shape[1]} inputs there, in {shown} "
            f"{tensor.count} x {tensor.k}"
        )
    squares = _read(path, sums).reshape(shape)
    rows = _read(path, counts)
    for end, values in ((SUMS, squares), (COUNTS, rows)):
        if not np.isfinite(values).all() or values.min() < 0:
            raise BadCheckpoint(
                f"{name}{end} in {path.name} has a value that is NaN, infinite or negative"
            )
    if squares[rows == 0].any():
        raise BadCheckpoint(f"{name}{SUMS} in {path.name} has sums of no inputs: the count is 0")
    return squares, rows


def _read(path: Path, entry: TensorEntry) -> Doubles:
    return np.fromfile(path, "<f4", entry.elements, offset=entry.offset).astype(np.float64)
