"""Models in these tests are tiny: a second thread of torch only waits for the first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hybrid import Made


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=["qwen3", "deepseek-v3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made.convert(request.param, tmp_path_factory.mktemp(request.param))
