"""A checkpoint whose weight files come later says what the whole one says, and sees when one is not what was said."""

from __future__ import annotations

from pathlib import Path

import pytest
from weights.fake_checkpoint import QWEN3, random_checkpoint, write_file

from ktcli.errors import BadCheckpoint
from ktcli.models import build
from ktcli.weights.arriving import Arriving, OtherHeader
from ktcli.weights.check import check, needed
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.storage import Read


def headers(source: Path, folder: Path) -> dict[str, int]:
    """Copies the small files and the headers; returns the bytes of each weight file."""
    folder.mkdir()
    sizes = {}
    for path in source.iterdir():
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            sizes[path.name] = len(data)
            data = data[: 8 + int.from_bytes(data[:8], "little")]
        (folder / path.name).write_bytes(data)
    return sizes


def test_it_says_what_the_whole_checkpoint_says(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", QWEN3, shards=3)
    sizes = headers(source, tmp_path / "head")
    model = build(QWEN3)
    with Checkpoint(source) as whole, Arriving(tmp_path / "head", sizes) as head:
        assert head.digest == whole.digest
        assert head.parts == whole.parts
        assert check(model, head) == check(model, whole)
        asked = needed(model.tensors, head)
        assert asked == {name: ((head.data_start(name), size),) for name, size in sizes.items()}
        for name in sizes:
            head.arrived(name, source / name)
        for part in whole.parts.values():
            wanted = Read(part.file, part.entry.offset, part.entry.size_bytes)
            assert (head.read(wanted) == whole.read(wanted)).all()


def test_a_file_with_another_header_is_refused(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", QWEN3, shards=2)
    sizes = headers(source, tmp_path / "head")
    other = random_checkpoint(tmp_path / "other", {**QWEN3, "vocab_size": 98}, shards=2)
    with Arriving(tmp_path / "head", sizes) as head:
        for name in sizes:
            with pytest.raises(OtherHeader, match=name):
                head.arrived(name, other / name)


@pytest.mark.parametrize("value", [0, 1])
def test_a_bias_that_was_taken_for_zeros_is_looked_at(tmp_path: Path, value: int) -> None:
    """AutoGPTQ gave one to every matrix."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    file = "model.safetensors"
    bias = bytes(14) + bytes([value, 0])
    write_file(
        source / file, {"a.qweight": ("I32", (1, 8), bytes(32)), "a.bias": ("F16", (8,), bias)}
    )
    sizes = headers(source, tmp_path / "head")
    with Arriving(tmp_path / "head", sizes) as head:
        assert head.unused(["a.qweight"]) == []
        assert head.presumed == {file}
        if value:
            with pytest.raises(BadCheckpoint, match=r"a\.bias in .* is a bias"):
                head.arrived(file, source / file)
        else:
            head.arrived(file, source / file)
        assert head.presumed == set()


def test_what_is_not_on_the_disk_any_more_is_never_read(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", QWEN3)
    sizes = headers(source, tmp_path / "head")
    with Arriving(tmp_path / "head", sizes) as head:
        first, second, *_ = sorted(head.parts.values(), key=lambda part: part.entry.offset)
        head.arrived(first.file, source / first.file)
        at = second.entry.offset
        head.lost(first.file, ((at, at + second.entry.size_bytes),))
        head.read(Read(first.file, first.entry.offset, first.entry.size_bytes))
        with pytest.raises(AssertionError, match="too late"):
            head.read(Read(first.file, at - 2, 4))
