"""Conversion is a pure map from checkpoint and recipe to bytes, whatever stops it on the way."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import oracle
import pytest
from convert import convert
from stored import column_factors, view
from weights.fake_checkpoint import (
    DEEPSEEK3,
    FP8,
    QWEN3,
    damaged,
    random_checkpoint,
    sources,
    write_checkpoint,
)

from ktcli.errors import BadCheckpoint, KtError, NotEnoughDisk
from ktcli.models import build
from ktcli.native import Pool
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role, Tensor, ceil_to
from ktcli.weights import strips, writer
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.coded import fp8
from ktcli.weights.conversion import Calibration, Provenance
from ktcli.weights.formats import FORMATS
from ktcli.weights.importance import MOST_STEPS, Importance
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import Recipe, format_of, is_in_f32
from ktcli.weights.storage import ByteSpan

POOL = Pool(2, spin_us=0)
FP8_BLOCKS = fp8((128, 128))
FAST = Recipe.named("int8", "bf16")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file and its bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def joined(tensor: Tensor, arrays: list[np.ndarray]) -> np.ndarray:
    """Rows of all pieces as the tensor orders them."""
    if not tensor.alternate:
        return np.concatenate(arrays)
    padded = [np.pad(a, ((0, ceil_to(len(a), 16) - len(a)), (0, 0))) for a in arrays]
    gate, up = (a.reshape(-1, 16, a.shape[1]) for a in padded)
    return np.stack([gate, up], axis=1).reshape(-1, gate.shape[2])


def values(reader: Checkpoint, name: str) -> np.ndarray:
    """All numbers of a tensor, in its shape."""
    span = ByteSpan(reader.find(name))
    raws = [reader.read(read) for read in span.source.storage.reads(span)]
    return reader.decode(POOL, span, raws).reshape(span.source.shape)


def factors(reader: Checkpoint, name: str) -> np.ndarray | None:
    """The factors of an FP8 tensor, each row of blocks 128 times; None: it is of another kind."""
    source = reader.find(name)
    if source.storage != FP8_BLOCKS:
        return None
    return np.repeat(values(reader, f"{name}_scale_inv"), 128, axis=0)[: source.rows]


def whole_matrix(tensor: Tensor, reader: Checkpoint) -> np.ndarray:
    """The only matrix of a tensor."""
    pieces = tensor.sources[0]
    return joined(tensor, [view(values(reader, p.name), p, 0) for p in pieces])


def factors_of_columns(
    tensors: tuple[Tensor, ...], reader: Checkpoint, recipe: Recipe
) -> dict[str, np.ndarray]:
    """Of the head and the norm before it, by name: what moves from the columns of one into the other."""
    found = {}
    for head in tensors:
        if head.gain is not None:
            matrix, gain = whole_matrix(head, reader), whole_matrix(head.gain, reader)
            by = column_factors(head, format_of(head, recipe), matrix, gain)
            found |= {head.name: by, head.gain.name: by}
    return found


def expected(
    tensor: Tensor, reader: Checkpoint, recipe: Recipe, by: np.ndarray | float = 1.0
) -> bytes:
    """The stored bytes of a tensor, made from whole arrays by the oracle."""
    fmt = format_of(tensor, recipe)
    parts = []
    for index in range(tensor.count):
        pieces = tensor.sources[0]
        arrays = [view(values(reader, p.at(index)), p, index) for p in pieces]
        scales = None
        if fmt is FORMATS["fp8"] and not any(p.band for p in pieces):
            found = [factors(reader, p.at(index)) for p in pieces]
            scales = None if found[0] is None else joined(tensor, found)
        matrix = joined(tensor, arrays)
        matrix = (matrix / by if tensor.gain else matrix * by).astype(np.float32)
        assert matrix.size == tensor.n * tensor.k
        if fmt is not None:
            parts.append(oracle.pack(fmt, np.ascontiguousarray(matrix), scales).tobytes())
        elif tensor.role is Role.TABLE and not is_in_f32(tensor, recipe):
            parts.append(oracle.round_to_bf16(matrix).tobytes())
        else:
            parts.append(matrix.astype(np.float32).tobytes())
    return b"".join(parts)


# What is stored as f32 where the checkpoint's numbers are.
KEPT = {
    "qwen3_moe": (ModelPart.EMBEDDING, ModelPart.ROUTER),
    "deepseek_v3": (ModelPart.EMBEDDING, ModelPart.LATENT, ModelPart.ROUTER),
}
CASES = [
    *((QWEN3, "BF16", name, "int8") for name in FORMATS),
    (QWEN3, "F16", "int4", "f32"),
    (QWEN3, "F32", "int4-g32", "bf16"),
    (DEEPSEEK3, "BF16", "int4", "int8"),
    (DEEPSEEK3, "F32", "bf16", "f32"),
    ({**DEEPSEEK3, **FP8}, "F8_E4M3", "int4", "bf16"),
    ({**DEEPSEEK3, **FP8}, "F8_E4M3", "fp8", "fp8"),
    ({**DEEPSEEK3, "q_lora_rank": None, "model_type": "deepseek_v2"}, "BF16", "int8", "int4"),
]


@pytest.mark.in_turn("case")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[1:])))
def test_bytes_are_the_oracles(
    tmp_path: Path, case: tuple[dict, str, str, str], monkeypatch: pytest.MonkeyPatch
):
    """Every tensor of every family, dtype and format; cutting into pieces changes nothing."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    config, dtype, experts, dense = case
    folder = random_checkpoint(tmp_path / "source", config, dtype=dtype, shards=3)
    recipe = Recipe.named(experts, dense)
    report = convert(folder, tmp_path / "pack", recipe, POOL)
    monkeypatch.setattr(strips, "STRIP_ELEMENTS", 3000)
    convert(folder, tmp_path / "pieces", recipe, POOL)
    pack, pieces = Pack.open(tmp_path / "pack"), Pack.open(tmp_path / "pieces")
    assert damaged(pack.path) == []
    recipe = pack.recipe
    assert recipe.in_f32 == (KEPT[config["model_type"]] if dtype in ("F32", "F16") else ())
    assert report.size_bytes == pack.size_bytes and report.kept_files == 0
    with Checkpoint(folder) as checkpoint:
        assert report.source_bytes <= sum(p.entry.size_bytes for p in checkpoint.parts.values())
        tensors = build(config).tensors
        moved = factors_of_columns(tensors, checkpoint, recipe)
        for tensor in tensors:
            wanted = expected(tensor, checkpoint, recipe, moved.get(tensor.name, 1.0))
            assert stored(pack, tensor) == wanted, tensor.name
            assert stored(pieces, tensor) == wanted, tensor.name


