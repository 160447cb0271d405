"""Serves many requests on one engine: decides which answers continue and which prompt is read in each step.

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
from contextlib import suppress
from functools import partial

from ktcli.engine.active import NO_DRAFT_ROOM, Active, DraftRoom
from ktcli.engine.contract import Engine
from ktcli.engine.drafting import Drafting
from ktcli.engine.pace import Pace, PromptPiece
from ktcli.engine.pages import PoolFull
from ktcli.engine.pagetable import pages_for
from ktcli.engine.request import Answer, Event, Finish, Finished, GenerationRequest
from ktcli.engine.sampler import Sampler
from ktcli.engine.sequence import Sequence
from ktcli.engine.step_part import StepPart
from ktcli.engine.waiting import Turns, require_room
from ktcli.errors import ContextFull, DeviceError, KtError, UsageError
from ktcli.native import PAGE_TOKENS, Batch, Run
from ktcli.native.choosing import Chooser
from ktcli.records import dataclass

PRIORITIES = range(-10, 11)


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a scheduler.

    Attributes:
        waiting: the most requests that wait for their first step.
        active: the most requests that are read or answered at once.
        pause_s: the seconds that a step should not exceed while answers wait for it; None: as few as cost at most
            5 % of the speed of answers and prompts together.
    """

    waiting: int = 512
    active: int = 16
    pause_s: float | None = None


def _piece(parts: list[StepPart]) -> PromptPiece:
    """What these parts of a step read of prompts, taken together."""
    reads = [part for part in parts if part.reads]
    tokens = sum(part.tokens for part in reads)
    return PromptPiece(tokens, sum(part.run.start * part.tokens for part in reads) / max(1, tokens))


def _importance(each: Active) -> tuple[int, int]:
    """The order in which requests keep their pages, the most important first."""
    return -each.answer.request.priority, each.answer.number


