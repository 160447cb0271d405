"""The storage tiers below memory: pages and states that are written to stores and restored from them.

What a sequence seals is due to be written as soon as nobody is disturbed by it (`writeback`). When a sequence begins,
pages that memory does not have but a store has are read into free ones and sealed there, so that they are found like
all others; stores that lack them get them, too (`restoring`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from ktcli.engine.pages import PagePool
from ktcli.engine.pagetable import WindowPages
from ktcli.engine.prefix import Content
from ktcli.engine.restoring import ReadingWorth, Restorer
from ktcli.engine.statepool import StatePool
from ktcli.engine.stores import PageMemory, Store, StoredMemory, Stores
from ktcli.engine.writeback import WriteBack
from ktcli.pagelabel import PageLabel

# After a step the engine counts as busy for as long as a person would notice a pause.
_BUSY_S = 0.5
_MOST_STEP_S = 60.0
_OWN = "disk"  # the store that only servers of the same library have
_STATES_OF_LINE = 2  # snapshots of one sequence that are due after a turn: the latest


class Tier:
    """Moves pages and states between the pools of an engine and stores.

    Args:
        stores: nearest first.
    """

    def __init__(
        self,
        stores: Iterable[Store],
        memory: PageMemory,
        pages: PagePool,
        states: StatePool | None,
        windows: WindowPages | None = None,
    ) -> None:
        self._stores = Stores(stores)
        self._memory = StoredMemory(memory, pages, states, windows)
        self._writeback = WriteBack(self._stores, self._memory)
        self._worth = ReadingWorth(self._stores, self._memory)
        self._restorer = Restorer(self._stores, self._memory, self._worth, self._writeback)
        self._latest: dict[int, deque[tuple[int, PageLabel]]] = {}  # snapshots, by line
        self._began = self._touched = 0.0
        self._in_step = self._hastens = False
        self._memory.watch(self._writeback.evicted)

    def detach(self) -> None:
        """Disconnects the stores from the engine's pools and empties the queue; no store copies anything afterwards."""
        self._memory.watch(None)
        self._writeback.forget()

    @property
    def prompt_tok_s(self) -> float | None:
        """The speed of computing prompts in tokens per second, as measured here or by an earlier process; None: it was
        not measured.
        """
        return self._worth.prompt_tok_s

    @prompt_tok_s.setter
    def prompt_tok_s(self, tok_s: float | None) -> None:
        self._worth.prompt_tok_s = tok_s

    @property
    def restored(self) -> dict[str, int]:
        """The number of token positions whose pages were read back from each store so far, by the store's name."""
        return dict(self._restorer.restored)

    @property
    def read_bps(self) -> dict[str, float]:
        """The measured bytes read per second from each store, by the store's name; without stores that were not read
        yet.
        """
        rates = {store.name: store.rate.bps for store in self._stores.all}
        return {name: bps for name, bps in rates.items() if bps is not None}

    @property
    def is_shared(self) -> bool:
        """Whether some store is shared with other servers, perhaps on other machines, and not only the own disk."""
        return any(store.name != _OWN for store in self._stores.all)

    # --- down -----------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether writing to stores should wait: a step of the engine runs, or ended less than half a second ago, and
        nobody waits for what is queued.
        """
        if self._hastens:
            return False
        since = time.monotonic() - self._touched
        return since < (_MOST_STEP_S if self._in_step else _BUSY_S)

    def step_begins(self) -> None:
        """Records that a step of the engine begins now."""
        self._began = self._touched = time.monotonic()
        self._in_step = True

    def step_ended(self, n_tokens: int) -> None:
        """Records that a step that computed `n_tokens` tokens of a sequence has ended now, and updates `prompt_tok_s`
        with its speed.
        """
        self._in_step = self._hastens = False
        self._touched = time.monotonic()
        self._worth.measure(n_tokens, self._touched - self._began)

    def sealed(self, page: int, label: PageLabel) -> None:
        """Queues a page that got its content address, or a snapshot of a state, to be written to the stores that lack
        it.
        """
        self._writeback.put(page, label)

    def kept(self, slot: int, label: PageLabel, line: int, *, marked: bool = False) -> None:
        """Records a snapshot of a sequence's state to be stored: at once if `marked`; else, if it is one of the
        sequence's latest two, at the next `turn_over`.

        Args:
            slot: the slot that has the snapshot.
            line: the number of the sequence.
            marked: whether other prompts will continue from it, see `Sequence.mark`.
        """
        if marked:
            self.sealed(slot, label)
            return
        latest = self._latest.setdefault(line, deque(maxlen=_STATES_OF_LINE))
        if all(label.key != other.key for _, other in latest):
            latest.append((slot, label))

    def turn_over(self) -> None:
        """Queues the latest snapshots of all sequences to be stored; called when an answer has ended, or another prompt
        begins.
        """
        states = self._memory.states
        for latest in self._latest.values():
            for slot, label in latest:
                if states is not None and states.slot_of(label.key) == slot:
                    self.sealed(slot, label)
        self._latest.clear()

    def hasten(self) -> None:
        """Lets stores write at full speed until the end of the next step, so that `persist`, which follows soon, has
        less to write.
        """
        self._hastens = True

    def persist(self, labels: Iterable[PageLabel]) -> None:
        """Adds these pages and the latest snapshots to the queue, and makes the stores write all of it at once, without
        waiting for that.

        Args:
            labels: the labels of a sequence's full pages; pages that are no longer in memory are left out.
        """
        for label in labels:
            for each in self._memory.kinds.values():
                if (page := each.pool.page_of(label.key)) is not None:
                    self.sealed(page, replace(label, kind=each.kind))
        self.turn_over()
        self._stores.hurry()

    def flush(self, wait_s: float) -> bool:
        """Waits until the stores' queues are empty; returns whether they were within `wait_s` seconds. What cannot be
        stored is dropped. Not to be called on the engine's thread.
        """
        self._stores.hurry()
        until = time.monotonic() + wait_s
        return all(store.flush(max(0.0, until - time.monotonic())) for store in self._stores.all)

    # --- up -------------------------------------------------------------------------------------------

    def bring(self, content: Content, have: int) -> dict[str, int]:
        """Reads the pages and states of the longest stored prefix of a sequence's ids, but not of all of them, from
        stores into memory that no sequence holds, as far as that is faster than computing; returns the number of
        positions read from each store, by its name, without stores that gave none.

        Args:
            content: the ids, and how each is to be computed.
            have: the positions that memory already has.
        """
        self.turn_over()
        before = self.restored
        self._restorer.bring(content, have)
        return {name: n - before[name] for name, n in self.restored.items() if n > before[name]}
