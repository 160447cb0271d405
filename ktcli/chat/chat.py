"""A chat with a loaded model: messages in, pieces of text out.

Each turn renders the whole conversation, and the engine computes only what it does not hold yet.
The ids of earlier turns are kept as they were generated (a model need not cut its own text the way the
tokenizer would), so the second turn computes the new question alone; where the template writes an
earlier turn differently (without its thoughts, say) as much as is common is reused.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ktcli.answers.events import AnswerPiece
from ktcli.chat.base import AnswerHooks, BaseChat, Progress
from ktcli.chat.compaction import DROP_SHARE, SUMMARY_SHARE, fewest_omitted
from ktcli.chat.conversation import Conversation, Saved, Turn
from ktcli.chat.reply import Reply
from ktcli.dialogue.answer import AnswerEvent, AnswerOptions, AnswerRun, PromptProgress, Said
from ktcli.dialogue.backend import ChatBackend, Identity, longer_context
from ktcli.dialogue.prompts import EncodedPrompt, PromptEncoder
from ktcli.dialogue.splice import Spoken, remember
from ktcli.dialogue.timeline import Loss, Timeline, common, lost
from ktcli.engine.drafting import NO_DRAFTS, DraftOptions
from ktcli.engine.request import Answer, GenerationRequest
from ktcli.engine.sampler import Sampler
from ktcli.errors import ContextFull
from ktcli.records import dataclass
from ktcli.text.settings import Settings

if TYPE_CHECKING:
    from ktcli.answers.grammar.whole import Shape


class Chat(BaseChat):
    """A conversation with a model loaded in this process.

    Attributes:
        session: the requests to the model.
    """

    def __init__(
        self,
        backend: ChatBackend,
        settings: Settings | None = None,
        draft: DraftOptions = NO_DRAFTS,
    ) -> None:
        super().__init__()
        self._draft = draft
        self._before: Timeline | None = None  # the timeline before the last one
        self._run: AnswerRun | None = None  # what the engine was asked last
        self._begin(backend)
        self.settings = settings or backend.texts.settings

    def _begin(self, backend: ChatBackend) -> None:
        self.backend, self.left = backend, False
        self.totals.loading_s += backend.loading_s
        self.session, self._run = backend.session(self._draft), None
        self._closing = weakref.finalize(self, self.session.abandon)
        context = backend.engine.context
        self._prompts = PromptEncoder(backend.texts, context, recurrent=backend.recurrent)

    def leave(self) -> None:
        """Releases the model and its cached state of the conversation; the only call allowed afterwards is `go_to`."""
        self._closing.detach()
        self.session.close()
        del self.backend, self.session, self._prompts
        self._run, self.left = None, True
        # Ids mean nothing to another model.
        self.spoken, self.timeline, self._before = [], None, None

    def go_to(self, backend: ChatBackend, settings: Settings) -> None:
        """Continues the conversation with another model, after `leave`; that model reads the conversation when the
        next question is asked.
        """
        self._begin(backend)
        self.settings = settings

    def keep(self) -> None:
        """Stores the end of the last answer in the engine's cache, so that it is reused when the conversation
        continues.
        """
        self.session.keep()

    @property
    def model(self) -> Identity:
        """The identity of the model in the saved conversation: its names and its conversion."""
        return self.backend.model

    @property
    def context(self) -> int:
        """The most positions, in tokens, that a conversation can have."""
        return self.backend.engine.context

    @property
    def longer(self) -> str:
        """A sentence for people that says how to get a longer context."""
        return longer_context(self.backend.engine)

    @property
    def thinks(self) -> bool:
        """Whether the model may think before it answers, as far as its files say."""
        return self.backend.answers.thinks

    @property
    def settings(self) -> Settings:
        """The settings in force from the next token on; setting them starts the random sequence anew."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        self._settings = settings
        # A kept chat may have been with a model of more tokens.
        self._sampler = Sampler(settings.sampling.within(self.backend.engine.spec.vocab))

    @property
    def seed(self) -> int:
        """The seed of the random sequence in use, given or drawn."""
        return self._sampler.seed

    def restore(self, saved: Saved) -> None:
        """Replaces the conversation and its settings by those of a saved one, see `BaseChat`; answers keep the
        ids that were generated if these decode to their text.
        """
        super().restore(saved)
        whole = self._prompts.is_whole
        self.spoken = [answer for answer in saved.spoken if whole(answer, foreign=True)]
        self.timeline = saved.timeline

    @property
    def loss(self) -> Loss | None:
        """From which token on, how many and why cached tokens could not be reused for the last prompt; None if all were
        reused.
        """
        now = self.reply.timeline if self.reply else None
        if self._before is None or now is None or self.reply is None:
            return None
        tokenizer, reused = self.backend.texts.tokenizer, self.reply.stats.reused_tokens
        return lost(self._before, now, reused, lambda ids: tokenizer.decode(ids, special=True))

    @property
    def used(self) -> int:
        """The number of tokens of the conversation that the engine has computed: the last prompt and its answer; 0
        before the first.
        """
        return 0 if self._run is None else self._run.length

    def _made(self, reply: Reply, hooks: AnswerHooks) -> Iterator[AnswerPiece]:
        """Yields the pieces of the answer, see `BaseChat`."""
        prompt = self._fitted(reply)
        reply.at, reply.timeline = len(prompt.text), self._read(prompt)
        self._before, self.reply = self.timeline, reply
        settings = self._settings
        options = AnswerOptions(
            self._sampler.settings,
            settings.stops,
            settings.max_tokens,
            shape=self._shape,
            think_budget=settings.think_budget,
        )
        yield from self._told(reply, prompt, options, self._sampler, hooks)
        if reply.ids:
            reply.clocks.append(self.backend.engine.operations())
        spoken = Spoken(reply.at, reply.text, tuple(reply.ids))
        if spoken.ids and self._prompts.is_whole(spoken):
            remember(self.spoken, spoken)
        read = reply.stats.prompt_tokens == len(prompt.ids)  # else reading it was stopped
        run = self._run
        if read and run is not None and run is reply.run:
            depths = run.depths_of(0, run.length).rstrip(b"\0")
            self.timeline = reply.timeline.answered(reply.text, reply.ids, depths)

    @property
    def _shape(self) -> Shape | None:
        """What the text of an answer must be."""
        if self.form is None:
            return None
        from ktcli.answers.grammar.whole import Shape  # most chats ask for no form

        return Shape(self.form)

    def _told(
        self,
        reply: Reply,
        prompt: EncodedPrompt,
        options: AnswerOptions,
        sampler: Sampler,
        hooks: AnswerHooks,
    ) -> Iterator[AnswerPiece]:
        """Yields the pieces of an answer; after those of each token, when its text is part of the reply, `heard` is
        told."""
        came: deque[AnswerEvent] = deque()
        run = reply.run = AnswerRun(
            self.backend.answers,
            self.backend.engine.context,
            prompt,
            options,
            partial(self._submit, prompt.text, options.shape),
            came.append,
            sampler=sampler,
        )
        try:
            run.submit()
            self._run = run
            while run.finish is None:
                if hooks.cancelled():
                    run.cancel()
                for event in self.session.step():
                    if event.answer in run.parts:  # else of an answer that was interrupted twice
                        run.hear(event)
                    while came:
                        yield from self._taken(reply, came.popleft(), hooks.progress)
        finally:
            if run.finish is None:  # nobody listens any more
                run.cancel()
                self.session.step()
            run.forget()

    def _submit(
        self,
        text: str,
        shape: Shape | None,
        request: GenerationRequest,
        sampler: Sampler | None,
        *,
        goes_on: bool,
    ) -> Answer:
        """Gives a request of an answer behind `text` to the model."""
        assert sampler is not None
        if shape is None or shape.form is None:
            return self.session.submit(request, sampler)
        from ktcli.answers.grammar.form import AnswerConstraint

        said = request.prompt[len(request.prompt) - request.said :]
        constraint = AnswerConstraint(shape.form, text, tuple(said))
        return self.session.submit(request, sampler, constraint)

    def _taken(
        self, reply: Reply, event: AnswerEvent, progress: Progress | None
    ) -> Iterator[AnswerPiece]:
        """Takes an event of an answer into its reply; yields the pieces to be shown."""
        if isinstance(event, PromptProgress):
            if progress is not None:
                progress(event.done, event.total)
        elif isinstance(event, Said):
            if not reply.clocks and event.token is not None:
                self._note_prompt(reply)
            yield from (each for each in event.events if isinstance(each, AnswerPiece))
            self.heard()
        elif event.error is not None:
            raise event.error
        else:
            reply.finish = event.finish

    def _note_prompt(self, reply: Reply) -> None:
        """Notes how the prompt was computed, once it was read and nothing else yet."""
        reply.clocks = [self.session.began, self.backend.engine.operations()]
        if reply.timeline is not None and reply.run is not None:
            depths = reply.run.depths_of(0, len(reply.timeline.ids)).rstrip(b"\0")
            reply.timeline = replace(reply.timeline, depths=depths)

    @property
    def _fitting(self) -> Fitting:
        """What makes prompts of the messages as they are now."""
        return Fitting(self._prompts, self._settings.variables, self.spoken)

    def _fitted(self, reply: Reply) -> EncodedPrompt:
        """The prompt of the conversation; the oldest turns are left out if it does not fit."""
        context, said = self.backend.engine.context, self.conversation
        was, fitted = said.omitted, self._fitting.encoded(said.messages)
        if self._settings.drops and not fitted.leaves(1, context):
            fitted = self._fitting.with_room(said, context // DROP_SHARE)
            reply.dropped = said.omitted.turns - was.turns
        if fitted.ids is None or not fitted.leaves(1, context):
            said.omitted = was
            self._refuse(fitted)
        return self._prompt(fitted.text, fitted.ids, said.messages)

    def _prompt(self, text: str, ids: list[int], messages: list[Turn]) -> EncodedPrompt:
        """The prompt of messages that were rendered and cut into ids."""
        variables = self._settings.variables
        made = self._prompts.encoded(text, ids, messages, variables, self.spoken)
        return replace(made, depths=self._depths(ids))

    def _summed_up(
        self, before: Conversation, reply: Reply, hooks: AnswerHooks
    ) -> Iterator[AnswerPiece]:
        """Yields the pieces of a summary, see `BaseChat`."""
        context = self.backend.engine.context
        most = max(1, context // SUMMARY_SHARE)
        fitted = self._fitting.encoded(before.messages)
        if not fitted.leaves(most, context):  # the oldest of them have to go unread
            fitted = self._fitting.with_room(before, context - most)
        if fitted.ids is None or not fitted.leaves(most, context):
            self._refuse(fitted)
        prompt = self._prompt(fitted.text, fitted.ids, before.messages)
        options = AnswerOptions(self._sampler.settings, max_tokens=most)
        sampler = Sampler(self._sampler.settings)  # the chat's own random sequence goes on
        return self._told(reply, prompt, options, sampler, hooks)

    def _read(self, prompt: EncodedPrompt) -> Timeline:
        messages = tuple((turn["role"], turn["content"]) for turn in self.conversation.messages)
        variables = self._settings.variables
        return Timeline(tuple(prompt.ids), messages, variables, self._model, prompt.depths)

    def _depths(self, prompt: Sequence[int]) -> bytes:
        """How the first ids of the prompt were computed, as far as this model did."""
        before = self.timeline
        if before is None or before.model != self._model:
            return b""
        return before.depths[: common(before.ids, prompt)]

    @property
    def _model(self) -> tuple[str, str]:
        """The name and the conversion of the model."""
        model = self.backend.model
        return model.name, model.pack

    def _refuse(self, fitted: FittedText) -> NoReturn:
        said, engine = self.conversation, self.backend.engine
        alone = len(said.turns) - said.omitted.turns < 2 or self._settings.drops
        what = "the question alone" if alone else "the conversation"
        ways = "/compact summarizes it, /undo removes the last turn, /clear starts over"
        if alone:
            ways = "ask about a part of it"
        raise ContextFull(
            f"{what} has {fitted.tokens(engine.context)} tokens, but the context holds "
            f"{engine.context:,}, so there is no room for an answer",
            hint=f"{ways}; {self.longer}",
        )


class FittedText(NamedTuple):
    """A prompt that fits the context: its messages, text and ids.

    Attributes:
        ids: of the text; None: they are surely more than the most that was allowed.
    """

    text: str
    ids: list[int] | None

    def leaves(self, room: int, context: int) -> bool:
        """Returns whether a context of `context` ids has room for this prompt and `room` more ids."""
        return self.ids is not None and len(self.ids) + room <= context

    def tokens(self, context: int) -> str:
        """Returns the number of the prompt's ids as words, "1,234", or "more than" the context's size if it is not
        known.
        """
        return f"more than {context:,}" if self.ids is None else f"{len(self.ids):,}"


@dataclass(frozen=True, slots=True)
class Fitting:
    """Makes the prompts of one chat as it is now, within the context.

    Attributes:
        variables: further variables of the chat template.
        spoken: the answers as they were generated.
    """

    prompts: PromptEncoder
    variables: Mapping[str, Any]
    spoken: Sequence[Spoken]

    def encoded(
        self, messages: list[Turn], most: int | None = None, *, passing: bool = False
    ) -> FittedText:
        """Returns the prompt of messages: its text and its ids; the ids are None if there are certainly more than
        `most` (None: than the context holds).

        Args:
            passing: see `PromptEncoder.ids`.
        """
        rendered = self.prompts.rendered(messages, self.variables)
        ids = self.prompts.ids(rendered, self.spoken, most, passing=passing)
        return FittedText(rendered.text, ids)

    def with_room(self, said: Conversation, most: int) -> FittedText:
        """Leaves as many of the oldest turns as needed out of the prompts of `said`, so that they have at most `most`
        ids; returns the prompt. The last question always stays, so a prompt of it alone may have more.
        """

        def fits(turns: int) -> bool:
            messages = replace(said, omitted=replace(said.omitted, turns=turns)).messages
            return self.encoded(messages, most, passing=True).leaves(0, most)

        turns = fewest_omitted(len(said.turns), said.omitted.turns, fits)
        said.omitted = replace(said.omitted, turns=turns)
        return self.encoded(said.messages)
