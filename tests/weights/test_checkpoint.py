"""The checkpoint reader: values as the formats define them, and one sentence for everything hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from weights.fake_checkpoint import (
    DEEPSEEK3,
    FP8,
    QWEN3,
    random_checkpoint,
    sources,
    write_checkpoint,
    write_file,
)
from weights.quantised import auto_round, compressed, modelopt, nvfp4, quark

from ktcli.errors import BadCheckpoint
from ktcli.native import Pool
from ktcli.weights.checkpoint import Checkpoint, read_config
from ktcli.weights.scheme import read_scheme
from ktcli.weights.storage import ByteSpan

POOL = Pool(2, spin_us=0)
NAME = "model.layers.1.self_attn.o_proj.weight"


def values(checkpoint: Checkpoint, name: str, start: int = 0, end: int | None = None) -> np.ndarray:
    span = ByteSpan(checkpoint.find(name), start, end)
    raws = [checkpoint.read(read) for read in span.source.storage.reads(span)]
    return checkpoint.decode(POOL, span, raws)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_values(tmp_path: Path, dtype: str, shards: int):
    stored = sources(QWEN3, dtype)
    write_checkpoint(tmp_path, QWEN3, stored, shards=shards)
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names) == set(stored)
        for name, (kind, shape, data) in stored.items():
            expected = torch.frombuffer(bytearray(data), dtype=kinds[kind]).float().numpy()
            found = values(checkpoint, name)
            assert np.array_equal(found.reshape(-1), expected)
            assert checkpoint.find(name, shape).shape == shape


def fp8(stored: dict[str, tuple], name: str) -> np.ndarray:
    """By torch: the codes times the factor of their 128 x 128 block."""
    _, shape, data = stored[name]
    codes = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    _, blocks, factors = stored[f"{name}_scale_inv"]
    scale = torch.frombuffer(bytearray(factors), dtype=torch.float32).reshape(blocks)
    wide = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    return (codes.reshape(shape) * wide).numpy()


def test_fp8_is_multiplied_by_its_factors(tmp_path: Path):
    config = {**DEEPSEEK3, **FP8, "hidden_size": 300, "intermediate_size": 400}
    stored = sources(config, "F8_E4M3")
    write_checkpoint(tmp_path, config, stored, shards=2)
    name = "model.layers.0.mlp.gate_proj.weight"  # [400, 300]: 4 x 3 blocks
    expected = fp8(stored, name)
    with Checkpoint(tmp_path) as checkpoint:
        assert np.array_equal(values(checkpoint, name), expected)
        # rows that begin inside a block take that block's factors
        for start, end in ((0, 128), (128, 256), (16, 48), (120, 300), (399, 400)):
            assert np.array_equal(values(checkpoint, name, start, end), expected[start:end])


def test_factors_may_be_bf16(tmp_path: Path):
    config = {**DEEPSEEK3, **FP8}
    stored = sources(config, "F8_E4M3")
    name = "model.layers.0.mlp.gate_proj.weight"
    _, blocks, factors = stored[f"{name}_scale_inv"]
    high = (np.frombuffer(factors, np.uint32) >> 16).astype(np.uint16)
    stored[f"{name}_scale_inv"] = ("BF16", blocks, high.tobytes())
    write_checkpoint(tmp_path, config, stored)
    same = (high.astype(np.uint32) << 16).tobytes()
    expected = fp8(stored | {f"{name}_scale_inv": ("F32", blocks, same)}, name)
    with Checkpoint(tmp_path) as checkpoint:
        assert np.array_equal(values(checkpoint, name), expected)


def test_shards_without_an_index(tmp_path: Path):
    write_checkpoint(tmp_path, QWEN3, sources(QWEN3), shards=3, indexed=False)
    with Checkpoint(tmp_path) as checkpoint:
        assert NAME in checkpoint.names
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"shard model-00002-of-00003.safetensors is missing"):
        Checkpoint(tmp_path)


def test_hub_cache_links_are_followed(tmp_path: Path):
    """The hub's cache: snapshots/REVISION/FILE -> ../../blobs/HASH."""
    real = random_checkpoint(tmp_path / "blobs", QWEN3)
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in real.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    with Checkpoint(snapshot) as checkpoint:
        assert NAME in checkpoint.names


def test_digest_tells_checkpoints_apart(tmp_path: Path):
    a = Checkpoint(random_checkpoint(tmp_path / "a", QWEN3))
    b = Checkpoint(random_checkpoint(tmp_path / "b", QWEN3, dtype="F16"))
    c = Checkpoint(random_checkpoint(tmp_path / "c", QWEN3))
    assert a.digest == c.digest != b.digest


# --- what is damaged or hostile -------------------------------------------------------------------

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def index_of(folder: Path) -> dict:
    return json.loads((folder / INDEX).read_text())


