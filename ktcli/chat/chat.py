"""A chat with a loaded model: messages in, pieces of text out.

Each turn renders the whole conversation, and the session computes only what it does not hold yet.
The ids of earlier turns are kept as they were generated (a model need not cut its own text the way the
tokenizer would), so the second turn computes the new question alone; where the template writes an
earlier turn differently (without its thoughts, say) as much as is common is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.chat.channels import Channels
from ktcli.chat.conversation import Conversation
from ktcli.chat.settings import Settings, read_settings, read_stop_ids
from ktcli.chat.stream import THINK, Detokenizer, StopStrings, Thinking
from ktcli.chat.template import ChatTemplate, load_template
from ktcli.chat.tokenizer import Tokenizer, load_tokenizer
from ktcli.engine.generate import Finish, Generation, Progress, Stats, Timeline
from ktcli.engine.sampler import Sampler
from ktcli.errors import ContextFull
from ktcli.models import Spec


class EngineLike(Protocol):
    """What a chat needs of an engine."""

    @property
    def context(self) -> int:
        """Positions of a session."""

    @property
    def spec(self) -> Spec:
        """The model's shape."""

    def depth_at(self, position: int) -> int:
        """How many experts the token of an answer at `position` may defer."""

    def session(self) -> Timeline:
        """A new timeline."""

    def chosen(self) -> NDArray[np.int64]:
        """How often each expert was chosen since the engine was made, [MoE layers, E]."""


@dataclass(frozen=True, slots=True)
class Voice:
    """What a model's text files say.

    Attributes:
        stop_ids: end an answer.
        settings: the model's own.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    stop_ids: frozenset[int]
    settings: Settings

    @property
    def may_think(self) -> bool:
        """Whether the template listens to `Settings.thinking`."""
        hello = [{"role": "user", "content": "hi"}]
        ways = (replace(self.settings, thinking=thinking) for thinking in (True, False))
        return len({self.template.render(hello, **way.variables) for way in ways}) > 1


def read_voice(name: str, folder: Path) -> Voice:
    """Read them; cheap, so it comes before weights are converted or loaded.

    Raises:
        BadCheckpoint: the tokenizer, template or settings are missing, damaged or hostile.
    """
    tokenizer = load_tokenizer(folder)
    template = load_template(folder, name=name)
    stop_ids = read_stop_ids(folder, tokenizer, template)
    return Voice(tokenizer, template, stop_ids, read_settings(folder))


@dataclass(frozen=True, slots=True)
class Speaker:
    """A loaded model that can talk; `name` is for people."""

    name: str
    engine: EngineLike
    voice: Voice


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer; `thought`: the model speaks to itself."""

    text: str
    thought: bool = False