class Scheduler:
    """Runs requests on one engine, many at a time: takes requests, and returns the events of their answers.

    Args:
        engine: the engine, which nobody else runs meanwhile.
        clock: returns the time in seconds.
    Attributes:
        stalled: whether the last step could do nothing, since all that is there waits for constraints.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._clock = engine, clock
        self._limits = limits or Limits()
        self.pace = Pace(self._limits.pause_s, engine.piece_times)
        self._chooser = Chooser(engine.pool, engine.spec.output_width)
        self._lock = threading.Lock()
        self._numbers = 0
        self._new: deque[Active] = deque()  # submitted since the last step
        self._waiting: list[Active] = []
        self._active: list[Active] = []  # these hold pages
        self._turns = Turns()
        # Who was not let in with so many pages available.
        self._refused: tuple[Active, tuple[int, int]] | None = None
        self._steps = 0
        self._pure_steps = 0.0  # of answers alone that are due before a prompt is read on
        self.stalled = False
        self._reading = False  # whether a prompt was there to be read in the last step

    @property
    def idle(self) -> bool:
        """Whether the scheduler has no request, neither waiting nor in progress."""
        return not (self._new or self._waiting or self._active)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their first step, or for KV-cache pages to continue."""
        return len(self._new) + len(self._waiting)

    @property
    def active(self) -> int:
        """The number of requests in progress, whose prompt is being computed or whose answer is being generated."""
        return len(self._active)

    def submit(
        self,
        request: GenerationRequest,
        *,
        sampler: Sampler | None = None,
        sequence: Sequence | None = None,
        drafting: Drafting | None = None,
        goes_on: bool = False,
    ) -> Answer:
        """Queues a request and returns its answer, which steps fill; its events come from `step`.

        Args:
            sampler: the sampler whose random numbers are continued; None: a new one.
            sequence: the sequence for prompt and answer, which stays the caller's; None: a new one, which is closed
                when the answer ends.
            drafting: what chooses the conversation's drafts, and goes on learning; None: a new one, by the request's
                options.
            goes_on: whether the request continues an answer that has just ended: it takes that one's place without
                waiting.
        Raises:
            QueueFull: too many requests wait already.
            ContextFull: the prompt leaves no room for an answer.
            UsageError: the prompt is empty, one of its ids or a setting is out of range, or the model does not do what
                is asked.
        """
        room = self._room(request)
        kept = sequence is not None
        drafts = request.draft.of(self._engine) if drafting is None else drafting
        with self._lock:
            if not goes_on:
                require_room(self.waiting, self._limits.waiting)
            self._numbers += 1
            answer = Answer(request, self._numbers, sampler or Sampler(request.sampling))
            answer.goes_on = goes_on
            timeline = sequence or self._engine.sequence()
            self._new.append(Active(answer, room, self._clock(), timeline, kept, drafts))
        return answer

    def step(self) -> list[Event]:
        """Runs one step of the engine; returns what happened in it, as events: a part of a prompt was read, a token was
        added to an answer, an answer ended. If there is no work, returns [] at once.

        A step that an exception from outside interrupts has no effect and can be repeated.
        """
        self._steps += 1
        self._collect()
        events: list[Event] = []
        self._end_cancelled(events)
        self._admit()
        answering = [each for each in self._active if not each.reading]
        prompts, read = bool(self._readers), self._reading
        parts = self._answers(answering, events, drafts=not prompts)
        # Room was made for the answers.
        self._reading = prompts and bool(self._readers)
        if self._reading:
            if parts and not read:
                self._pure_steps = self._pure_steps_before(parts)
            if parts and self._pure_steps >= 1:
                self._pure_steps -= 1
            else:
                self._prompts(parts, events)
        if parts:
            self._run(parts, events)
        self.stalled = bool(self._active) and not parts
        return events

    def close(self) -> list[Event]:
        """Cancels every request, waiting or in progress; returns their last events."""
        self._collect()
        for each in (*self._waiting, *self._active):
            each.answer.cancel()
        events: list[Event] = []
        self._end_cancelled(events)
        return events

    def _room(self, request: GenerationRequest) -> int:
        """The tokens that there is room for after the prompt: 1 at least, where an answer follows."""
        n, pools = len(request.prompt), request.pooled is not None
        if pools != self._engine.spec.embeds:
            raise UsageError(
                "this model generates text, not embeddings"
                if pools
                else "this model produces embeddings, not text"
            )
        if not n:
            raise UsageError("there is nothing to answer: the prompt has no tokens")
        if request.priority not in PRIORITIES:
            raise UsageError(f"priority must be -10 to 10, not {request.priority}")
        if not 0 <= request.said < n:
            raise UsageError(
                f"the prompt has {n} tokens, so {request.said} of them cannot belong to the answer"
            )
        vocab = self._engine.spec.vocab
        if bad := next((id for id in request.prompt if not 0 <= id < vocab), None):
            raise UsageError(f"token id {bad} is outside the vocabulary of {vocab}")
        request.sampling.require_within(vocab)
        holds = min(self._engine.context, self._engine.pools.pages.count * PAGE_TOKENS)
        if n >= holds + pools:
            raise ContextFull(
                f"the conversation has {n:,} tokens, but the context holds {holds:,}, "
                "so there is no room for an answer"
            )
        return holds - n

    def _collect(self) -> None:
        """Takes over what was submitted since the last step."""
        if not self._new:
            return
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
        if not self._waiting:
            return
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
        """Returns whether there are pages for what these requests have ahead of them, and for a prompt's chunk."""
        available, in_windows = self._engine.pools.available
        ahead = sum(each.pages_ahead for each in some)
        windows = sum(each.windows_ahead for each in some)
        chunk = pages_for(self._engine.max_tokens) + 1
        return ahead <= available and (not windows or min(windows + chunk, ahead) <= in_windows)

    def _in_turn(self, some: Iterable[Active]) -> list[Active]:
        of = {each.answer: each for each in some}
        return [of[answer] for answer in self._turns.first(of.keys(), self._steps)]

    def _answers(
        self, answering: list[Active], events: list[Event], *, drafts: bool
    ) -> list[StepPart]:
        """The runs of the answers in progress, the most important first: the others make room.

        Args:
            drafts: whether they may draft: beside a prompt each row would take its time.
        """
        parts: list[StepPart] = []
        for place, each in enumerate(sorted(answering, key=_importance), 1):
            if each in self._active:
                room = NO_DRAFT_ROOM
                if drafts and each.drafting is not None:
                    room = self._draft_room(parts, len(answering) - place)
                self._add(parts, each, partial(each.writes, self._engine, room), events)
        return parts

    def _draft_room(self, parts: list[StepPart], others: int) -> DraftRoom:
        """What a step with these parts has for the drafts of the next answer, if each of the others gets a row."""
        rows = sum(part.tokens for part in parts)
        return DraftRoom(self._outputs_left(parts, others), rows + others)

    def _pure_steps_before(self, answers: list[StepPart]) -> float:
        """The steps of answers alone before the first piece of a prompt: half of those that would follow it. None
        follow the last one, so that the other half makes up for it."""
        rows, first = sum(part.tokens for part in answers), self._in_turn(self._readers)[0]
        chunk, at, end = self._engine.max_tokens, first.sequence.length, first.prompt_tokens
        tokens = min(end - at, self.pace.piece(rows, chunk, at, end))
        return self.pace.pure_steps(rows, PromptPiece(tokens, at), chunk) / 2

    @property
    def _readers(self) -> list[Active]:
        """The requests of whose prompts something can be read now."""
        return [each for each in self._active if each.reading and not each.held]

    def _prompts(self, parts: list[StepPart], events: list[Event]) -> None:
        """Adds pieces of prompts, in turn, up to the rows that time allows."""
        answers, turns = sum(part.tokens for part in parts), self._in_turn(self._readers)
        left = min(self._engine.max_tokens, self._engine.max_rows - answers)
        shared = self.pace.shared(answers, len(turns), self._engine.max_tokens)
        if answers:
            at, end = turns[0].sequence.length, turns[0].prompt_tokens
            left = min(left, self.pace.piece(answers, self._engine.max_tokens, at, end))
        for place, each in enumerate(turns, 1):
            if each not in self._active:
                continue
            if not each.begun:
                each.open(self._engine)  # another request may have read the same since
                if each.held:
                    continue
            before = len(parts)
            most = left
            if each.scores:
                most = min(left, max(1, self._outputs_left(parts, len(turns) - place)))
            self._add(parts, each, partial(each.reads, self._engine, most), events)
            if len(parts) > before:
                self._turns.served(each.answer)
                left, shared = left - parts[-1].tokens, shared - parts[-1].tokens
                left = min(left, shared)
                if left < PAGE_TOKENS:
                    return  # the next may share pages with this one later

    def _outputs_left(self, parts: list[StepPart], others: int) -> int:
        """The rows that can give logits beside a step's parts, if each of so many others gets one."""
        outputs = sum(part.tokens - part.run.first_output for part in parts)
        return self._engine.max_outputs - outputs - others

    def _add(
        self, parts: list[StepPart], each: Active, make: Callable[[], Run], events: list[Event]
    ) -> None:
        """Adds a request's run; if there are no pages for it, the least important request gives its own back."""
        while each in self._active:
            try:
                parts.append(StepPart(each, make(), each.reading))
                return
            except PoolFull as error:
                self._collect()  # timelines of their callers that came meanwhile hold pages, too
                waiting = [one for one in self._waiting if one.sequence.length]
                if len(self._active) > 1:
                    planned = {part.active for part in parts}
                    others = (one for one in self._active if one not in planned)
                    self._suspend(max(others, key=_importance))
                elif waiting:  # with timelines of their callers
                    one = max(waiting, key=_importance)
                    one.open(self._engine, bring=False)  # what it has is known then
                    one.give_back()
                else:  # whoever holds the rest is none of this scheduler's requests
                    self._end(each, Finish.FAILED, events, error)

    def _suspend(self, each: Active) -> None:
        each.give_back()
        self._active.remove(each)
        self._waiting.append(each)

    # -- the step and its results ----------------------------------------------------------------------

    def _run(self, parts: list[StepPart], events: list[Event]) -> None:
        """Runs the step, and draws the next token of everybody who is up to date."""
        began = self._clock()
        for part in parts:
            part.active.start(began)
        try:
            rows = iter(self._engine.run(Batch(tuple([part.run for part in parts]))))
        except KtError as error:
            for part in parts:
                self._end(part.active, Finish.FAILED, events, error)
            return
        ran_s = self._clock() - began
        for part in parts:
            part.computed(rows)
        reads = (part.read_on(self._chooser) for part in parts if part.reads)
        events.extend(event for event in reads if event)
        self._choose(parts, events)
        self._account(parts, ran_s, self._clock() - began)
        for part in parts:
            finish = part.finish()
            if finish is not None:
                self._end(part.active, finish, events, part.error)

    def _choose(self, parts: list[StepPart], events: list[Event]) -> None:
        """Chooses the next tokens of each: as many as its draft is right, and one more; each choice is made as if its
        row had come from a step of its own."""
        while tried := [part for part in parts if part.open]:
            choices = [part.active.choice(part.row) for part in tried]
            for part, chosen in zip(tried, self._chooser.choose(choices), strict=True):
                try:
                    token = part.active.token(self._engine, chosen, part.row)
                except KtError as error:
                    part.end, part.error, part.open = Finish.FAILED, error, False
                else:
                    if part.take(token):
                        events.append(token)

    def _account(self, parts: list[StepPart], ran_s: float, seconds: float) -> None:
        """Enters a step into the statistics of whoever had a part in it, and into the pace.

        Args:
            ran_s: the seconds that it was computed.
            seconds: those with the choice of tokens.
        """
        for part in parts:
            part.account(seconds, seconds - ran_s)
        piece = _piece(parts)
        answers = sum(part.tokens for part in parts) - piece.tokens
        self.pace.record(answers, piece, seconds)
        if not piece.tokens:
            self._learn(parts, answers, ran_s)
        elif answers:
            self._pure_steps += self.pace.pure_steps(answers, piece, self._engine.max_tokens)
        else:
            self._pure_steps = 0.0

    def _learn(self, parts: list[StepPart], rows: int, seconds: float) -> None:
        """Tells those who draft what a step of answers alone took."""
        times = self._engine.step_times
        if times is not None:
            times.add(rows, seconds)
        for part in parts:
            drafting = part.active.drafting
            if drafting is not None and part.rows:
                drafting.ran(part.tokens, rows - part.tokens, seconds)

    def _end(
        self, each: Active, finish: Finish, events: list[Event], error: Exception | None = None
    ) -> None:
        """Ends a request; what it held is free."""
        (self._active if each in self._active else self._waiting).remove(each)
        is_read = not each.reading
        if each.answer.request.persist:
            each.sequence.persist()
        if not each.kept:
            with suppress(DeviceError):  # one that failed has nothing to give back
                each.sequence.close()
        if finish is Finish.CANCELLED and each.finish is not None and is_read:
            finish = each.finish  # all its tokens were out already
        each.answer.finish = finish
        events.append(Finished(each.answer, finish, error))
        if self.idle:
            self._turns.forget(())