def test_a_pack_that_rounded_what_it_keeps_is_complete(tmp_path: Path):
    """As an earlier kt wrote it: it is read, and not converted again."""
    folder = random_checkpoint(tmp_path / "source", QWEN3, dtype="F32")
    out = tmp_path / "pack"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ktcli.weights.convert.kept_in_f32", lambda model, checkpoint: ())
        convert(folder, out, FAST, POOL)
    assert "f32" not in json.loads((out / "kt.json").read_text())["recipe"]
    pack = Pack.open(out)
    assert all(pack.locate(tensor) for tensor in build(QWEN3).tensors)
    assert convert(folder, out, FAST, POOL).already_complete


def test_fp8_is_kept_as_it_is(tmp_path: Path):
    """What a pack of an FP8 checkpoint decodes to is what the checkpoint does; its error is 0."""
    config = {**DEEPSEEK3, **FP8}
    folder = random_checkpoint(tmp_path / "source", config, dtype="F8_E4M3")
    report = convert(folder, tmp_path / "pack", Recipe.named("fp8", "fp8"), POOL)
    pack, fmt = Pack.open(tmp_path / "pack"), FORMATS["fp8"]
    assert report.error["experts"] == 0
    with Checkpoint(folder) as checkpoint:
        for tensor in build(config).tensors:
            pieces = tensor.sources[0]
            if (
                format_of(tensor, pack.recipe) is not fmt
                or checkpoint.find(pieces[0].at(0)).storage != FP8_BLOCKS
            ):
                continue
            data = np.frombuffer(stored(pack, tensor), np.uint8).reshape(tensor.count, -1)
            for index in range(tensor.count):
                arrays = [view(values(checkpoint, p.at(index)), p, index) for p in pieces]
                found = oracle.unpack(fmt, data[index], tensor.n, tensor.k)
                assert np.array_equal(found, joined(tensor, arrays)), tensor.name


