"""A model folder as its authors published it: read lazily, tensor by tensor, and never believed.

Opening reads `config.json`, the index and the headers; tensor data is read when it is asked for, some
rows at a time (not mapped: a failing disk is then an error and not a signal). Files are looked for only
inside the folder. Formats: F32, BF16, F16, and F8_E4M3 with one f32 factor per block of 128 x 128, which
*multiplies* although it is called `weight_scale_inv`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import BadCheckpoint, hinted
from ktcli.native import DType, Pool
from ktcli.weights.header import (
    MAX_NESTING,
    MAX_TENSORS,
    Entry,
    is_regular,
    nests_beyond,
    read_bounded,
    read_header,
)

FP8_BLOCK = 128  # rows and columns that share one factor
MAX_CONFIG_BYTES = 1_000_000  # the largest published one has 60 kB
MAX_INDEX_BYTES = 100_000_000  # one line per tensor; the largest published one has 20 MB
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HINT = "fetch the model's files again: kt pull NAME (what is already complete is kept)"

_DTYPES = {"F32": DType.F32, "BF16": DType.BF16, "F16": DType.F16, "F8_E4M3": DType.F8_E4M3}


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of a checkpoint and the file that holds it."""

    name: str
    file: str
    entry: Entry

    @property
    def rows(self) -> int:
        """First dimension; 1 for vectors and scalars."""
        return self.entry.shape[0] if len(self.entry.shape) > 1 else 1

    @property
    def columns(self) -> int:
        """All other dimensions multiplied."""
        shape = self.entry.shape
        return prod(shape[1:]) if len(shape) > 1 else prod(shape)

    @property
    def row_bytes(self) -> int:
        return self.entry.size_bytes // max(self.rows, 1)

    @property
    def dtype(self) -> DType:
        return _DTYPES[self.entry.dtype]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, stop) of a tensor; all of it unless said otherwise."""

    source: Source
    start: int = 0
    end: int | None = None

    @property
    def stop(self) -> int:
        return self.source.rows if self.end is None else self.end

    @property
    def first(self) -> int:
        """The first row to read: FP8 factors belong to whole blocks."""
        aligned = self.source.dtype is DType.F8_E4M3
        return self.start // FP8_BLOCK * FP8_BLOCK if aligned else self.start

    @property
    def size_bytes(self) -> int:
        return (self.stop - self.first) * self.source.row_bytes


class Checkpoint:
    """An open model folder. Close it, or use it in a `with` statement.

    Attributes:
        config: what `config.json` says, an object; its values are not checked here.
        sources: all tensors by name.
        digest: tells checkpoints apart; SHA-256 over all headers.
    """

    def __init__(self, folder: Path) -> None:
        """Read config, index and headers.

        Raises:
            BadCheckpoint: a file is missing, damaged, hostile or of a kind that cannot be read.
        """
        self.folder = folder
        self._descriptors: dict[str, int] = {}
        with hinted(HINT):
            self.config = read_config(folder)
            _check_quantization(self.config)
            self.sources, files, self.digest = _open_shards(folder)
        for file in files:
            self._descriptors[file] = os.open(inside(folder, file), os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> Source:
        """The tensor called `name`.

        Raises:
            BadCheckpoint: it is missing, of a type that cannot be read, or not of the expected shape.
        """
        source = self.sources.get(name)
        if source is None:
            raise BadCheckpoint(
                f"the checkpoint in {self.folder} has no tensor {name!r}", hint=HINT
            )
        if source.entry.dtype not in _DTYPES:
            raise BadCheckpoint(
                f"{name} in {source.file} is stored as {source.entry.dtype}, which kt cannot convert",
                hint=f"kt reads {', '.join(_DTYPES)}",
            )
        if shape is not None and source.entry.shape != shape:
            raise BadCheckpoint(
                f"{name} in {source.file} has the shape {list(source.entry.shape)}, "
                f"config.json asks for {list(shape)}",
                hint=HINT,
            )
        if source.entry.dtype == "F8_E4M3":
            self._block_scale(source)
        return source

    def read(self, span: Span, into: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """The raw bytes of a span, in the given memory or new one. Several threads may call it at once.

        Raises:
            BadCheckpoint: the file ended early or the disk failed.
        """
        raw = np.empty(span.size_bytes, dtype=np.uint8) if into is None else into
        view, file = raw.data, span.source.file
        offset, done = span.source.entry.offset + span.first * span.source.row_bytes, 0
        while done < raw.size:
            try:
                got = os.preadv(self._descriptors[file], [view[done:]], offset + done)
            except OSError as error:
                raise BadCheckpoint(f"{file} cannot be read: {error.strerror}") from error
            if got == 0:
                raise BadCheckpoint(f"{file} became shorter while it was read", hint=HINT)
            done += got
        return raw

    def decode(self, pool: Pool, span: Span, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Rows [start, stop) as f32 [stop - start, columns], from the bytes that `read` gave.

        Raises:
            BadCheckpoint: a value is NaN or Inf.
        """
        source, scale = span.source, None
        if source.dtype is DType.F8_E4M3:
            factors = self._factors(pool, source)
            scale = factors[span.first // FP8_BLOCK : -(-span.stop // FP8_BLOCK)]
        try:
            values = pool.decode(source.dtype, raw, span.stop - span.first, source.columns, scale)
        except BadCheckpoint:
            raise BadCheckpoint(
                f"{source.name} in {source.file} holds NaN or Inf", hint=HINT
            ) from None
        return values[span.start - span.first :]

    def row_scales(self, pool: Pool, span: Span) -> NDArray[np.float32] | None:
        """Of an FP8 tensor the factor of each row and 128 columns, [stop - start, ceil(columns / 128)]:
        those that `decode` multiplied with; None: it is of another type."""
        if span.source.dtype is not DType.F8_E4M3:
            return None
        rows = np.arange(span.start, span.stop) // FP8_BLOCK
        return self._factors(pool, span.source)[rows]

    def _factors(self, pool: Pool, source: Source) -> NDArray[np.float32]:
        whole = Span(self._block_scale(source))
        return self.decode(pool, whole, self.read(whole))

    def _block_scale(self, source: Source) -> Source:
        """The factors of an FP8 tensor, [ceil(rows / 128), ceil(columns / 128)]."""
        companion = f"{source.name}_scale_inv"
        if companion not in self.sources or self.sources[companion].entry.dtype == "F8_E4M3":
            raise BadCheckpoint(
                f"{source.name} in {source.file} is FP8 without its {companion}", hint=HINT
            )
        return self.find(companion, (-(-source.rows // FP8_BLOCK), -(-source.columns // FP8_BLOCK)))


def read_config(folder: Path) -> dict[str, Any]:
    """The object in `config.json`.

    Raises:
        BadCheckpoint: missing, too large, not JSON, not an object, or it holds NaN or Infinity.
    """
    if not folder.is_dir():
        raise BadCheckpoint(
            f"{folder} is not a folder", hint="kt convert takes a model's name or its folder"
        )
    return parse_object(
        read_bounded(inside(folder, "config.json"), MAX_CONFIG_BYTES), "config.json"
    )


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object from a small file called `what`, without NaN, Infinity and endless nesting.

    Raises:
        BadCheckpoint: it is something else.
    """

    def refuse(word: str) -> NoReturn:
        raise BadCheckpoint(f"{what} holds {word}, which is no believable number")

    def number(text: str) -> float:
        value = float(text)
        return value if abs(value) < float("inf") else refuse(text[:40])

    def integer(text: str) -> int:
        return int(text) if len(text) < 25 else refuse(text[:40])

    try:
        value = json.loads(data, parse_constant=refuse, parse_float=number, parse_int=integer)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{what} is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{what} holds a {type(value).__name__}, not an object")
    if nests_beyond(value, MAX_NESTING):
        raise BadCheckpoint(f"{what} nests more than {MAX_NESTING} levels deep")
    return value


def inside(folder: Path, name: str) -> Path:
    """The path of the file `name` of a model folder, links followed.

    A link may lead only to the folder itself or, as in the cache of the Hugging Face hub, to `blobs`
    beside `snapshots`.

    Raises:
        BadCheckpoint: it leads elsewhere.
    """
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    try:
        path = (folder / name).resolve() if "\0" not in name else Path("/")
    except (RuntimeError, OSError):  # Python before 3.13 raises the former
        raise BadCheckpoint(f"the file {name!r} of {folder} is a link that leads nowhere") from None
    if not any(path.is_relative_to(place) for place in allowed):
        raise BadCheckpoint(
            f"the file {name!r} lies outside the model folder {folder}",
            hint="do not use this checkpoint: it points at other files of your machine",
        )
    return path


def _check_quantization(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        raise BadCheckpoint(
            f"the checkpoint is quantized with {str(method)[:40]!r}, which kt cannot convert yet",
            hint="convert a bf16, f16, f32 or fp8 (128 x 128 blocks) release of the model",
        )
    block = quantization.get("weight_block_size")
    if block != [FP8_BLOCK, FP8_BLOCK]:
        raise BadCheckpoint(
            f"the checkpoint is FP8 with weight_block_size {str(block)[:40]}, kt reads [128, 128] only",
            hint="convert a bf16 release of the model",
        )


def _open_shards(folder: Path) -> tuple[dict[str, Source], list[str], str]:
    """All tensors by name, the files, and SHA-256 over the files' names and headers."""
    weight_map = _read_index(folder)
    files = sorted(_list_shards(folder) if weight_map is None else set(weight_map.values()))
    digest, entries, n_tensors = sha256(), dict[str, dict[str, Entry]](), 0
    for file in files:
        path = inside(folder, file)
        if not is_regular(path):
            raise BadCheckpoint(f"the shard {file} is missing from {folder}")
        header = read_header(path)
        digest.update(f"{file}\n{len(header.raw)}\n".encode())
        digest.update(header.raw)
        entries[file] = header.entries
        n_tensors += len(header.entries)
        if n_tensors > MAX_TENSORS:
            raise BadCheckpoint(f"the shards in {folder} list more than {MAX_TENSORS} tensors")
    return _sources(entries, weight_map), files, digest.hexdigest()


def _sources(
    entries: Mapping[str, Mapping[str, Entry]], weight_map: Mapping[str, str] | None
) -> dict[str, Source]:
    """All tensors by name, from the entries of each file."""
    sources: dict[str, Source] = {}
    if weight_map is None:
        for file, its in entries.items():
            for name, entry in its.items():
                if name in sources:
                    raise BadCheckpoint(f"{name} lies in both {sources[name].file} and {file}")
                sources[name] = Source(name, file, entry)
        return sources
    for name, file in weight_map.items():
        if name not in entries[file]:
            raise BadCheckpoint(f"the index says that {name} lies in {file}, but it does not")
        sources[name] = Source(name, file, entries[file][name])
    return sources


_OF = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors")


def _list_shards(folder: Path) -> list[str]:
    """The weight files of a folder without an index: one, or a complete numbered set."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE in names:
        return [SINGLE]
    numbered = [found for name in names if (found := _OF.fullmatch(name))]
    if numbered:
        first = numbered[0]
        wanted = [
            f"{first[1]}-{i:05}-of-{first[3]}.safetensors" for i in range(1, int(first[3]) + 1)
        ]
        missing = sorted(set(wanted) - set(names))
        if missing:
            raise BadCheckpoint(f"the shard {missing[0]} is missing from {folder}")
        return wanted
    if len(names) == 1:
        return names
    found_what = "several .safetensors files without an index" if names else "no .safetensors file"
    if not names and (list(folder.glob("*.bin")) or list(folder.glob("*.pt*"))):
        found_what = "only PyTorch pickle files, which can run code when they are read"
    raise BadCheckpoint(f"{folder} holds {found_what}", hint="kt converts safetensors checkpoints")


_PAIR = re.compile(r'\s*"([^"\\\x00-\x1f]{1,1000})"\s*:\s*"([^"\\\x00-\x1f]{1,255})"\s*')
_WEIGHT_MAP = re.compile(r'"weight_map"\s*:\s*\{')


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name to file name as the index says; None without an index.

    Only the pairs of "weight_map" are read, by a pattern: a hostile index cannot nest or multiply.
    """
    path = folder / INDEX
    if not path.exists() and not path.is_symlink():
        return None
    data = read_bounded(inside(folder, INDEX), MAX_INDEX_BYTES)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadCheckpoint(f"{INDEX} is not UTF-8 text") from None
    starts = list(_WEIGHT_MAP.finditer(text))
    if len(starts) != 1:
        raise BadCheckpoint(f"{INDEX} has {len(starts)} weight maps instead of one")
    pairs: dict[str, str] = {}
    at = starts[0].end()
    while found := _PAIR.match(text, at):
        if found[1] in pairs:
            raise BadCheckpoint(f"{INDEX} lists {found[1]} twice")
        pairs[found[1]] = found[2]
        at = found.end()
        if text[at : at + 1] == "}" and pairs:
            return pairs
        if text[at : at + 1] != ",":
            break
        at += 1
    raise BadCheckpoint(f"{INDEX} is damaged at byte {at}")
