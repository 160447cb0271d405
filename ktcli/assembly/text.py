"""Whether the text files of a checkpoint can be used, asked before its weights are converted."""

from __future__ import annotations

from pathlib import Path

from ktcli.chat.tokenizer import has_tokenizer, load_tokenizer
from ktcli.weights.reader import small_files_of


def require_tokenizer(path: Path) -> None:
    """Refuses a checkpoint whose tokenizer would be refused later; one without a tokenizer passes.

    Args:
        path: a folder, or a GGUF file.
    Raises:
        BadCheckpoint: it is malformed, or of parts that no published one has.
    """
    with small_files_of(path) as folder:
        if has_tokenizer(folder):
            load_tokenizer(folder)
