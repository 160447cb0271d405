"""The pool decodes blocks to the bits that the gguf package gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from oracle import unpack

from ktcli.errors import BadCheckpoint, NativeError
from ktcli.native import DType, Numbers, Pool, packed_bytes
from ktcli.weights.formats import FORMATS
from ktcli.weights.gguf.types import STORAGES
from ktcli.weights.header import TensorEntry
from ktcli.weights.storage import ByteSpan, Part, PlainStorage, StorageSource

# Offsets of the f16 numbers in a block; elsewhere any byte will do.
HALVES = {
    "F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,),
    **{f"IQ{name}": (0,) for name in ("1_S", "2_XXS", "2_XS", "2_S", "3_XXS", "3_S", "4_NL", "4_XS")},
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


@pytest.mark.parametrize("name", [name for name in STORAGES if name != "I32"])
def test_decoded_as_the_package_does(name: str) -> None:
    raw = blocks(name, 5, 768, np.random.default_rng(0))
    if name == "IQ1_M":  # its f16 scale lies in the high halves of the last bytes
        raw.reshape(-1, 56)[:, 55] &= 0xBF
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    for pool in (Pool(1), Pool(2), Pool(9)):
        got = decoded(pool, span_of(name, 5, 768, raw.nbytes), raw)
        np.testing.assert_array_equal(got.view(np.uint32), wanted.reshape(5, 768).view(np.uint32))


def decoded(pool: Pool, span: ByteSpan, raw: np.ndarray) -> np.ndarray:
    return pool.decode(span.source.storage.numbers(pool, span, [raw.reshape(-1)]).whole)


def span_of(name: str, n: int, k: int, size_bytes: int) -> ByteSpan:
    part = Part("m", "f", TensorEntry(name, (n, k), 0, size_bytes))
    return ByteSpan(StorageSource("m", (n, k), STORAGES[name], (part,)))


@pytest.mark.parametrize(
    "name", [name for name, each in STORAGES.items() if isinstance(each, PlainStorage)]
)
def test_sizes_are_those_of_the_package(name: str) -> None:
    storage = STORAGES[name]
    assert isinstance(storage, PlainStorage)
    assert storage.dtype.block == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def test_part_of_a_block_and_what_is_not_finite_are_refused() -> None:
    with pytest.raises(NativeError):
        Pool(1).decode(Numbers(DType.Q4_K, np.zeros(72, np.uint8), 1, 128).whole)
    infinite = np.zeros(34, np.uint8)
    infinite[1] = 0x7C
    infinite[2] = 1
    with pytest.raises(BadCheckpoint):
        Pool(1).decode(Numbers(DType.Q8_0, infinite, 1, 32).whole)
    endless = np.full((1, 136), 0xFF, np.uint8)
    with pytest.raises(BadCheckpoint, match="NaN or Inf"):
        decoded(Pool(2), span_of("IQ4_XS", 1, 256, 136), endless)


def test_q4_0_is_held_exactly_by_four_bits_with_f32_scales() -> None:
    """Any codes with any scales, not only those that an encoder would choose."""
    pool, storage, fmt = Pool(1), STORAGES["Q4_0"], FORMATS["int4-g32-f32"]
    raw = blocks("Q4_0", 16, 256, np.random.default_rng(1))
    span = span_of("Q4_0", 16, 256, raw.size)
    matrix = decoded(pool, span, raw)
    kept = storage.kept(pool, span, [raw.reshape(-1)], fmt)
    packed = np.empty(packed_bytes(fmt, 16, 256), np.uint8)
    pool.pack(fmt, Numbers.of(matrix).whole, packed, scales=kept)
    np.testing.assert_array_equal(unpack(fmt, packed, 16, 256), matrix)
    assert storage.kept(pool, span, [raw.reshape(-1)], FORMATS["int4-g32"]) is None


def test_every_type_that_the_package_decodes_is_read() -> None:
    """Those that no file of weights has (Q8_1, Q8_K) it does not decode either."""
    decoded = {kind.name for kind in gguf.quants._type_traits}
    assert decoded <= STORAGES.keys()
