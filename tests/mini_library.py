"""The mark of tests that run the built-in model."""

import pytest

from ktcli.resources import data_path

NEEDS_KT_MINI = pytest.mark.skipif(
    not data_path("profiles", "kt-mini").joinpath("model.safetensors").exists(),
    reason="the trained model is not in this tree",
)
