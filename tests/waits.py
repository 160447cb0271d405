"""Waits for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # programs without it import this file, too
    import pytest

_LOOK_S = 0.005  # between two looks


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Returns once a condition holds; how long it takes on a machine that others use is no test's business."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it does not come about"
        time.sleep(_LOOK_S)


def patient(patch: pytest.MonkeyPatch, stores: ModuleType) -> None:
    """Lets a module of slow stores wait as long as they need; what is too slow is for the tests of that."""
    for name in ("OPEN_S", "LOOK_S", "READ_S", "STALL_S", "CLOSE_S"):
        patch.setattr(stores, name, 60.0)
