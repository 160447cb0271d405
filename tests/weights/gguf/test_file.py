"""A GGUF file as a checkpoint: names, configuration, sets of files, and hostile metadata."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from convert import convert_checkpoint
from gguf_cases import CASES
from gguf_models import GgufCase, write_gguf
from gguf_vocabularies import VOCABULARIES
from oracle import round_to_bf16

from ktcli.errors import BadCheckpoint
from ktcli.models import build
from ktcli.native import Pool
from ktcli.resources import data_path
from ktcli.weights.check import check
from ktcli.weights.checkpoint import Checkpoint, read_config
from ktcli.weights.gguf.architectures import ARCHITECTURES
from ktcli.weights.gguf.config import config_of as config_from
from ktcli.weights.gguf.file import Gguf
from ktcli.weights.gguf.metadata import Metadata
from ktcli.weights.gguf.names import hub_tensors
from ktcli.weights.gguf.types import STORAGES
from ktcli.weights.header import TensorEntry
from ktcli.weights.pack import Pack
from ktcli.weights.reader import config_of, examine
from ktcli.weights.storage import ByteSpan

MINI = next(case for case in CASES if case.name == "kt-mini-q8_0")
QWEN3 = next(case for case in CASES if case.name == "qwen3moe-q8_0")
NVFP4 = next(case for case in CASES if case.name == "qwen3moe-nvfp4")


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(MINI, tmp_path_factory.mktemp("mini") / "mini.gguf")


def test_the_config_is_that_of_the_hub(mini: Path) -> None:
    ours, theirs = dict(config_of(mini)), read_config(data_path("profiles", "kt-mini"))
    assert all(theirs.get(name, ours[name]) == ours[name] for name in ours)
    model = build(ours)
    assert model.spec == build(theirs).spec
    assert model.tensors == build(theirs).tensors


def test_the_tensors_are_those_of_the_hub(mini: Path) -> None:
    """Each tensor of the checkpoint has its place in the file, and is the same but for Q8_0's rounding."""
    pool = Pool(1)
    with Checkpoint(data_path("profiles", "kt-mini")) as theirs, Gguf(mini) as ours:
        split = {name for name in theirs.names if "kv_b_proj" in name}
        assert set(theirs.names) - split <= set(ours.names)
        check(build(ours.config), ours)
        for name in list(theirs.names)[::9]:
            if name not in split:
                found = [rows(pool, each, name) for each in (theirs, ours)]
                assert np.abs(found[0] - found[1]).max() <= np.abs(found[0]).max() / 126, name


def rows(pool: Pool, reader: Checkpoint | Gguf, name: str) -> np.ndarray:
    span = ByteSpan(reader.find(name))
    raws = [reader.read(each) for each in span.source.storage.reads(span)]
    return reader.decode(pool, span, raws)


def test_names_are_those_of_the_package() -> None:
    """What the package's table says a hub name is called, is shown under that hub name, where the table has it; but for
    what is one tensor in the file and two on the hub."""
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    for architecture, row in ARCHITECTURES.items():
        if architecture not in known:
            continue
        arch = known[architecture]
        table = gguf.get_tensor_name_map(arch, 1)
        for kind in gguf.MODEL_TENSORS[arch]:
            stem = gguf.TENSOR_NAMES[kind].format(bid=0)
            if stem.endswith(("ffn_gate_up_exps", "ssm_ba")):
                continue
            name = f"{stem}.bias" if stem.endswith("exp_probs_b") else f"{stem}.weight"
            shape = (2, 4, 32) if stem.endswith("_exps") else (4, 32)
            for hub, *_ in hub_tensors({name: TensorEntry("F32", shape, 0, 1024)}, row.names):
                if hub == name:
                    continue  # not a tensor that kt reads
                usual = hub.replace("experts.0.", "experts.").replace("experts.1.", "experts.")
                usual = usual.replace("correction_bias", "correction.bias")
                found = table.get_name(usual, (".weight", ".bias"))
                # Granite 4 without experts has the shared one alone, which files then call the MLP.
                dense = found and found.replace("_shexp", "")
                assert found in (None, name, stem) or dense == name, (architecture, hub)


