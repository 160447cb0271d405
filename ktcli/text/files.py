"""Reads a model's small text files, with a size limit and a one-sentence error for invalid contents.

They come from strangers: a file may be empty, endless, nested a million deep, or not text.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint

MAX_JSON_BYTES = 16 << 20  # tokenizer_config.json of the largest vocabularies has about 1 MB


def read_bytes(path: Path, most: int) -> bytes:
    """Returns the bytes of a file, which must not be empty.

    Raises:
        BadCheckpoint: it is missing, no plain file, empty, or larger than `most` bytes.
    """
    try:
        data = smallfiles.read_bounded(path, most)
    except (FileNotFoundError, NotADirectoryError):
        raise BadCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    if not data:
        raise BadCheckpoint(f"{path} is empty", hint="pull the model again; kt verify checks it")
    return data


def read_text(path: Path, most: int) -> str:
    """Returns the text of a UTF-8 file, each line end in it as a single newline character.

    Raises:
        BadCheckpoint: as `read_bytes`, or not UTF-8.
    """
    try:
        text = read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{path} is not UTF-8 text (byte {error.start})") from error
    return io.StringIO(text, newline=None).read()


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Returns the object that a JSON file holds.

    Raises:
        BadCheckpoint: as `read_text`, or not JSON, or not an object.
    """
    try:
        return smallfiles.json_object(read_text(path, most))
    except ValueError as error:
        raise BadCheckpoint(f"{path} {error}") from None


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds, an empty one if there is no such file; raises as `read_json`."""
    return read_json(path) if path.is_file() else {}


def without_surrogates(text: str) -> str:
    """Returns a text with a question mark for each lone surrogate, which JSON may hold and UTF-8 may not."""
    return text.encode("utf-8", "replace").decode("utf-8")
