"""The storage tiers below memory: pages and states that are written to stores and restored from them.

What a sequence seals is due to be written as soon as nobody is disturbed by it (`writeback`). When a sequence begins,
pages that memory does not have but a store has are read into free ones and sealed there, so that they are found like
all others; stores that lack them get them, too. A page that came back equals the one that left, bit for bit, or it does
not come back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Numbers
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Protocol

from ktcli.engine.pages import PagePool, PoolFull
from ktcli.engine.pagetable import PagedMemory, WindowPages
from ktcli.engine.prefix import Content
from ktcli.engine.statepool import Place, StatePool
from ktcli.engine.stores import Store, Stores
from ktcli.engine.writeback import WriteBack
from ktcli.native import PAGE_TOKENS
from ktcli.pagelabel import PageKind, PageLabel, U8Array
from ktcli.records import dataclass

# After a step the engine counts as busy for as long as a person would notice a pause.
_BUSY_S = 0.5
_MOST_STEP_S = 60.0
_SLICE_BYTES = 32 << 20  # read at once, before it is asked again whether reading is worth while
_LEAST_TIMED = 64  # tokens of a step whose speed says what a prompt's tokens cost
_OWN = "disk"  # the store that only servers of the same library have
_TRY_BYTES = (
    1 << 20
)  # read first of a store whose speed is not known: most of the time is not that of asking
_TRIED = 0.05  # of the time for computing a prompt, which reading may cost to measure a store
_MOST_ENDS = (
    4096  # of the last positions, at which a store that cannot list what it has is asked for states
)
_STATES_OF_LINE = 2  # snapshots of one sequence that are due after a turn: the latest

_Held = list[tuple[PagePool, int]]  # pages that are held until all is there


class PageMemory(PagedMemory, Protocol):
    """The interface of the memory of pages and states, which stores write from and read into."""

    @property
    def codec(self) -> str:
        """The name of their layout."""

    @property
    def state_bytes(self) -> int:
        """The bytes of a state as it is stored."""

    def saved_state(self, slot: int) -> U8Array:
        """Returns the stored bytes of a state; for a snapshot any thread may ask."""

    def state_room(self, slot: int) -> U8Array:
        """Returns a buffer for the bytes of a state that is read; `restore_state` then copies them into its slot."""

    def restore_state(self, slot: int, room: U8Array) -> None:
        """Copies the bytes that were read into `room`, as `state_room` returned it, into a slot."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The pages of one kind, and where they lie."""

    kind: PageKind
    pool: PagePool
    memory: PagedMemory


