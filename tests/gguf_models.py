"""Small GGUF files, the same bytes on every machine; which models there are is in `gguf_cases`.

Numbers come from SHAKE-256 of the tensor's name, so that neither a library's random generator nor its
rounding of logarithms decides; formats are encoded by the `gguf` package, or are random codes with a scale
that gives the numbers their size where the package has no encoder. What llama.cpp says of these files is
recorded in tests/data (see benchmarks/gguf_judge.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
# Offset of f16 scales in a block, in units of the tensor's, of the formats without an encoder.
_SCALES = {
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "IQ2_XS": ((0, 1.0),),
    "IQ4_XS": ((0, 1.0),),
    "NVFP4": (),  # an E4M3 byte for 16 columns instead
}


@dataclass(frozen=True)
class GgufCase:
    """One file.

    Attributes:
        kind: type of its matrices; "mixed": another one for each; "MXFP4": of its experts; "wide": F32, in numbers that
            bf16 holds, so that llama.cpp rounds nothing.
        tensors: makes (name, shape) of each, and its numbers.
        metadata: without the architecture's name.
        prompt: ids; none: random ones.
    """

    name: str
    architecture: str
    kind: str
    tensors: Callable[[GgufCase], Iterator[tuple[str, F32 | tuple[int, ...]]]]
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    prompt: tuple[int, ...] = ()


def write_gguf(case: GgufCase, path: Path) -> Path:
    """The file of a case."""
    writer = gguf.GGUFWriter(path, case.architecture)
    for key, value in case.metadata.items():
        name = (
            key
            if key.startswith(("tokenizer.", "general.", "split."))
            else f"{case.architecture}.{key}"
        )
        _ADD[type(value)](writer, name, value)
    for name, what in case.tensors(case):
        numbers, kind = _numbers(case, name, what)
        writer.add_tensor(name, numbers, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_ADD: dict[type, Callable[[Any, str, Any], None]] = {
    str: gguf.GGUFWriter.add_string,
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    list: gguf.GGUFWriter.add_array,
}


def _numbers(case: GgufCase, name: str, what: F32 | tuple[int, ...]) -> tuple[NDArray[Any], str]:
    """The stored numbers of a tensor and their type; vectors and routers stay F32."""
    shape = what if isinstance(what, tuple) else what.shape
    if "tid2eid" in name:  # a table of experts
        row = np.arange(shape[1], dtype=np.int32)
        return np.ascontiguousarray(np.arange(shape[0], dtype=np.int32)[:, None] % 3 + row), "I32"
    plain = len(shape) == 1 or any(each in name for each in ("ffn_gate_inp", ".bias", "conv1d"))
    kind = "F32" if plain or case.kind == "wide" else _kind(case.kind, name, shape[-1])
    if kind in _SCALES:
        return random_blocks(f"{case.seed} {name}", kind, shape, _rms(name, shape)), kind
    values = what if not isinstance(what, tuple) else _values(f"{case.seed} {name}", name, what)
    if case.kind == "wide":
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32), kind
    if kind in ("F32", "F16"):
        return values.astype(np.float32 if kind == "F32" else np.float16), kind
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]), kind


_MIX = ("Q4_K", "Q6_K", "Q5_K", "Q8_0", "Q4_0", "Q5_0", "BF16", "Q4_1", "Q5_1", "F16", "MXFP4")


def _kind(kind: str, name: str, k: int) -> str:
    if kind == "MXFP4":  # as published: the experts only
        return kind if "_exps" in name else "Q8_0"
    if kind != "mixed":
        return kind
    fitting = [
        each for each in _MIX if k % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[each]][0] == 0
    ]
    return fitting[
        int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % len(fitting)
    ]


def _rms(name: str, shape: tuple[int, ...]) -> float:
    """A layer adds less than it reads, and the head decides."""
    if name == "token_embd.weight":
        return 1.0
    size = 0.5 if ("output" in name or "down" in name) and name != "output.weight" else 1.0
    return (4.0 if name == "output.weight" else size) * float(shape[-1]) ** -0.5


_ABOUT_ONE = (
    *(f"norm{end}.weight" for end in ("", "_1", "_2")),
    "layer_output_scale.weight",
    ".scale",
)


def _values(seed: str, name: str, shape: tuple[int, ...]) -> F32:
    if name.endswith(".ssm_a"):
        return -1 - uniform(seed, shape, 0.5)
    if name.endswith(_ABOUT_ONE) or name == "rope_freqs.weight":
        return 1 + uniform(seed, shape, 0.5)
    if name.endswith("bias"):
        return uniform(seed, shape, 0.3)
    scale = 8.0 if "ffn_gate_inp.weight" in name else 1.0  # routers that decide
    return uniform(seed, shape, scale * 3**0.5 * _rms(name, shape))


def uniform(seed: str, shape: tuple[int, ...], most: float) -> F32:
    """Multiples of most / 2^15 in [-most, most)."""
    raw = hashlib.shake_256(seed.encode()).digest(2 * int(np.prod(shape)))
    whole = np.frombuffer(raw, dtype="<i2").astype(np.float32)
    return (whole * np.float32(most / 32768)).reshape(shape)


def random_blocks(seed: str, kind: str, shape: tuple[int, ...], rms: float) -> NDArray[np.uint8]:
    """Blocks of random codes whose numbers have this root mean square."""
    block, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = hashlib.shake_256(seed.encode()).digest(int(np.prod(shape)) // block * size_bytes)
    blocks = np.frombuffer(raw, dtype=np.uint8).copy().reshape(-1, size_bytes)

    def scale(value: float) -> None:
        for offset, factor in _SCALES[kind]:
            blocks[:, offset : offset + 2] = np.array([value * factor], "<f2").view(np.uint8)
        if kind == "NVFP4":
            blocks[:, :4] = gguf.quants.NVFP4.fp32_to_ue4m3(np.float32(value))

    scale(1.0)
    decoded = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    scale(rms / float(np.sqrt(np.mean(np.square(decoded, dtype=np.float64)))))
    return blocks.reshape(*shape[:-1], -1)
