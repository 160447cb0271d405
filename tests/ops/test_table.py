"""The table of operations and the C library say the same of each; what does not fit a row is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from optable import TABLE

from ktcli.native import Glu
from ktcli.native.library import library
from ktcli.ops.operation import FieldKind, Operation, layout_of
from ktcli.ops.part import ModelPart
from ktcli.ops.recording import Recorder
from ktcli.ops.table.attention import GqaShape
from ktcli.ops.tensors import Role, Tensor

HEADER = Path(__file__).parents[2] / "native" / "include" / "kt_operations.h"
PROTOTYPE = re.compile(r"KT_API \w+ kt_program_(\w+)\(kt_program \*program,?([^;]*)\);")
VIEW = re.compile(r"kt_view (\w+)")
# Parts of a program that compute nothing.
PLUMBING = {"given", "input", "part", "row", "routing", "chosen", "choice", "keep_hidden"}

# What C calls the fields of a kind that bear another name there, and of which type the others are.
NAMES = {
    "routing": "routing",
    "choice": "choice",
    "pages": "layer_offset",
    "state": "state_offset",
}
PLACED = {"gqa": ["windowed"]}  # what is said by where the layer's pages lie
TYPES = {
    FieldKind.MATRIX: {"struct kt_weight *", "struct kt_weight"},
    FieldKind.STACK: {"struct kt_weight *"},
    FieldKind.VECTOR: {"float *"},
    FieldKind.IDS: {"int32_t *"},
    FieldKind.MASK: {"uint8_t *"},
    FieldKind.TABLE: {"uint16_t *"},
}
by_name = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


def test_every_operation_of_c_has_a_row() -> None:
    found = {name for name, _ in PROTOTYPE.findall(HEADER.read_text())}
    assert found - PLUMBING == {row.name for row in TABLE}
    assert len({row.name for row in TABLE}) == len(TABLE)


@by_name
def test_c_has_the_views_of_the_row(row: type[Operation]) -> None:
    prototypes = dict(PROTOTYPE.findall(HEADER.read_text()))
    assert tuple(VIEW.findall(prototypes[row.name])) == (*row.outs, *layout_of(row).operands)


@by_name
def test_c_is_told_what_the_row_says(row: type[Operation]) -> None:
    ffi, lib = library()
    layout = layout_of(row)
    renamed = {called for field, called in NAMES.items() if getattr(layout, field)}
    wanted = {*layout.told, *layout.weights, *renamed, *PLACED.get(row.name, ())}
    last = ffi.typeof(getattr(lib, f"kt_program_{row.name}")).args[-1]
    fields = dict(last.item.fields) if last.cname == f"struct kt_{row.name} *" else {}
    tables = {name for name, kind in layout.weights.items() if kind is FieldKind.TABLE}
    assert set(fields) == wanted | {f"{name}_f32" for name in tables}
    for name, kind in layout.weights.items():
        assert fields[name].type.cname in TYPES[kind], name
    assert all(fields[f"{name}_f32"].type.cname == "float *" for name in tables)


@by_name
def test_a_row_names_its_own_fields(row: type[Operation]) -> None:
    layout = layout_of(row)
    assert set(row.overwrites) <= set(layout.operands) and row.__doc__
    assert bool(layout.state) == bool(layout.first)
    assert bool(layout.pages) == ("cached" in vars(row))


# -- what does not fit is refused when it is recorded --------------------------------------------------


def tensor(n: int, k: int, role: Role, count: int = 1) -> Tensor:
    name = f"{role.value} {n} x {k}"
    return Tensor(name, n, k, role, (), count=count, part=ModelPart.ATTENTION)


TABLE_OF_8 = tensor(30, 8, Role.TABLE)
GQA = GqaShape(2, 1, 4, 0.5)
REFUSED = {
    "linear weight": lambda b, x: b.linear(x, tensor(4, 9, Role.DENSE)),
    "linear bias": lambda b, x: b.linear(
        x, tensor(4, 8, Role.DENSE), bias=tensor(1, 5, Role.VECTOR)
    ),
    "is a matrix": lambda b, x: b.linear(x, tensor(4, 8, Role.EXPERTS)),
    "norm gain": lambda b, x: b.norm(x, tensor(1, 8, Role.VECTOR), 1e-5, head_width=4),
    "add b": lambda b, x: b.add(x, b.split(x, 4, 4)[0]),
    "gqa k": lambda b, x: b.gqa(x, x, x, GQA, layer=0),
    "gqa sinks": lambda b, x: b.gqa(
        x, *b.split(x, 4, 4), GQA, layer=0, sinks=tensor(1, 3, Role.VECTOR)
    ),
    "gqa v": lambda b, x: b.gqa(x, *b.split(x, 4, 4), replace(GQA, v=6), layer=0),
    "experts gate_up": lambda b, x: b.experts(
        x, None, tensor(32, 9, Role.EXPERTS, 4), tensor(8, 16, Role.EXPERTS, 4), glu=Glu()
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    recorder = Recorder()
    x = recorder.embed(TABLE_OF_8)
    with pytest.raises(AssertionError, match=message):
        REFUSED[message](recorder, x)
