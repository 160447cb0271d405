"""Measures how well engines predict a text, token by token: ids in, numbers out.

Every window of the text is read by all engines side by side, some rows in each step, of several windows if they are
short: the first engine's logits of the step are kept while the others' are compared with them, over the whole
vocabulary, and then dropped. So memory does not grow with the text. The next token is always given (teacher
forcing); the probability that a model gave it is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing

import numpy as np
from numpy.typing import NDArray

from ktcli.engine import Engine
from ktcli.engine.logits import F32Array
from ktcli.errors import KtError
from ktcli.measure.intervals import Interval, interval
from ktcli.measure.reader import Piece, TextReader, pieces, steps
from ktcli.records import dataclass

F64Array = NDArray[np.float64]
I32Array = NDArray[np.int32]

# The most logits of one step: those of one engine are kept beside those of another.
PIECE_BYTES = 64 << 20
_AT_ONCE_BYTES = 2 << 20  # of those, in one numpy call: its temporaries stay in the cache
_PIECE_TOKENS = 512  # no more are of use to an engine

# progress(tokens read, by all engines together)
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class EvalCase:
    """A model with one variant of how it is run.

    Attributes:
        defer: the number of experts of each token that are deferred, at every position: as if all the text were an
            answer.
        adapted: whether the engine's adapter is used, if it has one.
    """

    engine: Engine
    defer: int = 0
    adapted: bool = True


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of text that is read from an empty cache.

    Attributes:
        ids: the ids [T + 1] int32; each but the last is read.
        first: the first prediction that counts is that of ids[first + 1]; the window before counted those before.
    """

    ids: I32Array
    first: int

    @property
    def counted(self) -> int:
        """The number of predictions of the window that count: those that the previous window did not count."""
        return len(self.ids) - 1 - self.first


