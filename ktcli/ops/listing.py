"""Describes a recording for readers: every record as plain data, and identical layers only once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from itertools import groupby
from typing import Any

from ktcli.native import View
from ktcli.ops.operation import layout_of
from ktcli.ops.recording import Number, Record, Recording
from ktcli.ops.tensors import Tensor
from ktcli.records import dataclass


def described(record: Record) -> dict[str, Any]:
    """Returns a recorded operation as JSON-like data: `operation` (its name), `layer`, `outs` (views), `numbers`
    (routings or choices that it makes), and by field name `operands`, `weights` and `facts` (constants).

    `cached` (elements per position) and `state_first` (where its state begins) are there only if it has them.
    """
    operation = record.operation
    layout = layout_of(type(operation))
    document: dict[str, Any] = {
        "operation": operation.name,
        "layer": record.layer,
        "outs": [asdict(out) for out in record.outs],
        "numbers": [_number(number) for number in record.numbers],
        "operands": {name: view and asdict(view) for name, view in _named(record).items()},
        "weights": {name: _tensor(tensor) for name, tensor in weights(record).items()},
        "facts": {name: _plain(fact(operation)) for name, fact in layout.facts.items()},
    }
    document["operands"] |= {name: _number(number) for name, number in read_numbers(record).items()}
    if layout.pages:
        document["cached"] = operation.cached._asdict()
    if layout.first:
        document["state_first"] = getattr(operation, layout.first)
    return document


def read_numbers(record: Record) -> dict[str, Number]:
    """Returns what a recorded operation reads besides rows, by field name: the `Number` (kind and index in the
    recording) of a router's result (routing) or of chosen positions (choice); empty: it reads neither.
    """
    names = layout_of(type(record.operation)).numbers
    found = {name: getattr(record.operation, name) for name in names}
    return {name: number for name, number in found.items() if isinstance(number, Number)}


def weights(record: Record) -> dict[str, Tensor]:
    """Returns the declarations of the weight tensors that a recorded operation reads, by field name."""
    names = layout_of(type(record.operation)).weights
    found = {name: getattr(record.operation, name) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def telling_facts(record: Record) -> dict[str, Any]:
    """Returns the facts (constants) of a recorded operation that differ from their defaults, by name."""
    layout = layout_of(type(record.operation))
    found = {name: fact(record.operation) for name, fact in layout.facts.items()}
    return {name: value for name, value in found.items() if value != layout.defaults[name]}


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive records: those of a decoder layer, which represent all layers with the same operations, or those
    between layers.

    Attributes:
        layers: numbers of the layers that the records stand for; they are those of the first. (): of no layer.
    """

    layers: tuple[int, ...]
    records: tuple[Record, ...]


def sections(recording: Recording) -> list[Section]:
    """Returns the operations of a recording, in order, grouped into sections: one for each decoder layer and for each
    run of operations between layers. Layers with the same operations share the section of the first of them.
    """
    made: list[Section] = []
    alike: dict[str, int] = {}  # what a layer does -> its place among `made`
    for layer, group in groupby(recording.records, key=lambda record: record.layer):
        records = tuple(group)
        if layer is None:
            made.append(Section((), records))
            continue
        done = _canonical(records, layer)
        if done in alike:
            place = alike[done]
            made[place] = Section((*made[place].layers, layer), made[place].records)
        else:
            alike[done] = len(made)
            made.append(Section((layer,), records))
    return made


def _canonical(records: Sequence[Record], layer: int) -> str:
    """Returns a text that is the same for layers that do the same, whatever their number and their buffers."""
    buffers: dict[int, int] = {}
    numbers: dict[Number, int] = {}
    lines = []
    for record in records:
        views = [
            view and (buffers.setdefault(view.buffer, len(buffers)), view.column, view.width)
            for view in (*record.outs, *record.operands)
        ]
        made = (*read_numbers(record).values(), *record.numbers)
        mine = [numbers.setdefault(number, len(numbers)) for number in made]
        tensors = [
            (name, tensor.name.replace(f"layers.{layer}.", ""), tensor.count, tensor.n, tensor.k)
            for name, tensor in weights(record).items()
        ]
        facts = [
            fact(record.operation) for fact in layout_of(type(record.operation)).facts.values()
        ]
        lines.append(f"{record.operation.name} {views} {mine} {tensors} {facts}")
    return "\n".join(lines)


def _named(record: Record) -> Mapping[str, View | None]:
    names = layout_of(type(record.operation)).operands
    return dict(zip(names, record.operands, strict=True))


def _number(number: Number) -> dict[str, Any]:
    return {"kind": number.kind.value, "number": number.n}


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {"tensor": tensor.name, "count": tensor.count, "n": tensor.n, "k": tensor.k}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return list(value) if isinstance(value, tuple) else value
