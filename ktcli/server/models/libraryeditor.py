"""Changes the library for clients: pulls and removes models, and gives them further names.

A client names models of the library or of a hub, never a path or an address: nobody makes a server read a file of
its machine or fetch a place of their choice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ktcli.assembly.prepare import prepare
from ktcli.assembly.ready import at_hand
from ktcli.assembly.request import Wanted
from ktcli.errors import Busy, QueueFull, UsageError
from ktcli.records import dataclass
from ktcli.store import aliases, library
from ktcli.store.disposal import Disposal
from ktcli.store.reference import Reference, is_elsewhere, parse

WAITING_MOST = 8  # pulls that wait for another one
_TOLD_S = 0.2  # between two reports of one progress


@dataclass(frozen=True, slots=True)
class PullStep:
    """The progress of one step of a pull.

    Attributes:
        what: what happens.
        done, total: the bytes of it so far, and all; None: it is not counted in bytes.
    """

    what: str
    done: int | None = None
    total: int | None = None


class LibraryEditor:
    """Pulls, removes and renames models of the library for clients of the server.

    Args:
        wanted: how models are to be loaded, so that none is pulled that does not fit.
        check: called with the name and folder of a model before it is converted; it may raise.
    """

    def __init__(self, wanted: Wanted, check: Callable[[str, Path], object]) -> None:
        self._wanted, self._check = wanted, check
        self._turn = threading.Lock()
        self._asking = threading.BoundedSemaphore(WAITING_MOST + 1)

    def pull(
        self, name: str, tell: Callable[[PullStep], None], is_stopped: Callable[[], bool]
    ) -> None:
        """Pulls and converts a model, one at a time; returns when it can be loaded.

        Args:
            tell: called with each step of the progress.
            is_stopped: called now and then; true stops the pull. What came by then stays for the next pull.
        Raises:
            UsageError: the name does not name a model on a hub. QueueFull: too many pulls wait.
            Busy: it was stopped. KtError: see `prepare`.
        """
        reference = _require_no_place(name)
        if not self._asking.acquire(blocking=False):
            raise QueueFull(WAITING_MOST, WAITING_MOST)
        try:
            listener = _TellingListener(tell, is_stopped)
            with self._in_turn(listener):
                if at_hand(reference.text) is None:
                    prepare(reference.text, self._wanted, self._check, listener=listener)
        finally:
            self._asking.release()

    @contextmanager
    def _in_turn(self, listener: _TellingListener) -> Iterator[None]:
        if self._turn.locked():
            listener.note("waiting for another pull")
        while not self._turn.acquire(timeout=0.2):
            listener.go_on()
        try:
            yield
        finally:
            self._turn.release()

    @staticmethod
    def remove(name: str, used: Collection[str]) -> None:
        """Removes a model with its conversions from the library, or only the name if that is an alias.

        Args:
            used: the paths of the conversions that are being served.
        Raises:
            NotFound: there is no such model. UsageError: it cannot be removed.
            Busy: it is being served, or another process works on it.
        """
        reference = _require_no_place(name)
        if any(each.name.lower() == name.lower() for each in aliases.every()):
            aliases.remove(name)
            return
        going = Disposal.of([reference.text])
        if any(str(entry.path) in used for entry in going.entries):
            raise Busy(
                f"{name} is loaded, so it cannot be removed",
                hint="unload it first with keep_alive 0",
            )
        going.carry_out()

    @staticmethod
    def name(name: str, further: str) -> None:
        """Makes `further` another name (an alias) of a model of the library.

        Raises:
            NotFound: there is no such model. UsageError: `further` is not a valid name, or a model has it.
        """
        _require_no_place(name)
        aliases.require_free(further)
        reference = library.require_meaning(name)
        formats = f"@{reference.formats}" if reference.formats else ""
        aliases.save(further, f"{reference.lasting}{formats}", aliases.preset_of(name))


def _require_no_place(name: str) -> Reference:
    """Parses a model name of a client.

    Raises:
        UsageError: it does not name a model in the library or on a hub.
    """
    is_place = "://" in name or name.startswith((".", "/", "~")) or is_elsewhere(name)
    reference = None if is_place else parse(name)
    if reference is None or reference.folder is not None:
        raise UsageError(
            f"{name[:200]!r} is not a model name", hint="use a short name, or org/repo of a hub"
        )
    return reference


class _TellingListener:
    """Tells what assembly does as steps, and ends it when nobody wants it any more."""

    def __init__(self, tell: Callable[[PullStep], None], is_stopped: Callable[[], bool]) -> None:
        self._tell, self._is_stopped = tell, is_stopped

    def go_on(self) -> None:
        """Checks that the pull is still wanted. Raises: Busy."""
        if self._is_stopped():
            raise Busy("the pull was cancelled", hint="pull again to resume it")

    def note(self, text: str) -> None:
        self.go_on()
        self._tell(PullStep(text))

    def warn(self, text: str) -> None:
        self.note(text)

    def agree(self, offer: Iterable[str], command: str) -> None:
        for line in offer:
            self.note(line)

    @contextmanager
    def progress(
        self, title: str, total: int | None = None, *, unit: str = "B", done: int = 0
    ) -> Iterator[_TellingBar]:
        bar = _TellingBar(self, self._tell, PullStep(title, done, total) if unit == "B" else None)
        yield bar
        bar.say()


class _TellingBar:
    def __init__(
        self, listener: _TellingListener, tell: Callable[[PullStep], None], step: PullStep | None
    ) -> None:
        self._listener, self._tell, self._step = listener, tell, step
        self._told_s = 0.0

    def advance(self, amount: int = 1) -> None:
        if self._step is not None:
            self.update(done=(self._step.done or 0) + amount)
        self._listener.go_on()

    def update(self, *, done: int, total: int | None = None) -> None:
        self._listener.go_on()
        if self._step is None:
            return
        self._step = PullStep(self._step.what, done, total or self._step.total)
        if time.monotonic() - self._told_s >= _TOLD_S:
            self.say()

    def say(self) -> None:
        """Sends the progress as a step."""
        if self._step is not None:
            self._told_s = time.monotonic()
            self._tell(self._step)
