"""llama.cpp's imatrix as the importance of columns: names and shapes of every architecture, and what can be wrong."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from gguf_cases import CASES
from gguf_families import FAMILIES
from gguf_models import GgufCase, write_gguf
from imatrices import write_imatrix
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli.errors import KtError
from ktcli.models import Model, build
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.gguf.file import Gguf
from ktcli.weights.gguf.header import read_gguf_header
from ktcli.weights.gguf.imatrix import ReadImatrix, read_imatrix
from ktcli.weights.importance import measured, steps_of
from ktcli.weights.storage import Reader

BY_NAME = {case.name: case for case in (*CASES, *FAMILIES)}
SOME = (
    "qwen35moe",
    "deepseek4",
    "gemma4",
    "mimo2",
    "granitehybrid",
    "bailingmoe3",
    "gpt-oss-mxfp4",
)
GUESSING = {
    "bailingmoe2": "blk.4."
}  # its layer that guesses further tokens, which llama-imatrix does not run
Sums = dict[str, tuple[np.ndarray, np.ndarray]]


class Published:
    """A checkpoint of the hub, as far as its config tells."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config


def random_sums(path: Path, guessing: str = ".nextn") -> Sums:
    """Sums for all matrices in the layers of a GGUF file."""
    rng, made = np.random.default_rng(0), Sums()
    for name, entry in read_gguf_header(path).entries.items():
        is_matrix = name.endswith(".weight") and len(entry.shape) > 1 and "conv1d" not in name
        if name.startswith("blk.") and is_matrix and guessing not in name:
            count = entry.shape[0] if len(entry.shape) == 3 else 1
            made[name] = rng.random((count, entry.shape[-1])) + 0.01, np.full(count, 7.0)
    return made


def covered(case: GgufCase, tmp_path: Path) -> tuple[Model, Gguf, Path, Sums]:
    path = write_gguf(case, tmp_path / "model.gguf")
    checkpoint = Gguf(path)
    sums = random_sums(path, GUESSING.get(case.name, ".nextn"))
    return build(checkpoint.config), checkpoint, write_imatrix(tmp_path / "i.gguf", sums), sums


@pytest.mark.parametrize(
    "name",
    [name if name in SOME else pytest.param(name, marks=pytest.mark.thorough) for name in BY_NAME],
)
def test_every_architecture_is_covered(name: str, tmp_path: Path) -> None:
    """But for the head, which llama-imatrix leaves out; of a checkpoint of the hub as of a GGUF file."""
    model, checkpoint, path, _ = covered(BY_NAME[name], tmp_path)
    with checkpoint:
        found = read_imatrix(path, model, checkpoint, "model")
        hub = read_imatrix(path, model, cast(Reader, Published(checkpoint.config)), "model")
    assert found.missing == hub.missing == ("lm_head",) and found.unchosen == 0
    assert found.importance.steps.keys() == {t.name for t in measured(model)} - {"lm_head"}
    if name != "qwen3next":  # the hub has it as a model type of its own
        for tensor, steps in found.importance.steps.items():
            assert (steps == hub.importance.steps[tensor]).all()


def test_columns_that_a_converter_rearranged(tmp_path: Path) -> None:
    """The value heads of linear attention lie in another order in the file."""
    model, checkpoint, path, sums = covered(BY_NAME["qwen35moe"], tmp_path)
    with checkpoint:
        found = read_imatrix(path, model, checkpoint, "model").importance.steps
        places = checkpoint._views["linear_attn.out_proj.weight"].columns
    assert places is not None
    (out,) = (t for t in model.tensors if t.layer == 0 and "out_proj" in t.sources[0][0].name)
    squares, rows = sums["blk.0.ssm_out.weight"]
    moved = places.places(0, out.k)
    assert not (moved == np.arange(out.k)).all()
    assert (found[out.name] == steps_of(out, squares[:, moved], rows)).all()


