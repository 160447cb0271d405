"""Generates an answer to a prompt, in ids: prefill once, then one token at a time, or several that were drafted.

A `Generation` is an iterator of ids that keeps its own account of what was computed. It can be
abandoned between any two ids; the session then holds the prompt and the ids handed out (but perhaps
the last), so the next turn computes only the new ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ktcli.engine.drafting import Drafting
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
    steps: int = 0  # those that the answer took after its first token
    drafted: int = 0  # ids that were tried before anything chose them
    accepted: int = 0  # those of them that were chosen

    @property
    def tokens_per_step(self) -> float:
        """The tokens that an average step gave; 0: there was none. The first token is the prompt's."""
        return (self.steps + self.accepted) / self.steps if self.steps else 0.0

    @property
    def prefilled_tokens(self) -> int:
        """The prompt tokens that were computed."""
        return self.prompt_tokens - self.reused_tokens


class _Cancelled(Exception):
    """The generation was cancelled between two chunks of the prompt."""


@dataclass(slots=True)
class _Tried:
    """A step's logits, and the drafted ids that it computed: logits[i + 1] are those after drafted[i].

    Attributes:
        sure: the ids of the step before the drafted ones.
        right: the drafted ids that were chosen so far.
    """

    logits: list[Logits]
    drafted: Sequence[int] = ()
    sure: int = 1
    right: int = 0

    @property
    def next(self) -> Logits:
        return self.logits[self.right]


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
        depths, marks: of the prompt, as `Session.advance` takes them.
        drafting: the drafts of this conversation; None: every step computes one token.
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
    depths: bytes = b""
    marks: Sequence[int] = ()
    drafting: Drafting | None = None
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
        if self.drafting is not None:
            self.drafting.begin(history)
        tried = _Tried([logits])
        while len(self.ids) < limit:
            if self.cancelled():
                return
            started = time.perf_counter()
            token = self.sampler.next(tried.next, history)
            self.stats.eval_s += time.perf_counter() - started
            if token in self.stop_ids:
                self.finish = Finish.STOP
                return
            self._say(token, history)
            yield token  # shown while the next one is computed
            started = time.perf_counter()
            if self.drafting is None:
                tried = _Tried([self._plain(token, len(history) - 1)])
            elif not self._is_drafted(token, tried):
                tried = self._step(self.drafting, history, limit)
            self.stats.eval_s += time.perf_counter() - started
        self.finish = Finish.CONTEXT if limit == room else Finish.LENGTH

    def _say(self, token: int, history: list[int]) -> None:
        self.ids.append(token)
        history.append(token)
        self.stats.tokens += 1
        if self.drafting is not None:
            self.drafting.said(token)

    def _is_drafted(self, token: int, tried: _Tried) -> bool:
        """Tells whether the token is the next of the draft: then its logits are known, and it counts."""
        if tried.right == len(tried.drafted) or tried.drafted[tried.right] != token:
            return False
        tried.right += 1
        self.stats.accepted += 1
        self.session.keep(tried.sure + tried.right)
        return True

    def _step(self, drafting: Drafting, history: Sequence[int], limit: int) -> _Tried:
        """Computes the last id of `history` and a draft behind it, and before it what the session does not hold."""
        session, depth = self.session, self.depth_at(len(history) - 1)
        while self.depth_at(session.length) != depth:
            self._plain(history[session.length], session.length)
        sure = history[session.length :]
        drafted = self._draft(drafting, len(history), len(sure) - 1, limit)
        started = time.perf_counter()
        if len(sure) + len(drafted) == 1:
            logits = [self._plain(sure[0], session.length)]
        else:
            ids, temperature = [*sure, *drafted], self.sampler.sums_at
            logits = session.attempt(ids, 1 + len(drafted), temperature=temperature, defer=depth)
            session.keep(len(sure))
            self.stats.steps += 1
        drafting.ran(len(sure) + len(drafted), time.perf_counter() - started)
        self.stats.drafted += len(drafted)
        return _Tried(logits, drafted, len(sure))

    def _plain(self, token: int, position: int) -> Logits:
        """Computes one token."""
        self.stats.steps += 1
        depth = self.depth_at(position)
        return self.session.feed([token], temperature=self.sampler.sums_at, defer=depth)

    def _draft(
        self, drafting: Drafting, position: int, waiting: int, limit: int
    ) -> tuple[int, ...]:
        """The ids to try from `position` on: none after a stop, none that defers otherwise than the id before them."""
        most = min(limit - len(self.ids), self.session.most_tried) - 1
        drafted = drafting.next(waiting, most)
        depth = self.depth_at(position - 1)
        unfit = (
            i
            for i, id in enumerate(drafted)
            if id in self.stop_ids or self.depth_at(position + i) != depth
        )
        return drafted[: next(unfit, len(drafted))]

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
            self.prompt,
            progress=between_chunks,
            temperature=self.sampler.sums_at,
            depths=self.depths,
            marks=self.marks,
        )
        self.stats.prompt_s = time.perf_counter() - started
        self.stats.prompt_tokens, self.stats.reused_tokens = len(self.prompt), reused
        return logits


def six_lines(stats: Stats) -> str:
    """The statistics under an answer, in the words of ollama and KTransformers; and what was drafted, if anything."""

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
    if stats.drafted:
        words = f"{stats.drafted} drafted, {stats.accepted} accepted"
        rows.append(("draft:", f"{words}, {stats.tokens_per_step:.2f} tokens/step"))
    return "\n".join(f"{name:<22}{value}" for name, value in rows)


def cached_line(stats: Stats) -> str:
    """The line below the six: the tokens of the prompt that were in the cache, and all of them."""
    return f"{'cached / prompt:':<22}{stats.reused_tokens} / {stats.prompt_tokens} token(s)"
