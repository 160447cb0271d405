"""Serves many requests on one engine: which answers go on and which prompt is read in each step.

Every call of `step` makes at most one batch: each answer in progress gets its next token, and beside them a piece of a
prompt is read, when its turn has come (balance.py) and as long as measured times allow (pace.py). Between two steps any
request can be cancelled. When pages run out, the least important request gives its own back and waits: what it needs
is found again, or computed again in the same form, so nobody's ids depend on who else is served.

`submit` and `Answer.cancel` may be called from any thread, `step` from one thread only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ktcli.engine.active import NO_DRAFT_ROOM, Active, DraftRoom
from ktcli.engine.contract import Engine
from ktcli.engine.drafting import Drafting
from ktcli.engine.logits import Logits
from ktcli.engine.pace import Pace, Piece
from ktcli.engine.pages import PoolFull
from ktcli.engine.pagetable import pages_for
from ktcli.engine.request import (
    Answer,
    Event,
    Finish,
    Finished,
    GenerationRequest,
    PromptRead,
    Token,
)
from ktcli.engine.sampler import Sampler
from ktcli.engine.sequence import Sequence
from ktcli.engine.waiting import Turns, require_room
from ktcli.errors import ContextFull, KtError, UsageError
from ktcli.native import PAGE_TOKENS
from ktcli.native.batch import Batch, Run
from ktcli.native.choosing import Chooser

PRIORITIES = range(-10, 11)


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a scheduler.

    Attributes:
        waiting: the most requests that wait for their first step.
        active: the most requests that are read or answered at once.
        longest_s: the seconds that a step should not exceed while answers wait for it.
    """

    waiting: int = 512
    active: int = 16
    longest_s: float = 2.0


@dataclass(frozen=True, slots=True)
class _InStep:
    """What one request has in a step; `reads`: part of its prompt."""

    active: Active
    run: Run
    reads: bool

    @property
    def ends_chunk(self) -> bool:
        """Tells whether a chunk of the prompt ends here, as it would if the request were alone."""
        run = self.run
        return self.reads and run.chunk is not None and run.start + run.ids.size == sum(run.chunk)


@dataclass(slots=True)
class _Tried:
    """A request whose next tokens are chosen from the rows of a step.

    Attributes:
        rows: the logits after the last id that is known, and after each one that was drafted.
        right: the drafted ids that were chosen so far.
        open: whether the next token is to be chosen, too: its row is known.
        end: why no token follows; None: one does.
    """

    part: _InStep
    rows: list[Logits]
    drafted: list[int]
    right: int = 0
    open: bool = False
    end: Finish | None = None
    error: KtError | None = None

    @property
    def active(self) -> Active:
        return self.part.active

    @property
    def row(self) -> Logits:
        return self.rows[self.right]


def _piece(runs: list[Run]) -> Piece:
    """What these runs read of prompts, taken together."""
    tokens = sum(run.ids.size for run in runs)
    return Piece(tokens, sum(run.start * run.ids.size for run in runs) / tokens if tokens else 0.0)


def _importance(each: Active) -> tuple[int, int]:
    """The order in which requests keep their pages, the most important first."""
    return -each.answer.request.priority, each.answer.number