def usual(changes: Callable[[Sums], None] = lambda sums: None, **config: int) -> Sums:
    """Sums of a model of six experts in three layers."""
    rng = np.random.default_rng(1)
    made = Sums()
    for layer in range(3):
        for name, count, k in (
            ("attn_q", 1, 80),
            ("attn_k", 1, 80),
            ("attn_output", 1, 96),
            ("ffn_gate_inp", 1, 80),
            ("ffn_gate_exps", 6, 80),
            ("ffn_up_exps", 6, 80),
            ("ffn_down_exps", 6, 40),
        ):
            rows = rng.integers(1, 90, count).astype(float)
            made[f"blk.{layer}.{name}.weight"] = rng.random((count, k)) * rows[:, None], rows
    changes(made)
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("imatrix") / "source", QWEN3)


def read(path: Path, source: Path) -> ReadImatrix:
    with Checkpoint(source) as checkpoint:
        return read_imatrix(path, build(checkpoint.config), checkpoint, "model")


def test_each_expert_has_its_own(source: Path, tmp_path: Path) -> None:
    sums = usual()
    found = read(write_imatrix(tmp_path / "i.gguf", sums), source)
    tensors = {tensor.name: tensor for tensor in build(QWEN3).tensors}
    for name, of in (
        ("mlp.experts.gate_up", "ffn_gate_exps"),
        ("mlp.experts.down", "ffn_down_exps"),
        ("attn.o", "attn_output"),
    ):
        steps = found.importance.steps[f"layers.2.{name}"]
        assert (steps == steps_of(tensors[f"layers.2.{name}"], *sums[f"blk.2.{of}.weight"])).all()
    assert found.missing == ("lm_head",)


def test_gate_and_up_as_one_tensor(source: Path, tmp_path: Path) -> None:
    def merge(sums: Sums) -> None:
        for layer in range(3):
            sums[f"blk.{layer}.ffn_gate_up_exps.weight"] = sums.pop(
                f"blk.{layer}.ffn_gate_exps.weight"
            )
            del sums[f"blk.{layer}.ffn_up_exps.weight"]

    plain = read(write_imatrix(tmp_path / "a.gguf", usual()), source)
    merged = read(write_imatrix(tmp_path / "b.gguf", usual(merge)), source)
    name = "layers.1.mlp.experts.gate_up"
    assert (plain.importance.steps[name] == merged.importance.steps[name]).all()
    assert merged.missing == plain.missing


def test_experts_that_no_token_chose(source: Path, tmp_path: Path) -> None:
    """Get the mean of their layer, or for down, whose columns are each expert's own, equal columns."""

    def drop(sums: Sums) -> None:
        for part in ("gate", "up", "down"):
            squares, rows = sums[f"blk.0.ffn_{part}_exps.weight"]
            squares[4], rows[4] = 0, 0
        squares, rows = sums["blk.1.attn_output.weight"]
        squares[:], rows[:] = 0, 0

    sums = usual(drop)
    found = read(write_imatrix(tmp_path / "i.gguf", sums), source)
    squares, _ = sums["blk.0.ffn_gate_exps.weight"]
    mean = squares.sum(0) / squares.sum(0).mean()
    steps = found.importance.steps
    expected = np.rint(8 * np.log2(mean))
    assert (steps["layers.0.mlp.experts.gate_up"][4] == expected).all()
    assert not steps["layers.0.mlp.experts.down"][4].any()
    assert found.unchosen == 2 and found.missing == ("layers.1.attn.o", "lm_head")


OUT = "blk.1.attn_output.weight"
GATE = "blk.1.ffn_gate_exps.weight"


def put(name: str, which: int, value: float) -> Callable[[Sums], None]:
    def change(sums: Sums) -> None:
        sums[name][which].flat[0] = value

    return change


def fewer(name: str, count: int, k: int) -> Callable[[Sums], None]:
    def change(sums: Sums) -> None:
        squares, rows = sums[name]
        sums[name] = squares[:count, :k], rows[:count]

    return change


def without_layers(first: int) -> Callable[[Sums], None]:
    def change(sums: Sums) -> None:
        for name in [name for name in sums if int(name.split(".")[1]) >= first]:
            del sums[name]

    return change


