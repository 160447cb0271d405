"""Computes the figures of SGLang's `bench_serving` from the times of answers: throughput, and percentiles of
latencies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ktcli.measure.endpoint import StreamedAnswer
from ktcli.measure.traffic import Driven
from ktcli.records import dataclass

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies of answered requests, in milliseconds.

    Attributes:
        e2e: from each request to the end of its answer.
        ttft: to its first piece.
        tpot: between two tokens on average, without the first; of each answer with several.
        itl: between two pieces, of all answers.
    """

    e2e: Floats
    ttft: Floats
    tpot: Floats
    itl: Floats


@dataclass(frozen=True, slots=True)
class Served:
    """The throughput and the latencies of a server under some traffic.

    Attributes:
        completed, failed: requests with an answer and without.
        seconds: that all took together.
        input_tokens, output_tokens: of all answered requests.
        latencies: of these.
    """

    completed: int
    failed: int
    seconds: float
    input_tokens: int
    output_tokens: int
    latencies: Latencies

    @classmethod
    def of(cls, driven: Driven) -> Served:
        """Returns the throughput and latencies of requests that were sent to a server, from their answers; failed
        requests are only counted."""
        answers = [each for each in driven.answers if not each.error]
        return cls(
            len(answers),
            len(driven.answers) - len(answers),
            driven.seconds,
            sum(each.prompt_tokens for each in answers),
            sum(map(tokens_of, answers)),
            latencies(answers),
        )

    @property
    def concurrency(self) -> float:
        """The average number of requests that were under way at the same time."""
        return float(self.latencies.e2e.sum()) / 1e3 / self.seconds


def by_server(driven: Driven) -> dict[str, tuple[StreamedAnswer, ...]]:
    """Returns, by the name of each server behind a router, its answers in the order in which they were sent; {}: no
    answer names a server."""
    names = sorted({each.server for each in driven.answers if each.server})
    return {name: tuple(each for each in driven.answers if each.server == name) for name in names}


def tokens_of(answer: StreamedAnswer) -> int:
    """Returns the number of tokens of an answer as the server counts them or, if it does not, the number of the
    answer's pieces."""
    return answer.output_tokens or len(answer.pieces_s)


def latencies(answers: Sequence[StreamedAnswer]) -> Latencies:
    """Returns the latencies, in milliseconds, of all answers that have pieces: end to end, to the first piece, per
    token, and between pieces."""
    spoken = [each for each in answers if each.pieces_s]
    e2e = [each.pieces_s[-1] - each.sent_s for each in spoken]
    ttft = [each.pieces_s[0] - each.sent_s for each in spoken]
    tpot = [
        (each.pieces_s[-1] - each.pieces_s[0]) / (tokens_of(each) - 1)
        for each in spoken
        if tokens_of(each) > 1
    ]
    itl = [float(gap) for each in spoken for gap in np.diff(each.pieces_s)]
    return Latencies(*(1e3 * np.array(each, dtype=np.float64) for each in (e2e, ttft, tpot, itl)))


def percentile(values: Floats, percent: float) -> float:
    """Returns the value at the percentile `percent`, 0..100, of `values`; 0 if there are none."""
    return float(np.percentile(values, percent)) if values.size else 0.0
