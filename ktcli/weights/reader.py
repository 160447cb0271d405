"""Which reader a checkpoint needs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from ktcli.models import build
from ktcli.native import Format
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.encode import lossless_format
from ktcli.weights.storage import Reader


def open_checkpoint(path: Path) -> Reader:
    """The checkpoint at `path`, to be closed.

    Raises:
        BadCheckpoint: there is none, or it is damaged, hostile or of a kind that cannot be read.
    """
    return Checkpoint(path)


def experts_as_stored(path: Path) -> Format | None:
    """The format in which the routed experts of the checkpoint at `path` lose nothing; see `lossless_format`.

    Raises:
        BadCheckpoint: there is no checkpoint, or it is damaged, hostile or of a kind that cannot be read.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        return lossless_format(build(checkpoint.config), checkpoint)
