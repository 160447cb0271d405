"""The pack: the files of a converted model, their layout, and their strict reader.

A pack is one folder:

    kt.json                  the manifest; a folder without it is not a complete pack
    layer-00000.safetensors  every tensor of decoder layer 0: experts and dense part
    layer-00001.safetensors  …
    outer.safetensors        the tensors of no layer: embedding, final norm, output head
    config.json, tokenizer.json, …   taken over from the checkpoint as they are

Nothing in it depends on the machine that made it or on one that will read it: no NUMA node count, no
instruction set, no threads, no split between CPU and GPU.

WEIGHT FILES are safetensors files:

    0      u64 little-endian N
    8      N bytes of JSON, padded with spaces so that 8 + N is a multiple of 64
    8 + N  data: the tensors in the order of the JSON, without gaps

First come the packed tensors in the order the model declares them, each a multiple of 64 bytes long, so
that each begins on a 64-byte boundary; then the tables; then the vectors. In the JSON

    packed   dtype U8,   shape [count, bytes of one matrix]; panels as kt.h describes them
    table    dtype BF16 or F32, shape [n, k]; plain rows
    vector   dtype F32,  shape [k]
             (tables and vectors with count > 1 or vectors with n > 1 carry these dimensions in front)

and `__metadata__` holds for every tensor, under its name, what the bytes mean:

    "int4 1536 x 2048 x 128 alternate"     format, n, k, count, and whether panels of two sources alternate

The names of formats are those of `formats.FORMATS`; plain ones are called "table" and "vector".

KT.JSON is a JSON object, one-space indented, ASCII:

    kt_pack    1, the version of this description
    family     name of the model's family
    source     hub, repository, revision (null if nobody recorded them; of a GGUF file "gguf" and its name);
               digest: SHA-256 over, for each weight file of the checkpoint by name, "NAME\\nLENGTH\\n" and its
               header's JSON; of GGUF files over the hexadecimal SHA-256 of each header
    recipe     experts, dense: names of number formats; that of experts may end in "-mixed" (down projections are
               one step more precise, `formats.better_than`) and then in "-calibrated";
               f32, where there are some: parts of the model (`ops.part`) whose tables, and tensors that neither
               format is chosen for, are stored as f32; the others are bf16
    calibration  the text or imatrix that the importance of columns was found with, the method, and the SHA-256 of the
               importance (`importance_file`); older packs name the text and the method; missing if there is none
    formats    for each of these: bits, group, scale, codebook; codes: "e4m3" if they are no integers; rotation
    extras     files taken over: name, size_bytes, sha256
    files      weight files in the order written: name, size_bytes, sha256, and by kind of tensor (experts: gate
               and up of the routed ones; down; dense; kept)
               error: sqrt(sum (stored - source)^2 / sum source^2), to four digits
               cosine: of W x and W' x, W the sources and W' what is stored, as it is to be expected for inputs x
               with independent columns: of the same size, or with a calibration of the sizes it found

KT.JSON.PART exists while a conversion is unfinished: its first line is the manifest without files (as one
line), each further line one complete file. A line without its newline was never finished and counts not.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from ktcli import manifest
from ktcli.errors import BadCheckpoint, BadPack
from ktcli.manifest import FileRecord, Manifest
from ktcli.ops.tensors import Role, Tensor
from ktcli.records import dataclass
from ktcli.weights.documents import parse_object
from ktcli.weights.header import TensorEntry, encode_header, is_regular, read_bounded, read_header
from ktcli.weights.manifest import parse_pack
from ktcli.weights.recipe import Recipe, format_of, is_in_f32, stored_bytes

OUTER = "outer.safetensors"


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One weight file to be written.

    Attributes:
        tensors: the tensors in the order of their data.
        header: the bytes before the data.
    """

    name: str
    tensors: tuple[Tensor, ...]
    header: bytes
    size_bytes: int


def file_name(layer: int | None) -> str:
    """Returns the name of the pack's file that holds the tensors of layer `layer`; None: those of no layer."""
    return OUTER if layer is None else f"layer-{layer:05}.safetensors"


def weight_files(tensors: Iterable[Tensor], recipe: Recipe) -> tuple[WeightFile, ...]:
    """Returns the weight files that a pack of these tensors has, with their headers and sizes: those of the layers in
    order, then the one with the tensors of no layer.

    Raises:
        NativeError: a format cannot hold the shape of a tensor.
    """
    by_layer: dict[int | None, list[Tensor]] = {}
    for tensor in tensors:
        by_layer.setdefault(tensor.layer, []).append(tensor)
    layers: list[int | None] = [*sorted(layer for layer in by_layer if layer is not None)]
    return tuple(
        _weight_file(file_name(layer), by_layer[layer], recipe)
        for layer in layers + [None] * (None in by_layer)
    )


def _weight_file(name: str, tensors: list[Tensor], recipe: Recipe) -> WeightFile:
    place = {Role.TABLE: 1, Role.VECTOR: 2}
    ordered = tuple(sorted(tensors, key=lambda tensor: place.get(tensor.role, 0)))
    header = encode_header(
        {tensor.name: _stored_as(tensor, recipe) for tensor in ordered},
        {tensor.name: _meaning(tensor, recipe) for tensor in ordered},
    )
    size = len(header) + sum(stored_bytes(tensor, recipe) for tensor in ordered)
    return WeightFile(name, ordered, header, size)