def stored(pack: Pack, tensor: Tensor) -> bytes:
    place = pack.locate(tensor)
    return place.path.read_bytes()[place.offset : place.offset + place.size_bytes]


def test_what_nobody_needs_is_left(tmp_path: Path):
    """A multi-token-prediction layer and other tensors in the checkpoint change nothing."""
    stored = sources(DEEPSEEK3)
    more = {
        name.replace("layers.1.", "layers.3."): s
        for name, s in stored.items()
        if "layers.1." in name
    }
    more["model.layers.3.eh_proj.weight"] = ("BF16", (2,), bytes(4))
    more["model.layers.3.int"] = ("I64", (2,), bytes(16))
    convert(write_checkpoint(tmp_path / "a", DEEPSEEK3, stored), tmp_path / "x", FAST, POOL)
    convert(write_checkpoint(tmp_path / "b", DEEPSEEK3, stored | more), tmp_path / "y", FAST, POOL)
    x, y = tree(tmp_path / "x"), tree(tmp_path / "y")
    assert x.keys() == y.keys()
    assert {name for name in x if x[name] != y[name]} == {"kt.json"}  # the digest of the headers


def test_threads_isa_and_shards_do_not_matter(tmp_path: Path):
    stored = sources(QWEN3)
    made = []
    for i, pool in enumerate([POOL, Pool(1, isa="portable", spin_us=0), Pool(5, spin_us=0)]):
        source = write_checkpoint(tmp_path / f"source{i}", QWEN3, stored, shards=2)
        convert(source, tmp_path / f"pack{i}", Recipe(), pool)
        made.append(tree(tmp_path / f"pack{i}"))
    assert made[0] == made[1] == made[2]


def test_provenance_and_errors_are_recorded(tmp_path: Path):
    source = random_checkpoint(tmp_path / "s", QWEN3)
    origin = Provenance("hf", "org/repo", "abc")
    report = convert(source, tmp_path / "p", Recipe(), POOL, provenance=origin)
    manifest = Pack.open(tmp_path / "p").manifest
    assert (manifest.hub, manifest.repository, manifest.revision) == ("hf", "org/repo", "abc")
    assert manifest == report.manifest
    assert 0.05 < report.error["experts"] < 0.12 and 0.002 < report.error["dense"] < 0.02


def test_progress_ends_at_the_whole(tmp_path: Path):
    source = random_checkpoint(tmp_path / "s", QWEN3)
    seen: list[tuple[int, int]] = []
    convert(source, tmp_path / "p", FAST, POOL, progress=lambda *args: seen.append(args))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert (
        seen[-1][0]
        == seen[-1][1]
        == sum(path.stat().st_size for path in (tmp_path / "p").glob("*.saf*"))
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint") / "source", QWEN3, shards=2)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed conversion gives."""
    out = tmp_path_factory.mktemp("whole") / "pack"
    convert(source, out, FAST, POOL)
    return tree(out)


# --- what goes wrong ------------------------------------------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The system refuses to let a file grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_system_refuses_to_write(source: Path, whole: dict[str, bytes], tmp_path: Path):
    out = tmp_path / "p"
    with file_size_limit(20_000), pytest.raises(KtError, match="refused to write") as caught:
        convert(source, out, FAST, POOL)
    assert "completed files are kept" in caught.value.hint
    assert not list(out.glob("*.safetensors*"))
    convert(source, out, FAST, POOL)
    assert tree(out) == whole


def test_the_disk_is_full_half_way(source: Path, whole: dict[str, bytes], tmp_path: Path):
    out = tmp_path / "p"
    left = len(whole["layer-00000.safetensors"]) + 50_000
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(28, "No space left on device")
        done = real(fd, data[:left])
        left -= done
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.os, "write", write)
        with pytest.raises(NotEnoughDisk, match="on disk"):
            convert(source, out, FAST, POOL)
    assert [path.name for path in out.glob("*.safetensors*")] == ["layer-00000.safetensors"]
    report = convert(source, out, FAST, POOL)
    assert report.kept_files == 1 and tree(out) == whole


