"""The tier of KV pages in a Mooncake store, which other machines fill as well: asked with a bound, written behind.

Whatever goes wrong there costs a request its budget once: the process that runs Mooncake's client is killed, the store
rests, and a thread starts the process again after a while. Until then the store has nothing, and takes nothing. Nothing
that it gives is trusted, see `values`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ktcli.errors import KtError
from ktcli.pagelabel import Fill, PageKind, PageLabel, U8Array
from ktcli.records import dataclass
from ktcli.store.mooncake.address import MooncakeAddress
from ktcli.store.mooncake.process import Helper, HelperFailed
from ktcli.store.mooncake.values import key_of, read_value, value_bytes
from ktcli.store.pagefile import Damaged, Image, PageEntry, Space
from ktcli.store.pagewriter import PageWriter, Target
from ktcli.store.readrate import ASSUMED_BPS, ReadRate
from ktcli.store.remote import LOOK_S, OPEN_S, READ_S, READ_S_PER_TOKEN, STALL_S
from ktcli.threads import Daemon, in_parallel

REST_S = 30.0  # after which the process is started again
CLOSE_S = 1.5  # the longest that the end of kt waits for what is queued
_WRITE_S = 10.0  # for one file's worth of values
_FRESH_S = 60.0  # for which something that was seen there is taken to be there
_MOST_KNOWN = 1 << 18
_BATCH_BYTES = 16 << 20
_LEAST_ROOM = 48 << 20
_READERS = 4
_MOST_FAILURES = 2  # reads or writes that fail, one after the other
_FULL, _LARGER = -200, -600  # codes
_MISSES = {*range(-799, -699), _LARGER}  # missing, not whole yet, being removed; another value

_Name = tuple[PageKind, bytes]


@dataclass(frozen=True, slots=True)
class StoreConnection:
    """The parameters with which the client process is started.

    Attributes:
        command: its command line, see `command_of`.
        address: that of the master.
    """

    command: Sequence[str]
    address: MooncakeAddress


class MooncakeStore:
    """The stored pages and states of one space in a Mooncake store.

    Args:
        largest_bytes: the most bytes of data of a record.
        warn: called with a sentence about what went wrong; by the thread that calls the store.
    Attributes:
        rate: how long reads take.
    """

    name = "store"

    def __init__(
        self,
        connection: StoreConnection,
        space: Space,
        largest_bytes: int,
        warn: Callable[[str], object] = lambda said: None,
    ) -> None:
        self._connection, self._space, self._warn = connection, space, warn
        self._room_bytes = max(_LEAST_ROOM, _BATCH_BYTES + 2 * largest_bytes)
        self.rate = ReadRate(ASSUMED_BPS)
        self._guard = threading.Lock()  # of what follows
        self._helper: Helper | None = None  # None: the store rests
        self._killed: list[Helper] = []
        self._heard: list[str] = []
        self._complained: set[str] = set()
        self._failures = 0
        # When, `time.monotonic`, the end of the prefix, and the key before.
        self._seen: dict[_Name, tuple[float, int, bytes]] = {}
        self._strange: set[_Name] = set()  # what has other contents
        self._writes_from = 0.0  # `time.monotonic` from which on it writes
        self._until: float | None = None  # of the request that is served now
        self._written = 0
        self._closing, self._begun, self._wanted = (threading.Event() for _ in range(3))
        target = Target(space, _BATCH_BYTES, self._lacking, self._commit, lambda: None)
        self.writer = PageWriter(target, nice=0)
        self._wanted.set()
        # It lives as long as kt, so that the process does, too.
        Daemon(self._supervise, name="kt-mooncake").start()
        self._begun.wait(OPEN_S + 1)
        self._tell()

    @property
    def rests(self) -> bool:
        """Whether the store is out of use because it did not respond or failed; it is tried again after REST_S
        seconds.
        """
        return self._helper is None

    # --- the process ----------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Starts the process whenever there is none, after a rest; this thread starts no other before its end."""
        while not self._closing.is_set():
            self._wanted.wait()
            if self._closing.is_set() or (self._begun.is_set() and self._closing.wait(REST_S)):
                break
            self._wanted.clear()
            self._killed = [each for each in self._killed if not each.reap()]
            try:
                self._connection.address.require_listener(OPEN_S)
                helper = Helper(self._connection.command, self._room_bytes)
                helper.open(self._connection.address.master, OPEN_S)
            except (HelperFailed, KtError) as failure:
                self._complain(str(failure))
                self._wanted.set()
            else:
                with self._guard:
                    self._helper, self._failures = helper, 0
                if self._closing.is_set():
                    helper.kill()
            self._begun.set()

    def _fail(self, helper: Helper, why: str) -> None:
        """Kills the process, which nobody asks any more, and lets the store rest."""
        with self._guard:
            if self._helper is not helper:
                return
            self._helper = None
            self._killed.append(helper)
            self._seen.clear()
        helper.kill()
        if not self._closing.is_set():
            self._complain(why)
            self._wanted.set()

    def _complain(self, why: str, kind: str = "rests") -> None:
        """Notes what went wrong, for the next one who calls; each kind once."""
        with self._guard:
            if kind not in self._complained:
                self._complained.add(kind)
                where = self._connection.address
                self._heard.append(
                    f"kt goes on without the KV store {where}, and tries again later: {why}"
                    if kind == "rests"
                    else f"the KV store {where} {why}"
                )

    def _tell(self) -> None:
        while self._heard:
            self._warn(self._heard.pop(0))

    # --- what is there --------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Resets the time that a request may spend on the store, as one begins; lists nothing, see `seek`."""
        self._until = None
        self._tell()

    def seek(self, labels: Iterable[PageLabel]) -> None:
        """Asks the Mooncake store which of these KV pages and states it has, and notes the answer for `has` and
        `states`; without an answer they count as missing.
        """
        helper = self._helper
        if helper is None:
            return
        wanted = list(labels)
        if self._until is None:
            tokens = sum(label.ids.size for label in wanted if label.kind == PageKind.PAGE)
            self._until = time.monotonic() + READ_S + READ_S_PER_TOKEN * tokens
        asked = [
            label
            for label in wanted
            if not self.has(*_name(label)) and _name(label) not in self._strange
        ]
        if not asked:
            return
        keys = [key_of(self._space, label.kind, label.key) for label in asked]
        wait_s = min(LOOK_S, self._left_s())
        try:
            codes = helper.reads.codes({"op": "exist", "keys": keys}, wait_s)
        except HelperFailed as failure:
            self._fail(helper, str(failure))
        else:
            if all(code < 0 for code in codes):
                self._fail(helper, f"it answers with errors (code {codes[0]})")
            self._see([label for label, code in zip(asked, codes, strict=True) if code == 1])
        self._tell()

    def has(self, kind: PageKind, key: bytes) -> bool:
        """Returns whether the store was found to have, or was given, a KV page or state of this kind and key in the
        last minute; False while it rests.
        """
        seen = None if self.rests else self._seen.get((kind, key))
        return seen is not None and time.monotonic() - seen[0] < _FRESH_S

    def states(self) -> list[tuple[int, bytes, bytes]]:
        """Returns the stored states (what layers such as linear attention keep of a whole prompt prefix) that the store
        was found to have or was given in the last minute, longest prefix first, as tuples (number of tokens of the
        prefix, key of its full pages, its own key); a key is the hash of a prefix.
        """
        with self._guard:
            found = [
                (end, previous, key)
                for (kind, key), (_, end, previous) in self._seen.items()
                if kind == PageKind.STATE
            ]
        return sorted((each for each in found if self.has(PageKind.STATE, each[2])), reverse=True)

    def _see(self, labels: Iterable[PageLabel | PageEntry]) -> None:
        now = time.monotonic()
        with self._guard:
            if len(self._seen) > _MOST_KNOWN:
                self._seen.clear()
            self._seen.update((_name(each), (now, each.end, each.previous)) for each in labels)

    def _forget(self, label: PageLabel, *, is_strange: bool = False) -> None:
        with self._guard:
            self._seen.pop(_name(label), None)
            if is_strange and len(self._strange) < _MOST_KNOWN:
                self._strange.add(_name(label))

    # --- reading --------------------------------------------------------------------------------------

    def read(self, labels: Sequence[PageLabel], into: Sequence[U8Array]) -> int:
        """Reads KV pages and states from the store into the arrays `into`; returns how many arrived intact within the
        request's time limit, up to the first that did not. The other arrays have undefined contents.
        """
        came = 0
        while came < len(labels) and (helper := self._helper) is not None and self._left_s() > 0:
            n = self._fitting(labels[came:], into[came:])
            read = self._read(helper, labels[came : came + n], into[came : came + n]) if n else 0
            came += read
            if read < n or not n:
                break
        self._tell()
        return came

    def _fitting(self, labels: Sequence[PageLabel], into: Sequence[U8Array]) -> int:
        """How many of the first values fit into the memory."""
        n = size = 0
        for label, memory in zip(labels, into, strict=True):
            size += value_bytes(label, memory.size)
            if size > self._room_bytes:
                break
            n += 1
        return n

    def _read(self, helper: Helper, labels: Sequence[PageLabel], into: Sequence[U8Array]) -> int:
        sizes = [value_bytes(each, memory.size) for each, memory in zip(labels, into, strict=True)]
        places = [sum(sizes[:n]) for n in range(len(sizes))]
        keys = [key_of(self._space, label.kind, label.key) for label in labels]
        request = {"op": "get", "keys": keys, "at": places, "sizes": sizes}
        began = time.perf_counter()
        try:
            codes = helper.reads.codes(request, self._left_s())
        except HelperFailed as failure:
            self._fail(helper, str(failure))
            return 0
        jobs = list(zip(codes, sizes, places, labels, into, strict=True))

        def check(job: tuple[int, int, int, PageLabel, U8Array]) -> bool:
            return self._take(helper, *job)

        sound = in_parallel(check, jobs, _READERS, "kt-read")
        intact = next((n for n, ok in enumerate(sound) if not ok), len(sound))
        if intact:
            self.rate.note(sum(sizes[:intact]), time.perf_counter() - began)
        self._count(helper, [each for each in codes if each < 0 and each not in _MISSES])
        return intact

    def _take(
        self, helper: Helper, code: int, size: int, at: int, label: PageLabel, data: U8Array
    ) -> bool:
        """Checks a value that has come, and copies its data; returns whether it is what was asked for."""
        if code == size:
            try:
                read_value(helper.read_room[at : at + size], self._space, label, data)
            except Damaged as damage:
                self._forget(label, is_strange=True)
                said = "its tokens are computed again, and so are those of all others that differ"
                self._complain(f"has a value that {damage}; {said}", "damaged")
                return False
            return True
        self._forget(label, is_strange=code >= 0 or code == _LARGER)
        return False

    def _count(self, helper: Helper, errors: Sequence[int]) -> None:
        """Counts calls that failed one after the other; after a few the store rests."""
        self._failures = self._failures + 1 if errors else 0
        if self._failures >= _MOST_FAILURES:
            self._fail(helper, f"it answers with errors (code {errors[0]})")

    def _left_s(self) -> float:
        """The seconds that the request may still spend here."""
        return READ_S if self._until is None else self._until - time.monotonic()

    # --- writing --------------------------------------------------------------------------------------

    def put(self, label: PageLabel, size_bytes: int, fill: Fill) -> bool:
        """Queues a KV page or state, whose bytes another thread gets by calling `fill`, to be written to the store.
        Returns whether it is queued: not if the store has it, rests or is full, it is too large, or too many wait.
        """
        fits = value_bytes(label, size_bytes) <= self._room_bytes
        is_there = self.has(*_name(label)) or _name(label) in self._strange
        if not fits or is_there or not self._writes:
            return False
        return self.writer.put(label, size_bytes, fill)

    @property
    def _writes(self) -> bool:
        return not self.rests and time.monotonic() >= self._writes_from

    def _lacking(self, labels: Sequence[PageLabel]) -> list[bool]:
        return [self._writes and not self.has(*_name(label)) for label in labels]

    def _commit(self, image: Image) -> bool:
        """Stores the records of an image, each as a value; always done: what cannot be stored is dropped."""
        left = list(image.entries)
        while left and (helper := self._helper) is not None and self._writes:
            n = self._lay(helper, image, left)
            self._store(helper, left[:n])
            del left[:n]
        return True

    def _lay(self, helper: Helper, image: Image, entries: Sequence[PageEntry]) -> int:
        """Lays the first values that fit into the memory; returns their number."""
        # Where each is, and its bytes; of the writer's thread.
        self._laid: list[tuple[int, int]] = []
        at = 0
        for entry in entries:
            head, data = image.alone(entry)
            end = at + len(head) + data.size
            if end > self._room_bytes:
                break
            room = helper.write_room[at:end]
            room[: len(head)] = memoryview(head)
            room[len(head) :] = data
            self._laid.append((at, end - at))
            at = end
        return len(self._laid)

    def _store(self, helper: Helper, entries: Sequence[PageEntry]) -> None:
        request = {
            "op": "put",
            "keys": [key_of(self._space, entry.kind, entry.key) for entry in entries],
            "at": [helper.write_at + at for at, _ in self._laid],
            "sizes": [size for _, size in self._laid],
        }
        try:
            codes = helper.writes.codes(request, _WRITE_S)
        except HelperFailed as failure:
            self._fail(helper, str(failure))
            return
        stored = [entry for entry, code in zip(entries, codes, strict=True) if code == 0]
        self._see(stored)
        self._written += len(stored)
        if _FULL in codes:
            self._writes_from = time.monotonic() + REST_S
            self._complain("has no free memory; kt store serve lends it some", "full")
        self._count(helper, [code for code in codes if code < 0 and code != _FULL])

    def use(self, keys: Iterable[bytes]) -> None:
        """Does nothing: Mooncake's master records itself what is read."""

    def hurry(self) -> None:
        """Makes the writing thread store all queued KV pages and states at once; does not wait for it."""
        if not self.rests:
            self.writer.hurry()

    def flush(self, wait_s: float) -> bool:
        """Waits until no KV pages and states are queued any more, at most `wait_s` seconds; returns whether that is so,
        False if the store rests. Those that cannot be written are dropped. Any thread may call it.
        """
        until = time.monotonic() + wait_s
        while (helper := self._helper) is not None:
            before, left_s = self._written, until - time.monotonic()
            if self.writer.flush(min(STALL_S, max(0.0, left_s))):
                return True
            if left_s <= STALL_S:
                return False
            if self._written == before:
                self._fail(helper, "it does not take pages in time")
        return False

    def close(self) -> None:
        """Writes queued records for at most CLOSE_S seconds, and ends the process of Mooncake's client."""
        self.flush(CLOSE_S)
        self._closing.set()
        self._wanted.set()
        if (helper := self._helper) is not None:
            self._fail(helper, "")
        self.writer.close(0.0)
        self._killed = [each for each in self._killed if not each.reap()]
        self._tell()


def _name(label: PageLabel | PageEntry) -> _Name:
    return PageKind(label.kind), label.key
