"""A chat with a loaded model: messages in, pieces of text out.

Each turn renders the whole conversation, and the engine computes only what it does not hold yet.
The ids of earlier turns are kept as they were generated (a model need not cut its own text the way the
tokenizer would), so the second turn computes the new question alone; where the template writes an
earlier turn differently (without its thoughts, say) as much as is common is reused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from ktcli.chat.control import ControlTokens, Marked
from ktcli.chat.conversation import Conversation, Identity, Saved, Spoken, Turn, remember
from ktcli.chat.reuse import Loss, Timeline, common, lost
from ktcli.chat.settings import Settings, read_settings, read_stop_ids
from ktcli.chat.snapshots import snapshot_positions
from ktcli.chat.splice import Splicer
from ktcli.chat.template import ChatTemplate, load_template
from ktcli.chat.tokenizer import Tokenizer, load_tokenizer
from ktcli.chat.transcript import Added, AnswerPiece, Transcript
from ktcli.engine import Engine
from ktcli.engine.drafting import NO_DRAFTS, DraftWish
from ktcli.engine.request import (
    Answer,
    Finish,
    Finished,
    GenerationRequest,
    PromptRead,
    Stats,
    Token,
)
from ktcli.engine.sampler import Sampler
from ktcli.engine.scheduler import Scheduler
from ktcli.errors import ContextFull

# progress(tokens of the prompt that are read, tokens in all)
Progress = Callable[[int, int], None]


def longer_context(engine: Engine) -> str:
    """The advice for a longer conversation: an option, unless the model itself ends there."""
    most = engine.spec.context
    if engine.context < most:
        return f"--context gives more room, up to {most:,} tokens"
    return f"{most:,} tokens are the most that this model was made for"


@dataclass(frozen=True, slots=True)
class Voice:
    """A model's text files, read.

    Attributes:
        control: keeps words of a conversation from becoming control tokens.
        stop_ids: the ids of tokens that end an answer.
        settings: the model's own settings.
    """

    tokenizer: Tokenizer
    control: ControlTokens
    template: ChatTemplate
    stop_ids: frozenset[int]
    settings: Settings

    @property
    def may_think(self) -> bool:
        """Tells whether the template listens to `Settings.thinking`."""
        hello = [{"role": "user", "content": "hi"}]
        ways = (replace(self.settings, thinking=thinking) for thinking in (True, False))
        return len({self.template.render(hello, **way.variables) for way in ways}) > 1


def read_voice(name: str, folder: Path, *, allow_special: bool = False) -> Voice:
    """Reads the text files of a model; it is cheap, so it comes before weights are converted or loaded.

    Args:
        allow_special: whether texts of a conversation may give control tokens.
    Raises:
        BadCheckpoint: the tokenizer, template or settings are missing, damaged or hostile.
    """
    tokenizer = load_tokenizer(folder)
    template = load_template(folder, name=name)
    stop_ids = read_stop_ids(folder, tokenizer, template)
    control = ControlTokens(tokenizer, allowed=allow_special)
    return Voice(tokenizer, control, template, stop_ids, read_settings(folder))


@dataclass(frozen=True, slots=True)
class Speaker:
    """A loaded model that can talk.

    Attributes:
        name: the name for people.
        asked: the name that finds it again; empty: the same.
        pack: the identity of its conversion; empty: unknown.
    """

    name: str
    engine: Engine
    voice: Voice
    asked: str = ""
    pack: str = ""

    @property
    def model(self) -> Identity:
        """The model, as a kept conversation names it."""
        return Identity(self.name, self.asked or self.name, self.pack)


@dataclass(slots=True)
class Reply:
    """The answer to one question, final when its pieces are through.

    Attributes:
        text: the text that the conversation remembers: thoughts between marks are part of it, as templates
            cut them out themselves; thoughts in channels are not.
        at: the characters of the rendered conversation before it.
        timeline: what the model read for it; None before that is known.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish: Finish = Finish.CANCELLED
    at: int = 0
    timeline: Timeline | None = None


