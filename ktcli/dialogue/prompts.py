"""Turns messages into prompts: rendered and tokenized, with the ids of earlier answers as they were generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktcli.dialogue.rendering import Message, known_answer, rendered
from ktcli.dialogue.snapshots import shared_ids, snapshot_positions
from ktcli.dialogue.splice import Splicer, Spoken
from ktcli.engine.constraint import ForcedIds
from ktcli.records import dataclass
from ktcli.text.control import Marked
from ktcli.text.model import TextModel


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt that can be computed.

    Attributes:
        text: the rendered conversation.
        ids: its ids.
        marks: positions from which others will probably go on, see `Sequence.adopt`.
        continues: whether it ends with words of the model, which the answer goes on with.
        shared: the first ids with which other conversations begin, too.
        depths: how the first ids were computed, as far as that is known, see `GenerationRequest`.
        forced: what the answer has to be, unless whoever asks says what it has to be; None: anything.
        begins: whether it begins a conversation: nothing in it was said by a model.
    """

    text: str
    ids: Sequence[int]
    marks: tuple[int, ...] = ()
    caller: str = ""
    continues: bool = False
    shared: int = 0
    depths: bytes = b""
    forced: ForcedIds | None = None
    begins: bool = False


class PromptEncoder:
    """Makes the prompts of one model; thread-safe except for `is_whole`.

    Args:
        context: the number of positions that a conversation can have.
        recurrent: whether some layer keeps a state.
    """

    def __init__(self, texts: TextModel, context: int, *, recurrent: bool) -> None:
        self.texts, self.context = texts, context
        self._recurrent = recurrent
        self._splicer = Splicer(texts.tokenizer, texts.control)

    def rendered(
        self, messages: Sequence[Message], variables: Mapping[str, Any], *, continues: bool = False
    ) -> Marked:
        """Returns messages as the text of a prompt, rendered with the model's template, see `rendering.rendered`."""
        return rendered(self.texts, messages, variables, self.context, continues=continues)

    def ids(
        self,
        text: Marked,
        spoken: Sequence[Spoken],
        most: int | None = None,
        *,
        passing: bool = False,
    ) -> list[int] | None:
        """Returns the token ids of a rendered conversation; None if they are certainly more than `most`, or than the
        context holds if that is None.

        Args:
            spoken: answers as the model generated them, in the order of their places in the text; they keep their ids.
            passing: whether this prompt is only tried, so that the ids of its parts are not remembered for the next
                one.
        """
        return self._splicer.ids(
            text, spoken, self.context if most is None else most, passing=passing
        )

    def encoded(
        self,
        text: str,
        ids: Sequence[int],
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        spoken: Sequence[Spoken] = (),
        *,
        further: bool = True,
    ) -> EncodedPrompt:
        """Returns the prompt with this text and these ids of messages. If layers keep a state, it also has the
        positions from which other prompts may continue; if kt's own tables have the answer, that as well.

        Args:
            spoken: the answers in it as the model generated them.
            further: whether such positions are looked for behind the last question, too.
        """
        shared, marks = self._partings(ids, messages, variables, spoken, further=further)
        forced = self._forced(messages, variables)
        return EncodedPrompt(text, ids, marks, shared=shared, forced=forced)

    def _forced(
        self, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> ForcedIds | None:
        """Returns the text that the answer to messages must have; None: any."""
        found = known_answer(self.texts, messages, variables, self.context)
        if found is None:
            return None
        return ForcedIds(tuple(self.texts.control.encode_text(found.text)), found.lead)

    def is_whole(self, answer: Spoken, *, foreign: bool = False) -> bool:
        """Returns whether the ids of an answer decode to all of its text, see `Splicer.is_whole`."""
        return self._splicer.is_whole(answer, foreign=foreign)

    def _partings(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        spoken: Sequence[Spoken],
        *,
        further: bool,
    ) -> tuple[int, tuple[int, ...]]:
        """Returns the number of first ids that other conversations share, and the positions of the prompt at which a
        snapshot of the state should be stored; 0 and none where no layer has a state.
        """
        if not self._recurrent:
            return 0, ()

        def ids_of(messages: Sequence[Message]) -> list[int] | None:
            return self.ids(self.rendered(messages, variables), spoken, passing=True)

        shared = shared_ids(ids, messages, ids_of)
        if not further or messages[-1].get("role") != "user":
            return shared, ()
        return shared, snapshot_positions(ids, messages, ids_of, shared)
