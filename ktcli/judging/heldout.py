"""Measures how well variants of running a model predict held-out rows: the loss that training counts, row by row.

Every row is a document of its own, read from an empty cache, and only its trained tokens count. Tokens of a row are
alike, rows are not, so intervals are those of means over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.variants import EvalRequest, Variant
from ktcli.errors import UsageError
from ktcli.finetune.order import split
from ktcli.finetune.settings import FinetuneSettings
from ktcli.judging.prediction import measure
from ktcli.measure.evaluate import Scores, Window
from ktcli.measure.intervals import LEAST_GROUPS, Interval, grouped_interval
from ktcli.records import dataclass
from ktcli.samples.read import read_samples
from ktcli.samples.sample import Sample, SampleSet, require_within
from ktcli.samples.source import DataSource
from ktcli.text.model import read_trained_texts

F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class HeldOutData:
    """The samples that are held out.

    Attributes:
        read: all samples of the data.
        samples: those that are held out; without val_size all of them.
    """

    read: SampleSet
    samples: tuple[Sample, ...]

    @cached_property
    def windows(self) -> tuple[tuple[Window, Mask], ...]:
        """For each sample a pair (window, mask): its ids up to the last trained token as a window, and for each of the
        window's counted predictions whether it is of a trained token, bool.
        """
        return tuple(window_of(each.ids, each.trained) for each in self.samples)

    @property
    def predictions(self) -> int:
        """The number of counted token predictions in all samples: in each from the first trained token to the last."""
        return sum(window.counted for window, _ in self.windows)

    @property
    def trained_tokens(self) -> int:
        """The number of trained tokens in all samples whose predictions are counted."""
        return sum(int(mask.sum()) for _, mask in self.windows)


@dataclass(frozen=True, slots=True)
class RowMean:
    """A mean over the tokens of rows.

    Attributes:
        interval: its 95 % interval; None: there are fewer than LEAST_GROUPS rows.
    """

    mean: float
    interval: Interval | None

    @classmethod
    def of(cls, sums: F64, counts: F64) -> RowMean:
        """Returns the mean of a value over the tokens of all rows; its `interval` has the ends `low` and `high` of the
        95 % interval, or is None for fewer than 8 rows.

        Args:
            sums: for each row the sum of the value over its tokens, float64 [rows].
            counts: the number of tokens of each row, float64 [rows].
        """
        found = grouped_interval(sums, counts) if len(sums) >= LEAST_GROUPS else None
        return cls(float(sums.sum() / counts.sum()), found)


@dataclass(frozen=True, slots=True)
class RowDifference:
    """The differences of one variant's predictions from those of the first, token by token.

    Attributes:
        loss: nats per token. same_best: the share of tokens for which both find the same one likeliest.
        kl: the divergence of the first variant's predictions from its own, nats per token; None: not known.
        better, worse: the rows whose loss is lower, and higher.
    """

    loss: RowMean
    same_best: RowMean
    kl: RowMean | None
    better: int
    worse: int


@dataclass(frozen=True, slots=True)
class HeldOutResult:
    """The result of one variant.

    Attributes:
        loss: nats per trained token. rows: that of each row.
        against: the difference from the first variant; None: this is the first.
    """

    variant: Variant
    loss: RowMean
    rows: F64
    against: RowDifference | None


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """The results of all variants that read at least one row.

    Attributes:
        where: the rows that all of them read. tokens: the trained tokens of each.
        complete: whether these are all.
    """

    data: HeldOutData
    where: tuple[str, ...]
    tokens: NDArray[np.int64]
    results: tuple[HeldOutResult, ...]
    complete: bool


def window_of(ids: Sequence[int], trained: Sequence[bool]) -> tuple[Window, Mask]:
    """Returns a document as a pair (window, mask): its ids up to the last trained token as a window that counts
    predictions from the first trained token on, and for each of these whether it is of a trained token, bool.
    """
    marked = np.array(trained, dtype=np.bool_)
    marked[0] = False  # predicted from nothing
    at = np.flatnonzero(marked)
    first, end = int(at[0]), int(at[-1]) + 1
    return Window(np.array(ids[:end], dtype=np.int32), first - 1), marked[first:end]


def read_held_out(
    variants: Sequence[Variant],
    sources: Sequence[DataSource],
    settings: FinetuneSettings,
    listener: Listener = SILENT,
) -> HeldOutData:
    """Returns the samples of data files as `kt finetune` makes them, and those of them that it holds out; they are the
    same for all variants.

    Raises:
        UsageError: the data is invalid, samples may be longer than a model's context, or two models make different
            samples.
    """
    packs = {variant.ready.pack: variant for variant in variants}
    for variant in packs.values():
        require_within(settings.cutoff_len, variant.model.spec.context, variant.ready.base)
    found = {
        pack: read_samples(
            sources, read_trained_texts(variant.ready.base, pack), settings.samples, listener
        )
        for pack, variant in packs.items()
    }
    read = found[variants[0].ready.pack]
    for variant in variants:
        if _learned(found[variant.ready.pack]) != _learned(read):
            raise UsageError(
                f"{variant.conversion} and {variants[0].conversion} make different tokens of the data, so their losses"
                " cannot be compared",
                hint="measure each on its own",
            )
    for note in read.notes:
        listener.note(note)
    if not settings.val_size:
        return HeldOutData(read, read.samples)
    _, held = split(len(read.samples), settings.val_size, settings.seed)
    return HeldOutData(read, tuple(read.samples[number] for number in held))


def _learned(read: SampleSet) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    return [(each.ids, each.trained) for each in read.samples]


def measure_with_text(
    variants: Sequence[Variant],
    data: HeldOutData,
    text: Sequence[Window],
    asked: EvalRequest,
    listener: Listener = SILENT,
) -> tuple[HeldOutLoss, list[Scores]]:
    """Measures how well each variant predicts the held-out rows, and then a text; returns (the variants' loss on the
    rows, for each variant the scores of the text).

    Args:
        text: windows of the text; (): there is none.
    Raises:
        NotEnoughMemory: a variant does not fit into memory alone. KeyboardInterrupt: Ctrl-C came before the first row.
    """
    over = [*(window for window, _ in data.windows), *text]
    longest = max(len(window.ids) - 1 for window in over)
    scores, complete = measure(variants, over, replace(asked, length=longest), listener)
    count = data.predictions
    rows = held_out_loss(variants, data, [each.first(count) for each in scores])
    if not rows.results:
        raise KeyboardInterrupt
    return replace(rows, complete=rows.complete and complete), [
        _behind(each, count) for each in scores
    ]


def _behind(scores: Scores, count: int) -> Scores:
    kl = None if scores.kl is None else scores.kl[count:]
    return Scores(scores.nll[count:], scores.best[count:], kl)


def held_out_loss(
    variants: Sequence[Variant], data: HeldOutData, scores: Sequence[Scores]
) -> HeldOutLoss:
    """Returns the loss on held-out rows, from the scores of their windows, of each variant that has read any; rows that
    one of these variants has not read completely are left out.
    """
    measured = [
        (variant, each) for variant, each in zip(variants, scores, strict=True) if len(each.nll)
    ]
    done = min((len(each.nll) for _, each in measured), default=0)
    rows = _WholeRows(data, done)
    results: list[HeldOutResult] = []
    for variant, each in measured if len(rows.where) else ():
        sums = rows.sums(each.nll)
        against = _difference(rows, each, measured[0][1]) if results else None
        results.append(
            HeldOutResult(variant, RowMean.of(sums, rows.counts), sums / rows.counts, against)
        )
    tokens = rows.counts.astype(np.int64)
    return HeldOutLoss(data, rows.where, tokens, tuple(results), done == data.predictions)


class _WholeRows:
    """The rows of which all predictions are among the first `done`."""

    def __init__(self, data: HeldOutData, done: int) -> None:
        ends = np.cumsum([window.counted for window, _ in data.windows])
        numbers = {where: n for n, where in enumerate(dict.fromkeys(s.where for s in data.samples))}
        of = np.array([numbers[each.where] for each in data.samples])
        whole = np.ones(len(numbers), dtype=np.bool_)
        whole[of[ends > done]] = False
        self.where = tuple(where for where, n in numbers.items() if whole[n])
        place = np.cumsum(whole) - 1
        masks = np.concatenate([mask for _, mask in data.windows])[:done]
        owner = np.repeat(of, [window.counted for window, _ in data.windows])[:done]
        self._kept = np.flatnonzero(masks & whole[owner])
        self._owner = place[owner[self._kept]]
        self.counts = self.sums(np.ones(done))

    def sums(self, values: F64) -> F64:
        """Returns the sum of each row's values, of one for each prediction."""
        kept = values[self._kept]
        found = np.bincount(self._owner, weights=kept, minlength=len(self.where))
        return found.astype(np.float64)


def _difference(rows: _WholeRows, this: Scores, first: Scores) -> RowDifference:
    n = min(len(this.nll), len(first.nll))
    one, two = this.first(n), first.first(n)
    loss = rows.sums(one.nll - two.nll)
    same = RowMean.of(rows.sums((one.best == two.best).astype(np.float64)), rows.counts)
    if same.interval is not None:
        same = replace(same, interval=same.interval.within(0.0, 1.0))
    kl = None if one.kl is None else RowMean.of(rows.sums(one.kl), rows.counts)
    better, worse = int((loss < 0).sum()), int((loss > 0).sum())
    return RowDifference(RowMean.of(loss, rows.counts), same, kl, better, worse)