@dataclass(frozen=True, slots=True)
class Scores:
    """The predictions of one case, an array with one value for each of N predictions, in the text's order.

    Attributes:
        nll: the negative log-likelihood of the next token, nats.
        best: the likeliest token.
        kl: KL(first case || this one) of each prediction, nats; None: they were not compared.
    """

    nll: F64Array
    best: I32Array
    kl: F64Array | None

    def first(self, n: int) -> Scores:
        """Returns the scores of the first `n` predictions of the text."""
        return Scores(self.nll[:n], self.best[:n], None if self.kl is None else self.kl[:n])


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one case from another, over the same tokens in pairs.

    Attributes:
        nll: the difference of their losses, nats per token.
        same_best: the share of tokens for which both find the same next token likeliest.
        kl: the mean divergence of the other's predictions from this one's, nats per token; None: not known.
    """

    nll: Interval
    same_best: Interval
    kl: Interval | None


def windows(ids: Sequence[int], length: int, stride: int, begin: int | None) -> list[Window]:
    """Returns the windows into which a text is cut. Every id is predicted in one of them, except, if `begin` is None,
    the first of the text and, where windows do not overlap (`stride` is `length`), of each window.

    Args:
        length: the most ids of the text in a window.
        stride: the number of ids from the start of one window to that of the next, 1..length.
        begin: the id that is put before each window; None: the model has no such id, so that a window's first id is not
            predicted.
    """
    text = np.asarray(ids, dtype=np.int32)
    before = np.array([] if begin is None else [begin], dtype=np.int32)
    made, done = [], 0 if begin is not None else 1
    for start in range(0, len(text), stride):
        end = min(start + length, len(text))
        # Without an id before it the first of a window cannot be predicted, unless the window before did.
        least = start if begin is not None else start + 1
        if end > max(done, least):
            made.append(Window(np.concatenate([before, text[start:end]]), max(done, least) - least))
            done = end
    return made


def piece_tokens(vocab: int) -> int:
    """Returns the most tokens that one step of an evaluation reads, 1..512, so that their f32 logits over a vocabulary
    of `vocab` ids take at most PIECE_BYTES (64 MiB)."""
    return max(1, min(_PIECE_TOKENS, PIECE_BYTES // (4 * vocab)))


def windows_at_once(over: Sequence[Window], vocab: int) -> int:
    """Returns the greatest number of the windows `over` that fit into one step of an evaluation (see `piece_tokens`),
    at least 1."""
    rows = piece_tokens(vocab)
    cuts = [[Piece(window.ids[:-1])] for window in over if len(window.ids) - 1 <= rows]
    return max((len(step) for step in steps(cuts, rows, len(cuts))), default=1)


def score(
    cases: Sequence[EvalCase],
    over: Sequence[Window],
    *,
    at_once: int = 1,
    compare: bool = True,
    progress: Progress = lambda n: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[Scores]:
    """Returns, for each case (a model and how it is run), the scores of its predictions of the ids in the windows
    `over` of a text: loss, likeliest token and divergence; all cases have equally many predictions.

    Args:
        cases: the cases; their models have the same vocabulary.
        at_once: the most windows that are computed in one step; each engine needs room for as many sequences for each
            of its cases.
        compare: whether to measure the divergence of each prediction from the first case's.
        cancelled: called between steps; once it returns true, the scores of the finished windows are returned.
    Raises:
        KtError: a model's logits hold a NaN or Inf.
    """
    found = [_room(sum(window.counted for window in over), compare) for _ in cases]
    rows = piece_tokens(cases[0].engine.spec.vocab)
    cuts = [pieces(window.ids[:-1], window.first, rows) for window in over]
    targets = np.concatenate([window.ids[1 + window.first :] for window in over])
    whole = set(np.cumsum([window.counted for window in over]).tolist())
    done = at = read = 0
    with ExitStack() as stack:
        readers = [
            stack.enter_context(closing(TextReader(each.engine, each.defer, adapted=each.adapted)))
            for each in cases
        ]
        for step in steps(cuts, rows, at_once):
            n = sum(piece.ids.size for piece in step)
            here = slice(at, at + n - sum(piece.skip for piece in step))
            kept = None
            for reader, scores in zip(readers, found, strict=True):
                if cancelled():
                    return [each.first(done) for each in found]
                logits = reader.read(step)
                this = _Predictions(logits, _measure(logits, targets[here], scores, here))
                kept = kept or this
                if scores.kl is not None:
                    scores.kl[here] = _divergence(kept, this)
                read += n
                progress(read)
            at = here.stop
            done = at if at in whole else done
    return found


def _room(n: int, compare: bool) -> Scores:
    return Scores(np.empty(n), np.empty(n, np.int32), np.empty(n) if compare else None)


def difference(this: Scores, other: Scores) -> Difference:
    """Returns how the scores `this` differ from `other` over the predictions that both have: the difference of losses,
    the share with the same likeliest token, and the divergence of `this`; each a mean with its 95 % interval."""
    n = min(len(this.nll), len(other.nll))
    one, two = this.first(n), other.first(n)
    same = interval((one.best == two.best).astype(np.float64)).within(0.0, 1.0)
    kl = None if one.kl is None else interval(one.kl)
    return Difference(interval(one.nll - two.nll), same, kl)


@dataclass(frozen=True, slots=True)
class _Predictions:
    """The logits [R, V] and the logarithms of the sums of their exponentials [R]."""

    logits: F32Array
    sums: F64Array


def _measure(logits: F32Array, targets: I32Array, into: Scores, here: slice) -> F64Array:
    """Fills in likelihoods and likeliest tokens; returns log(sum(e^logits)) of each row, [R].

    Exponentials are f32, with an error of 1e-7 of each; their sums and all after them are f64.
    """
    sums = np.empty(len(logits))
    for part in _parts(*logits.shape):
        rows = logits[part]
        peak = rows.max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # NaN and Inf are found below
            sums[part] = np.log(np.exp(rows - peak).sum(axis=1, dtype=np.float64)) + peak[:, 0]
    into.nll[here] = _numbers(sums - logits[np.arange(len(logits)), targets])
    into.best[here] = logits.argmax(axis=1)
    return sums


def _divergence(first: _Predictions, this: _Predictions) -> F64Array:
    """The divergence KL(first || this) of each row: the sum over the vocabulary of p (log p - log q), [R]."""
    found = np.empty(len(this.sums))
    apart = (first.sums - this.sums).astype(np.float32)[:, None]
    for part in _parts(*this.logits.shape):
        p = np.exp(first.logits[part] - first.sums.astype(np.float32)[part, None])
        far = first.logits[part] - this.logits[part] - apart[part]  # log p - log q
        found[part] = (p * far).sum(axis=1, dtype=np.float64)
    return _numbers(found)


def _numbers(values: F64Array) -> F64Array:
    if not np.isfinite(values).all():
        raise KtError(
            "the model computed logits that are not numbers",
            hint="kt verify NAME checks its files; KT_ISA=portable uses the plainest kernels",
        )
    return values


def _parts(rows: int, vocab: int) -> Iterator[slice]:
    step = max(1, _AT_ONCE_BYTES // (4 * vocab))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
