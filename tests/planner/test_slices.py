"""Cutting a weight between teams: whole, in order, on units, and fair."""

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from ktcli.native import cut_columns
from ktcli.ops.tensors import Cut, ModelPart, Role, Tensor
from ktcli.planner.slices import cut, slices_of
from ktcli.weights.formats import FORMATS
from ktcli.weights.recipe import Recipe

WIDTHS = (0, 1, 16, 63, 64, 65, 768, 1408, 1536, 2048, 2880, 151_936)
SHARES = (
    (1,),
    (1, 1),
    (1, 1, 1),
    (1,) * 4,
    (1,) * 8,
    (32, 32),
    (12, 11),
    (1, 3),
    (0, 2, 5),
    (7, 0),
)


@pytest.mark.parametrize("shares", SHARES)
def test_cuts_are_whole_in_order_and_on_units(shares: tuple[int, ...]):
    for width, unit in product(WIDTHS, (16, 32, 64, 128)):
        ranges = cut(width, unit, shares)
        assert len(ranges) == len(shares), (width, unit)
        assert (ranges[0].start, ranges[-1].stop) == (0, width), unit
        assert all(before.stop == after.start for before, after in pairwise(ranges)), (width, unit)
        assert all(each.start % unit == 0 or each.start == width for each in ranges), (width, unit)


def test_nobody_is_a_unit_from_its_share():
    draw = random.Random(0)
    for _ in range(200):
        shares = [draw.randrange(0, 65) for _ in range(draw.randrange(1, 17))] + [1]
        width, unit = draw.randrange(0, 5000), draw.choice((16, 32, 64, 128))
        units = -(-width // unit)
        for share, part in zip(shares, cut(width, unit, shares), strict=True):
            least, most = units * share // sum(shares), -(-units * share // sum(shares))
            assert least <= -(-len(part) // unit) <= most, (width, unit, shares)


@pytest.mark.parametrize(
    ("width", "teams", "lengths"),
    [
        (64, 2, (0, 64)),
        (768, 2, (384, 384)),
        (768, 8, (64, 128) * 4),
        (1408, 4, (320, 384) * 2),
        (2880, 3, (960,) * 3),
        (2880, 8, (384, 320, 384, 320, 384, 384, 320, 384)),
        (160, 2, (64, 96)),  # the team with the partial unit has the odd one
    ],
)
def test_widths_of_real_models(width: int, teams: int, lengths: tuple[int, ...]):
    assert tuple(map(len, cut(width, 64, (1,) * teams))) == lengths


def test_one_team_has_everything():
    assert cut(2880, 64, (5,)) == (range(2880),)


NOTHING = [(-1, 64, (1,)), (64, 0, (1,)), (64, 64, ()), (64, 64, (0, 0)), (64, 64, (2, -1))]


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_to_cut_by(case: tuple[int, int, tuple[int, ...]]):
    with pytest.raises(ValueError, match="cannot cut"):
        cut(*case)


def test_where_the_formats_can_be_cut():
    units = {name: cut_columns(fmt) for name, fmt in FORMATS.items()}
    assert units == {
        "int4": 64, "int4-g32": 64, "int4-g128": 128, "int4-g32-f32": 64, "int4-g128-f32": 128,
        "nl4": 64, "nl4-g32": 64, "nl4-s8": 64, "int4-s8": 64, "int6": 64, "int4-row-had": 256,
        "mxfp4": 64, "int8": 64, "int8-row": 64, "fp8": 128, "mxfp8": 64, "bf16": 32, "f32": 16,
    }  # fmt: skip


def experts(n: int, k: int, by: Cut, alternate: bool = False) -> Tensor:
    made = Tensor("experts", n, k, Role.EXPERTS, (), count=4, cut=by, part=ModelPart.EXPERTS)
    return replace(made, alternate=alternate)


@pytest.mark.parametrize("each", [2, 1], ids=["gate and up", "up alone"])
@pytest.mark.parametrize("shares", [(1, 1), (2, 1), (1, 1, 1)])
def test_a_team_has_the_rows_of_gate_and_up_that_give_its_columns_of_down(
    shares: tuple[int, ...], each: int
):
    recipe = Recipe(FORMATS["int4-g32"], FORMATS["bf16"])
    width, hidden = 320, 256
    down = slices_of(experts(hidden, width, Cut.COLUMNS), recipe, shares)
    gate_up = slices_of(experts(each * width, hidden, Cut.ROWS, each == 2), recipe, shares)
    assert len(down) == len(gate_up) == len(shares)
    for columns, rows in zip(down, gate_up, strict=True):
        assert (rows.of.start, rows.of.stop) == (each * columns.of.start, each * columns.of.stop)
        assert (columns.n, columns.k) == (hidden, len(columns.of))
        assert (rows.n, rows.k) == (len(rows.of), hidden)
    assert sum(rows.n for rows in gate_up) == each * width
