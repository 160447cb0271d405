"""Safetensors headers: what lies is refused in one sentence; what is written, the library reads."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peak import PEAK
from safetensors import safe_open
from safetensors.numpy import save_file

from ktcli.errors import BadCheckpoint
from ktcli.weights.header import encode_header, read_header


def file_of(path: Path, text: str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    raw = text.encode() if isinstance(text, str) else text
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def one(dtype: str = '"F32"', shape: str = "[2]", span: str = "[0,8]", name: str = '"a"') -> str:
    return f'{{{name}:{{"dtype":{dtype},"shape":{shape},"data_offsets":{span}}}}}'


TWO = (
    '{{"a":{{"dtype":"U8","shape":[4],"data_offsets":[{}]}},'
    '"b":{{"dtype":"U8","shape":[4],"data_offsets":[{}]}}}}'
)
HOSTILE = {
    # what: (header, bytes of data, words of the sentence)
    "empty header": ("", 0, "missing at byte 0"),
    "not an object": ("[]", 0, "'{' is missing"),
    "no JSON": ("\0" * 64, 0, "'{' is missing"),
    "not UTF-8": (b"{\xff\xff}", 0, "not UTF-8"),
    "endless": ("{", 0, "no tensor can be read"),
    "deep": ('{"a":' + "[" * 1_000_000, 0, "no tensor can be read"),
    "deep object": ('{"a":{"dtype":' + '{"a":' * 100_000, 0, "no tensor can be read"),
    "something behind": (one() + "x", 8, "follows its last brace"),
    "two objects": (one() + one(), 8, "follows its last brace"),
    "missing comma": (one()[:-1] + '"b":{}}', 8, "','"),
    "trailing comma": (one()[:-1] + ",}", 8, "no tensor can be read"),
    "unknown type": (one('"F99"'), 8, "unknown type F99"),
    "type is no text": (one("[4]"), 8, "unknown type"),
    "field twice": (one(span="[0,8]").replace('"shape"', '"dtype"'), 8, "a field twice"),
    "field missing": ('{"a":{"dtype":"U8","shape":[4]}}', 4, "no tensor can be read"),
    "field too many": (one()[:-2] + ',"x":1}}', 8, "no tensor can be read"),
    "negative dimension": (one(shape="[-2]"), 8, "no tensor can be read"),
    "negative offset": (one(span="[-8,0]"), 8, "no tensor can be read"),
    "fraction": (one(shape="[2.0]"), 8, "no tensor can be read"),
    "numbers on two lines": (one(shape="[1\n2]"), 8, r"1\\n2\]' instead of at most 8"),
    "a space that is none of JSON": (one(shape="[\x1d2]"), 8, "no tensor can be read"),
    "empty dimension": (one(shape="[2,,1]"), 8, "whole numbers"),
    "nine dimensions": (one(shape="[1,1,1,1,1,1,1,1,2]"), 8, "at most 8"),
    "huge dimension": (one(shape="[" + "9" * 30 + "]"), 8, "whole numbers"),
    "overflow": (one(shape="[4294967296,4294967296]", span="[0,0]"), 0, "not the 0 bytes"),
    "overflow to right size": (one(shape="[9223372036854775809,2]"), 8, "not the 8 bytes"),
    "range backwards": (one(span="[8,0]"), 8, "byte range"),
    "three offsets": (one(span="[0,8,8]"), 8, "byte range"),
    "wrong size": (one(span="[0,7]"), 7, "not the 7 bytes"),
    "beyond the end": (one(), 7, "truncated"),
    "less than the file": (one(), 9, "followed by something else"),
    "far beyond the end": (one('"U8"', f"[{2**62}]", f"[0,{2**62}]"), 8, "truncated"),
    "overlap": (TWO.format("0,4", "2,6"), 6, "overlaps"),
    "same range": (TWO.format("0,4", "0,4"), 4, "overlaps"),
    "gap": (TWO.format("0,4", "8,12"), 12, "leaves a gap"),
    "gap at the start": (TWO.format("1,5", "5,9"), 9, "leaves a gap"),
    "name twice": (TWO.format("0,4", "4,8").replace('"b"', '"a"'), 8, "occurs twice"),
    "name with an escape": (one(name=r'"a\u0000"'), 8, "no tensor can be read"),
    "endless name": (one(name='"' + "a" * 5000 + '"'), 8, "no tensor can be read"),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{}}', 0, "occurs twice"),
    "metadata no text": ('{"__metadata__":{"a":1}}', 0, "a string is missing"),
    "metadata nested": ('{"__metadata__":{"a":{"b":"c"}}}', 0, "a string is missing"),
    "metadata torn": ('{"__metadata__":{"a":"b', 0, "not valid"),
    "metadata key twice": ('{"__metadata__":{"a":"b","a":"c"}}', 0, "occurs twice"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_header(tmp_path: Path, what: str):
    text, size, words = HOSTILE[what]
    path = file_of(tmp_path / "m.safetensors", text, b"\0" * size)
    with pytest.raises(BadCheckpoint, match=words.replace("{", r"\{")) as caught:
        read_header(path)
    assert "m.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (2 << 30, "claims a header of 2147483648 bytes"),
        (2**64 - 1, "claims a header of 18446744073709551615 bytes"),
        (99_000_000, "is truncated"),
        (3, "is truncated"),
    ],
)
def test_length_of_the_header_lies(tmp_path: Path, length: int, words: str):
    with pytest.raises(BadCheckpoint, match=words):
        read_header(file_of(tmp_path / "m.safetensors", "{}", length=length))


@pytest.mark.parametrize("size", range(8))
def test_file_of_a_few_bytes(tmp_path: Path, size: int):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\1" * size)
    with pytest.raises(BadCheckpoint, match="is not a safetensors file"):
        read_header(path)


def test_missing_and_not_a_file(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder", "nothing"):
        with pytest.raises(BadCheckpoint, match="not a plain file"):
            read_header(tmp_path / name)


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = file_of(tmp_path / "m.safetensors", "{}")

    def refused(*_: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(BadCheckpoint, match=r"m\.safetensors cannot be read: Permission denied"):
        read_header(path)


def test_a_large_lie_takes_no_memory(tmp_path: Path):
    """100 MB of nested JSON, in a process that may not grow by more than the file a few times."""
    path = file_of(tmp_path / "m.safetensors", '{"a":' + "[[]," * 24_000_000)
    code = PEAK + (
        "import sys; from pathlib import Path; from ktcli.weights.header import read_header\n"
        "before = peak_kib()\n"
        "try: read_header(Path(sys.argv[1]))\n"
        "except Exception as e: print(type(e).__name__)\n"
        "print(peak_kib() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    name, grown_kib = done.stdout.split()
    assert name == "BadCheckpoint"
    assert int(grown_kib) < 300_000


def test_reads_what_the_library_writes(tmp_path: Path):
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(5, dtype=np.uint8),
        "scalar": np.array(3, dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float16),
    }
    path = tmp_path / "m.safetensors"
    save_file(arrays, path, {"quote": 'a "b" \\ \n é', "format": "pt"})
    header, raw = read_header(path), path.read_bytes()
    assert header.metadata == {"quote": 'a "b" \\ \n é', "format": "pt"}
    assert set(header.entries) == set(arrays)
    for name, entry in header.entries.items():
        assert entry.shape == arrays[name].shape
        assert raw[entry.offset : entry.offset + entry.size_bytes] == arrays[name].tobytes()


def test_the_library_reads_what_we_write(tmp_path: Path):
    tensors = {"z.packed": ("U8", (2, 64)), "table": ("BF16", (3, 5)), "é": ("F32", (7,))}
    header = encode_header(tensors, {"z.packed": 'int4 "x"'})
    assert len(header) % 64 == 0
    data = np.arange(128 + 30 + 28, dtype=np.uint8).tobytes()
    path = tmp_path / "m.safetensors"
    path.write_bytes(header + data)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"z.packed": 'int4 "x"'}
        assert sorted(file.keys()) == sorted(tensors)
        assert file.get_tensor("z.packed").tobytes() == data[:128]
        assert file.get_slice("é").get_shape() == [7]


def test_names_we_write_come_back(tmp_path: Path):
    path = file_of(tmp_path / "m", encode_header({"a.b-c_3": ("U8", (1,))}, {})[8:], b"x")
    assert list(read_header(path).entries) == ["a.b-c_3"]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_changed_byte_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    """Whatever byte of a header changes: an error, or ranges that still lie inside the file."""
    good = json.dumps(json.loads(TWO.format("0,4", "4,8"))).encode()
    place = data.draw(st.integers(0, len(good) - 1))
    changed = good[:place] + bytes([data.draw(st.integers(0, 255))]) + good[place + 1 :]
    path = file_of(tmp_path_factory.getbasetemp() / "changed", changed, b"\0" * 8)
    try:
        header = read_header(path)
    except BadCheckpoint:
        return
    size = path.stat().st_size
    assert all(8 <= e.offset <= e.offset + e.size_bytes <= size for e in header.entries.values())


def test_tensors_without_elements_may_lie_anywhere_in_the_order(tmp_path: Path) -> None:
    """Several begin where another does, in whatever order they are named."""
    none = '{"dtype":"U8","shape":[0],"data_offsets":[%d,%d]}'
    some = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    for text in (
        f'{{"a":{some},"first":{none % (0, 0)},"last":{none % (4, 4)}}}',
        f'{{"last":{none % (4, 4)},"first":{none % (0, 0)},"a":{some}}}',
    ):
        header = read_header(file_of(tmp_path / "x.safetensors", text, bytes(4)))
        assert list(header.entries) == ["first", "a", "last"]


@pytest.mark.parametrize("missing", [1, 8, 9])
def test_a_header_that_the_file_does_not_hold_whole_is_cut_short(
    tmp_path: Path, missing: int
) -> None:
    path = file_of(tmp_path / "x.safetensors", "{}" + " " * 62, length=64 + missing)
    with pytest.raises(BadCheckpoint, match=f"is truncated: its header has {64 + missing} bytes"):
        read_header(path)
