"""Says how old the files are that a conversion is made of."""

from __future__ import annotations

from pathlib import Path

from ktcli.store import contents
from ktcli.weights.extras import extra_limit
from ktcli.weights.gguf.header import gguf_at


def newest_ns(path: Path) -> int:
    """Returns the time, in nanoseconds, of the last write to a file of a conversion's source; 0 if there is none."""
    if (file := gguf_at(path)) is not None:
        return max((part.stat().st_mtime_ns for part in contents.parts(file)), default=0)
    taken = (
        each
        for each in path.iterdir()
        if (each.suffix == ".safetensors" or extra_limit(each.name)) and each.is_file()
    )
    return max((each.stat().st_mtime_ns for each in taken), default=0)
