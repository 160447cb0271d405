"""Samples the next id from the logits of one step; knows nothing of text.

The native library chooses (`Sampler.choice`, kt_sample.h); `Sampler.next` does the same in numpy, as the reference.

The filters and their order are those of transformers (repetition penalty, temperature, top-k,
top-p, min-p), so that settings published with a model have the same meaning here as there. A seed fixes the
sequence: each token takes exactly one number from the generator. Whole blocks of tokens are judged by
their summary (logits.py), so that only few tokens are looked at one by one.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.logits import F32Array, Ids, Logits
from ktcli.errors import BadPack, UsageError
from ktcli.native import BLOCK_COLUMNS
from ktcli.native.choosing import BROKEN, NONE_LEFT, ChosenToken, TokenChoice

Weights = NDArray[np.float64]

# Colder is the same to every float32, and would divide by zero there.
_COLDEST = 1e-30
NOTHING_LEFT = "no token can follow: the mask leaves none"

# Setting → least, most, and both in words.
RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "0 (greedy) to 100"),
    "top_k": (0, 10_000_000, "0 (off) or more"),
    "top_p": (0.0, 1.0, "0 to 1 (off)"),
    "min_p": (0.0, 1.0, "0 (off) to 1"),
    "repetition_penalty": (0.01, 100.0, "0.01 to 100, 1 is off"),
    "presence_penalty": (-2.0, 2.0, "-2 to 2, 0 is off"),
    "frequency_penalty": (-2.0, 2.0, "-2 to 2, 0 is off"),
}
_MOST_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The settings by which the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 means greedy.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the smallest set of best tokens with at least this probability; 1 keeps all.
        min_p: drop tokens below this fraction of the best token's probability; 0 keeps all.
        repetition_penalty: above 1, tokens of the prompt and the answer become less likely.
        seed: equal seeds give equal texts; None draws one.
        greedy: take the best token always; only penalties and bias still count.
        presence_penalty: taken off the logits of tokens that are in the answer.
        frequency_penalty: taken off them once for each time that they are.
        logit_bias: (id, number that is added to its logit, -100 to 100) pairs of different ids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    greedy: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, (low, high, words) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # also false for NaN
                said = str(value)[:30]
                raise UsageError(f"{name.replace('_', '-')} is {said}, it can be {words}")
        for id, bias in self.logit_bias:
            if not 0 <= id < 2**31:
                raise UsageError(f"a logit bias is of token {str(id)[:30]}, there is no such id")
            if not -_MOST_BIAS <= bias <= _MOST_BIAS:
                raise UsageError(f"the logit bias of token {id} is {bias}, it can be -100 to 100")
        if len({id for id, _ in self.logit_bias}) < len(self.logit_bias):
            raise UsageError("a token has two logit biases")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"seed is {str(self.seed)[:30]}, it can be 0 to 2^64 - 1")

    def require_within(self, vocab: int) -> None:
        """Raises UsageError for biases of tokens that a vocabulary of `vocab` ids does not have.

        Raises:
            UsageError: there is one.
        """
        if bad := next((id for id, _ in self.logit_bias if id >= vocab), None):
            raise UsageError(
                f"a logit bias is of token {bad}, which is outside the vocabulary of {vocab}"
            )

    def within(self, vocab: int) -> SamplingSettings:
        """Returns the same settings without biases of tokens that a vocabulary of `vocab` ids does not have."""
        known = tuple((id, bias) for id, bias in self.logit_bias if id < vocab)
        return self if known == self.logit_bias else replace(self, logit_bias=known)

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn, so that a seed changes nothing."""
        return self.greedy or self.temperature == 0

    @property
    def counts(self) -> bool:
        """Whether the choice of a token depends on which tokens came before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


class History:
    """The ids of a prompt and its answer, as far as penalties need them.

    Args:
        counts: whether any setting needs them, see `SamplingSettings.counts`.
    """

    def __init__(self, prompt: Sequence[int], *, counts: bool) -> None:
        self._counts = counts
        # Without need numpy's search for different values is not called: its first call imports a large module.
        ids = np.asarray(prompt if counts else (), dtype=np.int32)
        self._seen = np.unique(ids) if counts else ids
        self._answered = np.zeros_like(self._seen)
        self._place = {id: place for place, id in enumerate(self._seen.tolist())}

    @property
    def seen(self) -> NDArray[np.int32]:
        """The different ids, [n]."""
        return self._seen[: len(self._place)]

    @property
    def answered(self) -> NDArray[np.int32]:
        """The number of times that each of them is in the answer, [n]."""
        return self._answered[: len(self._place)]

    def append(self, id: int) -> None:
        """Appends an id of the answer."""
        if not self._counts:
            return
        place = self._place.setdefault(id, len(self._place))
        if place == len(self._seen):
            room = np.zeros(place + 64, dtype=np.int32)
            self._seen = np.concatenate([self._seen, room])
            self._answered = np.concatenate([self._answered, room])
        self._seen[place] = id
        self._answered[place] += 1


class Sampler:
    """Chooses the tokens of one answer: one random sequence under one settings object.

    Attributes:
        seed: the seed in use, drawn if the settings name none.
        sums_at: the temperature for which logits should bring their sums; 0: it needs none.
        drawn: the numbers that were drawn.
        mask: bit i of word j: whether id 32 j + i may be the next; None: all may. Whoever sets it does so before
            each token.
    """

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings
        self.seed = secrets.randbits(32) if settings.seed is None else settings.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed))
        self.drawn = 0
        self.mask: NDArray[np.uint32] | None = None
        self._bias_ids = np.array([id for id, _ in settings.logit_bias], dtype=np.int32)
        self._bias = np.array([bias for _, bias in settings.logit_bias], dtype=np.float32)
        self._temperature = _temperature(settings)
        sums = settings.top_k == 0 and (settings.top_p < 1 or settings.min_p == 0)
        self.sums_at = self._temperature if sums else 0.0

    def choice(self, logits: Logits, history: History, *, likeliest: int = -1) -> TokenChoice:
        """Draws a random number for the next id, and returns how the library is to choose it.

        Args:
            logits: the logits of the last position.
            likeliest: the number of likeliest ids wanted with it; -1: no logarithms at all.
        """
        settings, temperature = self.settings, self._temperature
        return TokenChoice(
            logits.values,
            logits.peaks,
            logits.sums,
            logits.best,
            logits.temperature,
            temperature,
            self._draw() if temperature else 0.0,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            settings.repetition_penalty,
            settings.presence_penalty,
            settings.frequency_penalty,
            history.seen,
            history.answered,
            self._bias_ids,
            self._bias,
            self.mask,
            likeliest,
        )

    def next(self, logits: Logits, history: Sequence[int], answered: int = 0) -> int:
        """Draws the next id and returns it: the same as the library chooses for `choice`.

        Args:
            logits: the logits of the last position.
            history: the ids of the prompt and the answer so far, for penalties.
            answered: the number of those that are the answer's.
        Raises:
            BadPack: the logits hold NaN or infinity.
            UsageError: the mask leaves no token.
        """
        settings = self.settings
        _check(logits)
        scores = self._changed(logits, history, answered)
        if scores.values[scores.best] == -np.inf:
            raise UsageError(NOTHING_LEFT)
        if self._temperature == 0:
            return scores.best
        at = self._draw()
        if settings.top_k == 0 and settings.top_p == 1 and settings.min_p == 0:
            scores = scores.at_temperature(self._temperature)
            block, at = _pick(_masses(scores), at)
            ids = scores.ids_in(np.array([block]))
            chances = _chances(scores, scores.values[ids], scores.temperature)
        else:
            ids, chances = shortlist(scores, settings)
        return int(ids[_pick(chances, at)[0]])

    def skip(self, numbers: int) -> None:
        """Skips the next `numbers` numbers of the random sequence, as if they had been drawn."""
        self._random.bit_generator.advance(numbers)  # type: ignore[attr-defined]
        self.drawn += numbers

    def _draw(self) -> float:
        self.drawn += 1
        return float(self._random.random())

    def _changed(self, logits: Logits, history: Sequence[int], answered: int) -> Logits:
        """The logits with bias, penalties and mask."""
        settings = self.settings
        if settings.logit_bias:
            at = self._bias_ids.astype(np.int64)
            logits = logits.with_values(at, logits.values[at] + self._bias)
        logits = penalise(logits, history, settings.repetition_penalty)
        if answered and (settings.presence_penalty or settings.frequency_penalty):
            at, times = np.unique(np.asarray(history[-answered:]), return_counts=True)
            presence, frequency = map(
                np.float32, (settings.presence_penalty, settings.frequency_penalty)
            )
            less = presence + frequency * times.astype(np.float32)
            logits = logits.with_values(at, logits.values[at] - less)
        if self.mask is not None:
            allowed = np.unpackbits(self.mask.view(np.uint8), bitorder="little")
            out = np.flatnonzero(allowed[: len(logits.values)] == 0)
            if out.size:
                masked = np.full(out.size, -np.inf, dtype=np.float32)
                logits = logits.with_values(out, masked)
        return logits


def chosen_id(chosen: ChosenToken, logits: Logits) -> int:
    """Returns the id of the token that was chosen from these logits.

    Raises:
        BadPack, UsageError: there is none, see `Sampler.next`.
    """
    if chosen.id == BROKEN:
        _check(logits)
    if chosen.id == NONE_LEFT:
        raise UsageError(NOTHING_LEFT)
    return chosen.id


def _temperature(settings: SamplingSettings) -> float:
    """The divisor of logits; 0: greedy."""
    if settings.is_greedy:
        return 0.0
    return max(settings.temperature, _COLDEST)


def _check(logits: Logits) -> None:
    best = logits.values[logits.best]
    if not np.isfinite(best):
        raise BadPack(
            f"the model computed {best} where a number is due: its files or a kernel are wrong",
            hint="kt verify MODEL checks the files; KT_ISA=portable tries the plain kernels",
        )


def penalise(logits: Logits, history: Sequence[int], penalty: float) -> Logits:
    """Returns the logits with those of `history` divided (positive) or multiplied (negative) by `penalty`."""
    if penalty == 1.0 or not len(history):
        return logits
    seen = np.asarray(history, dtype=np.int64)
    values = logits.values[seen]
    return logits.with_values(seen, np.where(values < 0, values * penalty, values / penalty))


def shortlist(scores: Logits, settings: SamplingSettings) -> tuple[Ids, Weights]:
    """Returns the tokens that pass top-k, top-p and min-p, with their chances (not summing to 1).

    Args:
        scores: logits after the penalty.
    Returns:
        ids [n] ascending, and chances [n] relative to the best token's, n >= 1.
    """
    temperature = _temperature(settings)
    bound = settings.min_p  # tokens below it go
    below = 0.0  # chances of those that went
    if 0 < settings.top_k < len(scores.values):
        ids = _top_k(scores, settings.top_k)
        chances = _chances(scores, scores.values[ids], temperature)
        total = float(chances.sum())
    else:
        total = 0.0
        if settings.top_p < 1:
            scores = scores.at_temperature(temperature)
            masses = _masses(scores)
            total = float(masses.sum())
            bound = max(bound, _top_p_bound(masses, (1.0 - settings.top_p) * total))
        stay = _chances(scores, scores.peaks, temperature) >= bound
        if settings.top_p < 1:
            below = float(masses.sum(where=~stay))
        ids = scores.ids_in(np.flatnonzero(stay))
        chances = _chances(scores, scores.values[ids], temperature)
    likely = chances >= bound
    below += float(chances.sum(where=~likely))
    ids, chances = ids[likely], chances[likely]
    if settings.top_p < 1:
        kept = _top_p(chances, (1.0 - settings.top_p) * total - below)
        ids, chances = ids[kept], chances[kept]
    return ids, chances


def _top_p_bound(masses: Weights, tail: float) -> float:
    """A chance that is so low that all tokens below it lie in the tail of top-p.

    The tokens of a block below it together weigh at most the block's mass, and at most 64 times that chance: the
    greatest chance for which the sum of these limits over all blocks is no more than the tail.
    """
    ascending = np.sort(masses)
    sums = np.cumsum(ascending)
    others = np.arange(len(masses) - 1, -1, -1)
    light = int((sums + others * ascending <= tail).sum())  # blocks that count by their mass
    if light == len(masses):
        return 1.0
    rest = tail - (sums[light - 1] if light else 0.0)
    # A little less, since masses are rounded; the best token has 1.
    return min(1.0, 0.9999 * float(rest) / (len(masses) - light) / BLOCK_COLUMNS)


def _top_k(scores: Logits, k: int) -> Ids:
    """The k best ids, ascending; those that tie with the last of them stay, as in transformers."""
    peaks = scores.peaks
    blocks = np.arange(len(peaks))
    if len(peaks) > k:
        # Of k blocks the best lies at or above the bound, so at least k tokens do, the k best among them.
        blocks = np.flatnonzero(peaks >= np.partition(peaks, len(peaks) - k)[len(peaks) - k])
    ids = scores.ids_in(blocks)
    values = scores.values[ids]
    best_ones: Ids = ids[values >= np.partition(values, len(values) - k)[len(values) - k]]
    return best_ones


def _top_p(chances: Weights, tail: float) -> Ids:
    """The indices, ascending, without the least that together hold at most `tail`; one stays always."""
    order = np.argsort(chances, kind="stable")
    keep = np.cumsum(chances[order]) > tail
    keep[-1] = True
    kept: Ids = np.sort(order[keep])
    return kept


def _chances(scores: Logits, values: F32Array, temperature: float) -> Weights:
    """The chances of tokens with these values, where the best of `scores` has 1."""
    logs = (values - scores.values[scores.best]) / np.float32(temperature)
    chances: Weights = np.exp(logs).astype(np.float64)
    return chances


def _masses(scores: Logits) -> Weights:
    """The sum of the chances of each block's tokens."""
    return _chances(scores, scores.peaks, scores.temperature) * scores.sums


def _pick(weights: Weights, at: float) -> tuple[int, float]:
    """The index at which the share `at` of all weights is reached, and the share of that index's weight that is then
    used."""
    sums = np.cumsum(weights)
    wanted = at * sums[-1]
    # `at` of an inner index may have been rounded to 1: then the last index with a weight is taken.
    place = int(min(sums.searchsorted(wanted, side="right"), sums.searchsorted(sums[-1])))
    return place, max(0.0, float((wanted - (sums[place] - weights[place])) / weights[place]))
