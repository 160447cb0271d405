"""Formats by name, and which tensor gets which."""

import pytest
from stored import lone

from ktcli.errors import UsageError
from ktcli.native import Format, packed_bytes
from ktcli.ops.tensors import Cut, Role
from ktcli.weights.formats import FORMATS, better_than, format_named, losses, mixable
from ktcli.weights.recipe import (
    Recipe,
    automatic,
    dominated,
    format_of,
    split_pair,
    stored_bytes,
)


def test_names_are_those_of_the_rows():
    assert {name: row.name for name, row in FORMATS.items()} == {name: name for name in FORMATS}
    for row in FORMATS.values():
        assert len(row.codebook) == (16 if row.bits == 4 else 0)
        assert list(row.codebook) == sorted(row.codebook)


@pytest.mark.parametrize(("name", "guess"), [("INT4", "int4"), ("int4-g31", "int4-g32"), ("", "")])
def test_unknown_format_lists_the_names(name: str, guess: str):
    with pytest.raises(
        UsageError, match=f"did you mean {guess}" if guess else "no number format ''"
    ) as caught:
        format_named(name)
    assert caught.value.hint == "formats: " + ", ".join(FORMATS)


def test_defaults():
    assert Recipe.named() == Recipe() == Recipe.named("int4", "int8")
    assert Recipe.named(dense="bf16") == Recipe(FORMATS["int4"], FORMATS["bf16"])


@pytest.mark.parametrize(
    ("role", "name"),
    [
        (Role.EXPERTS, "int4-g32"),
        (Role.DENSE, "int8"),
        (Role.KEPT, "bf16"),
        (Role.TABLE, None),
        (Role.VECTOR, None),
    ],
)
def test_every_role_has_its_format(role: Role, name: str | None):
    tensor = lone(1 if role is Role.VECTOR else 40, 100, role, ("s",), count=3)
    recipe = Recipe.named("int4-g32", "int8")
    found = format_of(tensor, recipe)
    assert (found.name if found else None) == name
    if found is not None:
        assert stored_bytes(tensor, recipe) == 3 * packed_bytes(found, 40, 100)
    else:
        assert stored_bytes(tensor, recipe) == (
            3 * 100 * 4 if role is Role.VECTOR else 3 * 4000 * 2
        )


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_bits_per_weight_are_those_of_packed_bytes(fmt: Format):
    """Of a scale per row, 32 bits of 2^15 columns, less than a thousandth is left."""
    n, k = 64, 1 << 15
    assert fmt.bits_per_weight == pytest.approx(packed_bytes(fmt, n, k) * 8 / (n * k), abs=1e-3)


def test_automatic_formats_go_down_in_bits():
    """From 8 to 4; what holds the experts of a recipe is what these bits say."""
    bits = [Recipe.named(name).bits_per_expert_weight for name in automatic()]
    assert bits == sorted(bits, reverse=True) and (bits[0], bits[-1]) == (8, 4)
    assert automatic() == ("int8", "int4-s8-mixed", "int4-s8", "int4-row-had")


def test_mixed_and_calibrated_are_endings_of_a_name():
    plain = Recipe.named("int4")
    mixed = Recipe.named("int4-mixed-calibrated")
    assert (mixed.experts, mixed.down, mixed.calibrated) == (
        plain.experts,
        FORMATS["int8-row"],
        True,
    )
    assert plain.mixed() == Recipe.named("int4-mixed") and plain.down is None
    for name in ("int4", "nl4-g32-mixed", "int8-calibrated", "int4-row-had-mixed-calibrated"):
        assert Recipe.named(name).experts_name == name
    with pytest.raises(UsageError, match="no format one step more precise than f32"):
        Recipe.named("f32-mixed")


def test_every_pair_of_formats_is_read_back():
    """With every ending of the experts' name; no two pairs have one name, so there is one way to read it."""
    plain = [*FORMATS, *(f"{name}-mixed" for name in mixable())]
    experts = [*plain, *(f"{name}-calibrated" for name in plain)]
    for first in experts:
        for dense in FORMATS:
            pair = Recipe.named(first, dense).name
            assert split_pair(pair) == (first, dense)
    names = {f"{first}-{dense}" for first in experts for dense in FORMATS}
    assert len(names) == len(experts) * len(FORMATS)


def test_what_is_no_pair():
    pairs = {name for first in FORMATS for name in (f"{first}-{dense}" for dense in FORMATS)}
    both = {"int4-g32-f32", "int4-g128-f32"}
    assert pairs & set(FORMATS) == both
    for name in set(FORMATS) - both:
        assert split_pair(name) == (name, "")
    assert split_pair("int4-mixed-calibrated") == ("int4-mixed-calibrated", "")
    assert split_pair("") == ("", "") and split_pair("int5") == ("int5", "")
    for unknown in ("int4-int5", "int5-int4", "int4-mixed-int5", "int4-g32-", "-", "a-b-c"):
        with pytest.raises(UsageError, match="there is no number format"):
            Recipe.named(*split_pair(unknown))


def test_a_step_more_precise_is_more_bits():
    """And down projections alone take it."""
    for name in mixable():
        step = better_than(FORMATS[name])
        assert step and step.bits_per_weight > FORMATS[name].bits_per_weight
        recipe = Recipe.named(f"{name}-mixed")
        for cut, wanted in ((Cut.ROWS, name), (Cut.COLUMNS, step.name)):
            tensor = lone(64, 512, Role.EXPERTS, (), count=2, cut=cut)
            found = format_of(tensor, recipe)
            assert found and found.name == wanted


def test_formats_that_another_one_dominates() -> None:
    """The others have the least loss of their bytes."""
    lost = {each.format: each.nats for each in losses(experts=True)}
    best = sorted(lost.keys() - set(dominated()), key=lost.__getitem__)
    assert {"int8", "int4-s8", "int4-row-had"} <= set(best)
    assert {"int4-g128", "mxfp4", "nl4-s8"} <= set(dominated())
    bits = [Recipe.named(name).bits_per_expert_weight for name in best]
    assert bits == sorted(bits, reverse=True) and len(set(bits)) == len(bits)
    for name in dominated():
        own = Recipe.named(name).bits_per_expert_weight
        assert any(
            b <= own and lost[other] < lost[name] for other, b in zip(best, bits, strict=True)
        )
