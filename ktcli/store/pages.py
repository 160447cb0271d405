"""The store of KV pages in a folder: pages by their keys, read and checked by several threads, written by one.

A store is of one space: one model, computed in one way, in one layout. What it says it has may be gone or damaged when
it is read; then it is a miss, and a damaged file is deleted. Nothing here raises into a conversation: what cannot be
read is computed, and what cannot be written is said once.
"""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from ktcli.errors import Busy, KtError
from ktcli.pagelabel import Fill, PageKind, PageLabel, U8Array
from ktcli.records import dataclass
from ktcli.store.pagefile import Damaged, Image, PageEntry, Space, opened, read_record, read_table
from ktcli.store.pagefolder import SMALL_BYTES, PageFolder
from ktcli.store.pagewriter import NICE, PageWriter, Target
from ktcli.store.readrate import ASSUMED_BPS, ReadRate
from ktcli.threads import in_parallel

CLOSE_S = 20.0  # the longest that the end of a conversation waits for its pages
_READERS = 4
_LEAST_TABLES = 16  # of files that are read by more than one thread
_MOST_BATCH = 64 << 20
_MOST_SHARED_BATCH = 16 << 20  # whether a folder is slow or gone is seen file by file
_FILES = 4096  # that a full store consists of, about
_QUIET = (errno.EACCES, errno.EROFS, errno.EPERM)  # whoever has such a library knows
_GONE = (errno.ENOENT, errno.ESTALE)  # its owner has removed it
_AGAIN_S = 30.0  # after which writing to a shared folder is tried again
_MOST_OPEN = 64  # files that are open at a time, of the 1,024 that a process often may have
_MOST_RECORDS = 1 << 20  # that are known; each takes some 700 bytes of memory


class RecordObserver(Protocol):
    """The interface of a listener for the records that can be found in a store; called by any thread, which it must not
    block.
    """

    def stored(self, path: Path, entries: Sequence[PageEntry]) -> None:
        """Called when a page file with these records (KV pages and states) can be found in the store."""

    def removed(self, entries: Sequence[PageEntry]) -> None:
        """Called when these records (KV pages and states) are in no page file of the store any more."""


@dataclass(slots=True)
class StoreCounts:
    """The counts of a store's operations since it was opened.

    Attributes:
        read, read_bytes: the records read and found intact, and their bytes.
        written, written_bytes: the records written, and the bytes of their files.
        damaged: the files that were found damaged.
    """

    read: int = 0
    read_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    damaged: int = 0


