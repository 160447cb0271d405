"""What reading a layer's state costs, against counting it position by position."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktcli.ops.state import ABSORBED_TOKENS, LayerState

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


LATENT = LayerState(10, ops_per_position=30, expanded_ops=9, expansion_ops=100)


@pytest.mark.parametrize(
    ("start", "n"), [(0, 1), (0, 64), (40, 1), (300, 4), (300, 100), (300, 129)]
)
def test_latent_attention_takes_the_form_with_fewer_operations(start: int, n: int) -> None:
    """Absorbed, each pair is dear; expanded, each position before the step is expanded once. Many tokens always are."""
    pairs = sum(position + 1 for position in range(start, start + n))
    absorbed, expanded = 30 * pairs, 9 * pairs + 100 * start
    assert LATENT.ops(start, n) == (expanded if n > 128 else min(absorbed, expanded))
    assert LATENT.elements_read(start, n) == 10 * (start + n)


def test_the_forms_change_where_the_library_changes_them() -> None:
    header = Path(__file__).parents[2] / "native" / "src" / "mla.h"
    if not header.exists():
        pytest.skip("there is no source beside these tests")
    assert f"#define MLA_ABSORBED {ABSORBED_TOKENS}\n" in header.read_text(encoding="utf-8")
