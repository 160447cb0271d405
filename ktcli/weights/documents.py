"""The JSON documents next to a model's weights, as hostile input, and the paths of files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint
from ktcli.models.config import INFINITE


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Returns the JSON object in `data`, the bytes of a small file called `what`. Infinity, which is not JSON, is
    replaced by the form in which transformers 5 writes it.

    Raises:
        BadCheckpoint: `data` is no JSON object, is nested deeply, holds NaN or a number that is too large, or gives one
            name two different values.
    """

    def refuse(word: str) -> NoReturn:
        raise BadCheckpoint(f"{what} holds {word}, which is implausible")

    def constant(word: str) -> dict[str, str]:
        return dict(INFINITE) if word == "Infinity" else refuse(word)

    def number(text: str) -> float:
        value = float(text)
        return value if abs(value) < float("inf") else refuse(text[:40])

    def integer(text: str) -> int:
        return int(text) if len(text) < 25 else refuse(text[:40])

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        for name, value in pairs if len(found) < len(pairs) else ():
            if value != found[name]:
                raise BadCheckpoint(f"{what} gives {name[:60]!r} two different values")
        return found

    hooks = {
        "parse_constant": constant,
        "parse_float": number,
        "parse_int": integer,
        "object_pairs_hook": unique,
    }
    try:
        return smallfiles.json_object(data, **hooks)
    except ValueError as error:
        raise BadCheckpoint(f"{what} {error}") from None


def inside(folder: Path, name: str) -> Path:
    """Returns the resolved path of the file `name` of a model folder, links followed; it need not exist.

    A link may lead only to the folder itself or, as in the cache of the Hugging Face hub, to `blobs` beside
    `snapshots`.

    Raises:
        BadCheckpoint: the path leads elsewhere, or its links cannot be followed.
    """
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    try:
        path = (folder / name).resolve() if "\0" not in name else Path("/")
    except (RuntimeError, OSError):  # Python before 3.13 raises the former
        raise BadCheckpoint(f"the file {name!r} of {folder} is a broken link") from None
    if not any(path.is_relative_to(place) for place in allowed):
        raise BadCheckpoint(
            f"the file {name!r} is outside the model folder {folder}",
            hint="do not use this checkpoint: it points at other files on your machine",
        )
    return path
