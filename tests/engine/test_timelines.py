"""Laws of one sequence that schedules seldom reach: what is full leaves it as it was, and what is worth a snapshot."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from ktcli.engine.pages import PagePool, PoolFull
from ktcli.engine.pagetable import WindowPages
from ktcli.engine.statepool import before_tail
from ktcli.planner.memory import MOST_DRAFTED
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
    assert machine.pools.states is not None and len(machine.pools.states.places()) == kept


def test_going_back_reaches_the_last_state_that_is_kept_of_whatever_kind() -> None:
    """Steps of one token leave states that can be found again; a prompt's chunk leaves a snapshot."""
    machine = Machine(4, slots=14)
    sequence = machine.sequence()
    prefix: tuple[tuple[int, int], ...] = ()
    for n in (1, 1, 1, 20, 1, 1):
        prefix = fed(machine, sequence, prefix, [7] * n)
    for wanted, reached in ((25, 25), (24, 24), (23, 23), (22, 3), (2, 2)):
        assert sequence.truncate(wanted) == reached
        prefix = fed(machine, sequence, prefix[:reached], [8])
        sequence.truncate(reached)


def test_the_longest_beginning_with_a_state_is_found_whoever_left_a_shorter_one_later() -> None:
    machine = Machine(9, slots=9)
    for n in (130, 50, 20):
        sequence = machine.sequence()
        fed(machine, sequence, (), [7] * n)
        sequence.close()
    assert machine.sequence().adopt([7] * 200) == 130
    assert machine.sequence().adopt([7] * 130) == 50


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 128, 200])
def test_a_window_begins_with_the_page_of_the_first_position_that_a_token_sees(window: int) -> None:
    windows = WindowPages(PagePool(1), lambda of, to: None, window)
    for position in range(3 * PAGE + window):
        seen = range(max(0, position - window + 1), position + 1)
        assert windows.first(position) == seen[0] // PAGE


@pytest.mark.parametrize("window", [0, 70])
def test_a_fork_shares_nothing_that_a_failed_step_has_taken(window: int) -> None:
    machine = Machine(12, window=window)
    first = machine.sequence()
    prefix = fed(machine, first, (), [7] * (PAGE + 10))
    first.extend(np.full(2 * PAGE, 7, np.int32))  # never committed
    second = first.fork()
    assert (len(first.pages), len(second.pages)) == (4, 2)
    for sequence, id in ((first, 1), (second, 2)):
        fed(machine, sequence, prefix, [id] * (2 * PAGE))


def test_a_whole_draft_can_be_taken_back_whatever_others_have_taken_meanwhile() -> None:
    """Of the layers with a window, too, whose pages behind the window are given up."""
    machine = Machine(12, window=70, window_pages=3)
    first, second = machine.sequence(), machine.sequence()
    prefix = fed(machine, first, (), [7] * (2 * PAGE - 1))
    for _ in range(12):  # past the position where the window leaves its first page
        prefix = fed(machine, first, prefix, [8])
        with suppress(PoolFull):
            fed(machine, second, (), [9])
        second.truncate(0)
        back = first.length - MOST_DRAFTED
        assert first.truncate(back) == back
        prefix = fed(machine, first, prefix[:back], [id for id, _ in prefix[back:]])


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200, 528])
def test_the_last_tokens_of_a_prompt_that_is_not_short_are_a_chunk_of_their_own(
    tokens: int,
) -> None:
    left, sizes = tokens, []
    while left:
        sizes.append(before_tail(min(512, left), left))
        left -= sizes[-1]
    assert (tokens >= 64) == (sizes[-1] == 16)


@pytest.mark.parametrize("window", [0, 300])
def test_of_what_is_left_the_end_is_evicted_first(window: int) -> None:
    machine = Machine(4, window=window)
    first, second = machine.sequence(), machine.sequence()
    fed(machine, first, (), [7] * (4 * PAGE))
    first.close()
    fed(machine, second, (), [1] * (2 * PAGE))
    assert machine.sequence().adopt([7] * 300) == 2 * PAGE
