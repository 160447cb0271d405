"""The slow and obvious choice of a token, rule by rule and without summaries, that the library's is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ktcli.sampling import SamplingSettings


def changed(
    values: np.ndarray,
    settings: SamplingSettings,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """The logits [V] f32 with bias, penalties and mask, in this order."""
    values = values.copy()
    for id, bias in settings.logit_bias:
        values[id] += np.float32(bias)
    seen = np.unique(np.array([*prompt, *answer], dtype=np.int64))
    penalty = np.float32(settings.repetition_penalty)
    worse = values[seen] < 0
    values[seen] = np.where(worse, values[seen] * penalty, values[seen] / penalty)
    ids, times = np.unique(np.array(answer, dtype=np.int64), return_counts=True)
    presence, frequency = map(np.float32, (settings.presence_penalty, settings.frequency_penalty))
    values[ids] -= presence + frequency * times.astype(np.float32)
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: values.size]
        values[allowed == 0] = -np.inf
    return values


def chances(values: np.ndarray, settings: SamplingSettings) -> np.ndarray:
    """The probabilities [V] of changed logits; temperature, top-k, top-p and min-p in this order."""
    scores = values.astype(np.float64)
    if settings.is_greedy:
        return (np.arange(scores.size) == scores.argmax()).astype(float)
    left = np.exp((scores - scores.max()) / settings.temperature)
    if 0 < settings.top_k < scores.size:
        left[scores < np.sort(scores)[-settings.top_k]] = 0  # those that tie with the last stay
    if settings.top_p < 1:
        order = np.argsort(left, kind="stable")
        out = np.cumsum(left[order]) <= (1 - settings.top_p) * left.sum()
        out[-1] = False
        left[order[out]] = 0
    if settings.min_p:
        left[left < settings.min_p] = 0
    return left / left.sum()


def is_choice(id: int, values: np.ndarray, settings: SamplingSettings) -> bool:
    """Tells whether the first number that the settings' seed draws leads to this id of changed logits.

    But for rounding, which may also put the last token that top-p keeps in or out.
    """
    left = chances(values, settings)
    if settings.is_greedy:
        return bool(left[id] == 1)
    drawn, end = np.random.default_rng(settings.seed).random(), left[: id + 1].sum()
    off = 1e-6 + (left[left > 0].min() if settings.top_p < 1 else 0)
    return bool(np.isfinite(values[id]) and end - left[id] - off <= drawn <= end + off)
