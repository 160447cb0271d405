"""The file of an importance: equal work gives equal bytes, and whatever is wrong with one is a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from weights.fake_checkpoint import DEEPSEEK3, QWEN3

from ktcli.errors import BadCheckpoint, KtError, UsageError
from ktcli.models import build
from ktcli.weights.header import encode_header
from ktcli.weights.importance import MOST_STEPS, STEPS, Importance, measured, numbers_of
from ktcli.weights.importance_file import ImportanceFile, origin_in, read_importance

MODEL = build({**QWEN3, "num_hidden_layers": 1})


def importance(seed: int = 0) -> Importance:
    """Random steps for all of the model but its head."""
    rng = np.random.default_rng(seed)
    return Importance(
        {
            t.name: rng.integers(-MOST_STEPS, MOST_STEPS + 1, (t.count, t.k)).astype(np.int8)
            for t in measured(MODEL)
            if t.layer is not None
        }
    )


def file_of(found: Importance) -> ImportanceFile:
    return ImportanceFile(found, MODEL.spec.family, "00ff", "the text with SHA-256 0a, method 2")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(file_of(importance()).encoded()[1])
    return tmp_path / "a.safetensors"


def test_steps_are_eighths_of_an_octave() -> None:
    steps = np.arange(-MOST_STEPS, MOST_STEPS + 1).astype(np.int8)
    numbers = numbers_of(steps)
    assert numbers.dtype == np.float32
    assert (numbers == np.exp2(steps.astype(np.longdouble) / STEPS).astype(np.float32)).all()
    assert numbers_of(np.zeros(3, np.int8)).tolist() == [1, 1, 1]


def test_what_is_read_is_what_was_written(path: Path) -> None:
    written, data = file_of(importance()).encoded()
    assert path.read_bytes() == data == file_of(importance()).encoded()[1]
    found = read_importance(path, MODEL, "model")
    assert found.sha256 == written.sha256 != file_of(importance(1)).encoded()[0].sha256
    assert found.identity == written.identity == origin_in(path)
    assert found.importance.steps.keys() == importance().steps.keys()
    for name, steps in importance().steps.items():
        assert (found.importance.steps[name] == steps).all()
        assert (found.importance.row(name, 0) == numbers_of(steps[0])).all()
    assert found.importance.row("lm_head", 0) is None


def test_any_flipped_bit_is_found(path: Path) -> None:
    data = path.read_bytes()
    for at in range(0, len(data), 5):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(KtError):
            read_importance(path, MODEL, "model")
    for size in (0, 5, 100, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(BadCheckpoint):
            read_importance(path, MODEL, "model")
    path.write_bytes(data + b"\0")
    with pytest.raises(BadCheckpoint):
        read_importance(path, MODEL, "model")


NAME = "layers.0.attn.o"
META = {
    "kt_importance": "1",
    "sha256": "0" * 64,
    "family": MODEL.spec.family,
    "checkpoint": "0",
    "source": "s",
}
BAD = {
    "another type": ({NAME: ("U8", (1, 96))}, META, "is U8 instead of I8"),
    "another width": (
        {NAME: ("I8", (1, 95))},
        META,
        r"is \[1, 95\] there, and model has it as \[1, 96\]",
    ),
    "another name": ({"layers.7.attn.o": ("I8", (1, 96))}, META, "and model does not have it"),
    "nothing": ({}, META, "has the importance of no tensor"),
    "another family": (
        {NAME: ("I8", (1, 96))},
        {**META, "family": "gpt_oss"},
        "of the family 'gpt_oss'",
    ),
    "no family": ({NAME: ("I8", (1, 96))}, {**META, "family": ""}, "no valid 'family'"),
    "a later version": (
        {NAME: ("I8", (1, 96))},
        {**META, "kt_importance": "2"},
        "of version '2'; this kt reads",
    ),
    "weights": ({NAME: ("I8", (1, 96))}, {}, "but not of an importance"),
}


@pytest.mark.parametrize("what", BAD)
def test_headers_that_lie(what: str, path: Path) -> None:
    tensors, metadata, words = BAD[what]
    size = sum(int(np.prod(shape)) for _, shape in tensors.values())
    path.write_bytes(encode_header(tensors, metadata) + bytes(size))
    with pytest.raises(KtError, match=words) as caught:
        read_importance(path, MODEL, "model")
    assert caught.value.hint


def test_values_beyond_the_bounds(path: Path) -> None:
    """Under a hash that is right."""
    steps = {NAME: np.full((1, 96), MOST_STEPS + 1, np.int8)}
    path.write_bytes(file_of(Importance(steps)).encoded()[1])
    with pytest.raises(BadCheckpoint, match=r"outside -80\.\.80"):
        read_importance(path, MODEL, "model")


def test_another_model(path: Path) -> None:
    deeper, other = build({**QWEN3, "hidden_size": 96}), build(DEEPSEEK3)
    for model in (deeper, other):
        with pytest.raises(UsageError, match=r"another model|of the family"):
            read_importance(path, model, "model")
    written = replace(file_of(importance()), checkpoint="77")
    assert written.encoded()[0].sha256 != file_of(importance()).encoded()[0].sha256
