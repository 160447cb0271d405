"""Where KV pages are stored: the stores that people name, and the space that an engine's pages have in any of them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from ktcli.engine import Engine
from ktcli.records import dataclass
from ktcli.settings import MOONCAKE
from ktcli.store.pagefile import Space

OFF = "off"  # of the setting kv-store


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A folder in which several servers share KV pages, as somebody named it.

    Attributes:
        quota_bytes: the most bytes of the files that this library writes there; None: a share of the disk.
    """

    path: Path
    quota_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MooncakePlace:
    """A Mooncake store in which several servers share KV pages, as somebody named it.

    Attributes:
        text: its address, of which nothing was checked.
        is_insecure: whether the address may be one that is not of a private network.
    """

    text: str
    is_insecure: bool = False


def shared_place(
    text: str, quota_bytes: int | None = None, *, is_insecure: bool = False
) -> SharedStore | MooncakePlace | None:
    """Returns the store that an option or setting names; None: "off"."""
    if text == OFF:
        return None
    if text.startswith(MOONCAKE):
        return MooncakePlace(text, is_insecure)
    return SharedStore(Path(text).expanduser(), quota_bytes)


def space_of(engine: Engine) -> Space:
    """Returns the space of an engine's pages: everything that changes their bytes."""
    memory, pools = engine.memory, engine.pools
    windows = pools.windows
    facts: tuple[object, ...] = (pools.seed, memory.codec, memory.page_bytes, memory.state_bytes)
    if windows is not None and windows.memory is not None:
        facts = (*facts, windows.window, windows.memory.page_bytes)
    return Space(sha256(repr(facts).encode()).digest(), memory.codec)


def about_of(engine: Engine, model: str) -> dict[str, Any]:
    """Returns what a person may want to know of the stored pages of an engine."""
    memory = engine.memory
    return {"model": model, "page_bytes": memory.page_bytes, "state_bytes": memory.state_bytes}
