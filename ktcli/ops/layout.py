"""Describes a row of the table of operations: the kind of each field, and how its value is read from an operation.

Recorder, passes, backends, listing and tests go by this, and so know no operation by name.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from ktcli.ops.operation import WEIGHTS, FieldKind, Operation
from ktcli.records import dataclass

Kinds = frozenset[FieldKind]
Getter = Callable[[Operation], Any]

_OF_LAYER = frozenset({FieldKind.PAGES, FieldKind.STATE, FieldKind.FIRST})


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The fields of a row of the table of operations, grouped by kind.

    Attributes:
        operands: the fields that are rows of activations, in order.
        weights: the fields that are tensors, and the kind of each.
        routing, choice, pages, state, first: the name of the field of that kind; "" if there is none.
        given: the fields that a kernel is given under their own names, and the kind of each; None: a fact.
        told: the facts that C is told, by their names in C.
        facts: all facts, whether C is told or not.
        defaults: the default values of facts.
    """

    operands: tuple[str, ...]
    weights: Mapping[str, FieldKind]
    routing: str
    choice: str
    pages: str
    state: str
    first: str
    given: tuple[tuple[str, FieldKind | None], ...]
    told: Mapping[str, Getter]
    facts: Mapping[str, Getter]
    defaults: Mapping[str, Any]

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the fields that refer to a routing or choice by its number."""
        return tuple(name for name in (self.routing, self.choice) if name)


_LAYOUTS: dict[str, RowLayout] = {}


def layout_of(row: type[Operation]) -> RowLayout:
    """Returns the layout of a row's fields; it is made once for each row."""
    if row.name not in _LAYOUTS:
        _LAYOUTS[row.name] = _read_layout(row)
    return _LAYOUTS[row.name]


def _read_layout(row: type[Operation]) -> RowLayout:
    hints = typing.get_type_hints(row, include_extras=True)
    kinds = {field.name: _kinds(hints[field.name]) for field in fields(row)}
    facts: dict[str, Getter] = {}
    told: dict[str, Getter] = {}
    defaults: dict[str, Any] = {}
    for field in fields(row):
        if kinds[field.name] <= {FieldKind.IMPLIED}:
            for name, path, implied, default in _flat(field, hints[field.name]):
                facts[name], defaults[name] = attrgetter(path), default
                told |= {} if implied else {name: facts[name]}

    def named(kind: FieldKind) -> str:
        return next((name for name, of in kinds.items() if kind in of), "")

    return RowLayout(
        operands=tuple(name for name, of in kinds.items() if FieldKind.ROWS in of),
        weights={name: kind for name, of in kinds.items() for kind in of if kind in WEIGHTS},
        routing=named(FieldKind.ROUTING),
        choice=named(FieldKind.CHOICE),
        pages=named(FieldKind.PAGES),
        state=named(FieldKind.STATE),
        first=named(FieldKind.FIRST),
        given=tuple((n, next(iter(of), None)) for n, of in kinds.items() if not of & _OF_LAYER),
        told=told | {name: attrgetter(name) for name in row.derived},
        facts=facts,
        defaults=defaults,
    )


def _kinds(hint: Any) -> Kinds:
    """Returns the kinds in an annotation, whether it may be None or not."""
    inner = next((each for each in typing.get_args(hint) if hasattr(each, "__metadata__")), hint)
    found = (each for each in getattr(inner, "__metadata__", ()))
    return frozenset(each for each in found if isinstance(each, FieldKind))


def _flat(field: Any, hint: Any) -> list[tuple[str, str, Kinds, Any]]:
    """Returns (name, path, kinds, default) of a fact, or of each field of a dataclass of facts."""
    if not (isinstance(hint, type) and is_dataclass(hint)):
        return [(field.name, field.name, _kinds(hint), field.default)]
    inner = typing.get_type_hints(hint, include_extras=True)
    return [
        (of.name, f"{field.name}.{of.name}", _kinds(inner[of.name]), of.default)
        for of in fields(hint)
    ]
