"""The rows of a head that are read twice: few, and from all of it."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from ktcli.native import PANEL_ROWS
from ktcli.ops.tensors import ModelPart, Role, Stored, Tensor
from ktcli.weights.strips import SAMPLE, sample


@pytest.mark.parametrize("rows", [1, 100, SAMPLE, SAMPLE + 1, 5 * SAMPLE + 7, 151_936])
def test_a_sample_is_bounded_and_spread_over_all_rows(rows: int) -> None:
    stored = Stored("head", (rows, 64))
    head = Tensor("head", rows, 64, Role.DENSE, ((stored,),), part=ModelPart.HEAD)
    source = SimpleNamespace(shape=(rows, 64), rows=rows)
    spans = sample(head, SimpleNamespace(names={"head"}, find=lambda name, shape: source))  # type: ignore[arg-type]
    taken = [row for span in spans for row in range(span.start, span.stop)]
    assert len(taken) == len(set(taken)) and min(rows, SAMPLE // 2) <= len(taken)
    assert len(taken) <= min(rows, SAMPLE + PANEL_ROWS)
    edges = [0, *(span.start for span in spans), rows]
    widest = max(after - before for before, after in pairwise(edges))
    assert taken[-1] < rows and widest <= max(PANEL_ROWS, 2 * PANEL_ROWS * rows // SAMPLE)
