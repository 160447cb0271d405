"""Answers one request of a client: one or several answers to one prompt, told piece by piece to an event loop."""

from __future__ import annotations

import asyncio
import functools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ktcli.chat.calls.events import CallEvent
from ktcli.chat.calls.reader import CallReader, Read
from ktcli.chat.calls.values import Tools
from ktcli.chat.grammar.whole import Shape
from ktcli.chat.pieces import Added, AnswerPiece
from ktcli.chat.thoughts import ThoughtMarks
from ktcli.chat.transcript import Transcript
from ktcli.engine.constraint import Constraint
from ktcli.engine.request import (
    Answer,
    Event,
    Finish,
    Finished,
    GenerationRequest,
    PromptRead,
    Stats,
    Token,
)
from ktcli.engine.sampler import SamplingSettings
from ktcli.errors import Busy, ContextFull
from ktcli.server.loaded import Lease
from ktcli.server.metrics import Metrics
from ktcli.server.prompts import EncodedPrompt

STOPS_MOST = 16
CHOICES_MOST = 16


@dataclass(frozen=True, slots=True)
class Wish:
    """How a prompt is to be answered.

    Attributes:
        stops: texts that end an answer.
        max_tokens: the most tokens of an answer; None: as many as the context holds.
        choices: the number of answers.
        logprobs: the number of likeliest tokens that come with each token; None: no chances.
        tools: what may be called; None: nothing, and calls are not looked for.
        plain: whether the prompt is a text that goes on, in which nothing is a thought.
        shape: what an answer must be; None: anything.
        salt: the prompt is found in the cache by those who name the same one.
        endless: whether an answer goes on where the model ends it: for measurements.
        think_budget: the most tokens of an answer's thoughts, behind which they are ended and the answer follows; None:
            as many as the model likes.
    """

    sampling: SamplingSettings
    stops: Sequence[str] = ()
    max_tokens: int | None = None
    choices: int = 1
    logprobs: int | None = None
    tools: Tools | None = None
    plain: bool = False
    shape: Shape | None = None
    salt: str = ""
    endless: bool = False
    think_budget: int | None = None


class PromptProgress(NamedTuple):
    """The prompt is read: `done` of the `total` tokens that were not in the cache."""

    choice: int
    done: int
    total: int


class Said(NamedTuple):
    """A token of an answer, and the text that it completed."""

    choice: int
    token: Token | None  # None: the text was held back, and no token follows
    pieces: tuple[AnswerPiece | CallEvent, ...]


class Ended(NamedTuple):
    """An answer is at its end.

    Attributes:
        stopped: the client's stop text that ended it; empty: none did.
        calls: the tools that it called.
        error: why it failed.
    """

    choice: int
    finish: Finish
    stopped: str = ""
    error: Exception | None = None
    calls: int = 0


News = PromptProgress | Said | Ended


