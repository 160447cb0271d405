"""Whatever way a checkpoint lays a tensor out, its pieces are what slices of whole arrays say, read once."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stored import chosen, lone, view
from weights.fake_checkpoint import DEEPSEEK3, QWEN3, write_checkpoint

from ktcli.errors import BadCheckpoint
from ktcli.models import build
from ktcli.native import Pool
from ktcli.ops.tensors import Band, Role, Stored, Tensor
from ktcli.weights import strips
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.columns import Factors
from ktcli.weights.encode import Encoder
from ktcli.weights.recipe import Recipe
from ktcli.weights.storage import Raw, Read
from ktcli.weights.strips import sample

POOL = Pool(2, spin_us=0)
E, N, K = 3, 40, 70
EACH = Stored("m.{e}.w", (N, K))
FUSED = Stored("m.w", (E, 2 * N, K), matrix=True, count=N)
ACROSS = Stored("m.w", (E, K, 2 * N), matrix=True, transposed=True, count=N, step=2)
BAND = Stored("m.w", (E * 50, K), band=Band(50, 3, N))
LAYOUTS: dict[str, tuple[Stored, ...]] = {
    "one for each": (EACH,),
    "stacked": (EACH, Stored("m.other", (25, K))),
    "fused": (Stored("m.w", (E, N, K), matrix=True),),
    "second half": (Stored("m.w", (E, 2 * N, K), matrix=True, first=N),),
    "every third row": (Stored("m.w", (E, 100, K), matrix=True, first=4, step=3),),
    "interleaved": (
        Stored("m.w", (E, 2 * N, K), matrix=True, step=2),
        Stored("m.w", (E, 2 * N, K), matrix=True, first=1, step=2),
    ),
    "transposed": (Stored("m.w", (E, K, N), matrix=True, transposed=True),),
    "transposed and interleaved": (ACROSS,),
    "bands": (BAND,),
    "transposed bands": (Stored("m.w", (E * 90, N), band=Band(90, 5, K), transposed=True),),
    "an odd shape": (Stored("m.w", (E, N, 1, K), matrix=True),),
}


class Counting(Checkpoint):
    """Counts how often each byte is read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.bytes: Counter[tuple[str, int]] = Counter()

    def read(self, wanted: Read, into: Raw | None = None) -> Raw:
        for i in range(wanted.count):
            start = wanted.offset + i * wanted.stride
            self.bytes.update((wanted.file, at) for at in range(start, start + wanted.size_bytes))
        return super().read(wanted, into)


def arrays(tensor: Tensor) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    names = {p.at(e): p.shape for p in tensor.sources[0] for e in range(tensor.count)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in names.items()}


def written(folder: Path, made: dict[str, np.ndarray]) -> Counting:
    stored = {name: ("F32", x.shape, x.tobytes()) for name, x in made.items()}
    return Counting(write_checkpoint(folder, QWEN3, stored))


def encoded(tensor: Tensor, reader: Checkpoint) -> bytes:
    recipe = Recipe.named("f32", "f32")
    return b"".join(part.tobytes() for part in Encoder(reader, recipe, POOL).encode([tensor]))


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("elements", [1 << 22, 1500])
def test_pieces_are_slices(tmp_path: Path, how: str, elements: int, monkeypatch):
    """As plain rows, which are the values themselves; pieces are cut anywhere."""
    monkeypatch.setattr(strips, "STRIP_ELEMENTS", elements)
    pieces = LAYOUTS[how]
    n = sum(piece.rows for piece in pieces)
    tensor = lone(n, K, Role.TABLE, (pieces,), count=E)
    made = arrays(tensor)
    made = {name: np.round(x * 16) for name, x in made.items()}  # whole numbers: exact as bf16
    with written(tmp_path, made) as reader:
        found = np.frombuffer(encoded(tensor, reader), np.uint16).astype(np.uint32) << 16
        for e in range(E):
            parts = [view(made[p.at(e)].astype(np.float32), p, e).reshape(-1, K) for p in pieces]
            mine = found.view(np.float32).reshape(E, n, K)[e]
            assert np.array_equal(mine, np.concatenate(parts)), e
        if len(pieces) == 1:
            assert set(reader.bytes.values()) == {1}


@pytest.mark.parametrize("how", ["one for each", "fused", "interleaved", "transposed"])
def test_gate_and_up_alternate_however_they_lie(tmp_path: Path, how: str, monkeypatch):
    """The same values give the same bytes; a tensor that holds both is read once."""
    monkeypatch.setattr(strips, "STRIP_ELEMENTS", 5000)
    rng = np.random.default_rng(1)
    gate, up = rng.standard_normal((2, E, N, K)).astype(np.float32)
    one = {f"m.{e}.{part}": x[e] for part, x in (("g", gate), ("u", up)) for e in range(E)}
    halves = np.concatenate([gate, up], axis=1)
    turns = np.stack([gate, up], axis=2).reshape(E, 2 * N, K)
    shape, name = (E, 2 * N, K), "m.w"
    made, pieces = {
        "one for each": (one, (Stored("m.{e}.g", (N, K)), Stored("m.{e}.u", (N, K)))),
        "fused": ({name: halves}, (FUSED, Stored(name, shape, matrix=True, first=N))),
        "interleaved": ({name: turns}, LAYOUTS["interleaved"]),
        "transposed": (
            {name: np.ascontiguousarray(turns.swapaxes(1, 2))},
            (ACROSS, Stored(name, (E, K, 2 * N), matrix=True, transposed=True, first=1, step=2)),
        ),
    }[how]
    tensor = lone(96, K, Role.EXPERTS, (pieces,), count=E, alternate=True)
    plain = lone(96, K, Role.EXPERTS, ((Stored("g{e}", (N, K)), Stored("u{e}", (N, K))),), E, True)
    apart = {f"{part}{e}": x[e] for part, x in (("g", gate), ("u", up)) for e in range(E)}
    with written(tmp_path / "a", made) as reader, written(tmp_path / "b", apart) as simple:
        assert encoded(tensor, reader) == encoded(plain, simple)
        assert set(reader.bytes.values()) == {1}


