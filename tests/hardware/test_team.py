"""How many threads run the kernels, and where."""

from dataclasses import replace

import pytest

from ktcli.hardware.machine import Cpu
from ktcli.hardware.team import make_team, pinned_to, team_size

CPU = Cpu(None, (), (), 1, 4, 8, cores=(0, 2, 4, 6))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KT_THREADS", raising=False)


def test_one_thread_per_core_and_no_more_than_the_time_allowed():
    assert team_size(CPU) == 4
    assert team_size(replace(CPU, quota=2.5)) == 2


def test_what_is_asked_for_counts_before_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KT_THREADS", "3")
    assert team_size(CPU) == 3
    assert team_size(CPU, 1) == 1


def test_threads_are_pinned_while_there_are_cores():
    assert pinned_to(CPU, 2) == (0, 2)
    assert pinned_to(CPU, 4) == CPU.cores
    assert pinned_to(CPU, 5) is None


def test_a_team_runs_the_row_that_was_asked_for():
    team = make_team(replace(CPU, cores=(0,)), 2, isa="portable")
    assert (team.threads, team.isa) == (2, "portable")
