"""The choice of the next token of many rows of logits at once; see kt_sample.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import NativeError
from ktcli.native.library import BLOCK_COLUMNS, created, library
from ktcli.native.pool import Pool

F32Array = NDArray[np.float32]
I32Array = NDArray[np.int32]
_F32, _I32, _U32 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint32)

BROKEN, NONE_LEFT = -1, -2


class TokenChoice(NamedTuple):
    """The options for choosing a token from one row of logits; the fields are those of kt_choice.

    Attributes:
        values: [V] f32; with peaks and sums [B] f32 and best they are a row's logits and their summary.
        likeliest: the number of likeliest ids that are wanted; -1: no logarithms at all.
    """

    values: F32Array
    peaks: F32Array
    sums: F32Array
    best: int
    sums_temperature: float
    temperature: float
    at: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seen: I32Array | None = None
    answered: I32Array | None = None
    bias_ids: I32Array | None = None
    bias: F32Array | None = None
    mask: NDArray[np.uint32] | None = None
    likeliest: int = -1


class ChosenToken(NamedTuple):
    """The token that was chosen for one row of logits.

    Attributes:
        id: the token; BROKEN: a logit is NaN or infinite; NONE_LEFT: the mask leaves none.
        logprob: of the token, before anything was changed; 0 if it was not wanted.
        likeliest: (id, logprob) pairs, the likeliest first.
    """

    id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


class Chooser:
    """Chooses tokens of a vocabulary from rows of logits, with a pool's threads."""

    def __init__(self, pool: Pool, vocab: int) -> None:
        self._ffi, self._lib = library()
        handle = created(self._lib.kt_sampler_create, pool.handle, vocab)
        self._handle = self._ffi.gc(handle, self._lib.kt_sampler_free)
        self._pool, self._vocab = pool, vocab  # the pool has to outlive the handle
        self._blocks = -(-vocab // BLOCK_COLUMNS)
        types = {_F32: "float[]", _I32: "int32_t[]", _U32: "uint32_t[]"}
        self._kinds = {dtype: self._ffi.typeof(kind) for dtype, kind in types.items()}
        self._rows = self._ffi.new("kt_choice[]", 1)

    def choose(self, choices: Sequence[TokenChoice]) -> list[ChosenToken]:
        """Returns the token chosen for each of `choices`, in their order, with log-probabilities where they are wanted;
        the result is the same as for one choice after another.

        Raises:
            NativeError: an id is outside the vocabulary, or an array has another type or size.
        """
        n = len(choices)
        if len(self._rows) < n:
            self._rows = self._ffi.new("kt_choice[]", n)
        likeliest = [self._fill(i, choice) for i, choice in enumerate(choices)]
        if self._lib.kt_sampler_choose(self._handle, self._rows, n) < 0:
            raise NativeError(f"an id is outside the vocabulary of {self._vocab} tokens")
        rows = self._rows
        return [
            ChosenToken(rows[i].id, rows[i].logprob, () if found is None else _pairs(*found))
            for i, found in enumerate(likeliest)
        ]

    def _fill(self, i: int, choice: TokenChoice) -> tuple[I32Array, F32Array] | None:
        """Fills in row i; returns where the likeliest ids and their logarithms come to lie, if any are wanted. What the
        choice holds lives as long as it does."""
        self._check(choice)
        pointer, wanted = self._pointer, choice.likeliest
        found = (np.empty(wanted, np.int32), np.empty(wanted, np.float32)) if wanted > 0 else None
        self._rows[i] = (  # all fields at once, in their order
            pointer(choice.values, _F32),
            pointer(choice.peaks, _F32),
            pointer(choice.sums, _F32),
            choice.best,
            choice.sums_temperature,
            choice.temperature,
            choice.top_k,
            choice.top_p,
            choice.min_p,
            choice.at,
            choice.repetition,
            choice.presence,
            choice.frequency,
            0 if choice.seen is None else choice.seen.size,
            0 if choice.bias_ids is None else choice.bias_ids.size,
            pointer(choice.seen, _I32),
            pointer(choice.answered, _I32),
            pointer(choice.bias_ids, _I32),
            pointer(choice.bias, _F32),
            pointer(choice.mask, _U32),
            wanted,
            NONE_LEFT,
            0.0,
            pointer(found and found[0], _I32),
            pointer(found and found[1], _F32),
        )
        return found

    def _check(self, choice: TokenChoice) -> None:
        vocab, blocks = self._vocab, self._blocks
        sizes = choice.values.size, choice.peaks.size, choice.sums.size
        if sizes != (vocab, blocks, blocks):
            raise NativeError(f"the logits are not those of {vocab} tokens")
        if choice.mask is not None and choice.mask.size != -(-vocab // 32):
            raise NativeError(f"the mask does not have {vocab} bits")

    def _pointer(self, array: NDArray[Any] | None, dtype: np.dtype[Any]) -> Any:
        if array is None or not array.size:
            return self._ffi.NULL
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise NativeError(f"the array is not a contiguous row of {dtype}")
        return self._ffi.from_buffer(self._kinds[dtype], array)


def _pairs(ids: I32Array, logprobs: F32Array) -> tuple[tuple[int, float], ...]:
    """The (id, logprob) pairs of the ids that there are."""
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return tuple(pair for pair in pairs if pair[0] >= 0)