class Generation:
    """The answers to one prompt. Everything but `_ChoiceAnswer.hear` is for the event loop.

    Args:
        lease: of the model that answers; the generation takes one of its own until the last answer has ended.
        constraints: of each answer; empty: there are none.
    Attributes:
        id: a name that no other generation has.
    """

    def __init__(
        self,
        lease: Lease,
        prompt: EncodedPrompt,
        wish: Wish,
        metrics: Metrics,
        constraints: Sequence[Constraint] = (),
    ) -> None:
        self.id = secrets.token_hex(12)
        self.model, self.prompt, self.wish = lease.model, prompt, wish
        self._metrics, self.constraints = metrics, constraints
        self._began_s = time.monotonic()
        self._news: deque[News] = deque()
        self._came = asyncio.Event()
        self._cancelled = False
        self.failure: Exception | None = None  # that ends it whatever the engine says
        self.answers: list[_ChoiceAnswer] = []
        self._open = wish.choices
        self._others_wait = wish.choices > 1
        self._begin(0)
        self._lease = lease.again()

    @property
    def tokens(self) -> int:
        """The tokens of all answers so far."""
        return sum(each.stats.tokens for each in self.answers)

    @property
    def counts(self) -> dict[str, int]:
        """What the log says of it."""
        cached, prompt = self.reused_tokens, len(self.prompt.ids)
        return {"prompt_tokens": prompt, "cached_tokens": cached, "tokens": self.tokens}

    @property
    def reused_tokens(self) -> int:
        """The tokens of the prompt that were in the cache."""
        return self.answers[0].stats.reused_tokens

    async def news(self, patience_s: float) -> list[News]:
        """Returns what happened since the last call, at least one thing, or nothing after `patience_s` seconds."""
        if not self._news and self.failure is None:
            self._came.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._came.wait()
            except TimeoutError:
                return []
        found = list(self._news)
        self._news.clear()
        return found

    @property
    def over(self) -> bool:
        """Tells whether every answer has ended and been told."""
        return not self._open and not self._news

    def fail(self, error: Exception) -> None:
        """Ends every answer with an error; what the engine still says is not told."""
        self.failure = error
        self.cancel()
        self._came.set()

    def cancel(self) -> None:
        """Ends every answer at the next step."""
        self._cancelled = True
        for each in self.answers:
            each.cancel()

    def _begin(self, choice: int) -> None:
        made = _ChoiceAnswer(self, choice)
        self.answers.append(made)
        try:
            made.submit()
        except BaseException:
            self.answers.pop()
            raise

    def receive(self, news: News) -> None:
        """Takes what the engine's thread says."""
        if isinstance(news, Said) and news.token is not None:
            self._time(self.answers[news.choice])
        if isinstance(news, Ended):
            self._open -= 1
            self._close(news)
        # Once the prompt is read its pages are there for the other answers.
        if self._others_wait and not isinstance(news, PromptProgress):
            self._others_wait = False
            self._begin_others(news)
        if not self._open:
            self._lease.release()
        self._news.append(news)
        self._came.set()

    def _begin_others(self, news: Said | Ended) -> None:
        """Begins the other answers, unless the first one says that there will be none."""
        ended = (Finish.FAILED, Finish.CANCELLED)
        if self._cancelled or (isinstance(news, Ended) and news.finish in ended):
            self._open = 0 if isinstance(news, Ended) else 1
            return
        for choice in range(1, self.wish.choices):
            try:
                self._begin(choice)
            except Exception as error:
                self._open -= 1
                self._news.append(Ended(choice, Finish.FAILED, "", error))

    def _time(self, said: _ChoiceAnswer) -> None:
        """Notes when a token came."""
        now = time.monotonic()
        if said.heard_s:
            self._metrics.gap.observe(now - said.heard_s)
        else:
            self._metrics.first_token.observe(now - self._began_s)
        said.heard_s = now

    def _close(self, ended: Ended) -> None:
        said = self.answers[ended.choice]
        stats, seconds = said.stats, time.monotonic() - self._began_s
        self._metrics.ended(stats, ended.finish, seconds)
        if not self.wish.plain:
            self.model.prompts.remember(self.prompt, said.text, said.ids)

    def mail(self, news: News) -> None:
        """Sends something to the loop; called on the engine's thread."""
        self.model.mail.write(self.receive, news)


