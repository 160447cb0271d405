"""A chat with a loaded model: messages in, pieces of text out.

Each turn renders the whole conversation, and the engine computes only what it does not hold yet.
The ids of earlier turns are kept as they were generated (a model need not cut its own text the way the
tokenizer would), so the second turn computes the new question alone; where the template writes an
earlier turn differently (without its thoughts, say) as much as is common is reused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from ktcli.chat.compaction import DROP_SHARE, SUM_UP, SUMMARY_SHARE, fewest_omitted, older_turns
from ktcli.chat.control import Marked
from ktcli.chat.conversation import Conversation, Omission, Saved, Spoken, Turn, remember
from ktcli.chat.partner import Held, HeldIds, Partner
from ktcli.chat.pieces import Added, AnswerPiece
from ktcli.chat.reply import Reply
from ktcli.chat.reuse import Loss, Timeline, common, lost
from ktcli.chat.settings import Settings
from ktcli.chat.snapshots import shared_ids, snapshot_positions
from ktcli.chat.speaker import longer_context
from ktcli.chat.splice import Splicer
from ktcli.chat.transcript import Transcript
from ktcli.chat.worktimes import ChatTotals
from ktcli.engine.drafting import NO_DRAFTS, DraftWish
from ktcli.engine.request import (
    Answer,
    Finish,
    Finished,
    GenerationRequest,
    PromptRead,
    Token,
)
from ktcli.engine.sampler import Sampler
from ktcli.errors import ContextFull, KtError

if TYPE_CHECKING:
    from ktcli.chat.grammar.form import Form

# progress(tokens of the prompt that are read, tokens in all)
Progress = Callable[[int, int], None]


class Chat:
    """A conversation with a model.

    Attributes:
        conversation: the messages.
        reply: the reply to the last question that was not refused; None before the first.
        spoken: the answers as they were generated, by where they are in the rendered conversation.
        timeline: what the model read and said last; None before the first answer.
        heard: called after each token of an answer.
        left: whether it has no model: it was left, and another one could not be loaded.
        totals: what loading and all answers took.
        form: what the text of every answer must be, behind its thoughts; None: anything.
    """

    def __init__(
        self, speaker: Partner, settings: Settings | None = None, draft: DraftWish = NO_DRAFTS
    ) -> None:
        self.conversation = Conversation()
        self._draft = draft
        self.reply: Reply | None = None
        self.spoken: list[Spoken] = []
        self.timeline: Timeline | None = None
        self.heard: Callable[[], None] = lambda: None
        self.totals = ChatTotals()
        self.form: Form | None = None
        self._answering: Reply | None = None
        self._before: Timeline | None = None  # the timeline before the last one
        self._begin(speaker)
        self.settings = settings or speaker.voice.settings

    def _begin(self, speaker: Partner) -> None:
        self.speaker, self.left = speaker, False
        self.totals.loading_s += speaker.loading_s
        self._talk = speaker.talk(self._draft)
        self._closing = weakref.finalize(self, self.sequence.close)
        self._splicer = Splicer(speaker.voice.tokenizer, speaker.voice.control)

    def leave(self) -> None:
        """Gives up the model and all that its engine holds of the conversation; only `go_to` may follow."""
        self._closing()
        del self.speaker, self._talk, self._splicer
        self.left = True
        # Ids mean nothing to another model.
        self.spoken, self.timeline, self._before = [], None, None

    def go_to(self, speaker: Partner, settings: Settings) -> None:
        """Goes on with a model, after `leave`: it reads the conversation anew when it is asked."""
        self._begin(speaker)
        self.settings = settings

    @property
    def sequence(self) -> HeldIds:
        """What the engine holds of the conversation."""
        return self._talk.sequence

    @property
    def settings(self) -> Settings:
        """The settings in force from the next token on; setting them starts the random sequence anew."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        self._settings = settings
        # A kept chat may have been with a model of more tokens.
        self._sampler = Sampler(settings.sampling.within(self.speaker.engine.spec.vocab))

    @property
    def seed(self) -> int:
        """The seed of the random sequence in use, given or drawn."""
        return self._sampler.seed

    @property
    def thought_cut(self) -> bool:
        """Tells whether the last answer's thought was ended because it had spent its budget."""
        return self.reply is not None and self.reply.thought_cut

    @property
    def answering(self) -> Reply | None:
        """The answer that has begun and not ended."""
        return self._answering

    def restore(self, saved: Saved) -> None:
        """Goes on with a kept conversation, with its settings; a question without an answer gets an empty one."""
        self.conversation = saved.conversation.copy()
        self.conversation.end_question()
        self.settings = replace(self.settings, sampling=saved.sampling, **saved.others)
        whole = self._splicer.is_whole
        self.spoken = [answer for answer in saved.spoken if whole(answer, foreign=True)]
        self.timeline = saved.timeline

    @property
    def loss(self) -> Loss | None:
        """The cached tokens that the last prompt could not use; None if it used all."""
        now = self.reply.timeline if self.reply else None
        if self._before is None or now is None or self.reply is None:
            return None
        tokenizer = self.speaker.voice.tokenizer
        return lost(
            self._before,
            now,
            self.reply.stats.reused_tokens,
            lambda ids: tokenizer.decode(ids, special=True),
        )

    @property
    def used(self) -> int:
        """The number of tokens in the context."""
        return self.sequence.length

    def ask(
        self,
        question: str,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
    ) -> Iterator[AnswerPiece]:
        """Asks `question` and yields the answer's pieces as they come; it may be left at any piece.

        Raises:
            ContextFull: there is no room; the question is not part of the conversation.
            BadCheckpoint: the template or tokenizer is wrong.
        """
        return self._ask(question, self.conversation.copy(), cancelled, progress)

    def retry(
        self,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
    ) -> Iterator[AnswerPiece] | None:
        """Answers the last question again; returns None if there was none. If it is stopped before the first word,
        the earlier answer stays."""
        before = self.conversation.copy()
        question = self.conversation.undo()
        if question is None:
            return None
        return self._ask(question, before, cancelled, progress)

    def _ask(
        self,
        question: str,
        before: Conversation,
        cancelled: Callable[[], bool],
        progress: Progress | None,
    ) -> Iterator[AnswerPiece]:
        self.conversation.say("user", question.encode("utf-8", "replace").decode("utf-8"))
        return self._answer(before, cancelled, progress)

    def _answer(
        self, before: Conversation, cancelled: Callable[[], bool], progress: Progress | None
    ) -> Iterator[AnswerPiece]:
        """Yields the pieces of the answer to the last question; if there are none, the turns become `before`."""
        reply = self._answering = Reply()
        try:
            text, prompt = self._fitted(reply)
            reply.at, reply.timeline = len(text), self._read(prompt)
            self._before = self.timeline
            self.reply = reply
            transcript = Transcript(
                self.speaker.voice.tokenizer,
                self._settings.stops,
                text,
                self._settings.think_budget,
                once=self.form is not None,
                answers=self.speaker.voice.answers,
            )
            held = None if self.form is None else Held(self.form, text)
            read = reply.timeline
            most = self._settings.max_tokens
            answer = self._submit(read.ids, read.depths, most, transcript, held)
            reply.parts = [answer.stats]
            yield from self._told(answer, transcript, reply, cancelled, progress)
            if reply.thought_cut:
                yield from self._told_behind_thought(transcript, reply, cancelled, held)
            if reply.ids:
                reply.clocks.append(self.speaker.engine.operations())
        finally:
            self._answering = None
            self._remember(reply, before)
            if reply.timeline is not None:  # else it was refused
                self.totals.add(reply.stats, reply.laps)
        spoken = Spoken(reply.at, reply.text, tuple(reply.ids))
        if spoken.ids and self._splicer.is_whole(spoken):
            remember(self.spoken, spoken)
        if reply.stats.prompt_tokens == len(prompt):  # else reading it was stopped
            depths = self.sequence.depths
            self.timeline = reply.timeline.answered(reply.text, reply.ids, depths)

    def _submit(
        self,
        ids: Sequence[int],
        depths: bytes,
        most: int | None,
        transcript: Transcript,
        held: Held | None,
        said: int = 0,
    ) -> Answer:
        shared, marks = self._partings(ids, self.conversation.messages)
        request = GenerationRequest(
            ids,
            self._sampler.settings,
            self.speaker.voice.stop_ids,
            most,
            depths=depths,
            said=said,
            marks=marks,
            shared=shared,
            ends=transcript.hears,
        )
        return self._talk.submit(request, self._sampler, held)

    def _told(
        self,
        answer: Answer,
        transcript: Transcript,
        reply: Reply,
        cancelled: Callable[[], bool],
        progress: Progress | None,
    ) -> Iterator[AnswerPiece]:
        """Yields the pieces of an answer; after those of each token, when its text is part of the reply, `heard` is
        told."""
        try:
            while answer.finish is None:
                if cancelled():
                    answer.cancel()
                for event in self._talk.step():
                    if isinstance(event, PromptRead) and progress is not None:
                        progress(event.done, event.total)
                    if isinstance(event, Token):
                        self._note_depths(reply, event.answer)
                        reply.ids.append(event.id)
                        yield from self._added(reply, transcript.next())
                        self.heard()
                    if isinstance(event, Finished) and event.error is not None:
                        raise event.error
            reply.finish = answer.finish
            if transcript.spent and answer.finish is Finish.STOP:
                reply.thought_cut = True
                return
            yield from self._added(reply, transcript.finish())
            if transcript.stopped:
                reply.finish = Finish.STOP
        finally:
            if answer.finish is None:  # nobody listens any more
                answer.cancel()
                self._talk.step()

    def _told_behind_thought(
        self,
        transcript: Transcript,
        reply: Reply,
        cancelled: Callable[[], bool],
        held: Held | None,
    ) -> Iterator[AnswerPiece]:
        """Ends a thought that has spent its budget, as the model's family ends thoughts, and yields what follows."""
        assert reply.timeline is not None
        closing, most = transcript.closing(), self._settings.max_tokens
        left = None if most is None else most - len(reply.ids) - len(closing)
        room = self.speaker.engine.context - len(reply.timeline.ids) - len(reply.ids) - len(closing)
        if room < 1 or (left is not None and left < 1):
            reply.thought_cut = False  # there is no room for an answer
            reply.finish = Finish.CONTEXT if room < 1 else Finish.LENGTH
            yield from self._added(reply, transcript.finish())
            return
        reply.put_in = range(len(reply.ids), len(reply.ids) + len(closing))
        for id in closing:
            transcript.hears(id)
            reply.ids.append(id)
            yield from self._added(reply, transcript.next())
            self.heard()
        if held is not None:
            held = replace(held, said=tuple(reply.ids))
        ids = (*reply.timeline.ids, *reply.ids)
        said = len(reply.ids)
        answer = self._submit(ids, self.sequence.depths, left, transcript, held, said)
        reply.parts.append(answer.stats)
        yield from self._told(answer, transcript, reply, cancelled, None)

    def _note_depths(self, reply: Reply, answer: Answer) -> None:
        """Notes how the prompt was computed, once it was read and nothing else yet."""
        if not reply.ids and reply.timeline is not None:
            reply.clocks = [self._talk.began, self.speaker.engine.operations()]
            reply.timeline = replace(reply.timeline, depths=answer.depths)

    @staticmethod
    def _added(reply: Reply, added: Added) -> Iterator[AnswerPiece]:
        reply.text += added.text
        yield from added.spoken

    def _remember(self, reply: Reply, before: Conversation) -> None:
        """Keeps the answer, cut or whole; a question without any answer is taken back."""
        if reply.text or reply.finish is not Finish.CANCELLED:
            self.conversation.say("assistant", reply.text)
        else:
            self.conversation.become(before)

    def _fitted(self, reply: Reply) -> tuple[str, list[int]]:
        """Renders the conversation as text and as ids; the oldest turns are left out if it does not fit."""
        context, said = self.speaker.engine.context, self.conversation
        was = said.omitted
        text, ids = self._prompt(said.messages, context)
        if self._settings.drops and (ids is None or len(ids) >= context):
            text, ids = self._with_room(said, context // DROP_SHARE)
            reply.dropped = said.omitted.turns - was.turns
        if ids is None or len(ids) >= context:
            said.omitted = was
            self._refuse(f"{len(ids):,}" if ids else f"more than {context:,}")
        return text, ids

    def _with_room(self, said: Conversation, most: int) -> tuple[str, list[int] | None]:
        """The prompt of a conversation that is too long, without as many of its oldest turns as it takes to have at
        most `most` tokens, if that is possible; its last question stays."""

        def fits(turns: int) -> bool:
            ids = self._prompt(left_out(turns), most, passing=True)[1]
            return ids is not None and len(ids) <= most

        def left_out(turns: int) -> list[Turn]:
            return replace(said, omitted=replace(said.omitted, turns=turns)).messages

        turns = fewest_omitted(len(said.turns), said.omitted.turns, fits)
        said.omitted = replace(said.omitted, turns=turns)
        return self._prompt(said.messages, self.speaker.engine.context)

    def _prompt(
        self, messages: list[Turn], most: int, *, passing: bool = False
    ) -> tuple[str, list[int] | None]:
        """Renders messages as text and as ids; None: they are surely more than `most`."""
        rendered = self._rendered(messages)
        return rendered.text, self._splicer.ids(rendered, self.spoken, most, passing=passing)

    def compact(
        self, *, cancelled: Callable[[], bool] = lambda: False, progress: Progress | None = None
    ) -> int:
        """Lets the model sum up the oldest turns, and reads the summary in their place from then on.

        Returns:
            The number of turns that were summed up; 0: it was stopped, and nothing changed.
        Raises:
            UsageError: there is nothing to sum up. KtError: the model gave no summary.
        """
        said, context = self.conversation, self.speaker.engine.context
        turns = older_turns(len(said.turns), said.omitted.turns)
        most = max(1, context // SUMMARY_SHARE)
        before = Conversation(said.system, said.turns[:turns], said.omitted)
        before.say("user", SUM_UP)
        text, ids = self._prompt(before.messages, context)
        if ids is None or len(ids) + most > context:  # the oldest of them have to go unread
            text, ids = self._with_room(before, context - most)
        if ids is None or len(ids) + most > context:
            self._refuse(f"{len(ids):,}" if ids else f"more than {context:,}")
        summary = self._aside(before.messages, text, ids, most, cancelled, progress)
        if summary is None:
            return 0
        if not summary:
            raise KtError(
                "the model gave no summary, so nothing changed", hint="/undo takes a turn back"
            )
        counted = turns - said.omitted.turns
        said.omitted = Omission(turns, summary)
        return counted

    def _aside(
        self,
        messages: list[Turn],
        text: str,
        prompt: list[int],
        most: int,
        cancelled: Callable[[], bool],
        progress: Progress | None,
    ) -> str | None:
        """The answer, without its thoughts, to a prompt beside the conversation; None: it was stopped."""
        voice = self.speaker.voice
        transcript = Transcript(voice.tokenizer, (), text, answers=voice.answers)
        shared, marks = self._partings(prompt, messages)
        request = GenerationRequest(
            prompt,
            self._sampler.settings,
            voice.stop_ids,
            most,
            depths=self._depths(prompt),
            marks=marks,
            shared=shared,
            ends=transcript.hears,
        )
        sampler = Sampler(self._sampler.settings)  # the chat's own random sequence goes on
        answer = self._talk.submit(request, sampler)
        reply = Reply()
        pieces = list(self._told(answer, transcript, reply, cancelled, progress))
        if reply.finish is Finish.CANCELLED:
            return None
        return "".join(piece.text for piece in pieces if not piece.thought).strip()

    def _rendered(self, messages: list[Turn]) -> Marked:
        context = self.speaker.engine.context
        return self.speaker.voice.rendered(messages, self._settings.variables, context)

    def _partings(self, prompt: Sequence[int], messages: list[Turn]) -> tuple[int, tuple[int, ...]]:
        """The first ids with which other conversations begin, too, and the positions of the prompt at which a state
        should be kept; where layers keep any."""
        if not self.sequence.recurrent:
            return 0, ()
        context = self.speaker.engine.context

        def ids_of(messages: list[Turn]) -> list[int] | None:
            rendered = self._rendered(messages)
            return self._splicer.ids(rendered, self.spoken, context, passing=True)

        shared = shared_ids(prompt, messages, ids_of)
        return shared, snapshot_positions(prompt, messages, ids_of, shared)

    def _read(self, prompt: list[int]) -> Timeline:
        messages = tuple((turn["role"], turn["content"]) for turn in self.conversation.messages)
        variables, depths = self._settings.variables, self._depths(prompt)
        return Timeline(tuple(prompt), messages, variables, self._model, depths)

    def _depths(self, prompt: Sequence[int]) -> bytes:
        """How the first ids of the prompt were computed, as far as this model did."""
        before = self.timeline
        if before is None or before.model != self._model:
            return b""
        return before.depths[: common(before.ids, prompt)]

    @property
    def _model(self) -> tuple[str, str]:
        """The name and the conversion of the model."""
        model = self.speaker.model
        return model.name, model.pack

    def _refuse(self, tokens: str) -> NoReturn:
        alone = (
            len(self.conversation.turns) - self.conversation.omitted.turns < 2
            or self._settings.drops
        )
        what = "the question alone" if alone else "the conversation"
        ways = (
            "ask about a part of it"
            if alone
            else "/compact sums it up, /undo takes a turn back, /clear starts afresh"
        )
        raise ContextFull(
            f"{what} has {tokens} tokens and the context holds "
            f"{self.speaker.engine.context:,}, so there is no room for an answer",
            hint=f"{ways}; {longer_context(self.speaker.engine)}",
        )
