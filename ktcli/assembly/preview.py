"""Looks at a repository on its hub without its weights: its list of files, and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ktcli.errors import BadCheckpoint, gib
from ktcli.store.download import wanted
from ktcli.store.hubs import Hub, hub_of
from ktcli.store.reference import Reference
from ktcli.weights.reader import config_of

_CONFIG = "config.json"
_MAX_BYTES = 4 << 20  # of a config that is fetched only to be looked at


@dataclass(frozen=True, slots=True)
class Preview:
    """A model as its hub shows it: its `config.json`, and the bytes that a pull would fetch."""

    config: Mapping[str, Any]
    download_bytes: int


def preview(reference: Reference, *, hub: Hub | None = None) -> Preview:
    """Asks the hub of a reference for what a plan needs.

    Args:
        hub: where to ask; None: the hub of the reference.
    Raises:
        NotFound, HubError: there is no such repository, or the hub does not answer.
        BadCheckpoint: there is no model in it that kt could read.
    """
    client = hub or hub_of(reference)
    snapshot = client.look(reference.repository, reference.revision)
    files = wanted(snapshot)
    size = next(file.size_bytes for file in files if file.name == _CONFIG)
    if size > _MAX_BYTES:
        raise BadCheckpoint(
            f"{_CONFIG} of {reference.repository} is {gib(size)}, too large for one"
        )
    with TemporaryDirectory(prefix="kt-preview-") as folder:
        client.fetch(snapshot, [_CONFIG], Path(folder))
        config = config_of(Path(folder))
    return Preview(config, sum(file.size_bytes for file in files))
