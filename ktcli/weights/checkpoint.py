"""A model folder as published: read lazily, tensor by tensor, and never trusted.

Opening reads `config.json`, the index and the headers; tensor data is read when it is asked for, some
rows at a time (not mapped: a failing disk is then an error and not a signal). Files are looked for only
inside the folder. How numbers may be stored is in `storage`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from ktcli.errors import BadCheckpoint, hinted
from ktcli.models.pooling import KEY
from ktcli.numbered import numbered_set
from ktcli.weights.claims import COMPANIONS, source_named, source_names
from ktcli.weights.documents import inside, parse_object
from ktcli.weights.extras import extra_limit
from ktcli.weights.files import CheckpointFiles
from ktcli.weights.header import MAX_TENSORS, TensorEntry, is_regular, read_bounded, read_header
from ktcli.weights.scheme import read_scheme
from ktcli.weights.sentence import with_pooling
from ktcli.weights.storage import Part, Read, StorageSource
from ktcli.weights.unread import unread_files

MAX_CONFIG_BYTES = 1_000_000  # the largest published one has 60 kB
MAX_QUANTIZATION_BYTES = 20_000_000  # of many layers, each named
MAX_INDEX_BYTES = 100_000_000  # one line per tensor; the largest published one has 20 MB
MAX_BIAS_BYTES = 10_000_000
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Modelopt's, which may be all that says how a checkpoint is quantized.
QUANTIZATION = "hf_quant_config.json"
_BODY, _EMBEDDING = "model.", "embed_tokens.weight"
HINT = "fetch the model's files again: kt pull NAME (complete files are kept)"


class Checkpoint(CheckpointFiles):
    """An open model folder, a `Reader`. Close it, or use it in a `with` statement.

    Attributes:
        config: the object in `config.json`; its values are not checked here.
        parts: all tensors of the files by name.
        digest: tells checkpoints apart; SHA-256 over all headers.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int] | None = None) -> None:
        """Read config, index and headers.

        Args:
            sizes: the bytes of each weight file, where only their beginnings lie in `folder`, and nothing else can be
                read; None: all of them do.
        Raises:
            BadCheckpoint: a file is missing, damaged, hostile or of a kind that cannot be read.
        """
        self.path = folder
        with hinted(HINT):
            self.config = read_config(folder)
            self._scheme = read_scheme(self.config, _read_quantization(folder))
            self.parts, files, self.digest = _open_shards(folder, self.config, sizes or {})
        self._names = source_names(self.parts)
        here = files if sizes is None else ()
        super().__init__({file: inside(folder, file) for file in here}, HINT)

    @property
    def description(self) -> str:
        """The name of the file that says which tensors a checkpoint must have: "config.json"."""
        return "config.json"

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors of the checkpoint that can be asked for, including weights that the files store in
        packed form under other names."""
        return self._names

    def unused(self, taken: Collection[str]) -> list[str]:
        """Returns the names of the checkpoint's tensors that are not in `taken`, without those that merely accompany
        others (such as scales of activations) and biases that are all zeros."""
        return [
            name
            for name, part in self.parts.items()
            if name not in taken and not COMPANIONS.fullmatch(name) and not self._is_no_bias(part)
        ]

    def _is_no_bias(self, part: Part) -> bool:
        """Returns whether a tensor is a bias of zeros: AutoGPTQ before 0.5 gave one to every matrix."""
        stem = part.name.removesuffix(".bias")
        if f"{stem}.qweight" not in self.parts or part.entry.size_bytes > MAX_BIAS_BYTES:
            return False
        return self._is_zero(part)

    def _is_zero(self, part: Part) -> bool:
        return not self.read(Read(part.file, part.entry.offset, part.entry.size_bytes)).any()

    @property
    def small_files(self) -> tuple[str, ...]:
        """The names of the small files of the checkpoint that a pack also contains, such as config and tokenizer;
        sorted."""
        names = sorted(path.name for path in self.path.iterdir())
        return tuple(n for n in names if extra_limit(n) and is_regular(inside(self.path, n)))

    def small_file(self, name: str) -> bytes:
        """Returns the contents of the small file `name` of the checkpoint; of an embedding model's config.json, the
        JSON completed by how the model pools."""
        if name == CONFIG and KEY in self.config:
            return json.dumps(self.config, indent=1).encode()
        return read_bounded(inside(self.path, name), extra_limit(name))

    def _stored(self, name: str, shape: tuple[int, ...] | None) -> StorageSource:
        if name not in self._names:
            raise BadCheckpoint(f"the checkpoint in {self.path} has no tensor {name!r}")
        source = source_named(name, self.parts, self._scheme)
        if shape is not None and source.shape != shape:
            raise BadCheckpoint(
                f"{name} in {source.file} has the shape {list(source.shape)}, "
                f"but config.json requires {list(shape)}"
            )
        return source


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the JSON object in a model folder's `config.json`. For an embedding model it gets the field `kt_pooling`,
    how the outputs are pooled, from other files of the folder.

    Raises:
        BadCheckpoint: `config.json` is missing, too large or not valid (see `parse_object`), or one of those other
            files is damaged or names what kt does not compute.
    """
    if not folder.is_dir():
        raise BadCheckpoint(
            f"{folder} is not a folder", hint="give kt convert a model's name or its folder"
        )
    data = read_bounded(inside(folder, CONFIG), MAX_CONFIG_BYTES)
    return with_pooling(parse_object(data, CONFIG), folder)


