"""For the whole suite: property tests draw the same examples in every run, and are not timed; the row amx."""

import signal

import amx as emulator
import pytest
from hypothesis import settings

# A job that a shell started in the background inherits SIGINT ignored; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("kt", deadline=None, derandomize=True)
settings.load_profile("kt")


@pytest.fixture(scope="session")
def amx(tmp_path_factory: pytest.TempPathFactory) -> emulator.Amx:
    """How a child process gets the row amx; skips where none can."""
    if reason := emulator.why_not():
        pytest.skip(reason)
    return emulator.prepare(tmp_path_factory.mktemp("amx"))
