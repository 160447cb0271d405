"""Every table of kernels is complete, and each kernel takes what its row of the table of operations has."""

from __future__ import annotations

from inspect import signature

import pytest

from ktcli.ops.backend import FORWARD
from ktcli.ops.operation import FieldKind, layout_of
from ktcli.ops.table.experts import Experts
from ktcli.ops.table.rowwise import Embed, Select
from ktcli.ops.torch.kernels import EXACT, TORCH, Kernels, triton_kernels

BY_BACKEND = (Embed, Select, Experts)


@pytest.mark.parametrize("kernels", [TORCH, EXACT, None], ids=["torch", "exact", "triton"])
def test_kernels_take_what_the_row_has(kernels: Kernels | None) -> None:
    if kernels is None:
        pytest.importorskip("triton", reason="needs triton")
        kernels = triton_kernels()
    rows = [row for row in FORWARD if row not in BY_BACKEND]
    assert set(kernels.operations) == {row.name for row in rows}
    for row in rows:
        fields = {field.name: field.kinds for field in layout_of(row).fields}
        wanted = {name for name, kinds in fields.items() if not _of_layer(kinds)}
        for kind, name in ((FieldKind.PAGES, "cache"), (FieldKind.STATE, "state")):
            wanted |= {name} if any(kind in kinds for kinds in fields.values()) else set()
        wanted |= {"rows"} if row.reads_step else set()
        found = set(signature(kernels[row.name]).parameters) - {"exact"}
        assert found == wanted, row.name


def _of_layer(kinds: frozenset[FieldKind]) -> bool:
    return bool(kinds & {FieldKind.PAGES, FieldKind.STATE, FieldKind.FIRST})
