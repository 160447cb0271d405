"""Laws of one sequence that schedules seldom reach: what is full leaves it as it was, and what is worth a snapshot."""

from __future__ import annotations

import numpy as np
import pytest

from ktcli.engine.pages import PoolFull
from tests.engine.test_sequence import PAGE, Machine, fed


def test_where_only_the_pages_of_windows_are_full_nothing_is_taken() -> None:
    machine = Machine(12, window=70, window_pages=3)
    first, second = machine.sequence(), machine.sequence()
    fed(machine, first, (), [1] * (2 * PAGE))
    prefix = fed(machine, second, (), [2] * 10)
    pages, available = second.pages, machine.pools.available
    with pytest.raises(PoolFull):
        second.extend(np.full(3 * PAGE, 2, np.int32))
    assert (second.pages, machine.pools.available) == (pages, available)
    fed(machine, second, prefix, [2] * 5)  # it goes on with what it has


@pytest.mark.parametrize(
    ("first_output", "prompt", "kept"),
    [(None, True, 1), (None, False, 0), (0, True, 0)],
    ids=["a chunk of a prompt", "a draft", "a text of which each id is judged"],
)
def test_only_the_end_of_a_prompts_chunk_is_worth_a_snapshot(
    first_output: int | None, prompt: bool, kept: int
) -> None:
    machine = Machine(4, slots=6)
    sequence = machine.sequence()
    run = sequence.extend(np.full(20, 1, np.int32), first_output=first_output)
    machine.run(run, ())
    sequence.commit(run, prompt=prompt)
    assert machine.pools.states is not None and machine.pools.states.snapshots == kept