class Tier:
    """Moves pages and states between the pools of an engine and stores.

    Args:
        stores: nearest first.
    Attributes:
        prompt_tok_s: the tokens of prompts that are computed in a second, as measured here or by an earlier process;
            None: nobody measured.
    """

    def __init__(
        self,
        stores: Iterable[Store],
        memory: PageMemory,
        pages: PagePool,
        states: StatePool | None,
        windows: WindowPages | None = None,
    ) -> None:
        self._stores, self._memory = Stores(stores), memory
        self._states, self._windows = states, windows
        self._kinds = {PageKind.PAGE: _Kind(PageKind.PAGE, pages, memory)}
        if windows is not None:
            assert windows.memory is not None
            self._kinds[PageKind.WINDOW] = _Kind(PageKind.WINDOW, windows.pool, windows.memory)
        self._writeback = WriteBack(self._stores, self._saved)
        self._latest: dict[int, deque[tuple[int, PageLabel]]] = {}  # snapshots, by line
        self.prompt_tok_s: float | None = None
        self._began = self._touched = 0.0
        self._allowed_s = 0.0  # for measuring stores, of the prompt that begins now
        self._in_step = self._hastens = False
        self._restored = dict.fromkeys((store.name for store in self._stores.all), 0)
        for each in self._kinds.values():
            each.pool.on_evict = partial(self._writeback.evicted, each.kind)
        if states is not None:
            states.on_evict = partial(self._writeback.evicted, PageKind.STATE)

    def detach(self) -> None:
        """Disconnects itself from the pools; no store copies anything afterwards."""
        for each in self._kinds.values():
            each.pool.on_evict = None
        if self._states is not None:
            self._states.on_evict = None
        self._writeback.forget()

    @property
    def restored(self) -> dict[str, int]:
        """The positions that came back from each store so far, by its name."""
        return dict(self._restored)

    @property
    def read_bps(self) -> dict[str, float]:
        """The bytes read per second from each store, by its name; without stores that were not read yet."""
        rates = {store.name: store.rate.bps for store in self._stores.all}
        return {name: bps for name, bps in rates.items() if bps is not None}

    @property
    def is_shared(self) -> bool:
        """Whether other servers, on whatever machine, find what is stored."""
        return any(store.name != _OWN for store in self._stores.all)

    # --- down -----------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a step runs, or has just run and the next one is about to, and nobody waits for what is queued."""
        if self._hastens:
            return False
        since = time.monotonic() - self._touched
        return since < (_MOST_STEP_S if self._in_step else _BUSY_S)

    def step_begins(self) -> None:
        """Records that a step begins now."""
        self._began = self._touched = time.monotonic()
        self._in_step = True

    def step_ended(self, n_tokens: int) -> None:
        """Records that a step of `n_tokens` tokens of a sequence has ended, and measures its speed."""
        self._in_step = self._hastens = False
        self._touched = time.monotonic()
        if n_tokens >= _LEAST_TIMED and self._touched > self._began:
            fresh = n_tokens / (self._touched - self._began)
            known = self.prompt_tok_s
            self.prompt_tok_s = fresh if known is None else (known + fresh) / 2

    def sealed(self, page: int, label: PageLabel) -> None:
        """Queues a page that got its content address to be stored."""
        if size_bytes := self._size(label.kind):
            self._writeback.put(page, label, size_bytes)

    def kept(self, slot: int, label: PageLabel, line: int, *, marked: bool = False) -> None:
        """Records a snapshot of a sequence: the latest ones of a sequence are stored when the turn is over, and at once
        those from which other prompts will continue.

        Args:
            marked: whether it is such a one, see `Sequence.mark`.
        """
        if marked:
            self._writeback.put(slot, label, self._memory.state_bytes)
            return
        latest = self._latest.setdefault(line, deque(maxlen=_STATES_OF_LINE))
        if all(label.key != other.key for _, other in latest):
            latest.append((slot, label))

    def turn_over(self) -> None:
        """Queues the latest snapshots of all sequences to be stored: an answer has ended, or another prompt begins."""
        for latest in self._latest.values():
            for slot, label in latest:
                if self._states is not None and self._states.slot_of(label.key) == slot:
                    self._writeback.put(slot, label, self._memory.state_bytes)
        self._latest.clear()

    def hasten(self) -> None:
        """Has stores write at full speed until the end of the next step, by whole files: `persist` follows soon, and
        then less is left."""
        self._hastens = True

    def persist(self, labels: Iterable[PageLabel]) -> None:
        """Has everything in the queue, these pages and the latest snapshots stored at once in each store that lacks
        them.

        Args:
            labels: of the full pages of a sequence; those that memory has not any more are left out.
        """
        for label in labels:
            for each in self._kinds.values():
                if (page := each.pool.page_of(label.key)) is not None:
                    self.sealed(page, replace(label, kind=each.kind))
        self.turn_over()
        self._stores.hurry()

    def flush(self, wait_s: float) -> bool:
        """Waits until everything in the queue is stored; returns whether that was done within `wait_s` seconds. For any
        thread but the engine's.
        """
        self._stores.hurry()
        until = time.monotonic() + wait_s
        return all(store.flush(max(0.0, until - time.monotonic())) for store in self._stores.all)

    def _saved(self, kind: PageKind, number: int) -> U8Array:
        if kind == PageKind.STATE:
            return self._memory.saved_state(number)
        return self._kinds[kind].memory.saved_page(number)

    def _size(self, kind: PageKind) -> int:
        if kind == PageKind.STATE:
            return self._memory.state_bytes
        return self._kinds[kind].memory.page_bytes

    # --- up -------------------------------------------------------------------------------------------

    def bring(self, content: Content, have: int) -> dict[str, int]:
        """Reads the longest stored prefix of a content's ids, but not all of it, into free pages, and seals them;
        returns the number of positions from each store, by its name.

        Args:
            have: the positions that memory already has.
        """
        self.turn_over()
        before, labels = self.restored, _labels(content)
        left = content.ids.size - 1 - have
        self._allowed_s = _TRIED * left / self.prompt_tok_s if self.prompt_tok_s else 0.0
        if left > 0:  # otherwise nothing more can be found
            self._look(content, labels, have)
        held: _Held = []
        try:
            if self._states is None:
                opened = self._bring_open(content, labels, held, have)
                labels = opened or labels
                if not opened:
                    self._bring_prefix(labels, held)
            else:
                self._bring_state(content, labels, held, have)
        finally:
            for pool, page in reversed(held):  # the last pages are evicted first
                pool.release(page)
        for store in self._stores.all:
            store.use(label.key for label in labels)
        return {name: n - before[name] for name, n in self._restored.items() if n > before[name]}

    def _look(self, content: Content, labels: list[PageLabel], have: int) -> None:
        """Lets stores look for what is new: the nearest always, the others if pages still lack, or a state may, and
        reading may be faster than computing."""
        nearest = self._stores.all[0]
        nearest.refresh()
        known = all(self._known(PageKind.PAGE, label) for label in labels)
        known = known and self._reach(labels) == len(labels)  # with the windows before their end
        if known and self._states is None:
            return
        missing = [label for label in labels if not self._known(PageKind.PAGE, label)]
        for store in self._stores.all:
            if not missing or self._pays(PAGE_TOKENS * len(missing), missing, store):
                if store is not nearest:
                    store.refresh()
                store.seek([*labels, *self._windowed(labels, len(labels) * PAGE_TOKENS)])
                store.seek(self._partial(content, labels, have))

    def _partial(self, content: Content, labels: list[PageLabel], have: int) -> Iterator[PageLabel]:
        """Yields the labels of all that may be stored of a content at places that only its writer knew: states, or else
        pages before they were full."""
        ends = range(max(have + 1, content.ids.size - _MOST_ENDS), content.ids.size)
        if self._states is None:
            full = sum(1 for _ in takewhile(partial(self._known, PageKind.PAGE), labels))
            first = full * PAGE_TOKENS
            ends = range(max(first, have) + 1, min(first + PAGE_TOKENS, content.ids.size))
        for end in ends:
            full, rest = divmod(end, PAGE_TOKENS)
            span, previous = (end - rest, end), labels[full - 1].key if full else content.root
            if self._states is not None:
                yield _label(PageKind.STATE, previous, content, span)
            if rest:
                page = _label(PageKind.PAGE, previous, content, span)
                yield from [page] if self._windows is None else [page, _of_window(page)]

    def _bring_prefix(self, labels: list[PageLabel], held: _Held) -> None:
        """Reads the pages of the longest prefix before which the pages of the window are known, too."""
        n = self._reach(labels)
        missing = [
            label
            for label in self._windowed(labels[:n], n * PAGE_TOKENS)
            if self._kinds[PageKind.WINDOW].pool.page_of(label.key) is None
        ]
        pays = not missing or self._pays(n * PAGE_TOKENS, missing)
        n = self._reach(labels[: self._bring_pages(PageKind.PAGE, labels[:n], held)])
        while n and self._windows is not None:
            wanted = self._windowed(labels[:n], n * PAGE_TOKENS)
            came = self._bring_pages(PageKind.WINDOW, wanted, held, pays=pays)
            shorter = self._reach(labels[:n])
            if came == len(wanted) or shorter == n:
                return
            n = shorter  # something was damaged

    def _bring_open(
        self, content: Content, labels: list[PageLabel], held: _Held, have: int
    ) -> list[PageLabel]:
        """Reads the longest prefix that ends with a page stored before it was full, if reading pays; returns the labels
        of its pages, none if there is no such prefix or not all of it came.

        Args:
            labels: of the full pages of the content.
            have: the positions that memory already has.
        """
        pages = list(takewhile(partial(self._known, PageKind.PAGE), labels))
        first, previous = len(pages) * PAGE_TOKENS, pages[-1].key if pages else content.root
        last = min(first + PAGE_TOKENS - 1, content.ids.size - 1)
        for end in range(last, max(first, have), -1):
            page = _label(PageKind.PAGE, previous, content, (first, end))
            wanted = [*pages, page]
            windows = self._windowed(wanted, end)
            if not all(self._known(each.kind, each) for each in (page, *windows[-1:])):
                continue
            if self._worth_reading(wanted, windows, end - have):
                came = self._bring_pages(PageKind.PAGE, wanted, held, pays=True) == len(wanted)
                if came and windows:
                    count = self._bring_pages(PageKind.WINDOW, windows, held, pays=True)
                    came = count == len(windows)
                return wanted if came else []
        return []

    def _reach(self, labels: list[PageLabel]) -> int:
        """The most of the first pages before whose end all pages of the window are known, to memory or to the store."""
        n = len(labels)
        while n and self._windows is not None:
            first = self._windows.first(n * PAGE_TOKENS)
            unknown = [
                at
                for at in range(first, n)
                if not self._known(PageKind.WINDOW, replace(labels[at], kind=PageKind.WINDOW))
            ]
            if not unknown:
                break
            n = unknown[-1]
        return n

    def _windowed(self, labels: Numbers[PageLabel], end: int) -> list[PageLabel]:
        """The labels of the pages of the window before position `end`, of those of all pages up to there."""
        if self._windows is None:
            return []
        return [_of_window(label) for label in labels[self._windows.first(end) :]]

    def _known(self, kind: PageKind, label: PageLabel) -> bool:
        in_memory = self._kinds[kind].pool.page_of(label.key) is not None
        return in_memory or self._stored(kind, label)

    def _stored(self, kind: PageKind, label: PageLabel) -> bool:
        """Returns whether a page can be had from a store; one without bytes always can."""
        return not self._kinds[kind].memory.page_bytes or self._stores.has(kind, label.key)

    def _bring_pages(
        self, kind: PageKind, labels: Numbers[PageLabel], held: _Held, *, pays: bool = False
    ) -> int:
        """Holds the first pages as far as memory has them, and reads those after them; returns their number.

        Args:
            pays: whether that is known to be worth while.
        """
        pool, size = self._kinds[kind].pool, self._kinds[kind].memory.page_bytes
        n = 0
        while n < len(labels) and (page := pool.page_of(labels[n].key)) is not None:
            pool.hold(page)
            held.append((pool, page))
            n += 1
        most, came = max(1, _SLICE_BYTES // max(1, size)), 0
        while n < len(labels):
            # A store whose speed is not known yet is asked for little, then for more.
            trying = self._stores.unmeasured(labels[n:][:1])
            pays = pays and not trying
            at_once = min(most, max(1, _TRY_BYTES // max(1, size), came)) if trying else most
            part = list(takewhile(partial(self._stored, kind), labels[n : n + at_once]))
            tokens = sum(label.ids.size for label in part)
            if not part or not (pays or self._pays(tokens, part)):
                break
            read = self._read_pages(kind, part, held)
            n, came = n + read, came + read
            if read < len(part):
                break
        return n

    def _read_pages(self, kind: PageKind, labels: list[PageLabel], held: _Held) -> int:
        """Reads pages into free ones, and holds those that came; returns their number."""
        pool, memory = self._kinds[kind].pool, self._kinds[kind].memory
        try:
            taken = pool.take(min(len(labels), pool.available))
        except PoolFull:
            return 0
        n, came = len(taken), list[Store]()
        if memory.page_bytes:
            rooms = [memory.page_room(page) for page in taken]
            came = self._stores.read(labels[: len(taken)], rooms)
            n = len(came)
            for page, room in zip(taken[:n], rooms, strict=False):
                memory.restore_page(page, room)
        for page, label in zip(taken[:n], labels, strict=False):
            pool.seal(page, label.key, label if kind == PageKind.PAGE else None)
            self.sealed(page, label)
        for page in taken[n:]:
            pool.release(page)
        held += [(pool, page) for page in taken[:n]]
        if kind == PageKind.PAGE or not self._memory.page_bytes:
            for label, store in zip(labels, came, strict=False):
                self._restored[store.name] += label.ids.size
        return n

    def _bring_state(
        self,
        content: Content,
        labels: list[PageLabel],
        held: _Held,
        have: int,
    ) -> None:
        """Reads the longest prefix at whose end the store has a state, if it is longer than `have`."""
        root = content.root
        for end, previous, key in self._stores.states():
            full, rest = divmod(end, PAGE_TOKENS)
            if end <= have:
                return
            if end >= content.ids.size or previous != (labels[full - 1].key if full else root):
                continue
            state = _label(PageKind.STATE, previous, content, (end - rest, end))
            if state.key != key:
                continue
            tail = [_label(PageKind.PAGE, previous, content, (end - rest, end))] if rest else []
            windows = self._windowed([*labels[:full], *tail], end)
            if not self._worth_reading([*labels[:full], *tail], windows, end - have, state):
                continue
            if self._bring_pages(PageKind.PAGE, labels[:full], held) < full:
                continue
            if self._bring_pages(PageKind.PAGE, tail, held, pays=True) < len(tail):
                continue
            if not windows or self._bring_pages(PageKind.WINDOW, windows, held, pays=True) == len(
                windows
            ):
                self._read_state(state)
                return

    def _worth_reading(
        self,
        pages: list[PageLabel],
        windows: list[PageLabel],
        tokens: int,
        state: PageLabel | None = None,
    ) -> bool:
        """Returns whether stores have what memory has not of these pages, and reading them and a state is faster than
        computing so many tokens."""
        missing = [
            label
            for label in (*pages, *windows)
            if self._kinds[label.kind].pool.page_of(label.key) is None
        ]
        if not all(self._stored(label.kind, label) for label in missing):
            return False
        return self._pays(tokens, missing if state is None else [*missing, state])

    def _read_state(self, label: PageLabel) -> None:
        assert self._states is not None
        try:
            slot = self._states.take()
        except PoolFull:
            return
        room = self._memory.state_room(slot)
        if self._stores.read([label], [room]):
            self._memory.restore_state(slot, room)
            self._states.keep(label.key, slot, Place(label.previous, label.end), 0)
            if self._states.slot_of(label.key) == slot:
                self._writeback.put(slot, label, self._memory.state_bytes)
        self._states.release(slot)

    def _pays(self, n_tokens: int, labels: Numbers[PageLabel], store: Store | None = None) -> bool:
        """Returns whether reading is faster than computing so many tokens, as far as both were measured, or so little
        that it shows how fast a store is now.

        Args:
            store: the one that would give all of them; None: each is read where it is nearest.
        """
        if self.prompt_tok_s is None:
            return True
        sizes = [(each.kind, each.key, self._size(each.kind)) for each in labels]
        if store is None:
            seconds, unknown = self._stores.seconds(sizes), self._stores.unmeasured(labels)
        else:
            seconds, unknown = (
                store.rate.seconds(sum(s for *_, s in sizes)),
                not store.rate.is_known,
            )
        if seconds < n_tokens / self.prompt_tok_s:
            return True
        if unknown and store is not None:
            return store.rate.seconds(sizes[0][2]) <= self._allowed_s
        if unknown and seconds <= self._allowed_s:
            self._allowed_s -= seconds
            return True
        return False


def _labels(content: Content) -> list[PageLabel]:
    """The labels of the full pages of a prefix that leaves an id to compute."""
    labels, key = [], content.root
    for first in range(0, content.ids.size - PAGE_TOKENS, PAGE_TOKENS):
        labels.append(_label(PageKind.PAGE, key, content, (first, first + PAGE_TOKENS)))
        key = labels[-1].key
    return labels


def _of_window(label: PageLabel) -> PageLabel:
    """The label of the window page of the same prefix."""
    return replace(label, kind=PageKind.WINDOW)


def _label(kind: PageKind, previous: bytes, content: Content, span: tuple[int, int]) -> PageLabel:
    """The label of what ends with the ids of a span; `previous` is the key of the prefix before it."""
    first, end = span
    key, how = content.link(previous, first, end), content.how(slice(first, end))
    return PageLabel(kind, key, previous, end, content.ids[first:end], how)
