"""Requests the choice of the next id from the logits of one step; it does not know about text.

The native library chooses (kt_sample.h): `Sampler.choice` says how, with one number from the generator for each token,
so that a seed fixes the sequence. The filters and their order are those of transformers (repetition penalty,
temperature, top-k, top-p, min-p), so that settings published with a model have the same meaning here as there.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.constraint import mask_of
from ktcli.engine.logits import Logits
from ktcli.errors import BadPack, UsageError
from ktcli.native.choosing import BROKEN, NONE_LEFT, ChosenToken, TokenChoice
from ktcli.sampling import SamplingSettings

# Colder is the same to every float32, and would divide by zero there.
_COLDEST = 1e-30
NOTHING_LEFT = "no token is allowed next: the mask excludes them all"


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
        """The distinct ids of the prompt and the answer so far, [n]; empty if no sampling setting counts ids."""
        return self._seen[: len(self._place)]

    @property
    def answered(self) -> NDArray[np.int32]:
        """The number of times that each id of `seen` is in the answer so far, [n]."""
        return self._answered[: len(self._place)]

    def append(self, id: int) -> None:
        """Counts an id that was appended to the answer."""
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
    """

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings
        self.seed = secrets.randbits(32) if settings.seed is None else settings.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed))
        self.drawn = 0
        self._bias_ids = np.array([id for id, _ in settings.logit_bias], dtype=np.int32)
        self._bias = np.array([bias for _, bias in settings.logit_bias], dtype=np.float32)
        self._temperature = _temperature(settings)
        sums = settings.top_k == 0 and (settings.top_p < 1 or settings.min_p == 0)
        self.sums_at = self._temperature if sums else 0.0

    def choice(
        self,
        logits: Logits,
        history: History,
        *,
        mask: NDArray[np.uint32] | None = None,
        likeliest: int = -1,
    ) -> TokenChoice:
        """Returns the inputs for choosing the next id: the logits, the sampling settings, the ids seen so far, and a
        random number, which is drawn here unless the choice is greedy.

        Args:
            logits: the logits of the last position.
            history: the ids so far, for penalties.
            mask: bit i of word j: whether id 32 j + i may be the next; None: all may.
            likeliest: the number of likeliest ids whose log-probabilities are wanted besides the chosen id's; -1: none
                at all, not even that one's.
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
            mask,
            likeliest,
        )

    def skip(self, numbers: int) -> None:
        """Skips the next `numbers` random numbers of the answer's sequence, as if they had been drawn."""
        self._random.bit_generator.advance(numbers)  # type: ignore[attr-defined]
        self.drawn += numbers

    def _draw(self) -> float:
        self.drawn += 1
        return float(self._random.random())


def given_choice(logits: Logits, id: int, likeliest: int) -> TokenChoice:
    """Returns the inputs for a choice whose only outcome is `id`; its log-probability under these logits is still
    computed.

    Args:
        likeliest: the number of likeliest ids whose log-probabilities are wanted besides that of `id`.
    """
    mask = mask_of((id,), logits.values.size)
    row = (logits.values, logits.peaks, logits.sums, logits.best, logits.temperature)
    return TokenChoice(*row, temperature=0.0, at=0.0, mask=mask, likeliest=likeliest)


def chosen_id(chosen: ChosenToken, logits: Logits) -> int:
    """Returns the id of the token that was chosen from these logits, after checking that one could be.

    Raises:
        BadPack: the logits hold NaN or infinity.
        UsageError: the mask leaves no token.
    """
    if chosen.id == BROKEN:
        best = logits.values[logits.best]
        raise BadPack(
            f"the model computed {best} instead of a number: its files or a kernel are wrong",
            hint="kt verify MODEL checks the files; KT_ISA=portable uses the plain kernels",
        )
    if chosen.id == NONE_LEFT:
        raise UsageError(NOTHING_LEFT)
    return chosen.id


def _temperature(settings: SamplingSettings) -> float:
    """The divisor of logits; 0: greedy."""
    if settings.is_greedy:
        return 0.0
    return max(settings.temperature, _COLDEST)
