"""Refuses a checkpoint whose text files a chat would refuse, before its weights are converted."""

from __future__ import annotations

from pathlib import Path

from ktcli.text.tokenizer import examine_tokenizer
from ktcli.weights.reader import small_files_of


def require_known_tokenizer(path: Path) -> None:
    """Raises BadCheckpoint if a checkpoint's tokenizer has parts that no published one has; one without a tokenizer
    passes.

    Args:
        path: a folder, or a GGUF file.
    Raises:
        BadCheckpoint: its tokenizer has such a part.
    """
    with small_files_of(path) as folder:
        examine_tokenizer(folder)
