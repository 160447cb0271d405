"""How much of a GPU's memory a model was really given, where a plan had asked for more.

Kept so that the next start does not run out of memory on the way down again. It counts only as long as no
more memory is free than was free then: whoever had taken it may have gone.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from ktcli import config
from ktcli.errors import KtError

_NAME = "vram.json"
_MAX_BYTES = 1 << 20
_MORE = 1.02  # free memory wavers by some megabytes


def remembered(model: str, gpu: str, free_bytes: int) -> int | None:
    """What `model` may take of the memory of `gpu`, of which so much is free; None: nothing is known."""
    found = _read().get(_key(model, gpu))
    match found:
        case {"free_bytes": int(free), "limit_bytes": int(limit)}:
            return limit if limit > 0 and free_bytes <= free * _MORE else None
    return None


def remember(model: str, gpu: str, free_bytes: int, limit_bytes: int) -> None:
    """Keep what worked. Where the library cannot be written, it is forgotten."""
    path = config.home() / _NAME
    lock = config.lock(path.with_suffix(".lock"), "noting a GPU's memory", wait_s=1.0)
    with contextlib.suppress(KtError, OSError), lock:
        known = _read()
        known[_key(model, gpu)] = {"free_bytes": free_bytes, "limit_bytes": limit_bytes}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def _key(model: str, gpu: str) -> str:
    return f"{model} on {gpu}"


def _read() -> dict[str, Any]:
    path = config.home() / _NAME
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return {}
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