class PageStore:
    """The stored pages and states of one space.

    Args:
        quota_bytes: the most bytes of the whole folder, or of the files of this writer; 0: it is only read.
        about: facts of the space for people, noted in its folder.
        warn: called with a sentence about what went wrong; by the thread that calls the store.
    Attributes:
        steps: counts on while it looks or reads, so that others see that it does not hang.
        rate: how long reads take.
    """

    name = "disk"

    def __init__(
        self,
        folder: PageFolder,
        space: Space,
        quota_bytes: int,
        about: dict[str, Any] | None = None,
        warn: Callable[[str], object] = lambda said: None,
    ) -> None:
        self._folder, self._space, self._quota = folder, space, quota_bytes
        self._about, self._warn = about or {}, warn
        self._path = folder.folder_of(space)
        self._guard = threading.RLock()  # of what follows
        # Where each record lies, in one file or in several that were written at once.
        self._found: dict[tuple[int, bytes], list[tuple[Path, PageEntry]]] = {}
        self._files: dict[Path, tuple[PageEntry, ...]] = {}
        self._states: set[bytes] = set()  # the keys of those that are states
        self._n_records = 0
        self._ignored: set[Path] = set()
        self._trouble = ""
        self._hindrance = "it was too slow"  # why some were given up
        self._writes_from = 0.0  # `time.monotonic` from which on it writes
        self._stopped = False
        self._fresh: list[bytes] = []  # the last key of each file written since the queue was empty
        self._observer: RecordObserver | None = None
        self.steps = 0
        self.rate = ReadRate(ASSUMED_BPS if folder.is_shared else None)
        self.counts = StoreCounts()
        most = _MOST_SHARED_BATCH if folder.is_shared else _MOST_BATCH
        batch = max(SMALL_BYTES, min(quota_bytes // _FILES, most))
        target = Target(space, batch, self._wanted, self._commit, self._restamp)
        # What is asked for at once is written beside other answers.
        self.writer = PageWriter(target, nice=0 if folder.is_shared else NICE)
        if not folder.is_shared:
            self.refresh()

    @property
    def path(self) -> Path:
        """The path of the folder that holds the stored pages of all models."""
        return self._folder.path

    @property
    def _writes(self) -> bool:
        return self._quota > 0 and time.monotonic() >= self._writes_from

    # --- what is there ------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Lists the store's files of KV pages anew, reads the tables of those that other processes have written, and
        forgets those that were removed.
        """
        with self._guard:
            known = set(self._files)
        there = self._folder.paths(self._path)  # may take a while
        self.steps += 1
        for path in known - there:
            self._forget(path)
        with self._guard:
            self._ignored &= there  # one that is written again has another chance
            fresh = list(there - known - self._ignored)
        threads = min(_READERS, len(fresh) // _LEAST_TABLES)
        in_parallel(self._open, fresh, threads, "kt-read")

    def observe(self, observer: RecordObserver | None) -> None:
        """Sets the listener, which is told at once of all stored KV pages and states, and later of each change; None
        removes it.
        """
        with self._guard:
            self._observer = observer
            if observer is not None:
                for path, entries in self._files.items():
                    observer.stored(path, entries)

    def seek(self, labels: Iterable[PageLabel]) -> None:
        """Does nothing: `refresh` lists all stored KV pages and states, so that `has` needs no query."""

    def has(self, kind: PageKind, key: bytes) -> bool:
        """Returns whether the store has a KV page or state of this kind and key: at the last `refresh`, or as its
        own writes and reads have shown since.
        """
        return (kind, key) in self._found

    def states(self) -> list[tuple[int, bytes, bytes]]:
        """Returns the stored states (what layers such as linear attention keep of a whole prompt prefix) that `has`
        knows of, longest prefix first, as tuples (number of tokens of the prefix, key of its full pages, its own key);
        a key is the hash of a prefix.
        """
        with self._guard:
            entries = [self._found[PageKind.STATE, key][0][1] for key in self._states]
        return sorted(((e.end, e.previous, e.key) for e in entries), reverse=True)

    def _find(self, kind: int, key: bytes) -> tuple[Path, PageEntry] | None:
        """A file that has a record, and its entry there; None: there was none."""
        with self._guard:
            found = self._found.get((kind, key))
            return found[0] if found else None

    # --- reading --------------------------------------------------------------------------------------

    def read(self, labels: Sequence[PageLabel], into: Sequence[U8Array]) -> int:
        """Reads KV pages and states from files into the arrays `into`, in parallel; returns how many are intact and in
        memory, up to the first that is not. The other arrays have undefined contents.
        """
        began = time.perf_counter()
        intact = 0
        # Another file may have what one has not: each round reads something, or forgets a file.
        while outcomes := self._read_first(labels[intact:], into[intact:]):
            intact += next((n for n, ok in enumerate(outcomes) if not ok), len(outcomes))
        size_bytes, took_s = sum(each.nbytes for each in into[:intact]), time.perf_counter() - began
        self.counts.read += intact
        self.counts.read_bytes += size_bytes
        if intact:
            self.rate.note(size_bytes, took_s)
        return intact

    def _read_first(self, labels: Sequence[PageLabel], into: Sequence[U8Array]) -> list[bool]:
        """Reads the first records that are there without a gap, of so many files as may be open; returns which of them
        are intact."""
        with ExitStack() as closing:
            jobs = []
            descriptors: dict[Path, int] = {}
            for label, memory in zip(labels, into, strict=True):
                place = self._place(label, descriptors, closing)
                if place is None or len(descriptors) > _MOST_OPEN:
                    break
                jobs.append((*place, label, memory))
            return self._run(jobs)

    def use(self, keys: Iterable[bytes]) -> None:
        """Sets the time of last use of the files with these records to now. `keys` are in the order of a conversation:
        of these files, the one with its end is the first to be removed.
        """
        self._folder.use(list(self._paths(keys))[::-1])

    def _place(
        self, label: PageLabel, descriptors: dict[Path, int], closing: ExitStack
    ) -> tuple[Path, int, PageEntry] | None:
        """The file of a record, open, and its entry; None: it is not there."""
        found = self._find(label.kind, label.key)
        if found is None:
            return None
        path, entry = found
        if path not in descriptors:
            try:
                descriptors[path] = closing.enter_context(opened(path))
            except OSError:  # evicted meanwhile
                self._forget(path)
                return None
        return path, descriptors[path], entry

    def _run(self, jobs: list[tuple[Path, int, PageEntry, PageLabel, U8Array]]) -> list[bool]:
        problems = in_parallel(self._read, jobs, _READERS, "kt-read")
        for (path, *_), problem in zip(jobs, problems, strict=True):
            if problem is None:
                self._forget(path)
            elif problem:
                self._damaged(path, problem)
        return [problem == "" for problem in problems]

    def _read(self, job: tuple[Path, int, PageEntry, PageLabel, U8Array]) -> str | None:
        """Reads a record; returns what is wrong with it, else ""; None: it is gone."""
        _, descriptor, entry, label, memory = job
        try:
            read_record(descriptor, entry, label, memory)
        except Damaged as damage:
            return str(damage)
        except OSError as error:
            gone = self._folder.is_shared or error.errno in _GONE
            return None if gone else f"cannot be read: {error.strerror}"
        finally:
            self.steps += 1
        return ""

    def _open(self, path: Path) -> None:
        self.steps += 1
        try:
            _, entries = read_table(path, self._space)
        except Damaged as damage:
            self._damaged(path, str(damage))
            return
        except PermissionError:  # another's, of which each look would ask again
            entries = ()
        except OSError:  # evicted meanwhile
            return
        self._remember(path, entries)

    def _remember(self, path: Path, entries: tuple[PageEntry, ...]) -> None:
        """Notes the records of a file, unless it was found damaged meanwhile; of others' files, as many as fit."""
        with self._guard:
            if path in self._ignored or path in self._files:
                return
            is_own = path.name.startswith(self._folder.owner)
            if not is_own and self._n_records + len(entries) > _MOST_RECORDS:
                entries = ()
            self._files[path] = entries
            self._n_records += len(entries)
            for entry in entries:
                self._found.setdefault((entry.kind, entry.key), []).append((path, entry))
                if entry.kind == PageKind.STATE:
                    self._states.add(entry.key)
            if self._observer is not None:
                self._observer.stored(path, entries)

    def _forget(self, path: Path) -> None:
        with self._guard:
            entries = self._files.pop(path, ())
            self._n_records -= len(entries)
            gone = [entry for entry in entries if self._is_gone(path, entry)]
            if self._observer is not None and gone:
                self._observer.removed(gone)

    def _is_gone(self, path: Path, entry: PageEntry) -> bool:
        """Takes a file from those that have a record; returns whether it was the only one."""
        name = entry.kind, entry.key
        places = [place for place in self._found.get(name, ()) if place[0] != path]
        if places:
            self._found[name] = places
            return False
        if self._found.pop(name, None) and entry.kind == PageKind.STATE:
            self._states.discard(entry.key)
        return True

    def _damaged(self, path: Path, problem: str) -> None:
        """Deletes a file, unless it is another writer's; its pages are misses from now on. Said for the first one
        only."""
        with self._guard:
            self._forget(path)
            if path in self._ignored:
                return
            self._ignored.add(path)
            self.counts.damaged += 1
            first = self.counts.damaged == 1
        end = "it is ignored, and its tokens are computed again"
        if path.name.startswith(self._folder.owner):
            with suppress(OSError):
                path.unlink(missing_ok=True)
                end = "it is removed, and its tokens are computed again"
        if first:
            self._trouble = self._trouble or f"a KV page file {problem}: {path}; {end}"
        if not self.writer.is_current:
            self.tell()

    def tell(self) -> None:
        """Calls `warn` with the first problem met since the last call; does nothing if there was none."""
        with self._guard:
            said, self._trouble = self._trouble, ""
        if said:
            self._warn(said)

    # --- writing --------------------------------------------------------------------------------------

    def put(self, label: PageLabel, size_bytes: int, fill: Fill) -> bool:
        """Queues a KV page or state to be written to the disk, and returns True; returns False if the store has it
        already, cannot be written or has a full queue.

        Args:
            fill: copies the bytes into an array; called by another thread.
        """
        if not self._writes or self.has(label.kind, label.key):
            return False
        return self.writer.put(label, size_bytes, fill)

    def hurry(self) -> None:
        """Makes the writing thread store all queued KV pages and states at once; does not wait for it."""
        self.writer.hurry()

    def flush(self, wait_s: float = CLOSE_S) -> bool:
        """Waits until no KV pages and states are queued any more, at most `wait_s` seconds; returns whether that is so.
        Those that cannot be written are dropped.
        """
        done = self.writer.flush(wait_s)
        self.tell()
        return done

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Writes queued records within `wait_s` seconds, drops the rest, and ends the thread that writes."""
        self.writer.close(wait_s)
        if self.writer.dropped and self._writes:
            self._trouble = self._trouble or (
                f"{self.writer.dropped:,} KV pages were not written to {self._folder.where}: {self._hindrance}"
            )
        self.tell()

    def _wanted(self, labels: Sequence[PageLabel]) -> list[bool]:
        if not self._folder.is_shared:  # there, what is written twice harms nobody
            self.refresh()
        return [self._writes and not self.has(label.kind, label.key) for label in labels]

    def _commit(self, image: Image) -> bool:
        name, data = image.finish()
        if not self._writes or data.size > self._quota:
            return True
        try:
            self._folder.make()
            with self._folder.lock(0.0):
                self._folder.check()
                self._folder.prepare(self._space, self._about)
                if self._folder.lacks_room(self._quota, data.size):
                    self._restamp()  # of a conversation that is still being written, the end goes first, too
                self._folder.keep_within(self._quota, data.size)
                path = self._folder.write(self._path, name, data)
        except Busy as busy:
            self._hindrance = str(busy).partition(": ")[2]
            return False
        except (OSError, KtError) as error:
            self._stop(error)
            return True
        with self._guard:  # what had this name before is replaced
            self._forget(path)
            self._ignored.discard(path)
            self._remember(path, tuple(image.entries))
        self.counts.written += len(image.entries)
        self.counts.written_bytes += data.size
        self._fresh.append(image.entries[-1].key)
        if not self._folder.is_shared:
            self.refresh()
        return True

    def _stop(self, error: OSError | KtError) -> None:
        """Writes nothing more, or for a while if the folder is another machine's; the reason is said once, if the user
        can do something about it."""
        shared, before = self._folder.is_shared, self._stopped
        self._writes_from = time.monotonic() + (_AGAIN_S if shared else math.inf)
        self._stopped = True
        cause = error if isinstance(error, OSError) else error.__cause__
        is_quiet = isinstance(cause, OSError) and cause.errno in _QUIET and not shared
        if before or is_quiet:
            return
        why = cause.strerror if isinstance(cause, OSError) else str(error)
        now = "cannot be written" if shared else "are no longer written"
        self._trouble = self._trouble or (
            f"KV pages {now} to {self._folder.where}: {why} ({self._folder.path})"
        )

    def _restamp(self) -> None:
        """Notes that conversations whose ends were just written are used: their beginnings go last."""
        with self._guard:
            tips, self._fresh = self._fresh, []
        before: set[bytes] = set()
        for tip in reversed(tips):
            if tip not in before:
                chain = list(self._chain(tip))
                before.update(chain)
                self._folder.use(list(self._paths(chain)))

    def _chain(self, key: bytes) -> Iterator[bytes]:
        """The keys of a prefix that are stored, the last first."""
        while True:
            found = self._find(PageKind.PAGE, key) or self._find(PageKind.STATE, key)
            if found is None:
                return
            yield key
            if found[1].previous == key:  # a state at the end of a page
                return
            key = found[1].previous

    def _paths(self, keys: Iterable[bytes]) -> dict[Path, None]:
        """The files in which records with these keys lie, each once, in the same order."""
        with self._guard:
            there = (self._find(kind, key) for key in keys for kind in PageKind)
            return dict.fromkeys(found[0] for found in there if found is not None)
