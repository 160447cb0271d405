"""The two models of these tests, converted once."""

from __future__ import annotations

import pytest
from hybrid import Made


@pytest.fixture(scope="session", params=["qwen3", "deepseek-v3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made.convert(request.param, tmp_path_factory.mktemp(request.param))
