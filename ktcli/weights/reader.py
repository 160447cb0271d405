"""Which reader a checkpoint needs: a folder of safetensors files, or GGUF files."""

from __future__ import annotations

from pathlib import Path

from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.gguf.header import is_gguf
from ktcli.weights.storage import Reader


def open_checkpoint(path: Path) -> Reader:
    """The checkpoint at `path`, to be closed.

    Raises:
        BadCheckpoint: there is none, or it is damaged, hostile or of a kind that cannot be read.
    """
    if is_gguf(path):
        from ktcli.weights.gguf.file import Gguf

        return Gguf(path)
    return Checkpoint(path)
