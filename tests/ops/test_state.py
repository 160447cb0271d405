"""What reading a layer's state costs, against counting it position by position."""

from __future__ import annotations

import pytest

from ktcli.ops.state import LayerState

STATES = [
    LayerState(10, ops_per_position=7),
    LayerState(10, ops_per_position=7, window=4),
    LayerState(10, ops_per_position=7, chosen=5, index_elements=3, index_ops=2),
    LayerState(10, ops_per_position=7, chosen=5),  # chosen by another layer
]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("start", "n"), [(0, 1), (0, 4), (0, 12), (3, 2), (4, 1), (5, 1), (30, 3)])
def test_elements_and_operations_of_a_step(state: LayerState, start: int, n: int) -> None:
    chooses = 0 < state.chosen < start + n
    ops, touched = 0, set[int]()
    for position in range(start, start + n):
        first = max(0, position + 1 - state.window) if state.window else 0
        seen = range(first, position + 1)
        touched.update(seen)
        ops += min(len(seen), state.chosen or len(seen)) * state.ops_per_position
        ops += chooses * len(seen) * state.index_ops
    attended = min(len(touched), n * state.chosen) if chooses else len(touched)
    elements = attended * (state.position_elements - state.index_elements)
    elements += chooses * len(touched) * state.index_elements
    assert state.ops(start, n) == ops
    assert state.elements_read(start, n) == elements
