"""Formats by name, and which tensor gets which."""

import pytest

from ktcli.errors import UsageError
from ktcli.layers.tensors import Role, Tensor
from ktcli.native import packed_bytes
from ktcli.weights.formats import FORMATS, format_named
from ktcli.weights.recipe import Recipe, format_of, stored_bytes


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
    tensor = Tensor("t", 1 if role is Role.VECTOR else 40, 100, role, ("s",), count=3)
    recipe = Recipe.named("int4-g32", "int8")
    found = format_of(tensor, recipe)
    assert (found.name if found else None) == name
    if found is not None:
        assert stored_bytes(tensor, recipe) == 3 * packed_bytes(found, 40, 100)
    else:
        assert stored_bytes(tensor, recipe) == (
            3 * 100 * 4 if role is Role.VECTOR else 3 * 4000 * 2
        )
