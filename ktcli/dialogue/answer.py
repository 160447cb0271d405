"""One answer of a model: turns the events of an engine into those of a reader.

An answer whose thought has spent its budget is made in two parts: the ids that end the thought are put between them,
and the second part is a request of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ktcli.answers.calls.values import Tools
from ktcli.answers.events import Added, ReadEvent
from ktcli.answers.format import AnswerFormat
from ktcli.answers.reader import AnswerReader
from ktcli.dialogue.prompts import EncodedPrompt
from ktcli.engine.adapters import AttachedAdapter
from ktcli.engine.constraint import Constraint, ForcedIds
from ktcli.engine.forms import ABSORBED
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
from ktcli.engine.sampler import Sampler
from ktcli.errors import Busy, ContextFull
from ktcli.records import dataclass
from ktcli.sampling import SamplingSettings

if TYPE_CHECKING:
    from ktcli.answers.grammar.whole import Shape


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The options of an answer.

    Attributes:
        stops: texts that end an answer.
        max_tokens: the most tokens of an answer; None: as many as the context holds.
        choices: the number of answers.
        logprobs: the number of likeliest tokens that come with each token; None: no chances.
        tools: what may be called; None: nothing, and calls are not looked for.
        plain: whether the prompt is a text that goes on, in which nothing is a thought.
        shape: what an answer must be; None: anything.
        salt: the prompt is found in the cache by those who name the same one.
        adapter: the adapter that answers; None: that of the engine, if it has one for all.
        endless: whether an answer goes on where the model ends it: for measurements.
        think_budget: the most tokens of an answer's thoughts, behind which they are ended and the answer follows; None:
            as many as the model likes.
        stop_ids: ids that end an answer beside the model's own, even one that is endless.
        prompt_logprobs: the number of likeliest tokens that come with each token of the prompt but the first; None: no
            chances of the prompt.
        min_tokens: the tokens before which no such id can come.
        persist: whether the pages are in every store before the answer has ended.
        one_call: whether the first call of a tool ends an answer.
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
    adapter: AttachedAdapter | None = None
    endless: bool = False
    think_budget: int | None = None
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    persist: bool = False
    one_call: bool = False


class PromptProgress(NamedTuple):
    """The prompt is read: `done` of the `total` tokens that were not in the cache.

    Attributes:
        chances: further tokens of the prompt with their chances, if they were asked for.
    """

    choice: int
    done: int
    total: int
    chances: tuple[Token, ...] = ()


class Said(NamedTuple):
    """The next events of an answer.

    Attributes:
        token: the id that was chosen; None: the text was held back, or put in to end a thought.
        added: what it adds to the answer.
    """

    choice: int
    token: Token | None
    added: Added

    @property
    def events(self) -> tuple[ReadEvent, ...]:
        """The events to show to the user: pieces of text and of thoughts, and tool calls."""
        return self.added.events


class Ended(NamedTuple):
    """The event of an answer's end.

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


AnswerEvent = PromptProgress | Said | Ended


class Submit(Protocol):
    """A function that submits a request to an engine; the request's events are passed to `AnswerRun.hear`."""

    def __call__(
        self, request: GenerationRequest, sampler: Sampler | None, *, goes_on: bool
    ) -> Answer:
        """Returns the answer's account.

        Args:
            sampler: the random sequence that it goes on with; None: a new one.
            goes_on: whether it is the second part of an answer.
        """


