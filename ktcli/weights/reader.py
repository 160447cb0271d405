"""Opens a checkpoint with the reader it needs: a folder of safetensors files, GGUF files, or a folder that contains
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models import build
from ktcli.weights.check import check
from ktcli.weights.checkpoint import Checkpoint, read_config
from ktcli.weights.conversion import Source
from ktcli.weights.gguf.header import gguf_at
from ktcli.weights.storage import Reader


def open_checkpoint(path: Path) -> Reader:
    """Returns the open checkpoint at `path`, a model folder or a GGUF file; the caller closes it.

    Raises:
        BadCheckpoint: there is no checkpoint, or it is damaged, hostile or of a kind that cannot be read.
    """
    if (file := gguf_at(path)) is not None:
        from ktcli.weights.gguf.file import Gguf

        return Gguf(file)
    return Checkpoint(path)


@contextmanager
def source_at(path: Path, name: str) -> Iterator[Source]:
    """Opens a context that gives the checkpoint at `path` as the source of a conversion, called `name` in messages; the
    checkpoint is closed at its end.

    Raises:
        BadCheckpoint: it cannot be read.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        yield Source(name, checkpoint)


def config_of(path: Path) -> Mapping[str, Any]:
    """Returns the `config.json` object of the checkpoint at `path`; for a GGUF file, an equivalent object made from its
    metadata.

    Raises:
        BadCheckpoint: there is no checkpoint, or it cannot be read.
    """
    if gguf_at(path) is None:
        return read_config(path)
    with closing(open_checkpoint(path)) as checkpoint:
        return checkpoint.config


def examine(path: Path) -> None:
    """Checks that the checkpoint at `path` can be converted, as far as its headers and small files tell.

    Raises:
        BadCheckpoint: it cannot be converted.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        check(build(checkpoint.config), checkpoint)
        for name in checkpoint.small_files:
            checkpoint.small_file(name)


@contextmanager
def small_files_of(path: Path) -> Iterator[Path]:
    """Opens a context that gives a folder with the small files (config, tokenizer …) of the checkpoint at `path`: its
    own folder or, for a GGUF file, a temporary one.

    Errors about a file in it name the file at `path`.
    """
    if gguf_at(path) is None:
        yield path
        return
    with closing(open_checkpoint(path)) as checkpoint, TemporaryDirectory() as name:
        for file in checkpoint.small_files:
            (Path(name) / file).write_bytes(checkpoint.small_file(file))
        try:
            yield Path(name)
        except BadCheckpoint as error:
            said = str(error).replace(f"{name}/", f"{path}: ").replace(name, str(path))
            raise type(error)(said, hint=error.hint) from error