def test_elements_of_vectors_are_chosen(tmp_path: Path):
    """Biases of fused experts whose gate and up interleave, [E, 2n]."""
    pieces = tuple(Stored("b", (E, 10), matrix=True, first=i, step=2) for i in range(2))
    tensor = lone(1, 10, Role.VECTOR, (pieces,), count=E)
    made = {"b": np.arange(30, dtype=np.float32).reshape(E, 10)}
    with written(tmp_path, made) as reader:
        found = np.frombuffer(encoded(tensor, reader), np.float32).reshape(E, 10)
    assert found[1].tolist() == [10, 12, 14, 16, 18, 11, 13, 15, 17, 19]


def test_the_alternative_that_is_there_is_taken(tmp_path: Path):
    """By name; of equal names by shape; where nothing fits, the first is what is missing."""
    first, second = Stored("x", (4, K)), Stored("y", (K, 4), transposed=True)
    third = Stored("y", (4, K))
    tensor = lone(4, K, Role.TABLE, ((first,), (second,), (third,)))
    y = np.zeros((4, K), np.float32)
    for i, (made, wanted) in enumerate(
        [({"y": y}, third), ({"y": y.T.copy()}, second), ({"z": y}, first), ({"x": y, "y": y}, first)]
    ):  # fmt: skip
        with written(tmp_path / str(i), made) as reader:
            assert strips.pieces_of(tensor, reader) == (wanted,)


def test_a_vector_that_may_lack_is_of_zeros(tmp_path: Path):
    """There it is taken; there with another shape it is refused."""
    tensor = lone(1, 5, Role.VECTOR, ((Stored("x", (5,)),), ()))
    x = np.arange(5, dtype=np.float32)
    for name, wanted in (("x", x), ("y", np.zeros(5, np.float32))):
        with written(tmp_path / name, {name: x}) as reader:
            assert encoded(tensor, reader) == wanted.tobytes()
    with (
        written(tmp_path / "other", {"x": x[:4]}) as reader,
        pytest.raises(BadCheckpoint, match="shape"),
    ):
        encoded(tensor, reader)


@pytest.mark.parametrize("config", [QWEN3, DEEPSEEK3], ids=lambda config: config["model_type"])
def test_pieces_of_a_model_are_its_tensors(config: dict):
    """Every alternative gives n x k values; gate and up each half of the panels."""
    for tensor in build(config).tensors:
        for pieces in tensor.sources:
            rows = sum(-(-p.rows // 16) * 16 if tensor.alternate else p.rows for p in pieces)
            assert rows * pieces[0].columns == tensor.n * tensor.k, tensor.name


def test_the_sample_of_a_head_is_never_in_memory_at_once(tmp_path: Path):
    """A thousand rows of the widest head would be gigabytes."""
    (head,) = (t for t in build({**QWEN3, "hidden_size": 8192}).tensors if t.gain)
    head = replace(head, n=1024, sources=((Stored("m.w", (1024, 8192)),),))
    matrix = np.random.default_rng(3).standard_normal((1024, 8192)).astype(np.float32)
    written(tmp_path, {"m.w": matrix}).close()
    with Checkpoint(tmp_path) as checkpoint:  # not one that remembers each byte
        factors = Factors(checkpoint, POOL)
        tracemalloc.start()
        found = factors.largest(sample(head, checkpoint))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert np.array_equal(found, np.abs(matrix).max(axis=0))
    assert peak < matrix.nbytes / 10


def test_fused_experts_are_the_same_model(tmp_path: Path):
    """transformers' fused tensors instead of one for each expert."""
    rng = np.random.default_rng(2)
    for tensor in build(QWEN3).tensors:
        if tensor.role is not Role.EXPERTS or tensor.layer:
            continue
        made = {p.at(e): rng.standard_normal(p.shape) for p in tensor.sources[0] for e in range(6)}
        made = {name: x.astype(np.float32) for name, x in made.items()}
        every = [np.concatenate([made[p.at(e)] for p in tensor.sources[0]]) for e in range(6)]
        fused = {tensor.sources[1][0].name: np.stack(every)}
        assert chosen(tensor, fused) == tensor.sources[1]
        kind = tensor.name.rsplit(".")[-1]
        with written(tmp_path / kind, made) as a, written(tmp_path / f"{kind}f", fused) as b:
            assert encoded(tensor, a) == encoded(tensor, b)