def test_too_little_space_is_said_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ktcli.smallfiles.free_bytes", lambda folder: 1000)
    with pytest.raises(NotEnoughDisk, match=r"needs .* only 1000 B is free|only 1 KiB is free"):
        convert(source, tmp_path / "new" / "p", FAST, POOL)
    assert not (tmp_path / "new").exists()


def broken(stored: dict[str, tuple], name: str, **change: object) -> dict[str, tuple]:
    dtype, shape, data = stored[name]
    if "shape" in change:
        shape = change["shape"]
    if "value" in change:
        data = np.full(data.__len__() // 2, change["value"], np.uint16).tobytes()
    return {**stored, name: (dtype, shape, data)}


GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"  # [40, 80]
WRONG: dict[str, tuple[Callable[[dict], dict], str]] = {
    "missing": (lambda s: {k: v for k, v in s.items() if k != GATE}, f"no tensor '{GATE}'"),
    "shape": (lambda s: broken(s, GATE, shape=(80, 40)), r"shape \[80, 40\], but config.json requires \[40, 80\]"),
    "flat": (lambda s: broken(s, GATE, shape=(3200,)), r"shape \[3200\]"),
    "NaN": (lambda s: broken(s, GATE, value=0x7FC0), f"{GATE} in model.safetensors contains NaN or Inf"),
    "Inf": (lambda s: broken(s, GATE, value=0xFF80), f"{GATE} in model.safetensors contains NaN or Inf"),
    **{
        f"NaN in {name}": (lambda s, n=name: broken(s, n, value=0x7FC0), f"{name} in .* contains NaN or Inf")
        for name in (GATE.replace("gate", "up"), "model.layers.0.self_attn.k_proj.weight", "lm_head.weight")
    },
    "embedding NaN": (
        lambda s: broken(s, "model.embed_tokens.weight", value=0x7FC0),
        "model.embed_tokens.weight in .* NaN",
    ),
    "norm NaN": (lambda s: broken(s, "model.norm.weight", value=0x7FC0), "model.norm.weight in .* NaN"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_tensor_is_named(tmp_path: Path, what: str):
    change, words = WRONG[what]
    folder = write_checkpoint(tmp_path / "s", QWEN3, change(sources(QWEN3)))
    before = tree(folder)
    with pytest.raises(BadCheckpoint, match=words) as caught:
        convert(folder, tmp_path / "p", FAST, POOL)
    assert caught.value.hint
    assert tree(folder) == before
    assert not list(tmp_path.glob("p/*.tmp")) and not (tmp_path / "p" / "kt.json").exists()
    # Nothing was complete: nothing is left. Otherwise complete files wait for a repaired checkpoint.
    assert not (tmp_path / "p").exists() or list((tmp_path / "p").glob("*.safetensors"))


def test_a_config_that_asks_for_millions_of_tensors(tmp_path: Path):
    """Those that are missing are not all listed first, which took gigabytes."""
    config = {**QWEN3, "num_hidden_layers": 1024, "num_experts": 8192}
    folder = write_checkpoint(tmp_path / "s", config, {"x": ("BF16", (1,), bytes(2))})
    with pytest.raises(
        BadCheckpoint, match=r"no tensor 'model.embed_tokens.weight'.* at least 9995 more"
    ):
        convert(folder, tmp_path / "p", FAST, POOL)
    assert not (tmp_path / "p").exists()


def test_importance_of_a_head_with_one_large_column(tmp_path: Path):
    """Bringing columns on one scale moves their importance, but not beyond what packing takes."""
    stored = sources(QWEN3, "F32")
    head, gain = (
        np.frombuffer(stored[name][2], np.float32).copy()
        for name in ("lm_head.weight", "model.norm.weight")
    )
    head[::80] *= 1e6
    gain[0] = 1e-6
    stored["lm_head.weight"] = ("F32", (99, 80), head.tobytes())
    stored["model.norm.weight"] = ("F32", (80,), gain.tobytes())
    folder = write_checkpoint(tmp_path / "s", QWEN3, stored)
    largest = Importance({"lm_head": np.full((1, 80), MOST_STEPS, np.int8)})
    calibration = Calibration("x", largest)
    convert(folder, tmp_path / "p", Recipe.named("int8", "int8"), POOL, calibration=calibration)


TIED = {**QWEN3, "tie_word_embeddings": True}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_a_tied_head_of_its_own_is_kept_and_told(tmp_path: Path):
    stored = sources(TIED)
    folder = write_checkpoint(tmp_path / "s", TIED, stored)
    report = convert(folder, tmp_path / "p", FAST, POOL)
    assert report.remarks == (
        "config.json says tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.weight; "
        "both are stored",
    )
    write_checkpoint(tmp_path / "t", QWEN3, stored)
    untied = convert(tmp_path / "t", tmp_path / "q", FAST, POOL)
    assert untied.remarks == ()
    (mine, others) = (tree(tmp_path / each) for each in "pq")
    assert {name for name in mine if mine[name] != others[name]} == {"config.json", "kt.json"}


@pytest.mark.parametrize("missing", ["", EMBEDDING, HEAD])
def test_a_tied_head_is_the_embedding_whichever_is_there(tmp_path: Path, missing: str):
    stored = sources(TIED)
    stored[HEAD] = stored[EMBEDDING]
    write_checkpoint(tmp_path / "s", TIED, stored)
    there = {name: value for name, value in stored.items() if name != missing}
    write_checkpoint(tmp_path / "t", TIED, there)
    assert convert(tmp_path / "s", tmp_path / "p", FAST, POOL).remarks == ()
    assert convert(tmp_path / "t", tmp_path / "q", FAST, POOL).remarks == ()
    (mine, others) = (tree(tmp_path / each) for each in "pq")
    assert {name for name in mine if mine[name] != others[name]} <= {"kt.json"}  # of other headers


def test_too_large_for_bf16(tmp_path: Path):
    stored = sources(QWEN3, "F32")
    name = "model.layers.0.self_attn.o_proj.weight"
    stored[name] = ("F32", stored[name][1], np.full(96 * 80, 3.4e38, np.float32).tobytes())
    folder = write_checkpoint(tmp_path / "s", QWEN3, stored)
    with pytest.raises(BadCheckpoint, match=r"layers.0.attn.o holds values that are too large"):
        convert(folder, tmp_path / "p", FAST, POOL)


def test_a_gain_too_large_for_its_factors(tmp_path: Path):
    """The columns of the head on one scale would make the last norm's gain infinite."""
    stored = sources(QWEN3, "F32")
    gain = np.full(80, 3e38, np.float32)
    stored["model.norm.weight"] = ("F32", (80,), gain.tobytes())
    folder = write_checkpoint(tmp_path / "s", QWEN3, stored)
    with pytest.raises(
        BadCheckpoint, match="holds values that are too large for its number format"
    ):
        convert(folder, tmp_path / "p", Recipe.named("int8", "int8"), POOL)


def test_unknown_architecture_names_the_known(tmp_path: Path):
    folder = random_checkpoint(tmp_path / "s", QWEN3)
    (folder / "config.json").write_text(json.dumps({**QWEN3, "model_type": "gpt2"}))
    with pytest.raises(BadCheckpoint, match="gpt2") as caught:
        convert(folder, tmp_path / "p", FAST, POOL)
    assert "qwen3_moe" in caught.value.hint
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("value", [-1, 0, 10**9, 2**63, 1.5, "x", None])
def test_config_with_impossible_dimensions(tmp_path: Path, value: object):
    folder = random_checkpoint(tmp_path / "s", QWEN3)
    for key in ("hidden_size", "num_hidden_layers", "num_experts", "vocab_size"):
        (folder / "config.json").write_text(json.dumps({**QWEN3, key: value}))
        with pytest.raises(BadCheckpoint):
            convert(folder, tmp_path / "p", FAST, POOL)
        assert not (tmp_path / "p").exists()


def test_hostile_extras(tmp_path: Path):
    """Links to other files of the machine are not taken over."""
    folder = random_checkpoint(tmp_path / "s", QWEN3)
    (tmp_path / "secret").write_text("{}")
    (folder / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(BadCheckpoint, match="is outside"):
        convert(folder, tmp_path / "p", FAST, POOL)
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "chat_template.jinja")
    convert(folder, tmp_path / "p", FAST, POOL)
    assert set(tree(tmp_path / "p")) >= {"config.json", "tokenizer.json"}
    assert not (tmp_path / "p" / "chat_template.jinja").exists()
