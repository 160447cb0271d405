"""Reads what the name of a GGUF file says about it; its contents are checked when they are read."""

from __future__ import annotations

import re

GGUF = ".gguf"
VISION = "mmproj"  # in the names of files that read pictures or sound
_NO_MODEL = (VISION, "imatrix")  # the latter: importance matrices
_BLOB = re.compile(r"sha256-[0-9a-f]{64}")  # as Ollama calls what it keeps


def is_gguf(name: str) -> bool:
    """Returns whether a file name is that of a GGUF file: it ends in .gguf, or is a SHA-256 digest as in Ollama's
    store.
    """
    return name.lower().endswith(GGUF) or _BLOB.fullmatch(name) is not None


def is_model(name: str) -> bool:
    """Returns whether the name of a GGUF file is that of a model, and not of a vision projector or an importance
    matrix.
    """
    return not any(word in name.lower() for word in _NO_MODEL)
