"""Brings a repository into the library, with progress."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ktcli.assembly.listener import SILENT, Bar, Listener, announce_library
from ktcli.store.library import Entry
from ktcli.store.reference import HUBS, Reference


def fetch(reference: Reference, listener: Listener = SILENT, limit_bps: int | None = None) -> Entry:
    """Bring a repository into the library.

    Args:
        limit_bps: the most bytes per second, 0: no limit; None: the setting `pull-limit`.
    """
    from ktcli.store import download

    announce_library(listener)
    where = f"{reference.repository}{'@' if reference.revision else ''}{reference.revision}"
    listener.note(f"Looking at {where} on {HUBS[reference.hub]} …")
    watcher = _Bars(listener)
    try:
        return download.pull(reference, watcher, limit_bps=limit_bps)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"what arrived is kept; continue with: kt pull {reference.text}"
        ) from None
    finally:
        watcher.end()


class _Bars:
    """Shows each part of a pull as a progress bar."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._shown: AbstractContextManager[Bar] | None = None
        self._bar: Bar | None = None

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None:
        self.end()
        self._shown = self._listener.progress(what, total_bytes, done=done_bytes)
        self._bar = self._shown.__enter__()

    def advance(self, n_bytes: int) -> None:
        if self._bar is not None:
            self._bar.advance(n_bytes)

    def end(self) -> None:
        if self._shown is not None:
            self._shown.__exit__(None, None, None)
            self._shown = self._bar = None
