"""For the whole suite: property tests draw the same examples in every run, and are not timed; the row amx."""

import signal
from collections.abc import Iterator
from typing import Any

import amx as emulator
import pytest
from hypothesis import settings

# A job that a shell started in the background inherits SIGINT ignored; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tiers"]

settings.register_profile("kt", deadline=None, derandomize=True)
settings.load_profile("kt")


@pytest.fixture(scope="session")
def amx(tmp_path_factory: pytest.TempPathFactory) -> emulator.Amx:
    """How a child process gets the row amx; skips where none can."""
    if reason := emulator.why_not():
        pytest.skip(reason)
    return emulator.prepare(tmp_path_factory.mktemp("amx"))


@pytest.fixture(scope="session", autouse=True)
def native_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The C tests of this run (test_native_c.py), which begin with its first test; None: there are none."""
    items: list[Any] = [i for i in request.session.items if i.path.name == "test_native_c.py"]
    if not items:
        yield None
        return
    wanted = [(item.callspec.params["sanitizer"], item.callspec.params["source"]) for item in items]
    runs = items[0].module.Runs(wanted, tmp_path_factory.mktemp("native"))
    yield runs
    runs.close()
