"""Whose turn it is among requests that wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ktcli.engine.waiting import AGING_STEPS, Turns


def waiting(
    number: int, *, caller: str = "", priority: int = 0, since: int = 0, goes_on: bool = False
) -> Any:
    request = SimpleNamespace(caller=caller, priority=priority)
    return SimpleNamespace(request=request, number=number, since=since, goes_on=goes_on)


def order(turns: Turns, *answers: Any, step: int = 0) -> list[int]:
    return [answer.number for answer in turns.first(answers, step)]


def test_what_goes_on_comes_first_then_the_important_then_the_older() -> None:
    answers = [waiting(1), waiting(2, priority=1), waiting(3), waiting(4, goes_on=True)]
    assert order(Turns(), *answers[::-1]) == [4, 2, 1, 3]


def test_who_waits_for_long_goes_before_newer_ones_of_any_priority() -> None:
    old, new = waiting(1, priority=-3), waiting(2, since=3 * AGING_STEPS - 1)
    assert order(Turns(), new, old, step=3 * AGING_STEPS - 1) == [2, 1]
    assert order(Turns(), new, old, step=3 * AGING_STEPS) == [1, 2]


def test_of_several_callers_the_one_that_was_served_longest_ago_comes_first() -> None:
    turns = Turns()
    answers = [waiting(i, caller="ab"[i > 1]) for i in range(4)]
    assert order(turns, *answers) == [0, 1, 2, 3]
    turns.served(answers[0])
    assert order(turns, *answers[1:]) == [2, 3, 1]
    turns.served(answers[2])
    assert order(turns, answers[1], answers[3]) == [1, 3]
    turns.forget([answers[3]])
    assert order(turns, answers[1], answers[3]) == [1, 3]