class Scheduler:
    """Requests in, events out.

    Args:
        engine: the engine, which nobody else runs meanwhile.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._clock = engine, clock
        self._limits = limits or Limits()
        self.pace = Pace(self._limits.longest_s, engine.piece_times)
        self._chooser = Chooser(engine.pool, engine.spec.vocab)
        self._lock = threading.Lock()
        self._numbers = 0
        self._new: deque[Active] = deque()  # submitted since the last step
        self._waiting: list[Active] = []
        self._active: list[Active] = []  # these hold pages
        self._turns = Turns()
        self._refused: tuple[Active, tuple[int, int]] | None = (
            None  # who was not let in with so many pages available
        )
        self._steps = 0
        self._pure_steps = 0.0  # of answers alone that are due before a prompt is read on

    @property
    def idle(self) -> bool:
        """Tells whether there is nothing to do."""
        return not (self._new or self._waiting or self._active)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their first step, or for room to go on."""
        return len(self._new) + len(self._waiting)

    @property
    def active(self) -> int:
        """The number of requests that are read or answered."""
        return len(self._active)

    def submit(
        self,
        request: GenerationRequest,
        *,
        sampler: Sampler | None = None,
        sequence: Sequence | None = None,
        drafting: Drafting | None = None,
    ) -> Answer:
        """Takes a request; its events come from `step`.

        Args:
            sampler: goes on with this random sequence; None: a new one.
            sequence: the timeline to answer on, which stays the caller's and holds prompt and answer afterwards;
                None: one that ends with the answer.
            drafting: the drafts of the conversation, which go on learning; None: new ones, as the request wishes.
        Raises:
            QueueFull: too many wait already.
            ContextFull: the prompt leaves no room for an answer.
            UsageError: the prompt is empty, or the request makes no sense.
        """
        room = self._room(request)
        kept = sequence is not None
        drafts = request.draft.of(self._engine) if drafting is None else drafting
        with self._lock:
            require_room(self.waiting, self._limits.waiting)
            self._numbers += 1
            answer = Answer(request, self._numbers, sampler or Sampler(request.sampling))
            timeline = sequence or self._engine.sequence()
            self._new.append(Active(answer, room, self._clock(), timeline, kept, drafts))
        return answer

    def step(self) -> list[Event]:
        """Does one step; returns what happened. Without work it returns at once.

        A step that is interrupted, by an exception from outside, counts for nothing and can be done again.
        """
        self._steps += 1
        self._collect()
        events: list[Event] = []
        self._end_cancelled(events)
        self._admit()
        parts = self._answers(events)
        if any(each.reading for each in self._active):
            if parts and self._pure_steps >= 1:
                self._pure_steps -= 1
            else:
                self._prompts(parts, events)
        if parts:
            self._run(parts, events)
        return events

    def close(self) -> list[Event]:
        """Cancels every request; returns their last events."""
        self._collect()
        for each in (*self._waiting, *self._active):
            each.answer.cancel()
        events: list[Event] = []
        self._end_cancelled(events)
        return events

    def _room(self, request: GenerationRequest) -> int:
        """The tokens that there is room for after the prompt, 1 at least."""
        n = len(request.prompt)
        if not n:
            raise UsageError("there is nothing to answer: the prompt has no tokens")
        if request.priority not in PRIORITIES:
            raise UsageError(f"priority is {request.priority}, it can be -10 to 10")
        vocab = self._engine.spec.vocab
        if bad := next((id for id in request.prompt if not 0 <= id < vocab), None):
            raise UsageError(f"token id {bad} is outside the vocabulary of {vocab}")
        request.sampling.require_within(vocab)
        holds = min(self._engine.context, self._engine.pools.pages.count * PAGE_TOKENS)
        if n >= holds:
            raise ContextFull(
                f"the conversation has {n:,} tokens and the context holds {holds:,}, "
                "so there is no room for an answer"
            )
        return holds - n

    def _collect(self) -> None:
        """Takes over what was submitted since the last step."""
        with self._lock:
            while self._new:
                fresh = self._new.popleft()
                fresh.answer.since = self._steps
                self._waiting.append(fresh)

    def _end_cancelled(self, events: list[Event]) -> None:
        for each in (*self._waiting, *self._active):
            if each.answer.cancelled:
                self._end(each, Finish.CANCELLED, events)

    def _admit(self) -> None:
        """Lets requests begin, in turn, while there are seats, and pages for the prompt and a first piece of answer."""
        seats = min(self._limits.active, self._engine.max_outputs)
        while self._waiting and len(self._active) < seats:
            each, pools = self._in_turn(self._waiting)[0], self._engine.pools
            if self._active and (each, pools.available) == self._refused:
                return  # nothing has changed since
            each.open(self._engine)
            if self._active and not self._fit([*self._active, each]):
                each.give_back()
                self._refused = each, pools.available
                return
            self._turns.served(each.answer)
            self._waiting.remove(each)
            self._active.append(each)

    def _fit(self, some: list[Active]) -> bool:
        """Tells whether there are pages for what these requests have ahead of them, and for a prompt's chunk."""
        available, in_windows = self._engine.pools.available
        ahead = sum(each.pages_ahead for each in some)
        windows = sum(each.windows_ahead for each in some)
        chunk = pages_for(self._engine.max_tokens) + 1
        return ahead <= available and (not windows or min(windows + chunk, ahead) <= in_windows)

    def _in_turn(self, some: Iterable[Active]) -> list[Active]:
        of = {each.answer: each for each in some}
        return [of[answer] for answer in self._turns.first(of.keys(), self._steps)]

    def _answers(self, events: list[Event]) -> list[_InStep]:
        """The runs of the answers in progress, the most important first: the others make room."""
        parts: list[_InStep] = []
        answering = [each for each in sorted(self._active, key=_importance) if not each.reading]
        drafts = len(answering) == len(self._active)  # beside a prompt each row would take its time
        for place, each in enumerate(answering):
            if each in self._active:
                others = len(answering) - place - 1
                room = self._draft_room(parts, others) if drafts else NO_DRAFT_ROOM
                self._add(parts, each, partial(each.writes, self._engine, room), events)
        return parts

    def _draft_room(self, parts: list[_InStep], others: int) -> DraftRoom:
        """What a step with these parts has for the drafts of the next answer, if each of the others gets a row."""
        outputs = sum(part.run.ids.size - part.run.first_output for part in parts)
        rows = sum(part.run.ids.size for part in parts)
        return DraftRoom(self._engine.max_outputs - outputs - others, rows + others)

    def _prompts(self, parts: list[_InStep], events: list[Event]) -> None:
        """Adds pieces of prompts, in turn, up to the rows that time allows."""
        answers = sum(part.run.ids.size for part in parts)
        left = min(self._engine.max_tokens, self._engine.max_rows - answers)
        turns = self._in_turn([each for each in self._active if each.reading])
        if answers:
            at, end = turns[0].sequence.length, turns[0].prompt_tokens
            left = min(left, self.pace.piece(answers, self._engine.max_tokens, at, end))
        for each in turns:
            if each not in self._active:
                continue
            if not each.begun:
                each.open(self._engine)  # another request may have read the same since
            before = len(parts)
            self._add(parts, each, partial(each.reads, self._engine, left), events)
            if len(parts) > before:
                self._turns.served(each.answer)
                left -= parts[-1].run.ids.size
                if left < PAGE_TOKENS:
                    return  # the next may share pages with this one later

    def _add(
        self, parts: list[_InStep], each: Active, make: Callable[[], Run], events: list[Event]
    ) -> None:
        """Adds a request's run; if there are no pages for it, the least important request gives its own back."""
        planned = {part.active for part in parts}
        while each in self._active:
            try:
                parts.append(_InStep(each, make(), each.reading))
                return
            except PoolFull as error:
                if (
                    len(self._active) == 1
                ):  # whoever holds the rest is none of this scheduler's requests
                    self._end(each, Finish.FAILED, events, error)
                else:
                    others = (one for one in self._active if one not in planned)
                    self._suspend(max(others, key=_importance))

    def _suspend(self, each: Active) -> None:
        each.give_back()
        self._active.remove(each)
        self._waiting.append(each)

    # -- the step and its results ----------------------------------------------------------------------

    def _run(self, parts: list[_InStep], events: list[Event]) -> None:
        """Runs the step, and draws the next token of everybody who is up to date."""
        began = self._clock()
        for part in parts:
            part.active.start(began)
        try:
            rows = iter(self._engine.run(Batch(tuple(part.run for part in parts))))
        except KtError as error:
            for part in parts:
                self._end(part.active, Finish.FAILED, events, error)
            return
        ran_s = self._clock() - began
        tried: list[_Tried] = []
        for part in parts:
            part.active.computed(part.run, ends_chunk=part.ends_chunk)
            outputs = [next(rows) for _ in range(part.run.first_output, part.run.ids.size)]
            if outputs:
                tried.append(_Tried(part, outputs, part.active.drafted_in(part.run)))
        self._tell_read(parts, events)
        self._choose(tried, events)
        self._account(parts, self._clock() - began)
        for each in tried:
            if each.drafted:
                each.active.keep(each.part.run, each.right)
        if not any(part.reads for part in parts):
            self._learn(tried, sum(part.run.ids.size for part in parts), ran_s)
        for each in tried:
            if each.end is not None:
                self._end(each.active, each.end, events, each.error)
        for part in parts:
            finish = part.active.finish
            if finish is not None and part.active.sequence.length == len(part.active.known):
                self._end(part.active, finish, events)

    def _choose(self, tried: list[_Tried], events: list[Event]) -> None:
        """Chooses the next tokens of each: as many as its draft is right, and one more; each choice is made as if its
        row had come from a step of its own."""
        while tried:
            choices = [each.active.choice(each.row) for each in tried]
            for each, chosen in zip(tried, self._chooser.choose(choices), strict=True):
                try:
                    self._take(each, each.active.token(chosen, each.row), events)
                except KtError as error:
                    each.end, each.error = Finish.FAILED, error
            tried = [each for each in tried if each.open]

    def _take(self, each: _Tried, token: Token, events: list[Event]) -> None:
        """An answer goes on with a token, or ends."""
        active, answer = each.active, each.active.answer
        each.open = False
        if token.id in answer.request.stop_ids:
            each.end = Finish.STOP
            return
        active.take(token.id)
        events.append(token)
        if len(answer.ids) == active.room:
            active.finish = Finish.CONTEXT
        elif len(answer.ids) == answer.request.max_tokens:
            active.finish = Finish.LENGTH
        if each.right < len(each.drafted) and each.drafted[each.right] == token.id:
            each.right += 1
            answer.stats.accepted += 1
            each.open = active.finish is None
        if answer.request.ends(token.id):
            each.end, each.open = Finish.STOP, False
        elif active.finish is not None and not active.kept:
            each.end = active.finish

    def _learn(self, tried: list[_Tried], rows: int, seconds: float) -> None:
        """Tells those who draft what a step of answers alone took."""
        times = self._engine.step_times
        if times is not None:
            times.add(rows, seconds)
        for each in tried:
            own = each.part.run.ids.size
            if each.active.drafting is not None:
                each.active.drafting.ran(own, rows - own, seconds)

    def _tell_read(self, parts: list[_InStep], events: list[Event]) -> None:
        """Tells how far prompts are read."""
        for part in parts:
            active, stats = part.active, part.active.answer.stats
            done = active.sequence.length
            if part.reads and done > stats.prompt_tokens:
                stats.prompt_tokens = done
                total = active.prompt_tokens - stats.reused_tokens
                events.append(PromptRead(active.answer, done - stats.reused_tokens, total))

    def _account(self, parts: list[_InStep], seconds: float) -> None:
        """Enters a step into the statistics of whoever had a part in it, and into the pace."""
        piece = _piece([part.run for part in parts if part.reads])
        answers = sum(part.run.ids.size for part in parts) - piece.tokens
        for part in parts:
            stats = part.active.answer.stats
            if part.reads:
                stats.prompt_s += seconds
            else:
                stats.eval_s += seconds
                stats.steps += 1
                stats.drafted += len(part.active.drafted_in(part.run))
        self.pace.record(answers, piece, seconds)
        if answers and piece.tokens:
            self._pure_steps += self.pace.pure_steps(answers, piece, self._engine.max_tokens)
        elif piece.tokens:
            self._pure_steps = 0.0

    def _end(
        self, each: Active, finish: Finish, events: list[Event], error: Exception | None = None
    ) -> None:
        """Ends a request; what it held is free."""
        if not each.kept:
            each.sequence.close()
        (self._active if each in self._active else self._waiting).remove(each)
        if finish is Finish.CANCELLED and each.finish is not None:
            finish = each.finish  # all its tokens were out already
        each.answer.finish = finish
        events.append(Finished(each.answer, finish, error))
        if self.idle:
            self._turns.forget(())
