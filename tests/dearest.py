"""Says at the end of a run which files took most CPU time, with the processes that they started: a plugin of pytest.

The C tests under sanitizers are not among them: they are built and run beside the others (sanitized.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

MOST = 10
BEGUN = pytest.StashKey[float]()


def cpu_s() -> float:
    """Seconds of this process and of those it has waited for, in user and system mode."""
    return sum(os.times()[:4])


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tally())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGUN] = cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("cpu_s", cpu_s() - item.stash.get(BEGUN, cpu_s())))
    return report


class Tally:
    """Adds up what reports say, those of xdist's processes too."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._spent[report.nodeid.partition("::")[0]] += dict(report.user_properties)["cpu_s"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._spent) > MOST:
            terminalreporter.section("dearest files, in CPU seconds")
            for name, spent in self._spent.most_common(MOST):
                terminalreporter.write_line(f"{spent:7.1f}  {name}")
