"""The header of a GGUF file: what is written is read, and nothing hostile gets further than a sentence."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from ktcli.errors import BadCheckpoint
from ktcli.weights.gguf.header import read_gguf_header

TEXT, ARRAY, U8, U32, U64, BOOL, F32, Q8_0 = 8, 9, 0, 4, 10, 7, 0, 8


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dimensions = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, offset)
    )


def file(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    counts: tuple[int, int] | None = None,
    begin: bytes = b"GGUF\3\0\0\0",
) -> bytes:
    counts = counts or (len(tensors), len(keys))
    head = begin + struct.pack("<QQ", *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("words", ["a", "Größe", ""])
    writer.add_array("numbers", [1.5, -2.0])
    writer.add_bool("flag", True)
    writer.add_uint32("general.alignment", 64)
    writer.data_alignment = 64
    matrix = np.arange(128, dtype=np.float32).reshape(2, 64)
    writer.add_tensor("m", matrix)
    writer.add_tensor("q", gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    header = read_gguf_header(path)
    assert header.values["words"] == ["a", "Größe", ""] and header.values["flag"] is True
    assert header.values["numbers"] == [1.5, -2.0]
    assert {n: (e.dtype, e.shape) for n, e in header.entries.items()} == {
        "m": ("F32", (2, 64)),
        "q": ("Q8_0", (2, 64)),
    }
    reader = gguf.GGUFReader(path)
    assert [t.data_offset for t in reader.tensors] == [e.offset for e in header.entries.values()]
    assert read_gguf_header(path).digest == header.digest


HUGE = 1 << 62
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "only 0 bytes"),
    "another kind": (b"PK\3\4" + bytes(60), "not a GGUF file"),
    "version 1": (file(begin=b"GGUF\1\0\0\0"), "version 1"),
    "big-endian": (file(begin=b"GGUF\0\0\0\3"), "big-endian"),
    "many tensors": (file(counts=(HUGE, 0)), f"lists {HUGE} tensors and 0 keys; the limits"),
    "many keys": (file(counts=(0, HUGE)), f"lists 0 tensors and {HUGE} keys; the limits"),
    "keys that are not there": (file(counts=(0, 9)), "beyond the file"),
    "tensors that are not there": (file(counts=(9, 0)), "dimensions|beyond the file"),
    "a long key": (file((struct.pack("<Q", HUGE),)), f"a key has {HUGE} bytes; the limit"),
    "a long text": (
        file((key("a", TEXT, struct.pack("<Q", HUGE)),)),
        f"a has {HUGE} bytes; the limit",
    ),
    "a text beyond the file": (
        file((key("a", TEXT, struct.pack("<Q", 10**6)),)),
        "beyond the file",
    ),
    "no UTF-8": (file((key("a", TEXT, text(b"\xff\xfe")),)), "UTF-8"),
    "a key twice": (file((key("a", U8, b"\1"), key("a", U8, b"\1"))), "occurs twice"),
    "an unknown type": (file((key("a", 99, b""),)), "unknown type 99"),
    "a flag of 2": (file((key("a", BOOL, b"\2"),)), "boolean with the value 2"),
    "nested arrays": (
        file((key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 40),)),
        "array of type 9",
    ),
    "a long array": (file((key("a", ARRAY, struct.pack("<IQ", U8, HUGE)),)), "elements"),
    "an array beyond the file": (
        file((key("a", ARRAY, struct.pack("<IQ", U64, 10**6)),)),
        "beyond the file",
    ),
    "alignment 3": (file((key("general.alignment", U32, struct.pack("<I", 3)),)), "power of two"),
    "alignment as text": (file((key("general.alignment", TEXT, text("32")),)), "power of two"),
    "no dimensions": (file(tensors=(tensor("t", (), F32, 0),)), "0 dimensions"),
    "many dimensions": (file(tensors=(tensor("t", (1,) * 9, F32, 0),)), "9 dimensions"),
    "an empty shape": (file(tensors=(tensor("t", (4, 0), F32, 0),)), "shape"),
    "a shape that overflows": (file(tensors=(tensor("t", (HUGE, HUGE), F32, 0),)), "shape"),
    "an unknown tensor type": (
        file(tensors=(tensor("t", (32,), 77, 0),), data=256),
        "unknown type 77",
    ),
    "a removed tensor type": (
        file(tensors=(tensor("t", (32,), 4, 0),), data=256),
        "unknown type 4",
    ),
    "half a block": (
        file(tensors=(tensor("t", (48,), Q8_0, 0),), data=256),
        "not a multiple of 32",
    ),
    "data beyond the file": (file(tensors=(tensor("t", (64,), F32, 32),), data=256), "not inside"),
    "an offset beyond the file": (
        file(tensors=(tensor("t", (1,), F32, HUGE),), data=64),
        "not inside",
    ),
    "an offset off the grid": (file(tensors=(tensor("t", (1,), F32, 4),), data=64), "not inside"),
    "a tensor twice": (
        file(tensors=(tensor("t", (8,), F32, 0), tensor("t", (8,), F32, 32)), data=64),
        "occurs twice",
    ),
    "tensors that overlap": (
        file(tensors=(tensor("t", (16,), F32, 0), tensor("u", (8,), F32, 32)), data=64),
        "overlaps",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name: str, tmp_path: Path) -> None:
    raw, said = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(BadCheckpoint, match=said):
        read_gguf_header(path)


def test_no_file_and_no_plain_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(BadCheckpoint, match="not a plain file"):
            read_gguf_header(path)


def mutations(raw: bytes) -> list[bytes]:
    """The file cut off everywhere, and with bytes that are something else."""
    rng = np.random.default_rng(0)
    cut = [raw[:end] for end in range(0, len(raw), max(len(raw) // 150, 1))]
    for _ in range(400):
        other = bytearray(raw)
        for at in rng.integers(0, len(raw), rng.integers(1, 4)):
            other[at] = rng.choice([0, 1, 0x7F, 0xFF, rng.integers(256)])
        cut.append(bytes(other))
    return cut


def assert_only_sentences(read: Callable[[Path], object], raw: bytes, folder: Path) -> None:
    """Whatever is done to the file, it is read or refused."""
    path = folder / "mutated.gguf"
    refused = 0
    for mutated in mutations(raw):
        path.write_bytes(mutated)
        try:
            read(path)
        except BadCheckpoint:
            refused += 1
    assert refused > 150


def test_nothing_but_sentences(tmp_path: Path) -> None:
    keys = (
        key("general.architecture", TEXT, text("llama")),
        key("words", ARRAY, struct.pack("<IQ", TEXT, 3) + text("a") + text("b") + text("")),
        key("numbers", ARRAY, struct.pack("<IQ", U32, 2) + bytes(8)),
    )
    tensors = (tensor("t", (64, 2), Q8_0, 0), tensor("u", (8,), F32, 160))
    assert_only_sentences(read_gguf_header, file(keys, tensors, data=192), tmp_path)
