"""Which reader a checkpoint needs."""

from __future__ import annotations

from pathlib import Path

from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.storage import Reader


def open_checkpoint(path: Path) -> Reader:
    """The checkpoint at `path`, to be closed.

    Raises:
        BadCheckpoint: there is none, or it is damaged, hostile or of a kind that cannot be read.
    """
    return Checkpoint(path)
