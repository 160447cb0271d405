"""From the logits of one step to the next id. Numpy only; knows nothing of text.

The filters and their order are those of transformers (repetition penalty, temperature, top-k,
top-p, min-p), so that settings published with a model mean here what they mean there. A seed fixes the
sequence: each token takes exactly one number from the generator. A vocabulary has up to 200,000
entries and almost all of them are hopeless, so they are left out by a bound before anything is sorted.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import BadPack, UsageError

Logits = NDArray[np.float32]
Scores = NDArray[np.float64]
Ids = NDArray[np.int64]

_BLOCK = 64  # scores whose maximum bounds them

_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "0 (greedy) to 100"),
    "top_k": (0, 10_000_000, "0 (off) or more"),
    "top_p": (0.0, 1.0, "0 to 1 (off)"),
    "min_p": (0.0, 1.0, "0 (off) to 1"),
    "repetition_penalty": (0.01, 100.0, "0.01 to 100, 1 is off"),
}


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 means greedy.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the smallest set of best tokens with at least this probability; 1 keeps all.
        min_p: drop tokens below this fraction of the best token's probability; 0 keeps all.
        repetition_penalty: above 1, tokens of the prompt and the answer become less likely.
        seed: equal seeds give equal texts; None draws one.
        greedy: take the best token always; only the repetition penalty still counts.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    greedy: bool = False

    def __post_init__(self) -> None:
        for name, (low, high, words) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # also false for NaN
                said = str(value)[:30]
                raise UsageError(f"{name.replace('_', '-')} is {said}, it can be {words}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"seed is {str(self.seed)[:30]}, it can be 0 to 2^64 - 1")


class Sampler:
    """One random sequence under one settings object.

    Attributes:
        seed: the seed in use, drawn if the settings name none.
    """

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings
        self.seed = secrets.randbits(32) if settings.seed is None else settings.seed
        self._random = np.random.default_rng(self.seed)

    def next(self, logits: Logits, history: Sequence[int]) -> int:
        """The id that follows.

        Args:
            logits: of the last position, [V].
            history: ids of the prompt and the answer so far, for the repetition penalty.
        Raises:
            BadPack: the logits hold NaN or infinity.
        """
        settings = self.settings
        scores = penalise(_checked(logits), history, settings.repetition_penalty)
        if settings.greedy or settings.temperature == 0:
            return int(np.argmax(scores))
        ids, chances = shortlist(scores, settings)
        sums = np.cumsum(chances)
        drawn = np.searchsorted(sums, self._random.random() * sums[-1], side="right")
        return int(ids[min(int(drawn), len(ids) - 1)])


def _checked(logits: Logits) -> Logits:
    best = logits.max() if logits.size else np.nan  # NaN wins over everything in max()
    if not np.isfinite(best):
        raise BadPack(
            f"the model computed {best} where a number is due: its files or a kernel are wrong",
            hint="kt verify MODEL checks the files; KT_ISA=portable tries the plain kernels",
        )
    return logits


def penalise(logits: Logits, history: Sequence[int], penalty: float) -> Logits:
    """Logits [V] where tokens of `history` are divided (positive) or multiplied (negative)."""
    if penalty == 1.0 or not len(history):
        return logits
    seen = np.unique(np.asarray(history, dtype=np.int64))
    scores = logits.copy()
    values = scores[seen]
    scores[seen] = np.where(values < 0, values * penalty, values / penalty)
    return scores


def shortlist(scores: Logits, settings: SamplingSettings) -> tuple[Ids, Scores]:
    """The tokens that survive top-k, top-p and min-p, with their chances (not summing to 1).

    Args:
        scores: logits after the penalty, [V].
    Returns:
        ids [n] ascending, and chances [n] relative to the best token's, n >= 1.
    """
    ids: Ids = np.arange(len(scores))
    if 0 < settings.top_k < len(scores):
        ids = _top_k(scores, settings.top_k)
    # float32 where there are many; the best token has 1.
    coarse = np.exp((scores[ids] - scores.max()) / np.float32(settings.temperature))
    if settings.top_p < 1:
        kept = _top_p(coarse, settings.top_p)
        ids, coarse = ids[kept], coarse[kept]
    if settings.min_p > 0:
        kept = np.flatnonzero(coarse >= settings.min_p)
        ids, coarse = ids[kept], coarse[kept]
    return ids, coarse.astype(np.float64)


def _top_k(scores: Logits, k: int) -> Ids:
    """Places of the k best, ascending; those that tie with the last of them stay, as in transformers."""
    blocks = len(scores) // _BLOCK
    candidates: Ids = np.arange(len(scores))
    if blocks > k:
        # Of k blocks the best lies at or above `bound`, so at least k scores do, the k best among them.
        best = scores[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        bound = np.partition(best, blocks - k)[blocks - k]
        candidates = np.flatnonzero(scores >= bound)
    few = scores[candidates]
    last = np.partition(few, len(few) - k)[len(few) - k]
    best_ones: Ids = candidates[few >= last]
    return best_ones


def _top_p(chances: NDArray[np.float32], top_p: float) -> Ids:
    """Places, ascending, without the tail that holds at most 1 - top_p; one stays always."""
    tail = (1.0 - top_p) * float(chances.sum(dtype=np.float64))
    # Tokens below tail / n cannot fill the tail even all together, so they lie in it.
    hopeless = chances < tail / len(chances)
    below = float(chances.sum(dtype=np.float64, where=hopeless))
    likely = np.flatnonzero(~hopeless)
    order = likely[np.argsort(chances[likely], kind="stable")]
    keep = below + np.cumsum(chances[order], dtype=np.float64) > tail
    keep[-1] = True
    kept: Ids = np.sort(order[keep])
    return kept
