"""Every way to store numbers means what its authors say, element by element; each byte is read once; and what a
format can hold is held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import oracle
import pytest
from stored import lone
from weights import quantised
from weights.fake_checkpoint import QWEN3, write_checkpoint
from weights.quantised import Made, auto_round, compressed, modelopt, quark
from weights.test_encode import Counting, encoded

from ktcli.errors import BadCheckpoint
from ktcli.native import Pool
from ktcli.ops.tensors import Role, Stored
from ktcli.weights import strips
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.encode import Encoder
from ktcli.weights.formats import FORMATS
from ktcli.weights.recipe import Recipe
from ktcli.weights.storage import ByteSpan

POOL = Pool(2, spin_us=0)


@dataclass(frozen=True)
class Case:
    """One kind: who writes it, with which arguments, what the config says, and the format that holds it."""

    make: Callable[..., Made]
    args: dict[str, object]
    config: dict[str, object] = field(default_factory=dict)
    lossless: str | None = None
    shape: tuple[int, int] = (40, 160)


def gptq_config(**more: object) -> dict[str, object]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "sym": True,
        "desc_act": False,
        **more,
    }


def awq_config(**more: object) -> dict[str, object]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        **more,
    }


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
V4 = {**FP8, "scale_fmt": "ue8m0"}
ROWS = compressed(type="float", num_bits=8, strategy="channel")
CHANNELS = quark(dtype="fp8_e4m3", qscheme="per_channel", ch_axis=0)
MIXED = modelopt("MIXED_PRECISION", quantized_layers={
    "model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 16}, "model.layers.1.mlp": {"quant_algo": "FP8"},
})  # fmt: skip
IN_TWO_SIZES = gptq_config(dynamic={r"+:.*down": {"bits": 8, "group_size": 32}, r"-:.*gate$": {}})
NVFP4 = compressed(type="float", num_bits=4, strategy="tensor_group", group_size=16)
CASES = {
    "fp8 blocks": Case(quantised.fp8, {"scale": "F32", "of": "blocks"}, FP8, "fp8", (300, 150)),
    "fp8 blocks bf16": Case(quantised.fp8, {"scale": "BF16", "of": "blocks"}, FP8, "fp8", (130, 260)),
    "fp8 blocks e8m0": Case(quantised.fp8, {"scale": "F8_E8M0", "of": "blocks"}, FP8, "fp8", (130, 260)),
    "fp8 V4": Case(quantised.fp8, {"scale": "F8_E8M0", "of": "V4 blocks"}, V4, "fp8", (300, 150)),
    "fp8 V4 base": Case(quantised.fp8, {"scale": "F32", "of": "V4 blocks"}, V4, "fp8", (130, 260)),
    "fp8 rows": Case(quantised.fp8, {"scale": "BF16", "of": "rows"}, ROWS, "fp8"),
    "fp8 row vector": Case(quantised.fp8, {"scale": "F32", "of": "row vector"}, ROWS, "fp8"),
    "fp8 matrix": Case(quantised.fp8, {"scale": "F32", "of": "matrix"}, ROWS, "fp8"),
    "fp8 modelopt": Case(quantised.fp8, {"scale": "F32", "of": "matrix"}, modelopt("FP8"), "fp8"),
    "fp8 modelopt rows": Case(
        quantised.fp8, {"scale": "F32", "of": "row vector"}, modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "fp8"
    ),
    "fp8 modelopt blocks": Case(
        quantised.fp8, {"scale": "F32", "of": "standing blocks"}, modelopt("fp8_pb_wo"), "fp8", (300, 150)
    ),
    "fp8 in a mixture": Case(quantised.fp8, {"scale": "F32", "of": "matrix"}, MIXED, "fp8"),
    "fp8 quark": Case(
        quantised.fp8, {"scale": "F32", "of": "matrix"}, quark(dtype="fp8_e4m3", qscheme="per_tensor"), "fp8"
    ),
    "fp8 quark rows": Case(quantised.fp8, {"scale": "F32", "of": "row vector"}, CHANNELS, "fp8"),
    "mxfp8": Case(
        quantised.fp8, {"scale": "F8_E8M0", "of": "columns"},
        compressed(type="float", num_bits=8, strategy="group", group_size=32), "mxfp8",
    ),
    "mxfp8 modelopt": Case(quantised.fp8, {"scale": "F8_E8M0", "of": "columns"}, modelopt("MXFP8"), "mxfp8"),
    "mxfp4": Case(
        quantised.packed_fp4, {"codes": "weight_packed"},
        compressed(type="float", num_bits=4, strategy="group", group_size=32), "mxfp4",
    ),
    "mxfp4 auto-round": Case(
        quantised.packed_fp4, {"codes": "weight_packed"},
        auto_round("llm_compressor", group_size=32, data_type="mx_fp", act_bits=4), "mxfp4",
    ),
    "mxfp4 quark": Case(
        quantised.packed_fp4, {"codes": "weight"},
        quark(dtype="fp4", qscheme="per_group", group_size=32, ch_axis=-1, scale_format="e8m0"), "mxfp4",
    ),
    "nvfp4": Case(quantised.nvfp4, {"divides": True}, NVFP4),
    "nvfp4 modelopt": Case(quantised.nvfp4, {"divides": False}, modelopt("NVFP4", group_size=16)),
    "nvfp4 in a mixture": Case(quantised.nvfp4, {"divides": False}, MIXED),
    "nvfp4 in a mixture, by a word": Case(
        quantised.nvfp4, {"divides": False}, modelopt("MIXED_PRECISION", quantized_layers={"a": "NVFP4"})
    ),
    "int8 rows": Case(
        quantised.int8, {"scale": "BF16"}, compressed(num_bits=8, strategy="channel"), "int8-row"
    ),
    **{
        f"int{bits} g{group} {scale}": Case(
            quantised.packed,
            {"bits": bits, "group": group, "scale": scale},
            compressed(num_bits=bits, group_size=group or None, strategy="group" if group else "channel"),
            lossless,
        )
        for bits, group, scale, lossless in (
            (4, 32, "BF16", "int4-g32"), (4, 64, "BF16", "int4"), (4, 128, "BF16", "int4-g128"),
            (4, 0, "BF16", "int4-g128"), (4, 32, "F16", "int4-g32-f32"), (4, 128, "F32", "int4-g128-f32"),
            (8, 32, "BF16", None), (8, 0, "BF16", "int8-row"),
        )
    },
    "int4 g32 asymmetric": Case(
        quantised.packed,
        {"bits": 4, "group": 32, "scale": "BF16", "symmetric": False},
        compressed(num_bits=4, group_size=32, strategy="group", symmetric=False),
    ),
    "gptq": Case(quantised.gptq, {"group": 64}, gptq_config(), "int4-g32-f32"),
    "gptq g128": Case(
        quantised.gptq, {"group": 128}, gptq_config(group_size=128), "int4-g128-f32", (40, 256)
    ),
    "gptq a row": Case(quantised.gptq, {"group": 160}, gptq_config(group_size=-1), "int4-g128-f32"),
    "gptq without order": Case(quantised.gptq, {"group": 64, "g_idx": False}, gptq_config(), "int4-g32-f32"),
    "gptq v2": Case(
        quantised.gptq, {"group": 64, "v2": True}, gptq_config(checkpoint_format="gptq_v2"), "int4-g32-f32"
    ),
    "gptq asymmetric": Case(quantised.gptq, {"group": 64, "symmetric": False}, gptq_config(sym=False)),
    "gptq reordered": Case(quantised.gptq, {"group": 64, "reordered": True}, gptq_config(desc_act=True)),
    "gptq of 8 bits": Case(quantised.gptq, {"group": 64, "bits": 8}, gptq_config(bits=8)),
    "gptq of 8 bits, asymmetric": Case(
        quantised.gptq, {"group": 32, "bits": 8, "symmetric": False, "v2": True},
        gptq_config(bits=8, group_size=32, sym=False, format="gptq_v2"),
    ),
    "gptq of 8 bits in a mixture": Case(quantised.gptq, {"group": 32, "bits": 8}, IN_TWO_SIZES),
    "gptq of 4 bits in a mixture": Case(quantised.gptq, {"group": 64}, IN_TWO_SIZES, "int4-g32-f32"),
    "gptq auto-round": Case(quantised.gptq, {"group": 64}, auto_round("auto_gptq"), "int4-g32-f32"),
    "gptq auto-round itself": Case(
        quantised.gptq, {"group": 64, "v2": True, "symmetric": False, "g_idx": False},
        auto_round("gptqmodel", sym=False),
    ),
    "awq auto-round": Case(quantised.awq, {"group": 64}, auto_round("auto_awq", sym=False)),
    "awq": Case(quantised.awq, {"group": 32}, awq_config()),
    "awq symmetric": Case(
        quantised.awq, {"group": 32, "symmetric": True}, awq_config(zero_point=False), "int4-g32-f32"
    ),
}  # fmt: skip


def written(folder: Path, parts: quantised.Parts, config: dict[str, object]) -> Counting:
    return Counting(
        write_checkpoint(folder, {**QWEN3, "quantization_config": config}, parts, shards=2)
    )


def decoded(reader: Checkpoint, span: ByteSpan) -> np.ndarray:
    raws = [reader.read(read) for read in span.source.storage.reads(span)]
    return reader.decode(POOL, span, raws)


@pytest.mark.parametrize("what", CASES)
def test_values_are_those_of_the_format(tmp_path: Path, what: str):
    """The whole matrix, and any rows of it."""
    case = CASES[what]
    n, k = case.shape
    parts, wanted = case.make("m", n, k, np.random.default_rng(0), **case.args)
    with written(tmp_path, parts, case.config) as reader:
        source = reader.find("m.weight", (n, k))
        for start, stop in ((0, n), (0, 1), (8, 24), (3, 30), (n - 1, n)):
            found = decoded(reader, ByteSpan(source, start, stop))
            assert np.array_equal(found, wanted[start:stop]), (start, stop)
        assert "m.weight" in reader.names
        with pytest.raises(BadCheckpoint, match=r"m.weight in .* has the shape"):
            reader.find("m.weight", (k, n))


@pytest.mark.parametrize("what", CASES)
def test_each_byte_is_read_once_and_held(tmp_path: Path, what: str, monkeypatch):
    """Through the encoder, in pieces; the lossless format decodes to the same numbers."""
    case = CASES[what]
    n, k = case.shape
    monkeypatch.setattr(strips, "STRIP_ELEMENTS", 16 * k if case.shape == (40, 160) else 128 * k)
    parts, wanted = case.make("m", n, k, np.random.default_rng(1), **case.args)
    tensor = lone(n, k, Role.EXPERTS, ((Stored("m.weight", (n, k)),),))
    with written(tmp_path, parts, case.config) as reader:
        storage = reader.find("m.weight").storage
        assert case.lossless in (storage.lossless, "int8-row")
        recipe = Recipe.named(case.lossless or "f32", "f32")
        encoder = Encoder(reader, recipe, POOL)
        data = b"".join(part.tobytes() for part in encoder.encode([tensor]))
        packed = oracle.unpack(recipe.experts, np.frombuffer(data, np.uint8), n, k)
        assert np.array_equal(packed, wanted)
        assert [sums.error for sums in encoder.sums.values()] == [0]
        whole = {"weight_scale"} if case.args.get("of") == "matrix" else set()
        shared = {"g_idx", "weight_global_scale", "weight_scale_2", *whole}
        once = [p for p in reader.find("m.weight").parts if p.name.split(".")[-1] not in shared]
        for p in once:
            places = range(p.entry.offset, p.entry.offset + p.entry.size_bytes)
            assert {reader.bytes[p.file, place] for place in places} == {1}, p.name


def test_mxfp4_is_held_as_it_is(tmp_path: Path, monkeypatch):
    """Fused experts whose gate and up interleave, as gpt-oss has them; judged by transformers too."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    monkeypatch.setattr(strips, "STRIP_ELEMENTS", 3000)
    n_experts, n, k = 2, 40, 96
    parts, wanted = quantised.mxfp4("w", (n_experts, n, k)[:2], k, np.random.default_rng(0))
    raw = {name: np.frombuffer(p[2], np.uint8).reshape(p[1]) for name, p in parts.items()}
    judged = convert_moe_packed_tensors(
        *(torch.tensor(raw[f"w_{what}"]) for what in ("blocks", "scales")), dtype=torch.float32
    )
    assert np.array_equal(judged.transpose(1, 2).numpy(), wanted)
    shape = (n_experts, n, k)
    halves = [Stored("w_blocks", shape, matrix=True, first=i, step=2) for i in range(2)]
    tensor = lone(64, k, Role.EXPERTS, (tuple(halves),), n_experts, alternate=True)
    with written(tmp_path, parts, {"quant_method": "mxfp4"}) as reader:
        assert reader.find("w_blocks", shape).storage.lossless == "mxfp4"
        encoder = Encoder(reader, Recipe.named("mxfp4", "f32"), POOL)
        data = b"".join(part.tobytes() for part in encoder.encode([tensor]))
        assert set(reader.bytes.values()) == {1} and [
            sums.error for sums in encoder.sums.values()
        ] == [0]
    fmt = FORMATS["mxfp4"]
    for e in range(n_experts):
        mine = np.frombuffer(data, np.uint8).reshape(n_experts, -1)[e]
        panels = oracle.unpack(fmt, mine, 64, k).reshape(2, 2, 16, k)
        for i in range(2):
            assert np.array_equal(panels[:, i].reshape(32, k)[:20], wanted[e, i::2])