class Chat:
    """A conversation on an engine, which serves nobody else meanwhile.

    Attributes:
        sequence: what the engine holds of it.
        conversation: the messages.
        reply: the reply to the last question that was not refused; None before the first.
        spoken: the answers as they were generated, by where they are in the rendered conversation.
        timeline: what the model read and said last; None before the first answer.
        heard: called after each token of an answer.
    """

    def __init__(
        self, speaker: Speaker, settings: Settings | None = None, draft: DraftWish = NO_DRAFTS
    ) -> None:
        self.speaker = speaker
        self.conversation = Conversation()
        self.sequence = speaker.engine.sequence()
        weakref.finalize(self, self.sequence.close)
        self._scheduler = Scheduler(speaker.engine)
        self._drafting = draft.of(speaker.engine)
        self.reply: Reply | None = None
        self.spoken: list[Spoken] = []
        self.timeline: Timeline | None = None
        self.heard: Callable[[], None] = lambda: None
        self._answering: Reply | None = None
        self._before: Timeline | None = None  # the timeline before the last one
        self._splicer = Splicer(speaker.voice.tokenizer, speaker.voice.control)
        self.settings = settings or speaker.voice.settings

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
    def answering(self) -> Reply | None:
        """The answer that has begun and not ended."""
        return self._answering

    def restore(self, saved: Saved) -> None:
        """Goes on with a kept conversation, with its settings; a question without an answer gets an empty one."""
        self.conversation = Conversation(saved.conversation.system, list(saved.conversation.turns))
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
        before = list(self.conversation.turns)
        return self._ask(question, before, cancelled, progress)

    def retry(
        self,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
    ) -> Iterator[AnswerPiece] | None:
        """Answers the last question again; returns None if there was none. If it is stopped before the first word,
        the earlier answer stays."""
        before = list(self.conversation.turns)
        question = self.conversation.undo()
        if question is None:
            return None
        return self._ask(question, before, cancelled, progress)

    def _ask(
        self,
        question: str,
        before: list[Turn],
        cancelled: Callable[[], bool],
        progress: Progress | None,
    ) -> Iterator[AnswerPiece]:
        self.conversation.say("user", question.encode("utf-8", "replace").decode("utf-8"))
        return self._answer(before, cancelled, progress)

    def _answer(
        self, before: list[Turn], cancelled: Callable[[], bool], progress: Progress | None
    ) -> Iterator[AnswerPiece]:
        """Yields the pieces of the answer to the last question; if there are none, the turns become `before`."""
        reply = self._answering = Reply()
        try:
            text, prompt = self._prompt()
            reply.at, reply.timeline = len(text), self._read(prompt)
            self._before = self.timeline
            self.reply = reply
            transcript = Transcript(self.speaker.voice.tokenizer, self._settings.stops, text)
            answer = self._submit(reply.timeline, transcript)
            reply.stats = answer.stats
            yield from self._told(answer, transcript, reply, cancelled, progress)
        finally:
            self._answering = None
            self._remember(reply, before)
        spoken = Spoken(reply.at, reply.text, tuple(reply.ids))
        if spoken.ids and self._splicer.is_whole(spoken):
            remember(self.spoken, spoken)
        if reply.stats.prompt_tokens == len(prompt):  # else reading it was stopped
            depths = self.sequence.depths
            self.timeline = reply.timeline.answered(reply.text, reply.ids, depths)

    def _submit(self, read: Timeline, transcript: Transcript) -> Answer:
        request = GenerationRequest(
            read.ids,
            self._sampler.settings,
            self.speaker.voice.stop_ids,
            self._settings.max_tokens,
            depths=read.depths,
            marks=self._snapshots(read.ids),
            ends=transcript.hears,
        )
        return self._scheduler.submit(
            request, sampler=self._sampler, sequence=self.sequence, drafting=self._drafting
        )

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
                for event in self._scheduler.step():
                    if isinstance(event, PromptRead) and progress is not None:
                        progress(event.done, event.total)
                    if isinstance(event, Token):
                        self._note_depths(reply)
                        reply.ids.append(event.id)
                        yield from self._added(reply, transcript.next())
                        self.heard()
                    if isinstance(event, Finished) and event.error is not None:
                        raise event.error
            yield from self._added(reply, transcript.finish())
            reply.finish = Finish.STOP if transcript.stopped else answer.finish
        finally:
            if answer.finish is None:  # nobody listens any more
                answer.cancel()
                self._scheduler.step()

    def _note_depths(self, reply: Reply) -> None:
        """Notes how the prompt was computed, once it was read and nothing else yet."""
        if not reply.ids and reply.timeline is not None:
            reply.timeline = replace(reply.timeline, depths=self.sequence.depths)

    @staticmethod
    def _added(reply: Reply, added: Added) -> Iterator[AnswerPiece]:
        reply.text += added.text
        yield from added.pieces

    def _remember(self, reply: Reply, before: list[Turn]) -> None:
        """Keeps the answer, cut or whole; a question without any answer is taken back."""
        if reply.text or reply.finish is not Finish.CANCELLED:
            self.conversation.say("assistant", reply.text)
        else:
            self.conversation.turns[:] = before

    def _prompt(self) -> tuple[str, list[int]]:
        """Renders the conversation as text and as ids."""
        context = self.speaker.engine.context
        rendered = self._rendered(self.conversation.messages)
        ids = self._splicer.ids(rendered, self.spoken, context)
        if ids is None:
            self._refuse(f"more than {context:,}")
        if len(ids) >= context:
            self._refuse(f"{len(ids):,}")
        return rendered.text, ids

    def _rendered(self, messages: list[Turn]) -> Marked:
        voice = self.speaker.voice
        return voice.control.render(
            lambda messages, more: voice.template.render(messages, **more),
            messages,
            self._settings.variables,
            self.speaker.engine.context,
        )

    def _snapshots(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The positions of the prompt at which a state should be kept, where layers keep any."""
        if not self.sequence.recurrent:
            return ()
        context = self.speaker.engine.context

        def ids_of(messages: list[Turn]) -> list[int] | None:
            rendered = self._rendered(messages)
            return self._splicer.ids(rendered, self.spoken, context, passing=True)

        return snapshot_positions(prompt, self.conversation.messages, ids_of)

    def _read(self, prompt: list[int]) -> Timeline:
        messages = tuple((turn["role"], turn["content"]) for turn in self.conversation.messages)
        model = self.speaker.model
        before = self.timeline
        depths = before.depths[: common(before.ids, prompt)] if before is not None else b""
        return Timeline(
            tuple(prompt), messages, self._settings.variables, (model.name, model.pack), depths
        )

    def _refuse(self, tokens: str) -> NoReturn:
        raise ContextFull(
            f"the conversation has {tokens} tokens and the context holds "
            f"{self.speaker.engine.context:,}, so there is no room for an answer",
            hint="/clear starts afresh, /undo takes a turn back; "
            + longer_context(self.speaker.engine),
        )
