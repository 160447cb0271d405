"""Fetches a repository into the library, with progress."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Self

from ktcli.assembly.listener import SILENT, Bar, Listener, announce_library
from ktcli.errors import interrupted
from ktcli.store import library
from ktcli.store.choice import look
from ktcli.store.download import Watcher
from ktcli.store.entry import Entry
from ktcli.store.hubs import Snapshot
from ktcli.store.places import EntryKind
from ktcli.store.profile import HUBS
from ktcli.store.reference import Reference


def fetch(
    reference: Reference,
    listener: Listener = SILENT,
    *,
    snapshot: Snapshot | None = None,
    limit_bps: int | None = None,
) -> Entry:
    """Downloads a model's repository into the library, with a progress bar; returns its entry, see `download.pull`.

    Args:
        snapshot: what the hub said of it already; None: it is asked.
        limit_bps: the most bytes per second, 0: no limit; None: the setting `pull-limit`.
    """
    from ktcli.assembly.preview import read_of
    from ktcli.store import download

    announce_library(listener)
    if snapshot is None and library.find(reference.name, EntryKind.CHECKPOINT) is None:
        listener.note(looking(reference))
        _, snapshot = look(reference, tell=listener.note)
    said = f"the files that arrived are kept; continue with: kt pull {reference.text}"
    with interrupted(said), Bars(listener) as watcher:
        return download.pull(
            reference, watcher, snapshot=snapshot, limit_bps=limit_bps, read_of=read_of
        )


def looking(reference: Reference) -> str:
    """Returns the progress message "Looking up REPOSITORY on HUB …"."""
    where = f"{reference.repository}{'@' if reference.revision else ''}{reference.revision}"
    return f"Looking up {where} on {HUBS[reference.hub]} …"


class Bars(Watcher):
    """A watcher that shows each part of a pull as a progress bar; as a context it closes the last one at its end."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._shown: AbstractContextManager[Bar] | None = None
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None:
        """Closes the current progress bar and opens one of `total_bytes`, `done_bytes` of them done, titled `what`."""
        self.end()
        self._shown = self._listener.progress(what, total_bytes, done=done_bytes)
        self._bar = self._shown.__enter__()

    def advance(self, n_bytes: int) -> None:
        """Advances the current progress bar, if any, by `n_bytes`."""
        if self._bar is not None:
            self._bar.advance(n_bytes)

    def end(self) -> None:
        """Closes the current progress bar, if any."""
        if self._shown is not None:
            self._shown.__exit__(None, None, None)
            self._shown = self._bar = None
