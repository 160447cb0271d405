"""For the tests of commands: a library that all tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One library for all tests of a file: what it converts is converted once."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_HOME", str(folder))
        patch.setenv("KT_THREADS", "1")
        yield folder
