"""An engine without a model: the logits after a position are a hash of every id up to it, read from the pages.

So a wrong page, a page that somebody else wrote, or a run in another form shows at once. Time is counted, not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from ktcli.engine.draft import Draft
from ktcli.engine.draft_length import MOST_ROWS, StepTimes
from ktcli.engine.logits import Logits
from ktcli.engine.pages import PagePool
from ktcli.engine.pools import Pools
from ktcli.engine.sequence import Sequence as Timeline
from ktcli.native import PAGE_TOKENS, Pool
from ktcli.native.operands import Batch, Run
from ktcli.planner.cost import PieceTimes

VOCAB = 67
POOL = Pool(2)
STOP = 3


class ToyEngine:
    """See above.

    Args:
        pages: the pages of the pool.
        context: the positions of a sequence.
        forms: whether logits also depend on the form that each id was computed in, as with latent attention.
    Attributes:
        now_s: the time, which each step moves on by its cost.
        batches: the rows of each run of each step so far.
    """

    def __init__(
        self, pages: int = 64, context: int = 1024, *, forms: bool = False, max_tokens: int = 128
    ) -> None:
        self.context, self.max_tokens, self.max_outputs = context, max_tokens, 16
        self.max_rows = max_tokens + 15
        self.spec, self.pool = SimpleNamespace(vocab=VOCAB, output_width=VOCAB, embeds=False), POOL
        self._hashes = np.zeros((pages, PAGE_TOKENS), dtype=np.uint64)
        self.pools = Pools(PagePool(pages), None, self._copy, b"toy", context, latent=forms)
        self.step_times = StepTimes([self.cost_s(rows) for rows in range(1, MOST_ROWS + 1)])
        self.now_s = 0.0
        self.batches: list[list[int]] = []
        self.error: BaseException | None = None  # raised by the next step

    @property
    def piece_times(self) -> PieceTimes:
        """As they are, in another unit."""
        sizes = sorted({1, 4, 16, 32, 64, self.max_tokens})
        return PieceTimes(tuple(sizes), tuple(3 * self.cost_s(rows) for rows in sizes), 0.0)

    def sequence(self) -> Timeline:
        return Timeline(self.pools)

    def depth_at(self, position: int) -> int:
        return 1 if position >= 100 else 0

    def how_at(self, position: int) -> int:
        return self.pools.how(self.depth_at(position))

    def chunk_tokens(self, left: int) -> int:
        return min(left, self.max_tokens)

    def clock(self) -> float:
        return self.now_s

    def cost_s(self, rows: int) -> float:
        """The seconds of a step: a pass over the weights that so many rows touch, and arithmetic for each row."""
        touched = 1 - (1 - 1 / 16) ** rows
        return 0.002 + 0.1 * touched + 0.001 * rows

    def run(self, batch: Batch) -> list[Logits]:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        rows = [run.ids.size for run in batch.runs]
        assert 0 < sum(rows) <= self.max_rows
        self.batches.append(rows)
        self.now_s += self.cost_s(sum(rows))
        return [logits for run in batch.runs for logits in self._run(run)]

    def _run(self, run: Run) -> list[Logits]:
        hash_ = 17 if run.start == 0 else int(self._at(run, run.start - 1)[...])
        found = []
        for at, id in enumerate(run.ids.tolist()):
            form = run.defer, run.expanded[0] <= run.start + at < run.expanded[1]
            hash_ = hash((hash_, id, form)) & (2**64 - 1)
            self._at(run, run.start + at)[...] = hash_
            if at >= run.first_output:
                values = np.random.default_rng(hash_).normal(0, 2, VOCAB).astype(np.float32)
                found.append(Logits.of(values, run.temperature))
        return found

    def _at(self, run: Run, position: int) -> np.ndarray:
        page, slot = divmod(position, PAGE_TOKENS)
        return self._hashes[run.pages[page], slot, ...]

    def _copy(self, source: int, target: int) -> None:
        self._hashes[target] = self._hashes[source]


@dataclass
class Oracle:
    """A source of drafts that knows what will be said, but for ids that are wrong."""

    answer: Sequence[int]
    is_wrong: Callable[[int], bool] = lambda place: False
    vocab: int = VOCAB
    kinds: tuple[float, ...] = (0.5,)
    said: int = 0

    def follow(self, ids: Sequence[int]) -> None:
        self.said = 0

    def extend(self, id: int) -> None:
        self.said += 1

    def draft(self, most: int) -> Draft:
        places = range(self.said, min(self.said + most, len(self.answer)))
        return Draft(tuple((self.answer[i] + self.is_wrong(i)) % self.vocab for i in places))
