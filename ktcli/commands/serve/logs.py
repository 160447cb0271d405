"""The log of `kt serve` for people: a line for each request, and what the libraries of a server log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ktcli.output import out, safe


def log_request(entry: dict[str, Any]) -> None:
    """Writes a line about a request."""
    tokens = ""
    if "tokens" in entry:
        cached = f" ({entry['cached_tokens']:,} cached)" if entry["cached_tokens"] else ""
        tokens = f", {entry['prompt_tokens']:,} tokens{cached} in, {entry['tokens']:,} out"
    who = f"{entry['client']} ({entry['key']})" if "key" in entry else entry["client"]
    said = f"{who} {entry['method']} {entry['path']} {entry['status']}"
    said = safe(said)  # a path may hold an end of a line
    out.note(f"{time.strftime('%H:%M:%S')} {said} in {entry['seconds']:.2f} s{tokens}")


class LibraryLog(logging.Handler):
    """Says what the libraries of a server log as everything else is said, without tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a warning."""
        error = record.exc_info[1] if record.exc_info else None
        more = "" if error is None else f" ({type(error).__name__}: {error})"
        out.warn(safe(f"{record.getMessage()}{more}"))


@contextmanager
def libraries_heard() -> Iterator[None]:
    """Opens a context in which what libraries log is said."""
    handler, root = LibraryLog(logging.WARNING), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