def nothing(sums: Sums) -> None:
    for squares, rows in sums.values():
        squares[:], rows[:] = 0, 0


def other_names(sums: Sums) -> None:
    for name in list(sums):
        sums[name.replace("attn", "ssm").replace("ffn", "conv")] = sums.pop(name)


BAD = {
    "NaN": (put(OUT, 0, np.nan), f"{OUT}.in_sum2 in i.gguf has a value that is NaN"),
    "Inf": (put(GATE, 0, np.inf), "infinite or negative"),
    "negative": (put(OUT, 0, -1.0), "infinite or negative"),
    "count NaN": (put(GATE, 1, np.nan), f"{GATE}.counts in i.gguf has a value"),
    "count below 0": (put(GATE, 1, -3.0), "infinite or negative"),
    "count 0 of inputs": (put(OUT, 1, 0.0), "has sums of no inputs"),
    "no inputs at all": (nothing, "has nothing of the tensors of model"),
    "experts missing": (
        fewer(GATE, 5, 80),
        "another model: .* has 5 x 80 inputs there, in model 6 x 80",
    ),
    "columns missing": (
        fewer(OUT, 1, 95),
        "another model: .* has 1 x 95 inputs there, in model 1 x 96",
    ),
    "layers missing": (without_layers(2), "another model: it has 2 layers, model 3"),
    "layers too many": (
        lambda s: s.update({OUT.replace("1", "3"): s[OUT]}),
        "it has 4 layers, model 3",
    ),
    "another architecture": (other_names, "has nothing of the tensors"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_numbers_and_other_models(what: str, source: Path, tmp_path: Path) -> None:
    change, words = BAD[what]
    path = write_imatrix(tmp_path / "i.gguf", usual(change))
    with pytest.raises(KtError, match=words) as caught:
        read(path, source)
    assert caught.value.hint and "\n" not in str(caught.value)


def renamed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda data: data.replace(old, new)


def half(data: bytes) -> bytes:
    """One tensor of 96 numbers as f16."""
    info = f"{OUT}.in_sum2".encode() + struct.pack("<IQ", 1, 96)
    assert info + bytes(4) in data
    return data.replace(info + bytes(4), info + struct.pack("<I", 1))


DAMAGED = {
    "no counts": (
        renamed(f"{OUT}.counts".encode(), f"{OUT}.county".encode()),
        f"has {re.escape(OUT)}.in_sum2, but no",
    ),
    "no sums": (
        renamed(f"{OUT}.in_sum2".encode(), f"{OUT}.in_sum3".encode()),
        f"has {re.escape(OUT)}.counts, but no",
    ),
    "truncated": (lambda data: data[:-1000], "is not inside the file"),
    "cut in the header": (lambda data: data[:300], "extend beyond the file"),
    "many tensors": (lambda data: data[:8] + b"\xff" * 8 + data[16:], "the limits are"),
    "of a later version": (lambda data: data[:4] + b"\x09" + data[5:], "has version 9"),
    "half precision": (half, "is F16 instead of F32"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files(what: str, source: Path, tmp_path: Path) -> None:
    change, words = DAMAGED[what]
    path = write_imatrix(tmp_path / "i.gguf", usual())
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(KtError, match=words) as caught:
        read(path, source)
    assert caught.value.hint


def test_a_count_that_does_not_divide_the_sums(source: Path, tmp_path: Path) -> None:
    sums = usual()
    sums[GATE] = sums[GATE][0].reshape(1, -1), sums[GATE][1][:1]
    with pytest.raises(KtError, match="has 1 x 480 inputs there"):
        read(write_imatrix(tmp_path / "i.gguf", sums), source)


def test_a_model_is_no_imatrix(source: Path, tmp_path: Path) -> None:
    path = write_gguf(BY_NAME["qwen3moe-f16"], tmp_path / "model.gguf")
    with pytest.raises(KtError, match="is a GGUF file of a model, not an imatrix"):
        read(path, source)
