"""How a GGUF file says that a model makes embeddings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from convert import convert_checkpoint
from gguf_cases import CASES
from gguf_models import write_gguf

from ktcli.errors import BadCheckpoint
from ktcli.models import build
from ktcli.models.pooling import PoolingMode, TextPooling
from ktcli.weights.pack import Pack
from ktcli.weights.reader import config_of

QWEN3 = next(case for case in CASES if case.name == "qwen3-dense-q8_0")


def written(folder: Path, **metadata: Any) -> Path:
    """A file of Qwen3 whose metadata has these values, too."""
    return write_gguf(replace(QWEN3, metadata={**QWEN3.metadata, **metadata}), folder / "a.gguf")


@pytest.mark.parametrize(
    ("number", "mode"), [(1, PoolingMode.MEAN), (2, PoolingMode.FIRST), (3, PoolingMode.LAST)]
)
def test_the_pooling_type_is_read(number: int, mode: PoolingMode, tmp_path: Path) -> None:
    path = written(tmp_path, pooling_type=number)
    assert build(config_of(path)).pooling == TextPooling(mode)  # normalized, as llama.cpp does
    pack = Pack.open(convert_checkpoint(path, tmp_path / "pack", experts="int8", dense="int8"))
    model = build(pack.config)
    assert model.pooling == TextPooling(mode) and model.spec.embeds
    assert "lm_head" not in {tensor.name for tensor in model.tensors}


@pytest.mark.parametrize("more", [{}, {"pooling_type": 0}])
def test_without_one_a_file_generates_text(more: dict[str, int], tmp_path: Path) -> None:
    assert build(config_of(written(tmp_path, **more))).pooling is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"pooling_type": 4}, "ranks texts"),
        ({"pooling_type": 5}, "pooling type 5"),
        ({"pooling_type": "last"}, "pooling_type is 'last'"),
        ({"pooling_type": 3, "attention.causal": False}, "attends to later tokens"),
    ],
)
def test_what_kt_does_not_compute_is_refused(
    more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        config_of(written(tmp_path, **more))