def rewrite_index(folder: Path, **changes: str) -> None:
    index = index_of(folder)
    index["weight_map"].update(changes)
    (folder / INDEX).write_text(json.dumps(index))


def truncate(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def link_out(folder: Path) -> None:
    moved = folder.parent / "elsewhere.safetensors"
    (folder / SECOND).rename(moved)
    (folder / SECOND).symlink_to(moved)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def config(folder: Path, text: str | bytes) -> None:
    (folder / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)


def quantized(folder: Path, **table: object) -> None:
    config(folder, json.dumps({**QWEN3, "quantization_config": table}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: (f / SECOND).unlink(), f"shard {SECOND} is missing"),
    "truncated shard": (lambda f: truncate(f / FIRST, 100), f"{FIRST} is damaged: the data is truncated"),
    "empty shard": (lambda f: (f / FIRST).write_bytes(b""), f"{FIRST} has only 0 bytes"),
    "shard is a folder": (
        lambda f: ((f / FIRST).unlink(), (f / FIRST).mkdir()),
        f"shard {FIRST} is missing",
    ),
    "index names a parent": (
        lambda f: rewrite_index(f, **{NAME: "../../etc/passwd"}),
        "'../../etc/passwd' is outside",
    ),
    "index names a root": (lambda f: rewrite_index(f, **{NAME: "/etc/passwd"}), "is outside"),
    "index with a NUL": (lambda f: rewrite_index(f, **{NAME: "a\0b"}), "damaged at byte"),
    "link out of the folder": (link_out, "is outside the model folder"),
    "shard links to itself": (lambda f: link_to_itself(f / FIRST), f"{FIRST}.* is a broken link"),
    "index links to itself": (lambda f: link_to_itself(f / INDEX), f"{INDEX}.* is a broken link"),
    "config links to itself": (
        lambda f: link_to_itself(f / "config.json"),
        "config.json.* is a broken link",
    ),
    "index lies about a tensor": (lambda f: rewrite_index(f, extra=FIRST), "but it is not"),
    "index is no JSON": (lambda f: (f / INDEX).write_text("x" * 1000), "0 weight maps"),
    "index is not UTF-8": (lambda f: (f / INDEX).write_bytes(b"\xff\xfe"), "not UTF-8"),
    "index is torn": (lambda f: truncate(f / INDEX, 50), "damaged at byte"),
    "index is empty": (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), "damaged at byte"),
    "index with a number": (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 1}}'), "damaged at byte"),
    "index with a name twice": (
        lambda f: (f / INDEX).write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "{FIRST}"}}}}'),
        "lists a twice",
    ),
    "two weight maps": (
        lambda f: (f / INDEX).write_text('{"weight_map": {}, "weight_map": {}}'),
        "2 weight maps",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config is a list": (lambda f: config(f, "[]"), "holds a list, not an object"),
    "config is no JSON": (lambda f: config(f, "{"), "is not JSON"),
    "config is binary": (lambda f: config(f, b"\xff\0\xfe"), "is not JSON"),
    "config with NaN": (lambda f: config(f, '{"a": NaN}'), "holds NaN"),
    "config with two values": (
        lambda f: config(f, '{"a": {"b": 1, "c": 2, "b": 3}}'),
        "config.json gives 'b' two different values",
    ),
    "config with Infinity": (lambda f: config(f, '{"a": -Infinity}'), "holds -Infinity"),
    "config with 1e999": (lambda f: config(f, '{"a": 1e999}'), "holds 1e999"),
    "config with endless digits": (lambda f: config(f, '{"a": %s}' % ("9" * 9999)), "holds 9999"),
    "config nests": (lambda f: config(f, "[" * 100_000), "is not readable JSON"),
    "config nests 99 levels": (
        lambda f: config(f, '{"a":' * 99 + "1" + "}" * 99),
        "is nested more than 64 levels",
    ),
    "config of 2 MB": (lambda f: config(f, " " * 2_000_000), "larger than 977 KiB"),
    "quantized with nothing": (lambda f: config(f, '{"quantization_config": 3}'), "is quantized 3, which kt"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_checkpoint(tmp_path: Path, what: str):
    folder = random_checkpoint(tmp_path / "model", QWEN3, shards=2)
    damage, words = DAMAGE[what]
    damage(folder)
    with pytest.raises(BadCheckpoint, match=words) as caught:
        Checkpoint(folder)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_other_folders(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match=r"no .safetensors file"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match="pickle files, which can run code"):
        Checkpoint(tmp_path)
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}.safetensors", {})
    with pytest.raises(BadCheckpoint, match="several"):
        Checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match="not a folder"):
        read_config(tmp_path / "nothing")


# --- tensors --------------------------------------------------------------------------------------


def opened(tmp_path: Path, stored: dict[str, tuple]) -> Checkpoint:
    return Checkpoint(write_checkpoint(tmp_path / "m", QWEN3, stored))