class _ChoiceAnswer:
    """One answer, as the engine's thread hears it.

    Attributes:
        text: what the conversation remembers of it.
        heard_s: when its last token came, `time.monotonic`; 0: none has.
    """

    def __init__(self, generation: Generation, index: int) -> None:
        self._generation, self._index = generation, index
        voice, wish = generation.model.voice, generation.wish
        before = "" if wish.plain else generation.prompt.text
        self._answers = None if wish.plain else voice.answers
        style = None if wish.tools is None or self._answers is not None else voice.calls
        self._transcript = Transcript(
            voice.tokenizer,
            wish.stops,
            before,
            None if wish.plain else wish.think_budget,
            calls=style,
            once=wish.shape is not None and not wish.shape.free,
            answers=self._answers,
            tools=wish.tools,
            continues=generation.prompt.continues,
        )
        self._reader = None
        if style is not None and wish.tools is not None:
            self._reader = CallReader(style, wish.tools)
        self._marks = ThoughtMarks()
        self._thought = ""  # the last one, as long as it is not closed, where calls are looked for
        self._parts: list[Answer] = []  # where its thought was ended there are two
        self._put_in: list[int] = []  # between them: the ids that ended it
        self._cancelled = False
        self._lock = threading.Lock()  # the second part may be there before the first one is noted
        self.text = ""
        self.heard_s = 0.0

    @property
    def stats(self) -> Stats:
        """Its counts and times, which may grow."""
        return functools.reduce(Stats.going_on, [part.stats for part in self._parts])

    @property
    def ids(self) -> list[int]:
        """The ids of the answer so far, with those that ended its thought."""
        first, *rest = self._parts
        return [*first.ids, *self._put_in, *(id for part in rest for id in part.ids)]

    def cancel(self) -> None:
        """Ends it at the next step."""
        self._cancelled = True
        self._parts[-1].cancel()

    def submit(self) -> None:
        generation, wish = self._generation, self._generation.wish
        sampling = wish.sampling
        if sampling.seed is not None and self._index:
            sampling = replace(sampling, seed=(sampling.seed + self._index) % 2**64)
        request = GenerationRequest(
            generation.prompt.ids,
            sampling,
            () if wish.endless else generation.model.voice.stop_ids,
            wish.max_tokens,
            caller=generation.prompt.caller,
            logprobs=wish.logprobs,
            salt=wish.salt,
            marks=generation.prompt.marks,
            shared=generation.prompt.shared,
            ends=self._transcript.hears,
            constraint=generation.constraints[self._index] if generation.constraints else None,
        )
        with self._lock:
            self._parts.append(generation.model.thread.submit(request, self.hear))

    def _goes_on_behind_thought(self, said: Answer) -> Finish | None:
        """Ends a thought that has spent its budget, as `Chat` does, and submits what follows; returns why it cannot."""
        generation, request = self._generation, said.request
        closing = self._transcript.closing()
        most = None if request.max_tokens is None else request.max_tokens - len(said.ids)
        left = None if most is None else most - len(closing)
        if left is not None and left < 1:
            return Finish.LENGTH
        positions = range(len(request.prompt), len(request.prompt) + len(said.ids))
        how_at = generation.model.speaker.engine.how_at
        rest = replace(
            request,
            prompt=[*request.prompt, *said.ids, *closing],
            max_tokens=left,
            said=len(said.ids) + len(closing),
            depths=said.depths.ljust(len(request.prompt), b"\0") + bytes(map(how_at, positions)),
        )
        with self._lock:
            try:
                if request.constraint is not None:
                    for id in closing:
                        request.constraint.take(id)
                thread = generation.model.thread
                answer = thread.submit(rest, self.hear, said.sampler, goes_on=True)
            except ContextFull:
                return Finish.CONTEXT
            except Busy:  # the GPU has failed meanwhile
                return Finish.FAILED
            self._put_in = closing
            self._parts.append(answer)
        for id in closing:
            self._transcript.hears(id)
            generation.mail(Said(self._index, None, self._pieces(self._transcript.next())))
        if self._cancelled:  # perhaps before the second part was there
            answer.cancel()
        return None

    def hear(self, event: Event) -> None:
        """Hears what the engine's thread says of this answer."""
        tell: Callable[[News], None] = self._generation.mail
        if isinstance(event, Token):
            tell(Said(self._index, event, self._pieces(self._transcript.next())))
        elif isinstance(event, PromptRead):
            if len(self._parts) < 2:
                tell(PromptProgress(self._index, event.done, event.total))
        elif isinstance(event, Finished):
            finish = event.finish
            if finish is Finish.STOP and self._transcript.spent and not self._transcript.stopped:
                cannot = self._goes_on_behind_thought(event.answer)
                if cannot is None:
                    return
                finish = cannot
            thinks = self._transcript.thinks
            rest = self._pieces(self._transcript.finish())
            if self._reader is not None:
                rest += self._read(self._reader.finish())
                if thinks and finish is Finish.STOP and not self._reader.calls:
                    rest += self._read(self._reader.whole_calls_in(self._thought))
            if rest:
                tell(Said(self._index, None, rest))
            stopped = self._transcript.stopped
            finish = Finish.STOP if stopped else finish
            calls = self._transcript.calls if self._reader is None else self._reader.calls
            tell(Ended(self._index, finish, stopped, event.error, calls))

    def _pieces(self, added: Added) -> tuple[AnswerPiece | CallEvent, ...]:
        self.text += added.text
        if self._generation.wish.plain or self._answers is not None:
            return added.pieces
        pieces = self._marks.without(added.spoken)
        if self._reader is None:
            return pieces
        found: list[AnswerPiece | CallEvent] = []
        for piece in pieces:
            self._thought = self._thought + piece.text if piece.thought else ""
            found += [piece] if piece.thought else self._read(self._reader.feed(piece.text))
        return tuple(found)

    @staticmethod
    def _read(read: list[Read]) -> tuple[AnswerPiece | CallEvent, ...]:
        return tuple(AnswerPiece(each) if isinstance(each, str) else each for each in read)