@dataclass(slots=True)
class Reply:
    """What came out of one question, final when its pieces are through.

    Attributes:
        text: what the conversation remembers: thoughts between marks are part of it, as templates cut them
            out themselves; those in channels are not.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish: Finish = Finish.CANCELLED


@dataclass(frozen=True, slots=True)
class _Known:
    """A text whose ids are known, because the model generated part of it."""

    text: str = ""
    ids: tuple[int, ...] = ()


class Chat:
    """A conversation on one session.

    Attributes:
        conversation: the messages.
        reply: of the last question; None before the first.
    """

    def __init__(self, speaker: Speaker, settings: Settings | None = None) -> None:
        self.speaker = speaker
        self.conversation = Conversation()
        self.session = speaker.engine.session()
        self.reply: Reply | None = None
        self._known = _Known()
        self.settings = settings or speaker.voice.settings

    @property
    def settings(self) -> Settings:
        """In force from the next token on; setting them starts the random sequence anew."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        self._settings = settings
        self._sampler = Sampler(settings.sampling)

    @property
    def seed(self) -> int:
        """Of the random sequence in use, given or drawn."""
        return self._sampler.seed

    @property
    def used(self) -> int:
        """Tokens in the context."""
        return len(self.session.ids)

    def ask(
        self,
        question: str,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
    ) -> Iterator[Piece]:
        """Say `question`; the answer's pieces as they come. It may be left at any piece.

        Raises:
            ContextFull: there is no room; the question is not part of the conversation.
            BadCheckpoint: the template or tokenizer is wrong.
        """
        self.conversation.say("user", question.encode("utf-8", "replace").decode("utf-8"))
        return self._answer(cancelled, progress)

    def retry(
        self,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
    ) -> Iterator[Piece] | None:
        """Answer the last question again; None if there was none."""
        question = self.conversation.undo()
        if question is None:
            return None
        return self.ask(question, cancelled=cancelled, progress=progress)

    def _answer(self, cancelled: Callable[[], bool], progress: Progress | None) -> Iterator[Piece]:
        reply = Reply()
        self.reply = reply
        try:
            text, prompt = self._prompt()
            generation = self._generation(prompt, cancelled, progress, reply)
            if Channels.known_to(self.speaker.voice.tokenizer):
                yield from self._in_channels(generation, reply)
            else:
                yield from self._between_marks(generation, reply, text)
            reply.finish = generation.finish
        finally:
            self._remember(reply)
        self._known = self._now_known(text, prompt, reply)

    def _generation(
        self,
        prompt: list[int],
        cancelled: Callable[[], bool],
        progress: Progress | None,
        reply: Reply,
    ) -> Generation:
        return Generation(
            self.session,
            prompt,
            self._sampler,
            self.speaker.voice.stop_ids,
            self._settings.max_tokens,
            self.speaker.engine.context,
            cancelled,
            progress,
            self.speaker.engine.depth_at,
            stats=reply.stats,
            ids=reply.ids,
        )

    def _between_marks(self, generation: Generation, reply: Reply, prompt: str) -> Iterator[Piece]:
        """The answer's pieces where a model puts its thoughts between <think> and </think>."""
        thinking = Thinking(inside=prompt.rstrip().endswith(THINK))
        for fresh in self._texts(generation):
            reply.text += fresh
            yield from (Piece(part, thought) for thought, part in thinking.feed(fresh))
        yield from (Piece(part, thought) for thought, part in thinking.finish())

    def _in_channels(self, generation: Generation, reply: Reply) -> Iterator[Piece]:
        """The answer's pieces where a model answers in channels; stop strings count in the last one only."""
        channels = Channels(self.speaker.voice.tokenizer)
        stops = StopStrings(self._settings.stops)
        for id in generation:
            thought, text = channels.feed(id)
            if not thought:
                text = stops.feed(text)
                reply.text += text
            if text:
                yield Piece(text, thought)
            if stops.stopped:
                generation.finish = Finish.STOP
                return
        thought, text = channels.finish()
        if thought and text:
            yield Piece(text, thought)
        rest = stops.feed("" if thought else text) + stops.finish()
        if stops.stopped:
            generation.finish = Finish.STOP
        if rest:
            reply.text += rest
            yield Piece(rest)

    def _texts(self, generation: Generation) -> Iterator[str]:
        """The answer's text in whole characters, up to a stop string."""
        detokenizer = Detokenizer(self.speaker.voice.tokenizer)
        stops = StopStrings(self._settings.stops)
        for id in generation:
            text = stops.feed(detokenizer.feed(id))
            if text:
                yield text
            if stops.stopped:
                generation.finish = Finish.STOP
                return
        rest = stops.feed(detokenizer.finish()) + stops.finish()
        if stops.stopped:
            generation.finish = Finish.STOP
        if rest:
            yield rest

    def _remember(self, reply: Reply) -> None:
        """Keep the answer, cut or whole; a question that nothing was said to is taken back."""
        if reply.text or reply.finish is not Finish.CANCELLED:
            self.conversation.say("assistant", reply.text)
        else:
            self.conversation.turns.pop()

    def _prompt(self) -> tuple[str, list[int]]:
        """The conversation as text and as ids."""
        tokenizer, known = self.speaker.voice.tokenizer, self._known
        text = self.speaker.voice.template.render(
            self.conversation.messages, **self._settings.variables
        )
        ids: list[int] = []
        if known.text and text.startswith(known.text):
            fresh = tokenizer.encode(text[len(known.text) :])
            # Only a special token surely begins where the known text ends.
            if fresh and fresh[0] in tokenizer.special_ids:
                ids = [*known.ids, *fresh]
        ids = ids or tokenizer.encode(text)
        context = self.speaker.engine.context
        if len(ids) >= context:
            raise ContextFull(
                f"the conversation has {len(ids):,} tokens and the context holds {context:,}, "
                "so there is no room for an answer",
                hint="/clear starts afresh, /undo takes a turn back; "
                "start kt chat with a larger --context for longer conversations",
            )
        return text, ids

    def _now_known(self, text: str, prompt: list[int], reply: Reply) -> _Known:
        """What the next turn can take over: the prompt, and the answer if its ids are all its text."""
        if self.speaker.voice.tokenizer.decode(reply.ids) == reply.text:
            return _Known(text + reply.text, (*prompt, *reply.ids))
        return _Known(text, tuple(prompt))