def f32(*shape: int, value: float = 1.0) -> tuple:
    return "F32", shape, np.full(shape, value, np.float32).tobytes()


def test_what_find_refuses(tmp_path: Path):
    stored = {
        "whole": ("I64", (2,), bytes(16)),
        "w": f32(2, 3),
        "q": ("F8_E4M3", (2, 3), bytes(6)),
        "r": ("F8_E4M3", (2, 3), bytes(6)),
        "r_scale_inv": f32(3, 2),
    }
    with opened(tmp_path, stored) as checkpoint:
        with pytest.raises(BadCheckpoint, match="has no tensor 'nothing'"):
            checkpoint.find("nothing")
        with pytest.raises(BadCheckpoint, match="stored as I64"):
            checkpoint.find("whole")
        with pytest.raises(
            BadCheckpoint, match=r"shape \[2, 3\], but config.json requires \[3, 2\]"
        ):
            checkpoint.find("w", (3, 2))
        with pytest.raises(BadCheckpoint, match=r"q in .* lacks its q_scale_inv"):
            checkpoint.find("q")
        with pytest.raises(BadCheckpoint, match=r"r_scale_inv .* \[3, 2\], but r requires"):
            checkpoint.find("r")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(tmp_path: Path, value: float):
    stored = {"w": f32(4, 5), "bad": f32(4, 5, value=value)}
    with opened(tmp_path, stored) as checkpoint:
        values(checkpoint, "w")
        with pytest.raises(BadCheckpoint, match=r"bad in model.safetensors contains NaN or Inf"):
            values(checkpoint, "bad")


def test_fp8_nan_and_bad_factors(tmp_path: Path):
    stored = {
        "a": ("F8_E4M3", (2, 3), b"\0\0\x7f\0\0\0"),
        "a_scale_inv": f32(1, 1),
        "b": ("F8_E4M3", (2, 3), bytes(6)),
        "b_scale_inv": f32(1, 1, value=np.nan),
    }
    with opened(tmp_path, stored) as checkpoint:
        with pytest.raises(BadCheckpoint, match=r"a in .* NaN or Inf"):
            values(checkpoint, "a")
        with pytest.raises(BadCheckpoint, match=r"b in .* NaN or Inf"):
            values(checkpoint, "b")


def test_file_shortened_while_open(tmp_path: Path):
    with opened(tmp_path, {"w": f32(4, 5)}) as checkpoint:
        truncate(tmp_path / "m" / "model.safetensors", 8)
        with pytest.raises(BadCheckpoint, match="became shorter"):
            values(checkpoint, "w")


def test_scalars_and_vectors(tmp_path: Path):
    with opened(tmp_path, {"s": f32(), "v": f32(5), "c": f32(4, 1, 3)}) as checkpoint:
        found = [checkpoint.find(name) for name in "svc"]
        assert [(source.rows, source.columns) for source in found] == [(1, 1), (1, 5), (4, 3)]
        assert values(checkpoint, "s").tolist() == [[1.0]]


# --- what config.json says of quantization --------------------------------------------------------

