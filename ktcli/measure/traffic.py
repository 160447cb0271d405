"""Sends requests of a given length to a server, at a rate or with a given concurrency; no prompt repeats."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from math import inf
from queue import SimpleQueue

from ktcli.errors import KtError
from ktcli.measure.endpoint import Endpoint, Prompted, StreamedAnswer
from ktcli.records import dataclass
from ktcli.threads import Daemon

# Frequent words, of which tokenizers know each with the blank before it as one token.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem"
    " hand part place case week company system program question work government number night point home water room"
    " mother area money story fact month lot right study book eye job word business issue side kind head house"
    " service friend father power hour game line end member law car city community name"
).split()
_PROBES = (64, 192)  # words of the two prompts by which tokens are told from words
MOST_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests that are sent.

    Attributes:
        requests: their number.
        input_tokens, output_tokens: of each.
        rate: the requests per second, at random moments (Poisson); inf: all at the beginning.
        at_once: the most that are under way; None: any number.
        seed: of the words and the moments.
    """

    requests: int
    input_tokens: int
    output_tokens: int
    rate: float = inf
    at_once: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Driven:
    """The answers to the requests that were sent.

    Attributes:
        answers: in the order in which they were sent.
        seconds: from the first request to the end of the last answer.
    """

    answers: tuple[StreamedAnswer, ...]
    seconds: float


def drive(
    endpoint: Endpoint, traffic: Traffic, progress: Callable[[int], None] = lambda done: None
) -> Driven:
    """Sends the requests of `traffic` to a server and waits for all answers; returns these and the seconds they took
    together. Two short requests before them measure how many tokens a word has.

    Args:
        progress: called with the number of requests that are done.
    Raises:
        KtError: the server does not answer even a short request.
    """
    draw = random.Random(traffic.seed)
    words = _words_for(endpoint, traffic, draw)
    prompts = [_prompt(draw, words, traffic.output_tokens) for _ in range(traffic.requests)]
    return _Driver(endpoint, prompts, progress).drive(traffic, draw)


class _Driver:
    """Sends prompts from as many threads as may be under way."""

    def __init__(
        self, endpoint: Endpoint, prompts: list[Prompted], progress: Callable[[int], None]
    ) -> None:
        self._endpoint, self._prompts, self._progress = endpoint, prompts, progress
        self._waiting: SimpleQueue[int | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, StreamedAnswer]] = SimpleQueue()

    def drive(self, traffic: Traffic, draw: random.Random) -> Driven:
        most = min(len(self._prompts), traffic.at_once or MOST_AT_ONCE)
        for _ in range(most):  # daemons, so that Ctrl-C need not wait for answers
            Daemon(self._send, name="kt-send").start()
        began_s = time.perf_counter()
        sender = Daemon(self._arrive, traffic.rate, draw, most, name="kt-arrive")
        sender.start()
        found: dict[int, StreamedAnswer] = {}
        while len(found) < len(self._prompts):
            index, answer = self._done.get()
            found[index] = answer
            self._progress(len(found))
        seconds = time.perf_counter() - began_s
        return Driven(tuple(found[at] for at in sorted(found)), seconds)

    def _arrive(self, rate: float, draw: random.Random, threads: int) -> None:
        at_s = time.perf_counter()
        for index in range(len(self._prompts)):
            self._waiting.put(index)
            if rate != inf:
                at_s += draw.expovariate(rate)
                time.sleep(max(0.0, at_s - time.perf_counter()))
        for _ in range(threads):
            self._waiting.put(None)

    def _send(self) -> None:
        while (index := self._waiting.get()) is not None:
            try:
                answer = self._endpoint.ask(self._prompts[index])
            except Exception as error:  # whatever a server makes of it, the others go on
                answer = StreamedAnswer(error=f"{type(error).__name__}: {error}")
            self._done.put((index, answer))


def _words_for(endpoint: Endpoint, traffic: Traffic, draw: random.Random) -> int:
    """The words of which a prompt has the tokens that it should have, the template's included.

    Raises:
        KtError: the server does not answer.
    """
    few, many = (_probe(endpoint, draw, words) for words in _PROBES)
    per_word = (many - few) / (_PROBES[1] - _PROBES[0])
    if per_word <= 0:  # the server does not count
        return traffic.input_tokens
    return max(1, _PROBES[0] + round((traffic.input_tokens - few) / per_word))


def _probe(endpoint: Endpoint, draw: random.Random, words: int) -> int:
    answer = endpoint.ask(_prompt(draw, words, 1))
    if answer.error:
        raise KtError(f"{endpoint.url} does not answer for {endpoint.model}: {answer.error}")
    return answer.prompt_tokens


def _prompt(draw: random.Random, words: int, output_tokens: int) -> Prompted:
    return Prompted(" ".join(draw.choices(_WORDS, k=words)), output_tokens)