def test_fp8_of_fused_experts(tmp_path: Path):
    """[E, n, k] with the factors of each matrix's own blocks, and no multiple of 128 anywhere."""
    rng = np.random.default_rng(0)
    n, k, name = 200, 140, "m.gate_up_proj"
    made = [quantised.fp8("m", n, k, rng, scale="F32", of="blocks") for _ in range(3)]
    stored = {}
    for suffix, old in (("", "m.weight"), ("_scale_inv", "m.weight_scale_inv")):
        dtype, shape, _ = made[0][0][old]
        data = b"".join(parts[old][2] for parts, _ in made)
        stored[name + suffix] = (dtype, (3, *shape), data)
    with written(tmp_path, stored, FP8) as reader:
        source = reader.find(name, (3, n, k))
        for e, (_, wanted) in enumerate(made):
            assert np.array_equal(decoded(reader, ByteSpan(source, e * n, (e + 1) * n)), wanted)
            rows = ByteSpan(source, e * n + 130, e * n + 190)
            assert np.array_equal(decoded(reader, rows), wanted[130:190])


# --- what contradicts itself ----------------------------------------------------------------------

G64 = compressed(num_bits=4, group_size=64, strategy="group")


def made(what: str, **changes: object) -> quantised.Parts:
    """The parts of a case; a change is a new (dtype, shape), or None to leave the part out."""
    case = CASES[what]
    parts, _ = case.make("m", *case.shape, np.random.default_rng(0), **case.args)
    for name, change in changes.items():
        if change is None:
            del parts[f"m.{name}"]
        else:
            dtype, shape = change
            size = {"F16": 2, "BF16": 2, "I32": 4, "F32": 4, "U8": 1, "F8_E4M3": 1, "I64": 8}[dtype]
            parts[f"m.{name}"] = (dtype, shape, bytes(int(np.prod(shape)) * size))
    return parts