class AnswerRun:
    """One answer in progress; its events are passed to `tell`, in the thread that calls `hear`.

    Args:
        answers: how the model writes answers.
        context: the number of positions that a conversation can have.
        choice: the number of the answer, of several to one prompt.
        constraint: what it may be; None: anything.
        sampler: the random sequence that it goes on with; None: a new one.
    Attributes:
        text: what the conversation remembers of it.
        put_in: those of its ids that nothing chose: they end its thought, and are read as a prompt is.
        finish: the reason why it ended; None: it has not.
    """

    def __init__(
        self,
        answers: AnswerFormat,
        context: int,
        prompt: EncodedPrompt,
        options: AnswerOptions,
        submit: Submit,
        tell: Callable[[AnswerEvent], object],
        *,
        choice: int = 0,
        constraint: Constraint | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._context, self._prompt, self._options = context, prompt, options
        self._submit, self._tell, self._choice = submit, tell, choice
        self._constraint, self._sampler = constraint, sampler
        self._texts = answers.texts
        self._reader = AnswerReader(
            answers.texts.tokenizer,
            None if options.plain else answers,
            prompt.text,
            stops=options.stops,
            budget=None if options.plain else options.think_budget,
            tools=options.tools,
            once=options.shape is not None and not options.shape.free,
            continues=prompt.continues,
            one_call=options.one_call,
        )
        self.parts: list[Answer] = []
        self.ids: list[int] = []
        self.text, self.put_in = "", range(0)
        self._how = bytearray()  # of the prompt's ids and the answer's, once the first is there
        self._heard: Answer | None = None  # the part that gave the last id
        self.finish: Finish | None = None
        self._cancelled = False
        self._lock = threading.Lock()  # events of a part may come before it is noted

    @property
    def stats(self) -> Stats:
        """The answer's counts of tokens and times so far, summed over its parts."""
        return functools.reduce(Stats.going_on, [part.stats for part in self.parts] or [Stats()])

    @property
    def thought_cut(self) -> bool:
        """Whether the answer's thought was ended because its token budget was used up."""
        return bool(self.put_in)

    def depths_of(self, start: int, end: int | None = None) -> bytes:
        """Returns how each id of the prompt and the answer from `start` to `end` was computed, a byte for each as
        `engine.forms` defines it (depth of deferral, form of attention); empty before the answer's first id.
        """
        return bytes(self._how[start:end])

    @property
    def length(self) -> int:
        """The number of ids of prompt and answer that the engine has computed. Before the answer's first id only the
        prompt's ids read so far count; its last id does not count while it is chosen but not yet computed, or if the
        answer was cut there.
        """
        if not self.ids:
            return self.stats.prompt_tokens
        cut = self.finish in (None, Finish.CANCELLED, Finish.FAILED)
        cut = cut or bool(self._reader.stopped) or self._reader.called
        if (constraint := self.parts[-1].request.constraint) is not None:
            cut = cut or constraint.ended
        return len(self._prompt.ids) + len(self.ids) - cut

    @property
    def _forced(self) -> ForcedIds | None:
        """What it has to be, where whoever asks leaves that open."""
        options = self._options
        held = options.shape is not None or options.tools is not None or options.endless
        held = held or bool(options.stop_ids or options.min_tokens)
        return None if held else self._prompt.forced

    def submit(self) -> None:
        """Submits the answer's request to the engine.

        Raises:
            KtError: the engine does not take the request, see `Scheduler.submit`.
        """
        options, sampling = self._options, self._options.sampling
        if sampling.seed is not None and self._choice:
            sampling = replace(sampling, seed=(sampling.seed + self._choice) % 2**64)
        request = GenerationRequest(
            self._prompt.ids,
            sampling,
            options.stop_ids | (frozenset() if options.endless else self._texts.stop_ids),
            options.max_tokens,
            caller=self._prompt.caller,
            logprobs=options.logprobs,
            depths=self._prompt.depths,
            salt=options.salt,
            adapter=options.adapter,
            marks=self._prompt.marks,
            shared=self._prompt.shared,
            ends=self._reader.hears,
            constraint=self._constraint,
            forced=self._forced,
            min_tokens=options.min_tokens,
            prompt_logprobs=None if self._choice else options.prompt_logprobs,
            persist=options.persist,
        )
        with self._lock:
            self.parts.append(self._submit(request, self._sampler, goes_on=False))

    def cancel(self) -> None:
        """Cancels the answer; it ends at the next step."""
        self._cancelled = True
        if self.parts:
            self.parts[-1].cancel()

    def hear(self, event: Event) -> None:
        """Processes an event of the engine about this answer, and passes on what it adds to the answer. Never raises:
        an error ends the answer.
        """
        if self.finish is not None:
            return
        try:
            if isinstance(event, Token):
                self._take_token(event)
            elif isinstance(event, PromptRead):
                if len(self.parts) < 2:
                    self._tell(PromptProgress(self._choice, event.done, event.total, event.chances))
            else:
                self._finish(event)
        except Exception as error:
            self.cancel()
            self._end(Finish.FAILED, error)

    def forget(self) -> None:
        """Drops the references to the functions that submit requests and receive events; no event of the engine may
        follow.
        """
        self._submit, self._tell = _submit_nothing, _tell_nobody

    def _take_token(self, event: Token) -> None:
        self._note_prompt(event.answer)
        self._how.append(event.how)
        self.ids.append(event.id)
        self._say(event, self._reader.next())

    def _note_prompt(self, part: Answer) -> None:
        """Notes how the prompt of a part was computed, at the first event behind it."""
        if part is not self._heard:
            self._heard = part
            self._how[:] = part.depths.ljust(len(part.request.prompt), b"\0")

    def _finish(self, event: Finished) -> None:
        self._note_prompt(event.answer)
        finish, reader = event.finish, self._reader
        if finish is Finish.STOP and reader.spent and not reader.stopped:
            cannot = self._go_on(event.answer)
            if cannot is None:
                return
            finish = cannot
        rest = reader.finish(whole=finish is Finish.STOP)
        if rest.text or rest.events:
            self._say(None, rest)
        self._end(Finish.STOP if reader.stopped else finish, event.error)

    def _end(self, finish: Finish, error: Exception | None) -> None:
        self.finish, reader = finish, self._reader
        self._tell(Ended(self._choice, finish, reader.stopped, error, reader.calls))
        self.forget()

    def _say(self, token: Token | None, added: Added) -> None:
        self.text += added.text
        self._tell(Said(self._choice, token, added))

    def _go_on(self, said: Answer) -> Finish | None:
        """Ends a thought that has spent its budget, and submits what follows; returns why it cannot."""
        request, closing = said.request, self._reader.closing()
        taken = len(said.ids) + len(closing)
        most = None if request.max_tokens is None else request.max_tokens - taken
        if len(request.prompt) + taken >= self._context:
            return Finish.CONTEXT
        if most is not None and most < 1:
            return Finish.LENGTH
        rest = replace(
            request,
            prompt=[*request.prompt, *said.ids, *closing],
            max_tokens=most,
            said=taken,
            depths=bytes(self._how),
        )
        first = len(self.ids)
        with self._lock:
            try:
                if request.constraint is not None:
                    for id in closing:
                        request.constraint.take(id)
                answer = self._submit(rest, said.sampler, goes_on=True)
            except ContextFull:
                return Finish.CONTEXT
            self.put_in = range(first, first + len(closing))
            self.ids += closing
            self._how += bytes([self._how[-1] & ABSORBED]) * len(closing)
            self.parts.append(answer)
        self._say(None, self._closed(closing))
        if self._cancelled:  # perhaps before the second part was there
            answer.cancel()
        return None

    def _closed(self, closing: Sequence[int]) -> Added:
        """Returns what the ids that end a thought add."""
        added = []
        for id in closing:
            self._reader.hears(id)
            added.append(self._reader.next())
        events = tuple(event for each in added for event in each.events)
        return Added("".join(each.text for each in added), events)


def _submit_nothing(
    request: GenerationRequest, sampler: Sampler | None, *, goes_on: bool
) -> Answer:
    raise Busy("the answer has ended")


def _tell_nobody(event: AnswerEvent) -> None:
    """Nobody hears of an answer that has ended."""