def _stored_as(tensor: Tensor, recipe: Recipe) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of a tensor in the safetensors header."""
    if format_of(tensor, recipe) is not None:
        return "U8", (tensor.count, stored_bytes(tensor, recipe) // tensor.count)
    shape = (tensor.count, tensor.n, tensor.k)
    if tensor.role is Role.TABLE:
        dtype = "F32" if is_in_f32(tensor, recipe) else "BF16"
        return dtype, shape if tensor.count > 1 else shape[1:]
    return "F32", shape if tensor.count > 1 else shape[1:] if tensor.n > 1 else shape[2:]


def _meaning(tensor: Tensor, recipe: Recipe) -> str:
    fmt = format_of(tensor, recipe)
    words = f"{fmt.name if fmt else tensor.role.value} {tensor.n} x {tensor.k} x {tensor.count}"
    return words + (" alternate" if tensor.alternate else "")


@dataclass(frozen=True, slots=True)
class Location:
    """The file and offset of a tensor's bytes."""

    path: Path
    offset: int
    size_bytes: int


class Pack:
    """An open pack: manifest and headers are read and checked, weights are not (`kt verify` reads them).

    Attributes:
        config: the checkpoint's `config.json`.
    """

    def __init__(self, path: Path) -> None:
        """Opens the pack in `path`; see `open`."""
        self.path = path
        self.manifest, self.recipe = _read_manifest(path)
        self._entries: dict[str, tuple[Path, TensorEntry, str]] = {}
        try:
            for record in self.manifest.records:
                _check_size(path, record)
            for record in self.manifest.files:
                self._read_file(record)
            self.config = self._read_config()
        except BadPack:
            raise
        except BadCheckpoint as error:
            raise BadPack(f"the pack {path.name} is damaged: {error}") from None

    @classmethod
    def open(cls, path: Path) -> Pack:
        """Returns the open pack in the folder `path`.

        Raises:
            BadPack: the folder has no pack, or the pack's manifest, a header or the size of a file is wrong.
        """
        return cls(path)

    @property
    def family(self) -> str:
        """The name of the model family, as the manifest has it."""
        return self.manifest.family

    @property
    def identity(self) -> str:
        """The SHA-256, hexadecimal, of everything that the model's logits depend on: family, config, and weight
        files."""
        configs = (record for record in self.manifest.extras if record.name == "config.json")
        records = sorted(
            (record.name, record.sha256) for record in (*self.manifest.files, *configs)
        )
        return sha256(repr((self.family, records)).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """The total bytes of the pack's files, its manifest not included."""
        return self.manifest.size_bytes

    def locate(self, tensor: Tensor) -> Location:
        """Returns the file, the offset and the size of a tensor's bytes in the pack.

        Raises:
            BadPack: the tensor is missing, or its format or shape is not that of model and recipe.
        """
        found = self._entries.get(tensor.name)
        if found is None:
            raise BadPack(f"the pack {self.path.name} has no tensor {tensor.name}")
        path, entry, meaning = found
        wanted = _meaning(tensor, self.recipe)
        if meaning != wanted or (entry.dtype, entry.shape) != _stored_as(tensor, self.recipe):
            raise BadPack(
                f"{tensor.name} in {path.name} is {meaning[:80]!r}, but the model needs {wanted!r}"
            )
        return Location(path, entry.offset, entry.size_bytes)

    def _read_file(self, record: FileRecord) -> None:
        path = self.path / record.name
        header = read_header(path)
        for name, entry in header.entries.items():
            if name in self._entries:
                raise BadPack(f"{name} is in both {self._entries[name][0].name} and {record.name}")
            self._entries[name] = (path, entry, header.metadata.get(name, ""))

    def _read_config(self) -> dict[str, Any]:
        data = read_bounded(self.path / "config.json", 1_000_000)
        for record in self.manifest.extras:
            if record.name == "config.json" and record.sha256 == sha256(data).hexdigest():
                return parse_object(data, "config.json")
        raise BadPack("config.json does not match its hash in kt.json")


def is_pack(path: Path) -> bool:
    """Returns whether `path` is a folder with the manifest of a complete pack."""
    return is_regular(path / manifest.PACK)


def _read_manifest(path: Path) -> tuple[Manifest, Recipe]:
    if not is_pack(path):
        raise BadPack(
            f"{path} does not contain a converted model", hint="create one with: kt convert NAME"
        )
    try:
        return parse_pack(read_bounded(path / manifest.PACK, manifest.MAX_BYTES))
    except BadPack:
        raise
    except BadCheckpoint as error:
        raise BadPack(str(error), hint=error.hint) from None


def _check_size(folder: Path, record: FileRecord) -> None:
    path = folder / record.name
    if path.is_symlink() or not is_regular(path):
        raise BadPack(f"{record.name} is missing from {folder.name}")
    size = path.stat().st_size
    if size != record.size_bytes:
        raise BadPack(
            f"{record.name} in {folder.name} has {size} bytes instead of {record.size_bytes}"
        )