def test_a_file_that_says_nothing_of_a_query_latent_has_none() -> None:
    """V2-Lite's; the class of transformers has one where a config says nothing."""
    (case,) = (case for case in CASES if case.name == "deepseek2-q8_0")
    values = {f"deepseek2.{key}": value for key, value in case.metadata.items()}
    del values["deepseek2.attention.q_lora_rank"]
    entries = {"token_embd.weight": TensorEntry("F32", (300, 256), 0, 0)}
    metadata = Metadata({**values, "general.architecture": "deepseek2"}, "x.gguf", entries)
    model = build(config_from(metadata, ARCHITECTURES["deepseek2"]))
    assert "layers.0.attn.q_b" not in {tensor.name for tensor in model.tensors}


def test_a_stretched_rotation_of_no_kind_is_linear() -> None:
    """As llama.cpp reads it."""
    entries = {"token_embd.weight": TensorEntry("F32", (300, 256), 0, 0)}
    given = {f"qwen3moe.{key}": value for key, value in QWEN3.metadata.items()}
    for more, wanted in (
        ({}, None),
        ({"qwen3moe.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ):
        values = {**given, **more, "general.architecture": "qwen3moe"}
        found = config_from(Metadata(values, "x.gguf", entries), ARCHITECTURES["qwen3moe"])
        assert found.get("rope_scaling") == wanted


def test_fused_gate_and_up_are_two() -> None:
    whole = TensorEntry("F32", (3, 8, 32), 100, 3 * 8 * 32 * 4)
    found = list(hub_tensors({"blk.7.ffn_gate_up_exps.weight": whole}, {}))
    assert [hub for hub, *_ in found[:2]] == [
        "model.layers.7.mlp.experts.0.gate_proj.weight",
        "model.layers.7.mlp.experts.1.gate_proj.weight",
    ]
    one = {hub: (entry.shape, entry.offset - 100, entry.size_bytes) for hub, _, entry in found}
    assert one["model.layers.7.mlp.experts.1.gate_proj.weight"] == ((4, 32), 1024, 512)
    assert one["model.layers.7.mlp.experts.1.up_proj.weight"] == ((4, 32), 1536, 512)


def test_one_tensor_per_expert_as_in_old_files() -> None:
    entry = TensorEntry("F32", (4, 32), 0, 512)
    names = ARCHITECTURES["llama"].names
    found = [hub for hub, *_ in hub_tensors({"blk.0.ffn_down.5.weight": entry}, names)]
    assert found == ["model.layers.0.block_sparse_moe.experts.5.w2.weight"]


def nvfp4(path: Path, more: dict[str, tuple[int, ...]] | None = None) -> Path:
    def tensors(case: GgufCase) -> Any:
        yield from (each for each in NVFP4.tensors(case) if each[0] not in (more or {}))
        yield from (more or {}).items()

    return write_gguf(replace(NVFP4, tensors=tensors), path)


def test_nvfp4_is_multiplied_by_the_number_of_each_matrix(tmp_path: Path) -> None:
    path, pool = nvfp4(tmp_path / "nvfp4.gguf"), Pool(1)
    with Gguf(path) as model:
        check(build(model.config), model)
        for name, factor in (
            ("mlp.experts.2.down_proj", 1.0),
            ("self_attn.q_proj", 0.75),
            ("self_attn.k_proj", 1.0),
        ):
            entry = model.find(f"model.layers.1.{name}.weight").parts[0].entry
            raw = np.fromfile(path, np.uint8, entry.size_bytes, offset=entry.offset)
            plain = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.NVFP4)
            found = rows(pool, model, f"model.layers.1.{name}.weight")
            np.testing.assert_array_equal(found, plain.reshape(entry.shape) * np.float32(factor))
            assert np.abs(found).max() > 0


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("attn_k.scale", (2,), r"k_proj.scale in .* is F32 \[2\], not one F32 number"),
        ("attn_o.scale", (1,), "does not mention: 'blk.0.attn_o.scale'"),
        ("ffn_up_exps.scale", (3,), "experts.3.up_proj.weight in .* has no scale, .*experts.0.up_proj.scale does"),
        ("ffn_up_exps.scale", (5,), "does not mention: 'model.layers.0.mlp.experts.4.up_proj.scale'"),
    ],
)  # fmt: skip
def test_numbers_of_matrices_that_do_not_fit(
    name: str, shape: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        examine(nvfp4(tmp_path / "other.gguf", {f"blk.0.{name}": shape}))


# ---- sets of files -------------------------------------------------------------------------------


def split_set(folder: Path, count: int = 3) -> list[Path]:
    """The built-in model in so many files, as llama.cpp's tool splits: metadata in the first."""
    tensors = list(MINI.tensors(MINI))
    paths = []
    for i in range(count):
        part = tensors[i * len(tensors) // count : (i + 1) * len(tensors) // count]
        metadata = {"split.no": i, "split.count": count, "split.tensors.count": len(tensors)}
        case = replace(
            MINI,
            tensors=lambda case, part=part: iter(part),
            metadata=metadata | (MINI.metadata if i == 0 else {}),
        )
        paths.append(write_gguf(case, folder / f"mini-{i + 1:05}-of-{count:05}.gguf"))
    return paths


def test_a_set_is_one_model_whichever_file_is_named(mini: Path, tmp_path: Path) -> None:
    paths = split_set(tmp_path)
    with Gguf(mini) as one, Gguf(paths[2]) as many:
        assert many.config == one.config and set(many.names) == set(one.names)
        assert many.small_file("tokenizer.json") == one.small_file("tokenizer.json")
        pool, name = Pool(1), "model.layers.4.mlp.experts.31.down_proj.weight"
        np.testing.assert_array_equal(rows(pool, one, name), rows(pool, many, name))
    with Gguf(paths[0]) as same:
        assert same.digest == many.digest != one.digest


def test_a_set_must_be_whole_and_in_order(tmp_path: Path) -> None:
    paths = split_set(tmp_path)
    first, second = paths[0].read_bytes(), paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(BadCheckpoint, match=r"mini-00002-of-00003.gguf is missing"):
        Gguf(paths[0])
    paths[1].write_bytes(first)
    with pytest.raises(BadCheckpoint, match="claims to be number 1 of 3"):
        Gguf(paths[0])
    alone = tmp_path / "renamed.gguf"
    alone.write_bytes(second)
    with pytest.raises(BadCheckpoint, match="one of 3 files"):
        Gguf(alone)


# ---- what is wrong -------------------------------------------------------------------------------


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no architecture": ({"general.architecture": None}, "architecture ''"),
    "an unknown one": ({"general.architecture": "mamba"}, "architecture 'mamba'"),
    "a text for a number": ({"block_count": "two"}, "not a whole number"),
    "layers of two widths": ({"feed_forward_length": [256, 128]}, "not a whole number"),
    "no layers": ({"block_count": 0}, "outside 1"),
    "many layers": ({"block_count": 10**6}, "outside"),
    "no heads": ({"attention.head_count": 0}, "outside"),
    "a wide model": ({"embedding_length": 1 << 30}, "outside|shape"),
    "another width": ({"embedding_length": 128}, "has the shape"),
    "more experts": ({"expert_count": 9}, "has the shape|no tensor"),
    "more tokens than rows": ({"tokenizer.ggml.tokens": ["a"] * 301}, "301 tokens.* 300 rows"),
    "an unknown stretching": ({"rope.scaling.type": "spiral"}, "spiral"),
    "an endless epsilon": ({"attention.layer_norm_rms_epsilon": float("inf")}, "outside"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name: str, tmp_path: Path) -> None:
    changes, said = BAD[name]
    metadata = {**QWEN3.metadata, **changes}
    case = replace(QWEN3, metadata={k: v for k, v in metadata.items() if v is not None})
    if "general.architecture" in changes:
        case = replace(case, architecture=changes["general.architecture"] or "")
        case.metadata.pop("general.architecture", None)
    path = write_gguf(case, tmp_path / "bad.gguf")
    with pytest.raises(BadCheckpoint, match=said):
        examine(path)


@pytest.mark.parametrize("kind", ["Q2_K", "IQ2_XS", "IQ4_XS"])
def test_types_that_the_package_decodes_are_converted_like_its_numbers(
    kind: str, tmp_path: Path
) -> None:
    """A file of such blocks and one of what they mean, in F32, give the same bytes; the embedding of the latter stays
    F32, whose rounded numbers are those of the former."""
    coded = replace(next(case for case in CASES if case.name == "qwen3moe-q4_k"), kind=kind)
    path = write_gguf(coded, tmp_path / "coded.gguf")
    with Gguf(path) as reader:
        assert {part.entry.dtype for part in reader.parts.values()} == {kind, "F32"}
    numbers = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    plain = replace(coded, kind="F32", tensors=lambda case: iter(numbers.items()))
    packs = [
        convert_checkpoint(file, tmp_path / file.stem / "pack", experts="int4", dense="int8")
        for file in (path, write_gguf(plain, tmp_path / "plain.gguf"))
    ]
    blocks, wide = (_stored(Pack.open(pack)) for pack in packs)
    rounded = round_to_bf16(wide.pop("embed").view(np.float32))
    np.testing.assert_array_equal(blocks.pop("embed").view(np.uint16), rounded)
    assert blocks.keys() == wide.keys()
    assert all(np.array_equal(blocks[name], wide[name]) for name in blocks)


def _stored(pack: Pack) -> dict[str, np.ndarray]:
    """The bytes of every tensor."""
    found = ((tensor.name, pack.locate(tensor)) for tensor in build(pack.config).tensors)
    return {
        name: np.fromfile(at.path, np.uint8, at.size_bytes, offset=at.offset) for name, at in found
    }


def test_types_that_kt_does_not_read_are_named(tmp_path: Path) -> None:
    raw = np.zeros((300, 256), np.int8)
    path = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in QWEN3.metadata.items():
        if not isinstance(value, str):
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"qwen3moe.{key}", value)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=gguf.GGMLQuantizationType.I8)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    with pytest.raises(BadCheckpoint, match="stored as I8") as caught:
        examine(path)
    assert all(name in caught.value.hint for name in STORAGES)


def test_nothing_but_sentences(tmp_path: Path) -> None:
    """A file with a byte changed anywhere in its header is read or refused."""
    small = replace(QWEN3, tensors=lambda case: iter([("token_embd.weight", (64, 64))]))
    raw = write_gguf(small, tmp_path / "small.gguf").read_bytes()
    rng, path, refused = np.random.default_rng(0), tmp_path / "mutated.gguf", 0
    for at in rng.integers(24, len(raw) - 64 * 68, 250):
        other = bytearray(raw)
        other[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        path.write_bytes(bytes(other))
        try:
            examine(path)
        except BadCheckpoint:
            refused += 1
    assert refused == 250  # if nothing else, tensors are missing


def test_the_bytes_of_the_cases_do_not_change(tmp_path: Path) -> None:
    """Two runs give one file; that it is the recorded one is checked where llama.cpp is the judge."""
    case: GgufCase = VOCABULARIES[0]
    digests = {
        hashlib.sha256(write_gguf(case, tmp_path / f"{i}.gguf").read_bytes()).hexdigest()
        for i in range(2)
    }
    assert len(digests) == 1
