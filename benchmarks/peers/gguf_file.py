"""Writes a GGUF file of a model's true shapes with random weights.

    python -m benchmarks.peers.gguf_file CONFIG_JSON MIX FILE

Runs in the private environment, which has the `gguf` package. Random blocks of each number format are
made once and laid over a tensor again and again: speed does not depend on the values, and memory holds
every copy apart. What decides the experts of a token is not repeated: embedding and router are drawn in
full, and embeddings are about 64 times as large as what a layer adds (see ktcli.measure.synthetic), so
that tokens stay apart and choose their experts evenly.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.shapes import (
    ARCHITECTURES,
    BLOCKS,
    MIXES,
    GgufTensor,
    Part,
    metadata,
    size_bytes,
    tensors,
)

Bytes = NDArray[np.uint8]
_SEED = 1
_SAMPLE_BLOCKS = 1 << 15  # laid over a tensor again and again

# Where a block's f16 scales lie, and their size in units of the tensor's: the second of Q4_K is the
# offset that puts the mean of random nibbles near zero.
_SCALES = {
    "Q4_0": ((0, 1.0),),
    "Q8_0": ((0, 1.0),),
    "IQ4_XS": ((0, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q6_K": ((208, 1.0),),
}


def write(config: dict[str, Any], mix_name: str, path: Path) -> None:
    """The whole file, beside its place first."""
    mix = MIXES[mix_name]
    beside = path.with_suffix(".part")
    writer = gguf.GGUFWriter(beside, ARCHITECTURES[config["model_type"]])
    for key, value in metadata(config).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{writer.arch}.{key}", value)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    found = tensors(config)
    for tensor in found:
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            np.dtype(np.float32),  # says only that the shape is in elements
            size_bytes(tensor, mix),
            raw_dtype=gguf.GGMLQuantizationType[mix.type_of(tensor)],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in found:
        writer.write_tensor_data(_data(tensor, mix.type_of(tensor)))
    writer.close()
    with open(beside, "rb") as file:
        os.fsync(file.fileno())  # not while something is measured
    beside.replace(path)


def _data(tensor: GgufTensor, kind: str) -> NDArray[Any]:
    draw = np.random.default_rng([_SEED, *tensor.name.encode()])
    if tensor.part is Part.NORM:
        return np.ones(tensor.shape, dtype=np.float32)
    scale = tensor.shape[-1] ** -0.5
    if kind == "F32":
        return (draw.standard_normal(tensor.shape, dtype=np.float32) * np.float32(scale)).copy()
    if tensor.name == "token_embd.weight":
        return _table(draw, tensor.shape)
    return _tiled(tensor, kind, scale)


def _table(draw: np.random.Generator, shape: tuple[int, ...]) -> Bytes:
    """bf16 of random sign, from 32 to 128."""
    bits = draw.integers(0, 1 << 16, shape, dtype=np.uint16)
    bits &= np.uint16(0x80FF)
    bits += np.uint16((127 + 5) << 7)
    return bits.view(np.uint8)


def _tiled(tensor: GgufTensor, kind: str, rms: float) -> Bytes:
    """The sample of this format with this rms, over the whole tensor."""
    block_bytes, block = BLOCKS[kind]
    sample = _bf16(rms) if kind == "BF16" else _blocks(kind, rms)
    size = tensor.elements // block * block_bytes
    # An odd number of blocks, so that rows and experts begin at different places of the sample.
    flat = sample.reshape(-1)[: sample.size - block_bytes]
    data = np.empty(size, dtype=np.uint8)
    for start in range(0, size, flat.size):
        data[start : start + flat.size] = flat[: size - start]
    return data.reshape(*tensor.shape[:-1], -1)


@cache
def _bf16(rms: float) -> Bytes:
    draw = np.random.default_rng(_SEED)
    values = draw.standard_normal(_SAMPLE_BLOCKS * 32, dtype=np.float32) * np.float32(rms)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


@cache
def _blocks(kind: str, rms: float) -> Bytes:
    """Random blocks [blocks, bytes]; their scales follow from what they decode to with scale 1."""
    draw = np.random.default_rng(_SEED)
    blocks = draw.integers(0, 256, (_SAMPLE_BLOCKS, BLOCKS[kind][0]), dtype=np.uint8)
    _set_scales(blocks, kind, 1.0)
    decoded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    _set_scales(blocks, kind, rms / float(np.sqrt(np.mean(np.square(decoded)))))
    return blocks


def _set_scales(blocks: Bytes, kind: str, scale: float) -> None:
    for offset, factor in _SCALES[kind]:
        blocks[:, offset : offset + 2] = np.array([scale * factor], np.float16).view(np.uint8)


if __name__ == "__main__":
    write(json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
