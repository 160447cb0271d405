"""Reading pages and states back from stores into free ones of memory, as far as that is faster than computing them.

What came is sealed, so that it is found like all others. A page that came back equals the one that left, bit for bit,
or it does not come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Numbers
from dataclasses import replace
from itertools import takewhile

from ktcli.engine.pages import PagePool, PoolFull
from ktcli.engine.prefix import Content
from ktcli.engine.statepool import Place
from ktcli.engine.stores import KindPages, Store, StoredMemory, Stores
from ktcli.engine.writeback import WriteBack
from ktcli.native import PAGE_TOKENS
from ktcli.pagelabel import PageKind, PageLabel

_LEAST_TIMED = 64  # tokens of a step whose speed says what a prompt's tokens cost
_TRIED = 0.05  # of the time for computing a prompt, which reading may cost to measure a store
_SLICE_BYTES = 32 << 20  # read at once, before it is asked again whether reading is worth while
# Read first of a store whose speed is not known: most of the time is not that of asking.
_TRY_BYTES = 1 << 20
# Of the last positions, at which a store that cannot list what it has is asked for states.
_MOST_ENDS = 4096

_Held = list[tuple[PagePool, int]]  # pages that are held until all is there


class ReadingWorth:
    """Compares the time of reading with that of computing.

    Attributes:
        prompt_tok_s: the tokens of prompts that are computed in a second, as measured here or by an earlier process;
            None: nobody measured.
    """

    def __init__(self, stores: Stores, memory: StoredMemory) -> None:
        self._stores, self._memory = stores, memory
        self.prompt_tok_s: float | None = None
        self._allowed_s = 0.0  # for measuring stores, of the prompt that begins now

    def measure(self, n_tokens: int, seconds: float) -> None:
        """Updates the measured speed of computing prompts (`prompt_tok_s`) with a step that computed `n_tokens` tokens
        of a sequence in `seconds`; steps of fewer than 64 tokens are ignored.
        """
        if n_tokens >= _LEAST_TIMED and seconds > 0:
            fresh = n_tokens / seconds
            known = self.prompt_tok_s
            self.prompt_tok_s = fresh if known is None else (known + fresh) / 2

    def begin(self, n_tokens: int) -> None:
        """Sets the time that may be spent on measuring stores for a new prompt to 5 % of the expected time for
        computing its remaining `n_tokens` tokens; 0 while the speed of computing is unknown.
        """
        self._allowed_s = _TRIED * n_tokens / self.prompt_tok_s if self.prompt_tok_s else 0.0

    def pays(self, n_tokens: int, labels: Numbers[PageLabel], store: Store | None = None) -> bool:
        """Returns whether reading these pages and states from stores is expected to be faster than computing `n_tokens`
        tokens, or fits into the time that `begin` allows for measuring a store of unknown speed (if `store` is given,
        only reading the first of them must fit); True while the speed of computing is unknown.

        Args:
            labels: the labels of the pages and states to read.
            store: the store that would give all of them; None: each comes from the nearest store that has it.
        """
        if self.prompt_tok_s is None:
            return True
        sizes = [(each.kind, each.key, self._memory.size_bytes(each.kind)) for each in labels]
        if store is None:
            seconds, unknown = self._stores.seconds(sizes), self._stores.unmeasured(labels)
        else:
            seconds = store.rate.seconds(sum(size for *_, size in sizes))
            unknown = not store.rate.is_known
        if seconds < n_tokens / self.prompt_tok_s:
            return True
        if unknown and store is not None:
            return store.rate.seconds(sizes[0][2]) <= self._allowed_s
        if unknown and seconds <= self._allowed_s:
            self._allowed_s -= seconds
            return True
        return False


class Restorer:
    """Reads the longest stored prefix of a prompt; what came is queued for the stores that lack it.

    Attributes:
        restored: the positions that came back from each store so far, by its name.
    """

    def __init__(
        self, stores: Stores, memory: StoredMemory, worth: ReadingWorth, writeback: WriteBack
    ) -> None:
        self._stores, self._memory, self._worth, self._writeback = stores, memory, worth, writeback
        self._kinds, self._states, self._windows = memory.kinds, memory.states, memory.windows
        self.restored = dict.fromkeys((store.name for store in stores.all), 0)

    def bring(self, content: Content, have: int) -> None:
        """Reads the pages and states of the longest stored prefix of a sequence's ids, but not of all of them, from
        stores into memory that no sequence holds, as far as that is faster than computing, and seals them, so that
        they are found as cached.

        Args:
            content: the ids, and how each is to be computed.
            have: the positions that memory already has.
        """
        labels = _labels(content)
        left = content.ids.size - 1 - have
        self._worth.begin(left)
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

    def _look(self, content: Content, labels: list[PageLabel], have: int) -> None:
        """Lets stores look for what is new: the nearest always, the others if pages still lack, or a state may, and
        reading may be faster than computing."""
        nearest = self._stores.all[0]
        nearest.refresh()
        known = all(map(self._known, labels))
        known = known and self._reach(labels) == len(labels)  # with the windows before their end
        if known and self._states is None:
            return
        missing = [label for label in labels if not self._known(label)]
        for store in self._stores.all:
            if not missing or self._worth.pays(PAGE_TOKENS * len(missing), missing, store):
                if store is not nearest:
                    store.refresh()
                store.seek([*labels, *self._windowed(labels, len(labels) * PAGE_TOKENS)])
                store.seek(self._partial(content, labels, have))

    def _partial(self, content: Content, labels: list[PageLabel], have: int) -> Iterator[PageLabel]:
        """Yields the labels of all that may be stored of a content at places that only its writer knew: states, or else
        pages before they were full."""
        ends = range(max(have + 1, content.ids.size - _MOST_ENDS), content.ids.size)
        if self._states is None:
            full = sum(1 for _ in takewhile(self._known, labels))
            first = full * PAGE_TOKENS
            ends = range(max(first, have) + 1, min(first + PAGE_TOKENS, content.ids.size))
        for end in ends:
            full, rest = divmod(end, PAGE_TOKENS)
            span, previous = (end - rest, end), labels[full - 1].key if full else content.root
            if self._states is not None:
                yield content.label(PageKind.STATE, previous, *span)
            if rest:
                page = content.label(PageKind.PAGE, previous, *span)
                yield from [page] if self._windows is None else [page, _of_window(page)]

    def _bring_prefix(self, labels: list[PageLabel], held: _Held) -> None:
        """Reads the pages of the longest prefix before which the pages of the window are known, too."""
        n = self._reach(labels)
        windows = self._windowed(labels[:n], n * PAGE_TOKENS)
        missing = [label for label in windows if not self._in_memory(label)]
        pays = not missing or self._worth.pays(n * PAGE_TOKENS, missing)
        n = self._reach(labels[: self._bring_pages(labels[:n], held)])
        while n and self._windows is not None:
            wanted = self._windowed(labels[:n], n * PAGE_TOKENS)
            came = self._bring_pages(wanted, held, pays=pays)
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
        pages = list(takewhile(self._known, labels))
        first, previous = len(pages) * PAGE_TOKENS, pages[-1].key if pages else content.root
        last = min(first + PAGE_TOKENS - 1, content.ids.size - 1)
        for end in range(last, max(first, have), -1):
            page = content.label(PageKind.PAGE, previous, first, end)
            wanted = [*pages, page]
            windows = self._windowed(wanted, end)
            if not all(map(self._known, (page, *windows[-1:]))):
                continue
            if self._worth_reading(wanted, windows, end - have):
                came = self._bring_all(wanted, held) and self._bring_all(windows, held)
                return wanted if came else []
        return []

    def _reach(self, labels: list[PageLabel]) -> int:
        """The most of the first pages before whose end all pages of the window are known, to memory or to the store."""
        n = len(labels)
        while n and self._windows is not None:
            first = self._windows.first(n * PAGE_TOKENS)
            unknown = [at for at in range(first, n) if not self._known(_of_window(labels[at]))]
            if not unknown:
                break
            n = unknown[-1]
        return n

    def _windowed(self, labels: Numbers[PageLabel], end: int) -> list[PageLabel]:
        """The labels of the pages of the window before position `end`, of those of all pages up to there."""
        if self._windows is None:
            return []
        return [_of_window(label) for label in labels[self._windows.first(end) :]]

    def _in_memory(self, label: PageLabel) -> bool:
        return self._kinds[label.kind].pool.page_of(label.key) is not None

    def _known(self, label: PageLabel) -> bool:
        return self._in_memory(label) or self._stored(label)

    def _stored(self, label: PageLabel) -> bool:
        """Returns whether a page can be had from a store; one without bytes always can."""
        has_bytes = self._kinds[label.kind].memory.page_bytes > 0
        return not has_bytes or self._stores.has(label.kind, label.key)

    def _bring_all(self, labels: Numbers[PageLabel], held: _Held) -> bool:
        """Holds or reads pages, which is known to be worth while; returns whether all came."""
        return self._bring_pages(labels, held, pays=True) == len(labels)

    def _bring_pages(self, labels: Numbers[PageLabel], held: _Held, *, pays: bool = False) -> int:
        """Holds the first of some pages of a kind as far as memory has them, and reads those after them; returns their
        number.

        Args:
            pays: whether that is known to be worth while.
        """
        if not labels:
            return 0
        pages, n = self._kinds[labels[0].kind], 0
        pool, size = pages.pool, pages.memory.page_bytes
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
            part = list(takewhile(self._stored, labels[n : n + at_once]))
            tokens = sum(label.ids.size for label in part)
            if not part or not (pays or self._worth.pays(tokens, part)):
                break
            read = self._read_pages(pages, part, held)
            n, came = n + read, came + read
            if read < len(part):
                break
        return n

    def _read_pages(self, pages: KindPages, labels: list[PageLabel], held: _Held) -> int:
        """Reads pages into free ones, and holds those that came; returns their number."""
        kind, pool, memory = pages.kind, pages.pool, pages.memory
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
            self._writeback.put(page, label)
        for page in taken[n:]:
            pool.release(page)
        held += [(pool, page) for page in taken[:n]]
        if kind == PageKind.PAGE or not self._memory.own.page_bytes:
            for label, store in zip(labels, came, strict=False):
                self.restored[store.name] += label.ids.size
        return n

    def _bring_state(
        self, content: Content, labels: list[PageLabel], held: _Held, have: int
    ) -> None:
        """Reads the longest prefix at whose end the store has a state, if it is longer than `have`."""
        for end, previous, key in self._stores.states():
            full, rest = divmod(end, PAGE_TOKENS)
            if end <= have:
                return
            if end >= content.ids.size or previous != (
                labels[full - 1].key if full else content.root
            ):
                continue
            state = content.label(PageKind.STATE, previous, end - rest, end)
            if state.key != key:
                continue
            tail = [content.label(PageKind.PAGE, previous, end - rest, end)] if rest else []
            windows = self._windowed([*labels[:full], *tail], end)
            if not self._worth_reading([*labels[:full], *tail], windows, end - have, state):
                continue
            if self._bring_pages(labels[:full], held) < full:
                continue
            if self._bring_all(tail, held) and self._bring_all(windows, held):
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
        missing = [label for label in (*pages, *windows) if not self._in_memory(label)]
        if not all(map(self._stored, missing)):
            return False
        return self._worth.pays(tokens, missing if state is None else [*missing, state])

    def _read_state(self, label: PageLabel) -> None:
        assert self._states is not None
        try:
            slot = self._states.take()
        except PoolFull:
            return
        room = self._memory.own.state_room(slot)
        if self._stores.read([label], [room]):
            self._memory.own.restore_state(slot, room)
            self._states.keep(label.key, slot, Place(label.previous, label.end), 0)
            if self._states.slot_of(label.key) == slot:
                self._writeback.put(slot, label)
        self._states.release(slot)


def _labels(content: Content) -> list[PageLabel]:
    """The labels of the full pages of a prefix that leaves an id to compute."""
    labels, key = [], content.root
    for first in range(0, content.ids.size - PAGE_TOKENS, PAGE_TOKENS):
        labels.append(content.label(PageKind.PAGE, key, first, first + PAGE_TOKENS))
        key = labels[-1].key
    return labels


def _of_window(label: PageLabel) -> PageLabel:
    """The label of the window page of the same prefix."""
    return replace(label, kind=PageKind.WINDOW)
