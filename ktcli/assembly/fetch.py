"""Bringing a repository into the library, with progress."""

from __future__ import annotations

from ktcli.output import Progress, out
from ktcli.store.library import Entry
from ktcli.store.reference import HUBS, Reference


def fetch(reference: Reference) -> Entry:
    """Bring a repository into the library, with progress on stderr."""
    from ktcli.store import download

    where = f"{reference.repository}{'@' if reference.revision else ''}{reference.revision}"
    out.note(f"Looking at {where} on {HUBS[reference.hub]} …")
    watcher = _Bars()
    try:
        return download.pull(reference, watcher)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"what arrived is kept; continue with: kt pull {reference.text}"
        ) from None
    finally:
        watcher.end()


class _Bars:
    """Shows each part of a pull as a progress bar."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None:
        self.end()
        self._bar = out.progress(what, total_bytes, done=done_bytes).__enter__()

    def advance(self, n_bytes: int) -> None:
        if self._bar is not None:
            self._bar.advance(n_bytes)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None
