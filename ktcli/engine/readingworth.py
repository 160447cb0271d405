"""Whether pages are read from a store or computed anew: whichever is faster, as far as both were measured."""

from __future__ import annotations

from collections.abc import Sequence as Numbers

from ktcli.engine.storedmemory import StoredMemory
from ktcli.engine.stores import Store, Stores
from ktcli.pagelabel import PageLabel

_LEAST_TIMED = 64  # tokens of a step whose speed says what a prompt's tokens cost
_TRIED = 0.05  # of the time for computing a prompt, which reading may cost to measure a store


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
        """Takes the speed of a step of a sequence into account."""
        if n_tokens >= _LEAST_TIMED and seconds > 0:
            fresh = n_tokens / seconds
            known = self.prompt_tok_s
            self.prompt_tok_s = fresh if known is None else (known + fresh) / 2

    def begin(self, n_tokens: int) -> None:
        """Begins with a prompt of which so many tokens are left to compute."""
        self._allowed_s = _TRIED * n_tokens / self.prompt_tok_s if self.prompt_tok_s else 0.0

    def pays(self, n_tokens: int, labels: Numbers[PageLabel], store: Store | None = None) -> bool:
        """Returns whether reading is faster than computing so many tokens, as far as both were measured, or so little
        that it shows how fast a store is now.

        Args:
            store: the one that would give all of them; None: each is read where it is nearest.
        """
        if self.prompt_tok_s is None:
            return True
        sizes = [(each.kind, each.key, self._memory.size_bytes(each.kind)) for each in labels]
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
