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
    """Returns the store of KV pages that the text of an option or setting names: a Mooncake store, or a folder; None
    for "off".
    """
    if text == OFF:
        return None
    if text.startswith(MOONCAKE):
        return MooncakePlace(text, is_insecure)
    return SharedStore(Path(text).expanduser(), quota_bytes)


def space_of(engine: Engine) -> Space:
    """Returns the identity of the KV pages in a store that an engine can read: a SHA-256 of everything that changes the
    bytes of a page, and the name of the layout.
    """
    memory, pools = engine.memory, engine.pools
    windows = pools.windows
    facts: tuple[object, ...] = (pools.seed, memory.codec, memory.page_bytes, memory.state_bytes)
    if windows is not None and windows.memory is not None:
        facts = (*facts, windows.window, windows.memory.page_bytes)
    return Space(sha256(repr(facts).encode()).digest(), memory.codec)


def about_of(engine: Engine, model: str) -> dict[str, Any]:
    """Returns a description of an engine's stored KV pages for people: "model" (its name), "page_bytes" (of one page)
    and "state_bytes" (of one saved state).
    """
    memory = engine.memory
    return {"model": model, "page_bytes": memory.page_bytes, "state_bytes": memory.state_bytes}
