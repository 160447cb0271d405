"""DeepSeek-V4's storages: FP8 blocks and FP4 experts under powers of two.

Everything a byte can say is compared with arithmetic in f64, where 2^(b - 127) and its products are exact.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle
import pytest
from stored import lone
from weights import quantised
from weights.fake_checkpoint import QWEN3, sources, write_checkpoint
from weights.test_encode import Counting
from weights.test_storages import POOL, decoded

from ktcli.errors import BadCheckpoint
from ktcli.main import main
from ktcli.ops.tensors import Role, Stored
from ktcli.weights import strips
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.encode import Encoder
from ktcli.weights.formats import FORMATS
from ktcli.weights.recipe import Recipe
from ktcli.weights.storage import ByteSpan

EXPERT = "layers.0.ffn.experts.0.w1"
WEIGHT, SCALE = f"{EXPERT}.weight", f"{EXPERT}.scale"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
FP4 = {**FP8, "expert_dtype": "fp4"}
E2M1 = [(-1) ** (code >> 3) * (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7] for code in range(16)]  # fmt: skip
LARGEST = float(np.finfo(np.float32).max)
LOSSLESS = range(
    127 - 59, 127 + 57
)  # below, mxfp4 makes numbers 0; beyond, their squares exceed f32


def written(folder: Path, parts: quantised.Parts, config: object = FP4, **more: object) -> Path:
    whole = {**QWEN3, "quantization_config": config, **more}
    return write_checkpoint(folder, whole, parts, shards=2)


def opened(
    folder: Path, parts: quantised.Parts, config: object = FP4, **more: object
) -> Checkpoint:
    return Checkpoint(written(folder, parts, config, **more))


def fp4_of(codes: np.ndarray, exponents: np.ndarray) -> quantised.Parts:
    """The parts of codes [n, k] and E8M0 bytes [n, k / 32], the first of two codes in the low half of a byte."""
    n, k = codes.shape
    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return {
        WEIGHT: ("I8", (n, k // 2), pairs.tobytes()),
        SCALE: ("F8_E8M0", (n, k // 32), exponents.astype(np.uint8).tobytes()),
    }


def packed(reader: Checkpoint, fmt: str, n: int, k: int, name: str = WEIGHT) -> tuple[bytes, float]:
    """The bytes in a format, and the error that the packer counted."""
    shape = reader.find(name).shape
    tensor = lone(n, k, Role.EXPERTS, ((Stored(name, shape),),))
    encoder = Encoder(reader, Recipe.named(fmt, "f32"), POOL)
    data = b"".join(part.tobytes() for part in encoder.encode([tensor]))
    return data, sum(sums.error for sums in encoder.sums.values())


# --- what the bytes mean --------------------------------------------------------------------------


def test_fp4_means_all_that_its_bytes_can_say(tmp_path: Path):
    """Each code under each scale; a product beyond f32 is refused, a tiny one is exact."""
    codes = np.tile(np.arange(16), (255, 2))
    wanted = np.array(E2M1 * 2)[None, :] * np.exp2(np.arange(255.0) - 127)[:, None]
    with opened(tmp_path, fp4_of(codes, np.arange(255)[:, None])) as reader:
        source = reader.find(WEIGHT, (255, 32))
        fits = int((np.abs(wanted).max(axis=1) <= LARGEST).sum())
        assert fits == 253
        found = decoded(reader, ByteSpan(source, 0, fits))
        assert np.array_equal(found.astype(np.float64), wanted[:fits])
        for row in range(fits, 255):
            with pytest.raises(BadCheckpoint, match=f"{WEIGHT} in .* contains NaN or Inf"):
                decoded(reader, ByteSpan(source, row, row + 1))


def test_fp8_means_all_that_its_bytes_can_say(tmp_path: Path):
    """256 codes but NaN in each of 255 blocks, which lie side by side and one above the other."""
    numbers = np.array([code for code in range(256) if code & 127 != 127])
    codes = np.resize(numbers, (128, 2 * 128)).astype(np.uint8)
    tall = np.tile(codes, (128, 1))  # 128 x 2 blocks
    exponents = np.resize(np.arange(255), (128, 2)).astype(np.uint8)
    values = np.array([oracle.e4m3_value(code) for code in range(256)])
    parts = {
        "m.weight": ("F8_E4M3", tall.shape, tall.tobytes()),
        "m.scale": ("F8_E8M0", exponents.shape, exponents.tobytes()),
    }
    with opened(tmp_path, parts) as reader:
        source = reader.find("m.weight", tall.shape)
        for block, (left, right) in enumerate(exponents.astype(float)):
            span = ByteSpan(source, 128 * block, 128 * block + 128)
            factors = np.repeat(np.exp2([left - 127, right - 127]), 128)
            wanted = values[codes] * factors
            if np.abs(wanted).max() > LARGEST:
                with pytest.raises(BadCheckpoint, match=r"m.weight in .* contains NaN or Inf"):
                    decoded(reader, span)
            else:
                assert np.array_equal(decoded(reader, span).astype(np.float64), wanted), block


def test_transformers_reads_the_same(tmp_path: Path):
    """Its own way of reading these releases, on the bytes of both storages."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rng, judge = np.random.default_rng(0), Fp8Dequantize(None)
    types = {"I8": torch.int8, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3": torch.float8_e4m3fn}
    dense, _ = quantised.fp8("m", 256, 384, rng, scale="F8_E8M0", of="V4 blocks")
    experts, _ = quantised.fp4(EXPERT, 40, 96, rng)
    with opened(tmp_path, {**dense, **experts}) as reader:
        for parts, name in ((dense, "m"), (experts, EXPERT)):
            weight, scale = (
                torch.frombuffer(bytearray(data), dtype=types[dtype]).reshape(shape)
                for dtype, shape, data in (parts[f"{name}.weight"], parts[f"{name}.scale"])
            )
            wanted = judge._dequantize_one(weight, scale, torch.float32).numpy()
            found = decoded(reader, ByteSpan(reader.find(f"{name}.weight")))
            assert np.array_equal(found, wanted), name


# --- what a format keeps --------------------------------------------------------------------------


def test_fp4_is_held_by_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All scales from 2^-59 to 2^56, rows of every kind; each byte is read once; the bytes in the pack are those
    of the same numbers stored as gpt-oss does."""
    rng = np.random.default_rng(0)
    n, k = 2 * len(LOSSLESS), 96
    monkeypatch.setattr(strips, "STRIP_ELEMENTS", 16 * k)
    codes = rng.integers(0, 16, (n, k))
    codes[0] = 0
    codes[1] = rng.choice([0, 1, 8, 9], k)  # a smaller scale could hold these too
    exponents = np.repeat(np.resize(LOSSLESS, n)[:, None], 3, axis=1)
    wanted = np.array(E2M1)[codes] * np.repeat(np.exp2(exponents - 127.0), 32, axis=1)
    parts = fp4_of(codes, exponents)
    mx = {
        "w_blocks": ("U8", (n, k // 32, 16), parts[WEIGHT][2]),
        "w_scales": ("U8", (n, k // 32), parts[SCALE][2]),
    }
    with Counting(written(tmp_path, {**parts, **mx})) as reader:
        assert reader.find(WEIGHT, (n, k)).storage.lossless == "mxfp4"
        data, error = packed(reader, "mxfp4", n, k)
        size_bytes = reader.find(WEIGHT).size_bytes
        assert set(reader.bytes.values()) == {1} and len(reader.bytes) == size_bytes
        assert data == packed(reader, "mxfp4", n, k, "w_blocks")[0]
    found = oracle.unpack(FORMATS["mxfp4"], np.frombuffer(data, np.uint8), n, k)
    assert np.array_equal(found, wanted) and error == 0


@pytest.mark.parametrize("fmt", ["fp8", "f32"])
def test_powers_of_two_are_kept_as_f32_scales_are(tmp_path: Path, fmt: str):
    """The same bytes as from the same scales in f32, under either name."""
    n, k = 300, 150
    parts, wanted = quantised.fp8(
        "m", n, k, np.random.default_rng(1), scale="F8_E8M0", of="V4 blocks"
    )
    weight, (_, shape, raw) = parts["m.weight"], parts["m.scale"]
    factors = np.exp2(np.frombuffer(raw, np.uint8).astype(np.float32) - 127).astype("<f4")
    others = {
        "f32.weight": weight, "f32.scale": ("F32", shape, factors.tobytes()),
        "inv.weight": weight, "inv.weight_scale_inv": ("F32", shape, factors.tobytes()),
    }  # fmt: skip
    with opened(tmp_path, {**parts, **others}) as reader:
        data, error = packed(reader, fmt, n, k, "m.weight")
        assert error == 0
        assert np.array_equal(
            oracle.unpack(FORMATS[fmt], np.frombuffer(data, np.uint8), n, k), wanted
        )
        for stem in ("f32", "inv"):
            assert packed(reader, fmt, n, k, f"{stem}.weight")[0] == data


@pytest.mark.parametrize("fmt", ["int4", "int8", "bf16"])
def test_other_formats_see_the_numbers(tmp_path: Path, fmt: str):
    """As if they lay there as f32."""
    parts, values = quantised.fp4(EXPERT, 40, 96, np.random.default_rng(2))
    plain = {"p.weight": ("F32", values.shape, values.tobytes())}
    with opened(tmp_path, {**parts, **plain}) as reader:
        assert packed(reader, fmt, 40, 96)[0] == packed(reader, fmt, 40, 96, "p.weight")[0]


# --- what contradicts itself ----------------------------------------------------------------------

GOOD = fp4_of(np.zeros((40, 96), int), np.full((40, 3), 120))
BLOCKS, _ = quantised.fp8(EXPERT, 200, 150, np.random.default_rng(0), scale="F8_E8M0", of="V4 blocks")  # fmt: skip
DENSE = {name.replace(EXPERT, "m"): part for name, part in BLOCKS.items()}
E8M0 = "F8_E8M0"


def but(parts: quantised.Parts, name: str, dtype: str, *shape: int) -> quantised.Parts:
    """The parts with another tensor of zeros in the place of one."""
    bits = {"F32": 32, "F4": 4}.get(dtype, 8)
    return {**parts, name: (dtype, shape, bytes(bits * int(np.prod(shape)) // 8))}


def without(parts: quantised.Parts, name: str) -> quantised.Parts:
    return {key: part for key, part in parts.items() if key != name}


Wrong = tuple[quantised.Parts, dict[str, object], str]
WRONG: dict[str, Wrong] = {
    "fp4 without scales": (without(GOOD, SCALE), FP4, f"lacks its {SCALE}"),
    "fp4 under f32": (but(GOOD, SCALE, "F32", 40, 3), FP4, "stored as F32; kt reads F8_E8M0 there"),
    "fp4 under bytes": (but(GOOD, SCALE, "U8", 40, 3), FP4, "stored as U8; kt reads F8_E8M0 there"),
    "fp4 under E4M3": (but(GOOD, SCALE, "F8_E4M3", 40, 3), FP4, "stored as F8_E4M3; kt reads"),
    "fp4 in groups of 16": (but(GOOD, SCALE, E8M0, 40, 6), FP4, r"shape \[40, 6\], .* requires \[40, 3\]"),
    "fp4 in blocks": (but(GOOD, SCALE, E8M0, 1, 1), FP4, r"shape \[1, 1\], .* requires \[40, 3\]"),
    "fp4 of half a group": (
        but(but(GOOD, WEIGHT, "I8", 40, 24), SCALE, E8M0, 40, 2), FP4,
        "rows of 48 fp4 numbers; kt reads only multiples",
    ),
    "fp4 in unsigned bytes": (but(GOOD, WEIGHT, "U8", 40, 48), FP4, "stored as U8, which kt cannot convert"),
    "fp4 as F4": (but(GOOD, WEIGHT, "F4", 40, 96), FP4, "stored as F4, which kt cannot convert"),
    "fp4 nobody speaks of": (GOOD, FP8, "but is not fp4 according to config.json"),
    "fp4 said to be fp8": (GOOD, {**FP8, "expert_dtype": "fp8"}, "but is not fp4 according to config.json"),
    "fp4 that is no expert": (
        {"m.weight": GOOD[WEIGHT], "m.scale": GOOD[SCALE]}, FP4, "but is no routed expert",
    ),
    "fp8 said to be fp4": (BLOCKS, FP4, "stored as F8_E4M3, but config.json says that experts are fp4"),
    "fp8 without scales": (without(DENSE, "m.scale"), FP8, "lacks its m.weight_scale_inv"),
    "fp8 under bytes": (but(DENSE, "m.scale", "U8", 2, 2), FP8, "stored as U8; kt reads F32, F8_E8M0 there"),
    "fp8 under E4M3": (but(DENSE, "m.scale", "F8_E4M3", 2, 2), FP8, "stored as F8_E4M3"),
    "fp8 of rows": (but(DENSE, "m.scale", E8M0, 200, 1), FP8, r"shape \[200, 1\], .* requires \[2, 2\]"),
    "fp8 in other blocks": (but(DENSE, "m.scale", E8M0, 7, 5), FP8, r"shape \[7, 5\], .* requires \[2, 2\]"),
    "fp8 with two scales": (
        but(DENSE, "m.weight_scale_inv", "F32", 2, 2), FP8, "has both m.weight_scale_inv and m.scale",
    ),
    "fp8 said to be under floats": (DENSE, {**FP8, "scale_fmt": "float"}, "config.json says that scale_fmt is float"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_together(tmp_path: Path, what: str):
    parts, config, words = WRONG[what]
    name = next(name for name in parts if name.endswith(".weight"))
    with (
        opened(tmp_path, parts, config) as reader,
        pytest.raises(BadCheckpoint, match=words) as caught,
    ):
        reader.find(name)
    assert caught.value.hint and "\n" not in str(caught.value)


SAID: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "experts of another kind": ({**FP8, "expert_dtype": "nvfp4"}, {}, "expert_dtype 'nvfp4', but kt reads only 'fp8'"),
    "experts that are a list": (FP8, {"expert_dtype": ["fp4"]}, r"expert_dtype \['fp4'\]"),
    "two kinds of experts": (FP4, {"expert_dtype": "fp8"}, r"as \['fp4', 'fp8'\], which contradict each other"),
    "scales of another kind": (
        {**FP8, "scale_fmt": "ue4m3"}, {}, "scale_fmt 'ue4m3', but kt reads only 'ue8m0', 'float'",
    ),
    "blocks of V4.1": ({**FP4, "weight_block_size": [32, 32]}, {}, r"weight_block_size \[32, 32\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_what_a_config_cannot_say(tmp_path: Path, what: str):
    config, beside, words = SAID[what]
    with pytest.raises(BadCheckpoint, match=words):
        opened(tmp_path, GOOD, config, **beside)


@pytest.mark.parametrize("place", ["beside", "within", "inside", "both"])
def test_where_a_config_speaks_of_its_experts(tmp_path: Path, place: str):
    """DeepSeek-V4 beside the quantization, V4.1 and transformers within it; either in the text's own config."""
    fp4 = {"expert_dtype": "fp4"}
    config: dict[str, object] = {**FP8, **(fp4 if place in ("within", "both") else {})}
    beside = fp4 if place in ("beside", "both") else {}
    inner = {"text_config": {**QWEN3, "quantization_config": config, **fp4}}
    more = inner if place == "inside" else beside
    with opened(tmp_path, GOOD, None if place == "inside" else config, **more) as reader:
        assert reader.find(WEIGHT, (40, 96)).storage.lossless == "mxfp4"


# --- scales that are none --------------------------------------------------------------------------

LATE = "model.layers.2.mlp.experts.5.down_proj"  # in the last file of a pack
WIDE = {**QWEN3, "hidden_size": 96, "moe_intermediate_size": 64}


@pytest.mark.parametrize(("kind", "at"), [("fp4", 0), ("fp4", -1), ("fp8", 0)])
def test_a_nan_scale_is_refused(
    kind: str, at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """255 as the first or the last scale of the last matrix."""
    stored = sources(WIDE)
    del stored[f"{LATE}.weight"]
    rng = np.random.default_rng(0)
    made, _ = (
        quantised.fp4(LATE, 96, 64, rng)
        if kind == "fp4"
        else quantised.fp8(LATE, 96, 64, rng, scale="F8_E8M0", of="V4 blocks")
    )
    dtype, shape, data = made[f"{LATE}.scale"]
    bad = bytearray(data)
    bad[at] = 255
    stored |= {**made, f"{LATE}.scale": (dtype, shape, bytes(bad))}
    config = {**WIDE, "quantization_config": {**FP8, "expert_dtype": kind}}
    folder = write_checkpoint(tmp_path / "s", config, stored)
    assert main(["convert", str(folder), "--out", str(tmp_path / "p")]) == 5
    captured = capsys.readouterr()
    assert f"{LATE}.weight in model.safetensors contains NaN or Inf" in captured.err
    assert captured.out == "" and not (tmp_path / "p" / "kt.json").exists()
