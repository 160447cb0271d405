"""The pool decodes blocks to the bits that the gguf package gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from ktcli.errors import BadCheckpoint, NativeError
from ktcli.native import DType, Pool, packed_bytes
from ktcli.weights.formats import FORMATS
from ktcli.weights.gguf.file import STORAGES
from ktcli.weights.header import Entry
from ktcli.weights.oracle import unpack
from ktcli.weights.storage import Part, Source, Span

# Offsets of the f16 numbers in a block; elsewhere any byte will do.
HALVES = {
    "F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def blocks(name: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks [n, bytes of a row] whose numbers are finite."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = rng.integers(0, 256, (n * k // elements, size), dtype=np.uint8)
    for offset in HALVES.get(name, ()):
        raw[:, offset + 1] &= 0xBB  # exponents below 15, subnormal ones too
    if name == "MXFP4":
        raw[:, 0] %= 250
    if name in ("BF16", "F32"):
        raw[:, -1] &= 0xBF
    return raw.reshape(n, -1)


@pytest.mark.parametrize("name", STORAGES)
def test_decoded_as_the_package_does(name: str) -> None:
    rng, dtype = np.random.default_rng(0), STORAGES[name].dtype
    raw = blocks(name, 5, 768, rng)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    got = Pool(2).decode(dtype, raw.reshape(-1), 5, 768)
    np.testing.assert_array_equal(got.view(np.uint32), wanted.reshape(5, 768).view(np.uint32))


@pytest.mark.parametrize("name", STORAGES)
def test_sizes_are_those_of_the_package(name: str) -> None:
    assert STORAGES[name].dtype.block == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def test_part_of_a_block_and_what_is_not_finite_are_refused() -> None:
    with pytest.raises(NativeError):
        Pool(1).decode(DType.Q4_K, np.zeros(72, np.uint8), 1, 128)
    infinite = np.zeros(34, np.uint8)
    infinite[1] = 0x7C
    infinite[2] = 1
    with pytest.raises(BadCheckpoint):
        Pool(1).decode(DType.Q8_0, infinite, 1, 32)


def test_q4_0_is_held_exactly_by_four_bits_with_f32_scales() -> None:
    """Any codes with any scales, not only those that an encoder would choose."""
    pool, storage, fmt = Pool(1), STORAGES["Q4_0"], FORMATS["int4-g32-f32"]
    raw = blocks("Q4_0", 16, 256, np.random.default_rng(1))
    source = Source(
        "m", (16, 256), storage, (Part("m", "f", Entry("Q4_0", (16, 256), 0, raw.size)),)
    )
    span = Span(source)
    matrix = storage.decode(pool, span, [raw.reshape(-1)])
    kept = storage.kept(pool, span, [raw.reshape(-1)], fmt)
    packed = np.empty(packed_bytes(fmt, 16, 256), np.uint8)
    pool.pack(fmt, matrix, packed, scales=kept)
    np.testing.assert_array_equal(unpack(fmt, packed, 16, 256), matrix)
    assert storage.kept(pool, span, [raw.reshape(-1)], FORMATS["int4-g32"]) is None
