"""Answers one request of a client: one or several answers to one prompt, sent piece by piece to an event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ktcli.dialogue.answer import AnswerEvent, AnswerOptions, AnswerRun, Ended, PromptProgress, Said
from ktcli.dialogue.prompts import EncodedPrompt
from ktcli.engine.constraint import Constraint
from ktcli.engine.request import Answer, Finish, GenerationRequest
from ktcli.engine.sampler import Sampler
from ktcli.engine.tier import Tier
from ktcli.server.http.metrics import Metrics
from ktcli.server.models.model import Lease
from ktcli.server.tracing.spans import Inference, finish_of
from ktcli.threads import BackgroundCall

PERSIST_S = 10.0  # the longest that the end of an answer waits for its pages to be stored


class Generation:
    """The answers to one request. Everything but the callbacks of their runs is for the event loop.

    Args:
        lease: of the model that answers; the generation takes one of its own until the last answer has ended.
        constraints: of each answer; empty: there are none.
    Attributes:
        id: a name that no other generation has.
        name: the name of the model that answers.
        ended: called with the tokens of all answers when the last has ended.
    """

    def __init__(
        self,
        lease: Lease,
        prompt: EncodedPrompt,
        options: AnswerOptions,
        metrics: Metrics,
        constraints: Sequence[Constraint] = (),
    ) -> None:
        self.id = secrets.token_hex(12)
        self.model, self.prompt, self.name = lease.model, prompt, lease.name
        adapter = None if lease.adapter is None else lease.adapter.attached
        tier = lease.model.backend.engine.pools.tier
        persist = options.persist or (tier is not None and tier.is_shared and _reads_only(options))
        self.options = replace(options, adapter=adapter, persist=persist)
        self._context = lease.model.backend.engine.context
        self._metrics, self.constraints = metrics, constraints
        self._began_s = time.monotonic()
        self._events: deque[AnswerEvent] = deque()
        # When the last token of each answer came, `time.monotonic`.
        self._token_s: dict[int, float] = {}
        self._first_s: float | None = None  # when the first one of all came
        self._finishes: dict[int, str] = {}  # why answers have ended
        self.came = asyncio.Event()  # set with each event
        self.ended: Callable[[int], None] = lambda tokens: None
        self._cancelled = False
        # Where the pages of the prompt are to be stored before its answers end; None: it does not matter.
        self._tier = tier if persist else None
        self._persisting: set[asyncio.Task[None]] = set()  # which nobody else holds
        self.failure: Exception | None = None  # that ends it whatever the engine says
        self.answers: dict[int, AnswerRun] = {}  # by their numbers
        self._open = options.choices
        self._others_wait = options.choices > 1
        self._begin(0)
        self._lease = lease.again()

    @property
    def tokens(self) -> int:
        """The number of tokens that all answers have generated so far."""
        return sum(each.stats.tokens for each in self.answers.values())

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.prompt.ids)

    @property
    def inference(self) -> Inference:
        """The facts of this generation for its trace, at its end: the model, times, token counts, and why the answers
        ended."""
        return Inference(
            self.name,
            self.id,
            self._began_s,
            self._first_s,
            time.monotonic(),
            len(self.prompt.ids),
            self.reused_tokens,
            self.tokens,
            [self._finishes[each] for each in sorted(self._finishes)],
        )

    @property
    def reused_tokens(self) -> int:
        """The number of tokens of the prompt that were in the cache."""
        return self.answers[0].stats.reused_tokens

    @property
    def reused_by_tier(self) -> dict[str, int]:
        """The number of tokens of the prompt that were in the cache, by where they were: "memory", or a store's
        name."""
        return self.answers[0].stats.reused_by_tier

    def taken(self) -> list[AnswerEvent]:
        """Returns the events of the answers since the last call, possibly none; does not wait."""
        found = list(self._events)
        self._events.clear()
        return found

    @property
    def over(self) -> bool:
        """Whether every answer has ended and all its events have been returned."""
        return not self._open and not self._events

    def fail(self, error: Exception) -> None:
        """Cancels every answer, and makes `error` the `failure` of this generation, whatever the engine says later."""
        self.failure = error
        self.cancel()
        self.came.set()

    def cancel(self) -> None:
        """Cancels every answer: the engine ends it at its next step."""
        self._cancelled = True
        for each in self.answers.values():
            each.cancel()

    def _begin(self, choice: int) -> None:
        def submit(request: GenerationRequest, sampler: Sampler | None, *, goes_on: bool) -> Answer:
            return self.model.thread.submit(request, made.hear, sampler, goes_on=goes_on)

        made: AnswerRun = AnswerRun(
            self.model.answers,
            self._context,
            self.prompt,
            self.options,
            submit,
            lambda event: self.model.queue.put(self.receive, event),
            choice=choice,
            constraint=self.constraints[choice] if self.constraints else None,
        )
        self.answers[choice] = made
        try:
            made.submit()
        except BaseException:
            del self.answers[choice]
            raise

    def receive(self, event: AnswerEvent) -> None:
        """Adds an event of an answer to those that `taken` returns; to be called in the event loop. If KV pages are to
        be stored before an answer ends, its end is held back until they are, for at most PERSIST_S seconds."""
        given_up = (Finish.FAILED, Finish.CANCELLED)
        if self._tier is None or not isinstance(event, Ended) or event.finish in given_up:
            self._take(event)
            return
        task = asyncio.create_task(self._persist(self._tier, event))
        self._persisting.add(task)
        task.add_done_callback(self._persisting.discard)

    async def _persist(self, tier: Tier, event: Ended) -> None:
        loop, stored = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            try:
                tier.flush(PERSIST_S)
            finally:
                loop.call_soon_threadsafe(stored.set)

        try:
            BackgroundCall(flush, "kt-persist")  # the loop's threads are few, and needed by others
            await stored.wait()
        finally:
            self._take(event)

    def _take(self, event: AnswerEvent) -> None:
        if isinstance(event, Said) and event.token is not None:
            self._time(event.choice)
        if isinstance(event, Ended):
            self._open -= 1
            self._finishes[event.choice] = finish_of(event)
        # Once the prompt is read its pages are there for the other answers.
        if self._others_wait and not isinstance(event, PromptProgress):
            self._others_wait = False
            self._begin_others(event)
        if not self._open:
            self._lease.release()
            self.ended(self.tokens)
        self._events.append(event)
        self.came.set()
        if isinstance(event, Ended):
            self._close(event)  # last: a fault in it keeps nobody waiting, and no model in memory

    def _begin_others(self, event: Said | Ended) -> None:
        """Begins the other answers, unless the first one says that there will be none."""
        ended = (Finish.FAILED, Finish.CANCELLED)
        if self._cancelled or (isinstance(event, Ended) and event.finish in ended):
            self._open = 0 if isinstance(event, Ended) else 1
            return
        for choice in range(1, self.options.choices):
            try:
                self._begin(choice)
            except Exception as error:
                self._open -= 1
                self._events.append(Ended(choice, Finish.FAILED, "", error))

    def _time(self, choice: int) -> None:
        """Measures the time to the first token, or between two."""
        now, before = time.monotonic(), self._token_s.get(choice)
        if before is None:
            self._metrics.times["time_to_first_token"].observe(now - self._began_s)
            self._first_s = now if self._first_s is None else self._first_s
        else:
            self._metrics.times["inter_token_latency"].observe(now - before)
        self._token_s[choice] = now

    def _close(self, ended: Ended) -> None:
        said = self.answers[ended.choice]
        stats, seconds = said.stats, time.monotonic() - self._began_s
        self._metrics.ended(stats, ended.finish, seconds)
        if self.prompt.begins and ended.choice == 0:
            self._metrics.began(stats)
        if not self.options.plain:
            self.model.prompts.remember(self.prompt, said.text, said.ids)


class Generations:
    """The answers to one or several prompts of a request, numbered consecutively: those to the first prompt come first.

    Attributes:
        id: that of the first.
    """

    def __init__(self, of: Sequence[Generation]) -> None:
        self._of, self._came = of, asyncio.Event()
        self.id, self.model, self.prompts = of[0].id, of[0].model, [each.prompt for each in of]
        self.name = of[0].name
        for each in of:
            each.came = self._came

    @property
    def tokens(self) -> int:
        """The number of tokens that all answers have generated so far."""
        return sum(each.tokens for each in self._of)

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(each.prompt_tokens for each in self._of)

    @property
    def reused_tokens(self) -> int:
        """The number of tokens of the prompts that were in the cache."""
        return sum(each.reused_tokens for each in self._of)

    @property
    def reused_by_tier(self) -> dict[str, int]:
        """The number of tokens of the prompts that were in the cache, by where they were: "memory", or a store's
        name."""
        found: dict[str, int] = {}
        for each in self._of:
            for tier, tokens in each.reused_by_tier.items():
                found[tier] = found.get(tier, 0) + tokens
        return found

    @property
    def counts(self) -> dict[str, int]:
        """The token counts for the log, by name: `prompt_tokens`, those of them from the cache (`cached_tokens`), and
        generated `tokens`."""
        cached, prompt = self.reused_tokens, self.prompt_tokens
        return {"prompt_tokens": prompt, "cached_tokens": cached, "tokens": self.tokens}

    @property
    def inference(self) -> Inference:
        """The facts of all generations together for a trace, at their end: the model, times, token counts, and why the
        answers ended."""
        of = [each.inference for each in self._of]
        return Inference(
            self.name,
            self.id,
            min(each.began_s for each in of),
            min((each.first_s for each in of if each.first_s is not None), default=None),
            max(each.ended_s for each in of),
            self.prompt_tokens,
            self.reused_tokens,
            self.tokens,
            [finish for each in of for finish in each.finishes],
        )

    @property
    def failure(self) -> Exception | None:
        """The error of the first generation that failed outside the engine; None: none did."""
        return next((each.failure for each in self._of if each.failure is not None), None)

    @property
    def over(self) -> bool:
        """Whether every answer has ended and all its events have been returned."""
        return all(each.over for each in self._of)

    def cancel(self) -> None:
        """Cancels every answer: the engine ends it at its next step."""
        for each in self._of:
            each.cancel()

    async def events(self, timeout_s: float) -> list[AnswerEvent]:
        """Returns the events of the answers since the last call, waiting for one if there are none; empty after
        `timeout_s` seconds, or if a generation failed."""
        if (found := self._taken()) or self.failure is not None:
            return found
        self._came.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._came.wait()
        except TimeoutError:
            return []
        return self._taken()

    def _taken(self) -> list[AnswerEvent]:
        """Returns the events that are there, under the numbers of all choices."""
        first, found = 0, list[AnswerEvent]()
        for each in self._of:
            events = each.taken()
            if first:
                events = [event._replace(choice=first + event.choice) for event in events]
            found += events
            first += each.options.choices
        return found


def _reads_only(options: AnswerOptions) -> bool:
    """Returns whether a request is what routers send to a server that reads a prompt for another one."""
    chances = (options.logprobs, options.prompt_logprobs)
    return options.max_tokens == 1 and chances == (None, None)
