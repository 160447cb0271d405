"""Reading a model's small text files: bounded, and wrong content is one sentence.

They come from strangers: a file may be empty, endless, nested a million deep, or not text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.weights.header import MAX_NESTING, nests_beyond

MAX_JSON_BYTES = 16 << 20  # tokenizer_config.json of the largest vocabularies has about 1 MB


def check_size(path: Path, most: int) -> int:
    """Bytes of a file that must exist, be a file, hold something, and not more than `most`."""
    try:
        if not path.is_file():
            raise BadCheckpoint(f"{path} is missing")
        size = path.stat().st_size
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    if size == 0:
        raise BadCheckpoint(f"{path} is empty", hint="pull the model again; kt verify checks it")
    if size > most:
        raise BadCheckpoint(
            f"{path} has {size:,} bytes, more than the {most:,} such a file can have"
        )
    return size


def read_text(path: Path, most: int) -> str:
    """The text of a file in UTF-8.

    Raises:
        BadCheckpoint: missing, empty, too large, or not UTF-8.
    """
    check_size(path, most)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object a JSON file holds.

    Raises:
        BadCheckpoint: as `read_text`, or not JSON, or not an object.
    """
    text = read_text(path, most)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:100]
        raise BadCheckpoint(f"{path} is not JSON: {why}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} holds a {type(value).__name__} where an object is due")
    if nests_beyond(value, MAX_NESTING):
        raise BadCheckpoint(f"{path} nests more than {MAX_NESTING} levels deep")
    return value