INT4 = compressed(num_bits=4, group_size=32, strategy="group")
UNREADABLE: dict[str, tuple[object, str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "with 'bitsandbytes'"),
    "hqq": ({"quant_method": "hqq"}, "with 'hqq'"),
    "no method": ({"bits": 4}, "with None"),
    "a method that is a list": ({"quant_method": ["fp8"]}, r"with \['fp8'\]"),
    "text": ("fp8", "is quantized 'fp8'"),
    "endless text": ({"quant_method": "x" * 9999}, "xxx[.][.][.], which kt does not read"),
    "fp8 with other blocks": (
        {"quant_method": "fp8", "weight_block_size": [1, 64]}, r"weight_block_size \[1, 64\], but kt reads only \[128",
    ),
    "fp8 of another kind": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    "gptq of 3 bits": (
        {"quant_method": "gptq", "bits": 3, "group_size": 128}, r"\(gptq\) with bits 3, but kt reads only 4, 8",
    ),
    "gptq of 2 bits somewhere": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:down": {"bits": 2}}},
        r"\(gptq\) with bits 2, but kt reads only 4, 8",
    ),
    "rules that are none": ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:down": 8}}, "quantizes [+]:down with 8"),
    "rules that are a list": ({"quant_method": "gptq", "bits": 4, "dynamic": ["down"]}, r"has the dynamic \['down'\]"),
    "gptq of True bits": ({"quant_method": "gptq", "bits": True}, "with bits True"),
    "gptq of marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format 'marlin'"),
    "gptq of endless groups": ({"quant_method": "gptq", "bits": 4, "group_size": 10**9}, "group_size 1000000000"),
    "awq of 8 bits": ({"quant_method": "awq", "bits": 8}, r"\(awq\) with bits 8"),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
    "mxfp6": ({**INT4, "format": "mxfp6-pack-quantized"}, "format 'mxfp6-pack-quantized'"),
    "nvfp4 in groups of 32": (
        compressed(type="float", num_bits=4, strategy="tensor_group", group_size=32),
        "group_size 32, but kt reads only 16",
    ),
    "mxfp8 in groups of 64": (
        compressed(type="float", num_bits=8, strategy="group", group_size=64), "group_size 64, but kt reads only 32",
    ),
    "an unknown packing": (auto_round("auto_gptq:marlin24", bits=3), r"\(auto-round\) with bits 3"),
    "a packing of its own": (auto_round("fake"), "packing_format 'auto_round:fake'"),
    "scales of E5M3": (auto_round("llm_compressor_nvfp4_e5m3"), "'auto_round:llm_compressor_nvfp4_e5m3'"),
    "fp8 of another kind, auto-round": (auto_round("fp8_static", fmt="e5m2"), "fmt 'e5m2'"),
    "integers in a layout for floats": (auto_round("llm_compressor"), "data_type 'int', but kt reads only 'mx_fp'"),
    "smoothed": (modelopt("NVFP4_AWQ", group_size=16), "quant_algo 'NVFP4_AWQ'"),
    "int4 of modelopt": (modelopt("W4A16_AWQ", group_size=128), "quant_algo 'W4A16_AWQ'"),
    "nvfp4 in groups of 32, modelopt": (modelopt("NVFP4", group_size=32), "group_size 32, but kt reads only 16"),
    "a mixture with int8": (
        modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W8A16"}}),
        "quant_algo 'W8A16'",
    ),
    "modelopt without a name": ({"quant_method": "modelopt"}, "quant_algo None"),
    "modelopt in a word": ({"quant_method": "modelopt", "quantization": "FP8"}, r"\(modelopt\) with 'FP8'"),
    "int4 of Quark": (quark(dtype="int4", qscheme="per_group"), "dtype 'int4', but kt reads only 'fp8_e4m3', 'fp4'"),
    "columns of Quark": (quark(dtype="fp8_e4m3", qscheme="per_channel", ch_axis=1), "ch_axis 1"),
    "two steps of Quark": ({**quark(), "global_quant_config": {"weight": [{}, {}]}}, r"with weight \[{}, {}\]"),
    "Quark's simulation": ({**quark(), "export": {"weight_format": "fake_quantized"}}, "format 'fake_quantized'"),
    "sparse": ({**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "is sparse with"),
    "no groups": ({**INT4, "config_groups": {}}, "has the config_groups"),
    "activations only": (
        {**INT4, "config_groups": {"group_0": {"weights": None, "input_activations": {"num_bits": 8}}}},
        "quantizes only activations",
    ),
    "int3": (compressed(num_bits=3, group_size=32, strategy="group"), "num_bits 3, but kt reads only 4, 8"),
    "float of 6 bits": (compressed(type="float", num_bits=6, strategy="group"), "num_bits 6, but kt reads only 4, 8"),
    "an order of its own": (
        compressed(num_bits=4, group_size=32, strategy="group", actorder="group"), "actorder 'group'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNREADABLE)
def test_unreadable_quantization(what: str):
    """Named by what was found, with what kt reads."""
    found, words = UNREADABLE[what]
    for config in ({"quantization_config": found}, {"text_config": {"quantization_config": found}}):
        with pytest.raises(BadCheckpoint, match=words) as caught:
            read_scheme(config)
        assert "kt reads bf16" in caught.value.hint and len(str(caught.value)) < 200


def test_whole_numbers_written_as_floats():
    given = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    floats = {**given, "bits": 4.0, "group_size": 128.0}
    assert read_scheme({"quantization_config": floats}) == read_scheme(
        {"quantization_config": given}
    )


def test_nothing_is_quantized():
    assert read_scheme({}).method == read_scheme({"quantization_config": None}).method == ""


BESIDE = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["*g"]},
}  # fmt: skip


def test_what_modelopt_says_beside_config_json(tmp_path: Path):
    """It counts where `config.json` says nothing."""
    parts, _ = nvfp4("m", 16, 64, np.random.default_rng(0), divides=False)
    write_checkpoint(tmp_path, QWEN3, parts, shards=1)
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(BadCheckpoint, match="as nvfp4 does, but"),
    ):
        checkpoint.find("m.weight")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(BESIDE))
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.find("m.weight").storage.label == "nvfp4"
    assert read_scheme({"quantization_config": modelopt("FP8")}, BESIDE).floats == frozenset()
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "INT4_AWQ"}}')
    with pytest.raises(BadCheckpoint, match="quant_algo 'INT4_AWQ'"):
        Checkpoint(tmp_path)