WRONG: dict[str, tuple[str, dict, dict | None, str]] = {
    "fp8 without scales": ("fp8 rows", {"weight_scale": None}, None, "lacks its m.weight_scale_inv"),
    "fp8 with other blocks": (
        "fp8 blocks", {"weight_scale_inv": ("F32", (5, 3))}, None, r"shape \[5, 3\], but m.weight requires",
    ),
    "no scale": ("int4 g32 BF16", {"weight_scale": None}, None, "without its weight_scale"),
    "another group": ("int4 g32 BF16", {}, G64, "gives m.weight_packed 4 bits in groups of 64"),
    "not packed": ("int4 g32 BF16", {}, FP8, "gives m.weight_packed no packed integers"),
    "no zero point": (
        "int4 g32 BF16", {}, CASES["int4 g32 asymmetric"].config, "lacks its m.weight_zero_point",
    ),
    "no zeros": ("gptq", {"qzeros": None}, None, "lacks its m.qzeros"),
    "no order": ("gptq reordered", {"g_idx": None}, None, "lacks its m.g_idx"),
    "zeros are f32": ("gptq", {"qzeros": ("F32", (3, 5))}, None, "m.qzeros in .* is stored as F32; kt reads I32 there"),
    "packed zeros are bf16": (
        "int4 g32 asymmetric", {"weight_zero_point": ("BF16", (5, 5))}, None, "stored as BF16; kt reads I32",
    ),
    "fp8 with whole numbers": (
        "fp8 blocks", {"weight_scale_inv": ("I32", (3, 2))}, None, "stored as I32; kt reads",
    ),
    "nothing packed": ("gptq a row", {"qweight": ("I32", (0, 0))}, None, "holds 0 x 0 codes"),
    "scales of other groups": ("gptq", {}, gptq_config(group_size=32), r"m.scales .* requires \[5, 40\]"),
    "gptq as awq": ("gptq", {}, awq_config(group_size=64), "holds 20 x 320 codes; kt reads only multiples of 8"),
    "gptq without a config": ("gptq", {}, FP8, "does not call the checkpoint gptq or awq"),
    "nvfp4 by a config of mxfp4": (
        "nvfp4", {}, CASES["mxfp4"].config, "scales of F8_E4M3, as nvfp4 does, but config.json does not say so",
    ),
    "mxfp4 by a config of nvfp4": ("mxfp4", {}, NVFP4, "scales of U8, as mxfp4 does, but config.json does not say so"),
    "nvfp4 without its number": ("nvfp4", {"weight_global_scale": None}, None, "lacks its m.weight_scale_2"),
    "a number for each row": ("nvfp4", {"weight_global_scale": ("F32", (40,))}, None, r"packed requires \[\] or"),
    "nvfp4 without scales": ("nvfp4", {"weight_scale": None}, None, "without its m.weight_scale"),
    "nvfp4 in rows of 24": ("nvfp4", {"weight_packed": ("U8", (40, 12))}, None, "rows of 24 nvfp4 numbers; kt reads"),
    "scales of 8 columns": ("nvfp4", {"weight_scale": ("F8_E4M3", (40, 20))}, None, r"requires \[40, 10\]"),
    "powers of two as floats": ("mxfp4", {"weight_scale": ("F32", (40, 5))}, None, "as F32; kt reads F8_E8M0, U8"),
    "mxfp8 as fp8": ("mxfp8", {}, FP8, r"has the shape \[40, 5\]"),
    "two sizes, neither": (
        "gptq of 8 bits in a mixture", {"qzeros": ("I32", (5, 3))}, None, r"m.qzeros in .* has the shape \[5, 3\]",
    ),
    "integers": ("gptq", {"weight": ("I64", (4,))}, None, "stored as I64"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_together(tmp_path: Path, what: str):
    name, changes, config, words = WRONG[what]
    with (
        written(tmp_path, made(name, **changes), config or CASES[name].config) as reader,
        pytest.raises(BadCheckpoint, match=words) as caught,
    ):
        reader.find("m.weight", CASES[name].shape)
    assert caught.value.hint and "\n" not in str(caught.value)


def test_an_order_that_names_no_group(tmp_path: Path):
    parts = made("gptq reordered")
    dtype, shape, data = parts["m.g_idx"]
    parts["m.g_idx"] = (dtype, shape, (9).to_bytes(4, "little") + data[4:])
    with (
        written(tmp_path, parts, gptq_config(desc_act=True)) as reader,
        pytest.raises(BadCheckpoint, match=r"m.g_idx names a group that is not one of 3"),
    ):
        decoded(reader, ByteSpan(reader.find("m.weight")))


def test_encoded_twice_the_same(tmp_path: Path):
    """`encoded` of the neighbouring test reads these as it reads plain ones."""
    parts, wanted = quantised.awq("m", 40, 160, np.random.default_rng(3), group=32)
    tensor = lone(40, 160, Role.EXPERTS, ((Stored("m.weight", (40, 160)),),))
    with written(tmp_path, parts, awq_config()) as reader:
        data = np.frombuffer(encoded(tensor, reader), np.uint8)
        assert np.array_equal(oracle.unpack(FORMATS["f32"], data, 40, 160), wanted)
