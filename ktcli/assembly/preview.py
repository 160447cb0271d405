"""Examines a repository on its hub without its weights: its contents, its config.json, and the headers of its files.

The headers say whether kt can convert the model. They are put into files as long as those of the hub, with nothing
behind the headers, which take no room; so whatever reads checkpoints reads these too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint, gib
from ktcli.ggufname import GGUF
from ktcli.models import build
from ktcli.records import dataclass
from ktcli.store.choice import look
from ktcli.store.download import Watcher, fetch_beginnings, fetch_files, wanted
from ktcli.store.hubs import Hub, RemoteFile, Snapshot
from ktcli.store.reference import Reference
from ktcli.store.retrying import Tell, silent
from ktcli.weights.checkpoint import (
    INDEX,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    MAX_QUANTIZATION_BYTES,
    QUANTIZATION,
    unread_in,
)
from ktcli.weights.gguf.header import MAX_HEADER_BYTES as MAX_GGUF_HEADER_BYTES
from ktcli.weights.gguf.header import read_gguf_header
from ktcli.weights.header import MAX_HEADER_BYTES
from ktcli.weights.reader import config_of, examine
from ktcli.weights.sentence import MAX_BYTES, SENTENCE_FILES

# Before the number of the process in the name of a folder. It is not in the library: that may lie on a file system on
# which files as long as those of the hub do take room.
_FOLDER = "kt-preview-"
_CONFIG = "config.json"
_MOST = {
    _CONFIG: MAX_CONFIG_BYTES,
    INDEX: MAX_INDEX_BYTES,
    QUANTIZATION: MAX_QUANTIZATION_BYTES,
    **dict.fromkeys(SENTENCE_FILES, MAX_BYTES),
}
_FIRST_BYTES = 64 << 10  # holds the header of most shards
_LENGTH_BYTES = 8  # of a header's length, which is what a file begins with
WEIGHTS = ".safetensors"
# A GGUF file does not say how long its header is; the first one of a set has the vocabulary in it.
_GGUF_BYTES, _MORE = 8 << 20, 8


@dataclass(frozen=True, slots=True)
class Preview:
    """A model as its hub lists it: its `config.json`, and the bytes that a pull would fetch."""

    config: Mapping[str, Any]
    download_bytes: int


def preview(reference: Reference, *, tell: Tell = silent) -> Preview:
    """Fetches the config.json and the file headers of a repository from its hub; returns the config and the bytes that
    a pull would download.

    Args:
        tell: is given a sentence when a hub is waited for, or passed over.
    Raises:
        NotFound, HubError: there is no such repository, or the hub does not respond.
        BadCheckpoint: there is no model in it that kt could convert.
    """
    client, snapshot = look(reference, tell=tell)
    return preview_of(client, snapshot, reference.quant)


def preview_of(
    client: Hub, snapshot: Snapshot, quant: str = "", watcher: Watcher | None = None
) -> Preview:
    """Returns the config.json of a repository whose list of files is known, and the bytes that a pull would download,
    after checking the headers of its weight files.

    Args:
        quant: the quantisation of the GGUF files to look at; empty: the safetensors files are looked at.
    Raises:
        NotFound, HubError: the hub does not respond.
        BadCheckpoint: there is no model in it that kt could convert.
    """
    files = wanted(snapshot, quant)
    _remove_leftovers()
    with TemporaryDirectory(prefix=f"{_FOLDER}{os.getpid()}-") as name:
        folder = Path(name)
        try:
            if quant:
                _fetch_gguf_headers(client, snapshot, files, folder, watcher or Watcher())
            else:
                _fetch_small(client, snapshot, files, folder)
                build(config_of(folder))  # of a family that kt does not know nothing more is asked
                files = read_of(folder, files)
                fetch_headers(client, snapshot, files, folder, watcher or Watcher())
                for file in files:
                    if file.name.endswith(WEIGHTS):
                        os.truncate(folder / file.name, file.size_bytes)
            config = config_of(folder)
            examine(folder)
        except BadCheckpoint as error:
            said = str(error).replace(name, snapshot.repository)
            raise BadCheckpoint(
                said, hint="nothing was pulled; try another repository of this model"
            ) from error
    return Preview(config, sum(file.size_bytes for file in files))


def _remove_leftovers() -> None:
    """Removes the folders of processes that were killed in `preview_of`."""
    for path in Path(gettempdir()).glob(f"{_FOLDER}[0-9]*-*"):
        process = path.name.removeprefix(_FOLDER).partition("-")[0]
        with suppress(OSError):  # another process was faster
            if path.lstat().st_uid == os.getuid() and not smallfiles.is_running(process):
                shutil.rmtree(path)


def read_of(folder: Path, files: Sequence[RemoteFile]) -> tuple[RemoteFile, ...]:
    """Returns the given files of a repository without the weight files that the model does not read.

    Args:
        folder: holds the repository's config.json and index of weights.
    Raises:
        BadCheckpoint: the config.json or the index is damaged.
    """
    unread = unread_in(folder, [file.name for file in files if file.name.endswith(WEIGHTS)])
    return tuple(file for file in files if file.name not in unread)


def _fetch_small(
    client: Hub, snapshot: Snapshot, files: Sequence[RemoteFile], folder: Path
) -> None:
    small = [file for file in files if file.name in _MOST]
    for file in small:
        if file.size_bytes > _MOST[file.name]:
            size = gib(file.size_bytes)
            raise BadCheckpoint(
                f"{file.name} of {snapshot.repository} is {size}, which is too large for such a file"
            )
    fetch_files(client, snapshot, small, folder, Watcher())


def fetch_headers(
    client: Hub,
    snapshot: Snapshot,
    files: Sequence[RemoteFile],
    folder: Path,
    watcher: Watcher,
) -> None:
    """Downloads the beginning of every safetensors file among `files` into `folder`: its whole header, and at least 64
    KiB. Of a header longer than MAX_HEADER_BYTES (100 MB) only these 64 KiB are downloaded.
    """
    weights = [file for file in files if file.name.endswith(WEIGHTS)]
    fetch_beginnings(client, snapshot, dict.fromkeys(weights, _FIRST_BYTES), folder, watcher)
    longer = {}
    for file in weights:
        with (folder / file.name).open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if _FIRST_BYTES - _LENGTH_BYTES < length <= MAX_HEADER_BYTES:
            longer[file] = _LENGTH_BYTES + length
    fetch_beginnings(client, snapshot, longer, folder, watcher)


def _fetch_gguf_headers(
    client: Hub,
    snapshot: Snapshot,
    files: Sequence[RemoteFile],
    folder: Path,
    watcher: Watcher,
) -> None:
    """Fetches more of a file until its header can be read, or is longer than any that kt reads."""
    lengths = {file: _GGUF_BYTES for file in files if file.name.endswith(GGUF)}
    while lengths:
        fetch_beginnings(client, snapshot, lengths, folder, watcher)
        for file, length in tuple(lengths.items()):
            path = folder / file.name
            os.truncate(path, file.size_bytes)
            try:
                read_gguf_header(path)
            except BadCheckpoint:
                if length >= min(MAX_GGUF_HEADER_BYTES, file.size_bytes):
                    raise
                lengths[file] = length * _MORE
            else:
                del lengths[file]
