"""A conversation with whoever answers it: messages in, pieces of text out.

What is here is the same for a model whose ids are at hand (`chat`) and for one that a server keeps to itself
(`remote`): the messages, the settings, the answer while it is made, and what stays of one that was stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ktcli.answers.events import AnswerPiece
from ktcli.chat.compaction import SUM_UP, older_turns
from ktcli.chat.conversation import Conversation, Omission, Saved
from ktcli.chat.reply import Reply
from ktcli.chat.worktimes import ChatTotals
from ktcli.dialogue.backend import Identity
from ktcli.dialogue.splice import Spoken
from ktcli.dialogue.timeline import Loss, Timeline
from ktcli.engine.request import Finish
from ktcli.errors import KtError
from ktcli.text.files import without_surrogates
from ktcli.text.settings import Settings

if TYPE_CHECKING:
    from ktcli.answers.grammar.form import Form

# progress(tokens of the prompt that are read, tokens in all)
Progress = Callable[[int, int], None]


def not_cancelled() -> bool:
    """Returns False, always: the default of `cancelled`, for an answer that nobody stops."""
    return False


class AnswerHooks(NamedTuple):
    """The functions of whoever wants an answer: whether to stop it, and who is told how far its prompt is read."""

    cancelled: Callable[[], bool] = not_cancelled
    progress: Progress | None = None


class BaseChat(ABC):
    """A conversation with a model.

    Attributes:
        conversation: the messages.
        reply: the reply to the last question that was not refused; None before the first.
        spoken: the answers as they were generated, by where they are in the rendered conversation.
        timeline: what the model read and said last; None before the first answer, and where its ids are not known.
        heard: called after each token of an answer.
        left: whether it has no model: it was left, and another one could not be loaded.
        totals: what loading and all answers took.
        form: what the text of every answer must be, behind its thoughts; None: anything.
    """

    def __init__(self) -> None:
        self.conversation = Conversation()
        self.reply: Reply | None = None
        self.spoken: list[Spoken] = []
        self.timeline: Timeline | None = None
        self.heard: Callable[[], None] = lambda: None
        self.left = False
        self.totals = ChatTotals()
        self.form: Form | None = None
        self._answering: Reply | None = None

    # --- whom it is with ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def model(self) -> Identity:
        """The identity of the model in the saved conversation: its names, its conversion, its server."""

    @property
    @abstractmethod
    def context(self) -> int | None:
        """The most positions, in tokens, that a conversation can have; None if the server does not say."""

    @property
    @abstractmethod
    def longer(self) -> str:
        """A sentence for people that says how to get a longer context."""

    @property
    @abstractmethod
    def thinks(self) -> bool:
        """Whether the model may think before it answers, as far as that is known."""

    @property
    @abstractmethod
    def settings(self) -> Settings:
        """The settings in force from the next token on; setting them starts the random sequence anew."""

    @settings.setter
    @abstractmethod
    def settings(self, settings: Settings) -> None: ...

    @property
    @abstractmethod
    def seed(self) -> int | None:
        """The seed of the random sequence in use, given or drawn; None: a server drew it."""

    @property
    @abstractmethod
    def used(self) -> int:
        """The number of tokens of the conversation that are in the context: those read and generated so far."""

    @property
    def loss(self) -> Loss | None:
        """From which token on, how many and why cached tokens could not be reused for the last prompt; None if all were
        reused, or that is not known.
        """
        return None

    # --- questions and answers ------------------------------------------------------------------------

    @property
    def thought_cut(self) -> bool:
        """Whether the last answer's thought was ended because its token budget was used up."""
        return self.reply is not None and self.reply.thought_cut

    @property
    def answering(self) -> Reply | None:
        """The answer in progress; None if there is none."""
        return self._answering

    def ask(
        self,
        question: str,
        *,
        cancelled: Callable[[], bool] = not_cancelled,
        progress: Progress | None = None,
    ) -> Generator[AnswerPiece]:
        """Sends `question` to the model; yields the answer's pieces as they come. Closing the generator stops the
        answer.

        Raises:
            ContextFull: the question does not fit into the context; it is not added to the conversation.
            BadCheckpoint: the template or tokenizer fails. ServerFailed: the server did not answer to the end.
        """
        return self._ask(question, self.conversation.copy(), AnswerHooks(cancelled, progress))

    def retry(
        self,
        *,
        cancelled: Callable[[], bool] = not_cancelled,
        progress: Progress | None = None,
    ) -> Iterator[AnswerPiece] | None:
        """Returns an iterator of the pieces of another answer to the last question, which replaces the earlier one;
        None if there was no question. If it is stopped before the first word, the earlier answer stays.
        """
        before = self.conversation.copy()
        question = self.conversation.undo()
        if question is None:
            return None
        return self._ask(question, before, AnswerHooks(cancelled, progress))

    def _ask(
        self, question: str, before: Conversation, hooks: AnswerHooks
    ) -> Generator[AnswerPiece]:
        self.conversation.say("user", without_surrogates(question))
        return self._answer(before, hooks)

    def _answer(self, before: Conversation, hooks: AnswerHooks) -> Generator[AnswerPiece]:
        """Yields the pieces of the answer to the last question; if there are none, the turns become `before`."""
        reply = self._answering = Reply()
        try:
            yield from self._made(reply, hooks)
        finally:
            self._answering = None
            self._remember(reply, before)
            if reply.timeline is not None:  # else it was refused
                self.totals.add(reply.stats, reply.laps)

    @abstractmethod
    def _made(self, reply: Reply, hooks: AnswerHooks) -> Iterator[AnswerPiece]:
        """Yields the pieces of the answer to the conversation as it is now; `reply` is its account."""

    def _remember(self, reply: Reply, before: Conversation) -> None:
        """Keeps the answer, cut or whole; a question without any answer is taken back."""
        if reply.text or reply.finish is not Finish.CANCELLED:
            self.conversation.say("assistant", reply.text)
        else:
            self.conversation.become(before)

    # --- the conversation -----------------------------------------------------------------------------

    def restore(self, saved: Saved) -> None:
        """Replaces the conversation and its settings by those of a saved one; a last question without an answer gets
        an empty one.
        """
        self.conversation = saved.conversation.copy()
        self.conversation.end_question()
        self.settings = self.settings.restored(saved.sampling, saved.others)

    def compact(
        self, *, cancelled: Callable[[], bool] = not_cancelled, progress: Progress | None = None
    ) -> int:
        """Has the model write a summary, which replaces the oldest turns in prompts; returns the number of turns that
        were summed up, 0 if it was stopped and nothing changed.

        Raises:
            UsageError: there is nothing to sum up. KtError: the model gave no summary.
        """
        said = self.conversation
        turns = older_turns(len(said.turns), said.omitted.turns)
        before = Conversation(said.system, said.turns[:turns], said.omitted)
        before.say("user", SUM_UP)
        reply = Reply()
        pieces = list(self._summed_up(before, reply, AnswerHooks(cancelled, progress)))
        if reply.finish is Finish.CANCELLED:
            return 0
        summary = "".join(piece.text for piece in pieces if not piece.thought).strip()
        if not summary:
            raise KtError(
                "the model wrote no summary, so nothing has changed",
                hint="/undo removes the last turn",
            )
        counted = turns - said.omitted.turns
        said.omitted = Omission(turns, summary)
        return counted

    @abstractmethod
    def _summed_up(
        self, before: Conversation, reply: Reply, hooks: AnswerHooks
    ) -> Iterator[AnswerPiece]:
        """Yields the pieces of a summary, beside the conversation; what is asked for it ends `before`."""
