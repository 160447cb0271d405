"""The pools of pages and states that an engine's sequences share, and the prefixes cached in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field
from typing import NamedTuple

from ktcli.engine.adapters import AttachedAdapter
from ktcli.engine.forms import ABSORBED
from ktcli.engine.pages import PagePool
from ktcli.engine.pagetable import WindowPages
from ktcli.engine.prefix import Content
from ktcli.engine.statepool import StatePool
from ktcli.engine.tier import Tier
from ktcli.errors import KtError
from ktcli.native import PAGE_TOKENS
from ktcli.records import dataclass


class KnownPrefix(NamedTuple):
    """A prefix whose pages, and state if there are any, are in the pools.

    Attributes:
        keys: of its full pages.
        pages: all its pages; the last may be a part of one.
        windows: its pages of the layers with a window, the last ones as far as the window reaches.
        slot: its state; -1: none.
        shared: all full pages that are known, also those after the last state.
    """

    length: int
    keys: list[bytes]
    pages: list[int]
    windows: list[int]
    slot: int
    shared: list[int]


@dataclass(slots=True)
class Pools:
    """The pools of pages and states that the sequences of an engine share.

    Attributes:
        states: the slots of states; None: no layer keeps any.
        copy: copies the contents of a page to another: (from, to).
        seed: the key of the empty prefix, see `prefix.seed`.
        context: the most positions of a sequence.
        tier: where pages and states go that leave memory, and come back from; None: nowhere.
        windows: the pages of the layers with a window; None: they have none of their own.
        latent: whether the model has latent attention, see `forms`.
        adapter: the adapter of sequences that name none; None: they have none.
        depth: how many operations on pages and states are in each other now.
        waiting: how sequences are closed that were collected, when there is none.
    """

    pages: PagePool
    states: StatePool | None
    copy: Callable[[int, int], None]
    seed: bytes
    context: int
    tier: Tier | None = None
    windows: WindowPages | None = None
    latent: bool = False
    adapter: AttachedAdapter | None = None
    depth: int = 0
    waiting: deque[Callable[[], None]] = field(default_factory=deque)

    @contextmanager
    def adapter_aside(self) -> Iterator[AttachedAdapter | None]:
        """Opens a context in which new sequences have no adapter unless they name one; yields the default adapter that
        is set aside, None if there is none.
        """
        kept, self.adapter = self.adapter, None
        try:
            yield kept
        finally:
            self.adapter = kept

    def later(self, close: Callable[[], None]) -> None:
        """Queues `close`, a function that closes a garbage-collected sequence; the engine's thread calls it before or
        after an operation on pages. Any thread may call this.
        """
        self.waiting.append(close)

    def begin(self) -> None:
        """Begins an operation on pages and states: if it is the outermost one, garbage-collected sequences are closed
        now, and then none until the matching `end`.
        """
        self.depth += 1
        self._settle()

    def end(self) -> None:
        """Ends an operation on pages and states that `begin` began; garbage-collected sequences are closed first if it
        is the outermost one.
        """
        self._settle()
        self.depth -= 1

    def _settle(self) -> None:
        while self.depth == 1 and self.waiting:  # closing is an operation, too
            with suppress(KtError):  # of a device that failed, which has nothing to give back
                self.waiting.popleft()()

    def how(self, depth: int) -> int:
        """Returns the byte that encodes how an id is computed with this depth of deferral: the depth, plus 0x80
        (absorbed form, not expanded) in models with latent attention.
        """
        return depth | ABSORBED if self.latent else depth

    @property
    def available(self) -> tuple[int, int]:
        """The pair (ordinary, window) of the numbers of KV-cache pages that can be allocated; window is 0 if the
        sliding-window layers have no pages of their own.
        """
        self.begin()
        self.end()
        windows = self.windows
        return self.pages.available, 0 if windows is None else windows.pool.available

    def forget(self) -> None:
        """Frees all pages and snapshots of states that no sequence holds, and makes those that are held unfindable: no
        prefix is cached any more.
        """
        self.begin()
        try:
            self.pages.forget()
            if self.windows is not None:
                self.windows.pool.forget()
            if self.states is not None:
                self.states.forget()
        finally:
            self.end()

    def hold(self, known: KnownPrefix) -> None:
        """Adds a reference to each page and to the state of a cached prefix."""
        for page in known.pages:
            self.pages.hold(page)
        for page in known.windows:
            assert self.windows is not None
            self.windows.pool.hold(page)
        if self.states is not None:
            self.states.hold(known.slot)

    def find(self, content: Content) -> KnownPrefix:
        """Returns the longest cached prefix of a sequence's ids, but not all of them, with the numbers of its pages and
        the slot of its state; its length is 0 if nothing is cached.
        """
        keys: list[bytes] = []
        found: list[int] = []
        limit, key = content.ids.size - 1, content.root
        for first in range(0, limit - PAGE_TOKENS + 1, PAGE_TOKENS):
            key = content.link(key, first, first + PAGE_TOKENS)
            page = self.pages.find(key)
            if page is None:
                break
            keys.append(key)
            found.append(page)
        if self.states is not None:
            return self._with_state(keys, found, content)
        if (further := self._in_page(keys, found, content)) is not None:
            return further
        n = len(found)
        while (windows := self._window(n * PAGE_TOKENS, keys[:n])) is None:
            n -= 1
        return KnownPrefix(n * PAGE_TOKENS, keys[:n], found[:n], windows, -1, found)

    def _in_page(self, keys: list[bytes], found: list[int], content: Content) -> KnownPrefix | None:
        """The prefix that ends within the page behind those that are known; None: no page begins with its ids.

        Args:
            keys, found: of the full pages that are known.
        """
        first = len(found) * PAGE_TOKENS
        span = slice(first, min(first + PAGE_TOKENS, content.ids.size - 1))
        begun = self.pages.beginning(
            keys[-1] if keys else content.root, content.ids[span], content.depths[span]
        )
        if begun is None:
            return None
        key, tokens = begun
        windows, page = self._window(first + tokens, [*keys, key]), self.pages.find(key)
        if windows is None or page is None:
            return None
        return KnownPrefix(first + tokens, keys, [*found, page], windows, -1, found)

    def _with_state(
        self,
        keys: list[bytes],
        found: list[int],
        content: Content,
    ) -> KnownPrefix:
        """The same where layers keep states: the longest that has one at its end.

        Args:
            keys, found: of the full pages that are known.
        """
        assert self.states is not None
        at = {key: i for i, key in enumerate([content.root, *keys])}
        limit = content.ids.size - 1
        best = KnownPrefix(0, [], [], [], -1, found)
        for place, key in self.states.places():
            full, rest = divmod(place.position, PAGE_TOKENS)
            start = place.position - rest
            if not best.length < place.position <= limit or at.get(place.page_key) != full:
                continue
            if rest and content.link(place.page_key, start, place.position) != key:
                continue
            tail = self.pages.find(key) if rest else None
            windows = self._window(place.position, [*keys[:full], *([key] if rest else [])])
            if (rest and tail is None) or windows is None:
                continue
            slot = self.states.find(key)
            assert slot is not None
            pages = found[:full] if tail is None else [*found[:full], tail]
            best = KnownPrefix(place.position, keys[:full], pages, windows, slot, found)
        return best

    def _window(self, position: int, keys: list[bytes]) -> list[int] | None:
        """The pages, of the layers with a window, that a token at `position` reads; None: they are not all known.

        Args:
            keys: of all pages up to there.
        """
        if self.windows is None:
            return []
        pool, first = self.windows.pool, self.windows.first(position)
        pages = [pool.page_of(key) for key in keys[first:]]
        return None if None in pages else [page for page in pages if page is not None]
