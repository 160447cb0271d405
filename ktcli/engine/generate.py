"""Generates an answer to a prompt, in ids: prefill once, then one token at a time.

A `Generation` is an iterator of ids that keeps its own account of what was computed. It can be
abandoned between any two ids; the session then holds the prompt and the ids handed out (but perhaps
the last), so the next turn computes only the new ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ktcli.engine.logits import Logits
from ktcli.engine.sampler import Sampler
from ktcli.engine.session import Progress, Session
from ktcli.errors import ContextFull


class Finish(Enum):
    """The reason why an answer ended."""

    STOP = "stop"  # the model ended it, or a stop string appeared
    LENGTH = "length"  # --max-tokens
    CONTEXT = "context"  # no position left
    CANCELLED = "cancelled"  # Ctrl-C, or whoever asked has left
    FAILED = "failed"  # the model or the machine could not go on


@dataclass(slots=True)
class Stats:
    """The counts and times of one answer; every counted token went through the model once.

    Times are those of the steps that it took part in, with whatever else these computed.
    """

    prompt_tokens: int = 0  # the prompt's tokens, as far as it was read
    reused_tokens: int = 0  # those of them that were already in the cache
    prompt_s: float = 0.0
    tokens: int = 0  # the answer's tokens, without the stop token
    eval_s: float = 0.0
    queued_s: float = 0.0  # from the request to its first step

    @property
    def prefilled_tokens(self) -> int:
        """The prompt tokens that were computed."""
        return self.prompt_tokens - self.reused_tokens


class _Cancelled(Exception):
    """The generation was cancelled between two chunks of the prompt."""


@dataclass(slots=True)
class Generation:
    """One answer while it is made; iterate to make it.

    Attributes:
        stop_ids: ids that end the answer and are no part of it.
        max_tokens: the most tokens of the answer; None: as many as the context holds.
        context: the number of positions of the session.
        cancelled: called between tokens and between chunks of the prompt; true ends the answer.
        progress: called while the prompt is read: (tokens done, tokens in all).
        depth_at: returns the number of experts that the token at a position may defer; prompts are read without
            deferral.
        ids: the ids handed out so far.
        finish: the reason why it ended; CANCELLED until it ends by itself.
    """

    session: Session
    prompt: Sequence[int]
    sampler: Sampler
    stop_ids: Collection[int]
    max_tokens: int | None
    context: int
    cancelled: Callable[[], bool] = lambda: False
    progress: Progress | None = None
    depth_at: Callable[[int], int] = lambda position: 0
    stats: Stats = field(default_factory=Stats)
    ids: list[int] = field(default_factory=list)
    finish: Finish = Finish.CANCELLED

    def __iter__(self) -> Iterator[int]:
        room = self.context - len(self.prompt)
        if room < 1:
            raise ContextFull(
                f"the conversation has {len(self.prompt):,} tokens and the context holds "
                f"{self.context:,}, so there is no room for an answer"
            )
        try:
            logits = self._prefill()
        except _Cancelled:
            return
        limit = room if self.max_tokens is None else min(room, self.max_tokens)
        history = list(self.prompt)
        while len(self.ids) < limit:
            if self.cancelled():
                return
            started = time.perf_counter()
            token = self.sampler.next(logits, history)
            self.stats.eval_s += time.perf_counter() - started
            if token in self.stop_ids:
                self.finish = Finish.STOP
                return
            self.ids.append(token)
            history.append(token)
            self.stats.tokens += 1
            yield token  # shown while the next one is computed
            started = time.perf_counter()
            depth = self.depth_at(len(history) - 1)
            logits = self.session.feed([token], temperature=self.sampler.sums_at, defer=depth)
            self.stats.eval_s += time.perf_counter() - started
        self.finish = Finish.CONTEXT if limit == room else Finish.LENGTH

    def _prefill(self) -> Logits:
        started = time.perf_counter()

        def between_chunks(done: int, total: int) -> None:
            self.stats.reused_tokens = len(self.prompt) - total
            self.stats.prompt_tokens = self.stats.reused_tokens + done
            self.stats.prompt_s = time.perf_counter() - started
            if self.progress is not None:
                self.progress(done, total)
            if self.cancelled() and done < total:
                raise _Cancelled

        logits, reused = self.session.advance(
            self.prompt, progress=between_chunks, temperature=self.sampler.sums_at
        )
        self.stats.prompt_s = time.perf_counter() - started
        self.stats.prompt_tokens, self.stats.reused_tokens = len(self.prompt), reused
        return logits


def six_lines(stats: Stats) -> str:
    """The statistics under an answer, in the words of ollama and KTransformers."""

    def rate(count: int, seconds: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    rows = [
        ("prompt eval count:", f"{stats.prefilled_tokens} token(s)"),
        ("prompt eval duration:", f"{stats.prompt_s:.9f}s"),
        ("prompt eval rate:", f"{rate(stats.prefilled_tokens, stats.prompt_s):.2f} tokens/s"),
        ("eval count:", f"{stats.tokens} token(s)"),
        ("eval duration:", f"{stats.eval_s:.9f}s"),
        ("eval rate:", f"{rate(stats.tokens, stats.eval_s):.2f} tokens/s"),
    ]
    return "\n".join(f"{name:<22}{value}" for name, value in rows)


def cached_line(stats: Stats) -> str:
    """The line below the six: the tokens of the prompt that were in the cache, and all of them."""
    return f"{'cached / prompt:':<22}{stats.reused_tokens} / {stats.prompt_tokens} token(s)"