def _read_quantization(folder: Path) -> dict[str, Any]:
    """The object in modelopt's file beside `config.json`; {} without one."""
    path = inside(folder, QUANTIZATION)
    if not path.exists():
        return {}
    return parse_object(read_bounded(path, MAX_QUANTIZATION_BYTES), QUANTIZATION)


def unread_in(folder: Path, names: Collection[str]) -> frozenset[str]:
    """Returns the names of a repository's weight files that a conversion does not read: those that the index does not
    name or that hold only tensors which the model leaves out. Without an index: all but `model.safetensors`; none if
    that is missing.

    Args:
        folder: the folder with its config.json and, if there is one, its index.
        names: the weight files of the repository.
    Raises:
        BadCheckpoint: config.json or the index is damaged.
    """
    weight_map = _read_index(folder)
    if weight_map is None:
        return frozenset(names) - {SINGLE} if SINGLE in names else frozenset()
    beside = frozenset(names) - set(weight_map.values())
    return beside | unread_files(read_config(folder), weight_map)


def _open_shards(
    folder: Path, config: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[dict[str, Part], list[str], str]:
    """Opens the shards: all tensors by name, the files, and SHA-256 over the files' names and headers. One that
    nobody reads may be missing."""
    weight_map = _read_index(folder)
    if weight_map is not None:
        lacking = {
            file for file in set(weight_map.values()) if not is_regular(inside(folder, file))
        }
        lacking &= unread_files(config, weight_map) if lacking else set()
        weight_map = {name: file for name, file in weight_map.items() if file not in lacking}
    files = sorted(_list_shards(folder) if weight_map is None else set(weight_map.values()))
    digest, entries, n_tensors = sha256(), dict[str, dict[str, TensorEntry]](), 0
    for file in files:
        path = inside(folder, file)
        if not is_regular(path):
            raise BadCheckpoint(f"the shard {file} is missing from {folder}")
        header = read_header(path, sizes.get(file))
        digest.update(f"{file}\n{len(header.raw)}\n".encode())
        digest.update(header.raw)
        entries[file] = header.entries
        n_tensors += len(header.entries)
        if n_tensors > MAX_TENSORS:
            raise BadCheckpoint(f"the shards in {folder} list more than {MAX_TENSORS} tensors")
    return _below_body(_parts(entries, weight_map)), files, digest.hexdigest()


def _below_body(parts: dict[str, Part]) -> dict[str, Part]:
    """Returns the tensors under their names in a whole model; one that was published without its head, as those for
    embeddings are, has them without the prefix of its body."""
    if _EMBEDDING not in parts or any(name.startswith(_BODY) for name in parts):
        return parts
    named = {_BODY + name: part for name, part in parts.items()}
    return {name: replace(part, name=name) for name, part in named.items()}


def _parts(
    entries: Mapping[str, Mapping[str, TensorEntry]], weight_map: Mapping[str, str] | None
) -> dict[str, Part]:
    """The tensors of all files by name, from the entries of each file."""
    parts: dict[str, Part] = {}
    if weight_map is None:
        for file, its in entries.items():
            for name, entry in its.items():
                if name in parts:
                    raise BadCheckpoint(f"{name} is in both {parts[name].file} and {file}")
                parts[name] = Part(name, file, entry)
        return parts
    for name, file in weight_map.items():
        if name not in entries[file]:
            raise BadCheckpoint(f"the index says that {name} is in {file}, but it is not")
        parts[name] = Part(name, file, entries[file][name])
    return parts


def _list_shards(folder: Path) -> list[str]:
    """The weight files of a folder without an index: one, or a complete numbered set."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE in names:
        return [SINGLE]
    numbered = [name for name in names if numbered_set(name) != [name]]
    if numbered:
        wanted = numbered_set(numbered[0])
        missing = sorted(set(wanted) - set(names))
        if missing:
            raise BadCheckpoint(f"the shard {missing[0]} is missing from {folder}")
        return wanted
    if len(names) == 1:
        return names
    found_what = "several .safetensors files without an index" if names else "no .safetensors file"
    if not names and (list(folder.glob("*.bin")) or list(folder.glob("*.pt*"))):
        found_what = "only PyTorch pickle files, which can run code when they are read"
    raise BadCheckpoint(
        f"{folder} contains {found_what}", hint="kt converts safetensors checkpoints"
    )


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
