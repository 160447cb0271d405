"""Measuring beside others: ratios to a ceiling taken around each run, and who else used the cores."""

import os
from pathlib import Path

import pytest

from ktcli.measure.clock import NOISY_SHARE, Measurement, Others, TimedRun, alternate, busy_seconds

TICK = os.sysconf("SC_CLK_TCK")


def stat(*ticks_per_cpu: tuple[int, ...]) -> str:
    lines = [f"cpu{i} {' '.join(map(str, ticks))}" for i, ticks in enumerate(ticks_per_cpu)]
    return "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 12 0 0", "ctxt 99"]) + "\n"


def write(root: Path, text: str) -> None:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc" / "stat").write_text(text)


def test_work_runs_between_ceilings():
    order: list[str] = []

    def ideal() -> float:
        order.append("ceiling")
        return 1.0

    measured = alternate(lambda: order.append("work"), ideal, pairs=3)
    assert order == ["ceiling", "work"] * 3 + ["ceiling"]
    assert len(measured.runs) == 3


def test_a_run_is_compared_with_the_ceilings_around_it():
    drifting = iter([1.0, 3.0, 5.0])
    measured = alternate(lambda: None, lambda: next(drifting), pairs=2)
    assert [run.ideal_s for run in measured.runs] == [2.0, 4.0]


def test_the_median_of_ratios_counts_and_the_extremes_are_kept():
    runs = (TimedRun(2.0, 1.0), TimedRun(4.0, 1.0), TimedRun(1.0, 0.9))
    measured = Measurement(runs, others_share=0.0)
    assert measured.share == 0.5
    assert (measured.fastest_s, measured.seconds, measured.slowest_s) == (1.0, 2.0, 4.0)


def test_a_drifting_machine_does_not_change_the_share():
    """The machine halves its speed in the middle: times double, ratios stay."""
    runs = tuple(TimedRun(seconds=2.0 * slow, ideal_s=1.5 * slow) for slow in (1, 1, 2, 2, 2))
    assert Measurement(runs, 0.0).share == pytest.approx(0.75)


@pytest.mark.parametrize(("share", "noisy"), [(0.0, False), (NOISY_SHARE, False), (0.11, True)])
def test_noisy_above_a_tenth_of_the_cores(share: float, noisy: bool):
    assert Measurement((TimedRun(1.0, 1.0),), share).noisy is noisy


def test_busy_time_of_the_given_cores_only():
    # user nice system idle iowait irq softirq steal guest guest_nice
    text = stat((1, 2, 3, 100, 50, 4, 5, 6, 1, 2), (1000,) * 10)
    busy, total = busy_seconds(text, frozenset({0}))
    assert busy == (1 + 2 + 3 + 4 + 5 + 6) / TICK
    assert total == (1 + 2 + 3 + 100 + 50 + 4 + 5 + 6) / TICK


def test_what_others_used_between_two_readings(tmp_path: Path):
    write(tmp_path, stat((0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 0)))
    others = Others(tmp_path, cpus=[0, 1])
    # A hundred seconds on two cores, half of them busy: this process hardly ran in between.
    write(
        tmp_path,
        stat((50 * TICK, 0, 0, 50 * TICK, 0, 0, 0, 0), (0, 50 * TICK, 0, 50 * TICK, 0, 0, 0, 0)),
    )
    assert others.share() == pytest.approx(0.5, abs=0.01)


def test_own_work_is_not_noise(tmp_path: Path):
    write(tmp_path, stat((0, 0, 0, 0, 0, 0, 0, 0)))
    others = Others(tmp_path, cpus=[0])
    before = os.times()
    while sum(os.times()[:2]) - sum(before[:2]) < 0.1:
        pass
    own = round((sum(os.times()[:2]) - sum(before[:2])) * TICK)
    write(tmp_path, stat((own, 0, 0, own, 0, 0, 0, 0)))
    assert others.share() < 0.1


def test_a_kernel_that_does_not_say_is_not_noisy(tmp_path: Path):
    assert Others(tmp_path).share() == 0.0
