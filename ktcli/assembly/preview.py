"""Looks at a repository on its hub without its weights: its list of files, and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ktcli.errors import BadCheckpoint, gib
from ktcli.store.download import fetch_files, wanted
from ktcli.store.hubs import Hub, hub_named
from ktcli.store.reference import Reference
from ktcli.weights.reader import config_of

_CONFIG = "config.json"
_MAX_BYTES = 4 << 20  # of a config that is fetched only to be looked at


@dataclass(frozen=True, slots=True)
class Preview:
    """A model as its hub shows it: its `config.json`, and the bytes that a pull would fetch."""

    config: Mapping[str, Any]
    download_bytes: int


class _Unwatched:
    """Hears how a fetch goes on, and says nothing."""

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None: ...
    def advance(self, n_bytes: int) -> None: ...
    def end(self) -> None: ...


def preview(reference: Reference, *, hub: Hub | None = None) -> Preview:
    """Asks the hub of a reference for what a plan needs.

    Args:
        hub: where to ask; None: the hub of the reference.
    Raises:
        NotFound, HubError: there is no such repository, or the hub does not answer.
        BadCheckpoint: there is no model in it that kt could read.
    """
    client = hub or hub_named(reference.hub)
    snapshot = client.look(reference.repository, reference.revision)
    files = wanted(snapshot)
    described = next(file for file in files if file.name == _CONFIG)
    if described.size_bytes > _MAX_BYTES:
        size = gib(described.size_bytes)
        raise BadCheckpoint(f"{_CONFIG} of {reference.repository} is {size}, too large for one")
    with TemporaryDirectory(prefix="kt-preview-") as folder:
        fetch_files(client, snapshot, [described], Path(folder), _Unwatched())
        config = config_of(Path(folder))
    return Preview(config, sum(file.size_bytes for file in files))
