"""What the binding says in numbers of its own is what kt.h says."""

from enum import IntEnum

import pytest

from ktcli import native
from ktcli.hardware.numa import MAX_TEAMS
from ktcli.measure.tiles import TileMin
from ktcli.native.library import library
from ktcli.native.program import CACHES
from ktcli.ops.kvformat import FORMATS
from ktcli.ops.table.experts import GroupScore, Score
from ktcli.ops.table.rowwise import GateKind, Reads

CONSTANTS = {
    "KT_PAGE_TOKENS": native.PAGE_TOKENS,
    "KT_BLOCK_COLUMNS": native.BLOCK_COLUMNS,
    "KT_PANEL_ROWS": native.PANEL_ROWS,
    "KT_MAX_NODES": MAX_TEAMS,
    "KT_TILE_KINDS": len(TileMin._fields),
} | {f"KT_TILE_{kind.upper()}": i for i, kind in enumerate(TileMin._fields)}
CONSTANTS |= {f"KT_CACHE_{name.upper()}": i for i, name in enumerate(CACHES)}

ENUMS = {
    "KT_SCALE_": native.Scale,
    "KT_": native.DType,
    "KT_CEILING_": native.Ceiling,
    "KT_CUT_": native.Axis,
    "KT_READ_": Reads,
    "KT_GATE_": GateKind,
    "KT_SCORE_": Score,
    "KT_GROUP_": GroupScore,
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants(name: str) -> None:
    assert getattr(library()[1], name) == CONSTANTS[name]


def test_a_program_can_have_each_format_of_a_cache() -> None:
    assert tuple(FORMATS) == CACHES


@pytest.mark.parametrize("prefix", ENUMS)
def test_enums(prefix: str) -> None:
    values: type[IntEnum] = ENUMS[prefix]
    _, lib = library()
    assert {each.name: getattr(lib, prefix + each.name) for each in values} == {
        each.name: each.value for each in values
    }
