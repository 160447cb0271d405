"""For the whole suite: property tests draw the same examples in every run, and are not timed; the row amx."""

import fcntl
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import amx as emulator
import pytest
from hypothesis import settings

from ktcli.output import Mode, out

# A job that a shell started in the background, or under nohup, inherits signals ignored; tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The suite's models are tiny: a second thread of torch or of numpy's BLAS would only wait for the first.
os.environ["OMP_NUM_THREADS"] = "1"

# Nor do the settings of whoever runs the tests change what they find.
os.environ["KT_CONFIG"] = "/nonexistent/config.toml"
os.environ["KT_LIBRARIES"] = "off"
# No test asks a hub of the world; one that asks its own says so.
os.environ["HF_ENDPOINT"] = os.environ["MODELSCOPE_ENDPOINT"] = "http://127.0.0.1:9"
os.environ["MODELSCOPE_API_MAX_RETRIES"] = "1"
# Nor are the libraries of tests remembered as theirs.
os.environ["XDG_STATE_HOME"] = "/dev/null"
# Nor is it remembered when tiles pay: it would be measured, for two seconds, by each test that loads a model.
if "amx_tile" in Path("/proc/cpuinfo").read_text():
    os.environ.setdefault("KT_TILE_MIN", "16")

pytest_plugins = ["tiers", "sanitized", "dearest"]

settings.register_profile("kt", deadline=None, derandomize=True)
settings.load_profile("kt")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: looking for garbage among it takes a sixth of the time, and later more."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def pytest_unconfigure() -> None:
    """Of what is never looked for Triton's binding says that it leaked; without Triton looking would take 5 s."""
    if "triton" in sys.modules:
        gc.unfreeze()


@pytest.fixture(autouse=True)
def output_as_at_the_start() -> None:
    """No test finds the output as the options of a command in another test have set it."""
    out.mode, out.says_yes, out.logs_json = Mode.HUMAN, False, False


@pytest.fixture(scope="session", autouse=True)
def own_library(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """Tests that name no library share one that nobody else has: not the user's, nor that of another process of xdist,
    whose servers would be found there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(tmp_path_factory.mktemp("library")))
        yield


@pytest.fixture(scope="session", autouse=True)
def eager_writers() -> Generator[None, None, None]:
    """KV pages are written at the usual priority: at the lowest, beside other processes of the suite, that takes nearly
    as long as the end of a store waits for it."""
    from ktcli.store import pages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "NICE", 0)
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> Generator[None, None, None]:
    """Servers may take their time to say what they are; who does not wait for them is for the tests of that."""
    from ktcli.server.attached import client
    from ktcli.server.process import discovery

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "FACTS_S", 60.0)
        patch.setattr(discovery, "ANSWER_S", 60.0)
        yield


@pytest.fixture(scope="session")
def amx(tmp_path_factory: pytest.TempPathFactory) -> emulator.Amx:
    """How a child process gets the row amx; skips where none can. It is built once in a run, by the first process of
    xdist that asks; others wait for it."""
    if reason := emulator.why_not():
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "amx"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return emulator.prepare(folder)


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """A case's random checkpoint (reference.py), written once in a session: to be read only."""
    from reference import write_checkpoint

    written: dict[str, Path] = {}

    def checkpoint(case: Any) -> Path:
        if case.name not in written:
            folder = tmp_path_factory.mktemp(case.name)
            written[case.name] = write_checkpoint(case, folder / "checkpoint")
        return written[case.name]

    return checkpoint


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is measured for a millisecond, over few megabytes: for tests of what is said of it,
    whatever it is."""
    from ktcli.measure import bench, layer, rates
    from ktcli.native import Pool

    real = Pool.ceiling

    def ceiling(self: Pool, kind: Any, seconds: float, *data: Any) -> float:
        return real(self, kind, 1e-3, *data)

    monkeypatch.setattr(Pool, "ceiling", ceiling)
    monkeypatch.setattr(layer, "_RUN_S", 1e-3)
    monkeypatch.setattr(layer, "_MOST_LAYERS", 4)
    monkeypatch.setattr(bench, "CEILING_BYTES", 4 << 20)
    for name in ("BUFFER_BYTES", "SMALLEST_BUFFER_BYTES"):
        monkeypatch.setattr(rates, name, 4 << 20)
