"""Creates prompts from a chat's messages that fit the context, leaving out the oldest turns if necessary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ktcli.chat.compaction import fewest_omitted
from ktcli.chat.conversation import Conversation, Turn
from ktcli.dialogue.prompts import PromptEncoder
from ktcli.dialogue.splice import Spoken
from ktcli.records import dataclass


class FittedText(NamedTuple):
    """A prompt that fits the context: its messages, text and ids.

    Attributes:
        ids: of the text; None: they are surely more than the most that was allowed.
    """

    text: str
    ids: list[int] | None

    def leaves(self, room: int, context: int) -> bool:
        """Returns whether the prompt leaves room for so many ids in a context."""
        return self.ids is not None and len(self.ids) + room <= context

    def tokens(self, context: int) -> str:
        """Returns the number of its ids, for people."""
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
        """Returns messages as text and as at most `most` ids; None: as many as the context holds.

        Args:
            passing: see `PromptEncoder.ids`.
        """
        rendered = self.prompts.rendered(messages, self.variables)
        ids = self.prompts.ids(rendered, self.spoken, most, passing=passing)
        return FittedText(rendered.text, ids)

    def with_room(self, said: Conversation, most: int) -> FittedText:
        """Returns the prompt of a conversation that is too long, of `most` ids at most if possible: as many of the
        oldest turns as needed are omitted from now on; the last question stays.
        """

        def fits(turns: int) -> bool:
            messages = replace(said, omitted=replace(said.omitted, turns=turns)).messages
            return self.encoded(messages, most, passing=True).leaves(0, most)

        turns = fewest_omitted(len(said.turns), said.omitted.turns, fits)
        said.omitted = replace(said.omitted, turns=turns)
        return self.encoded(said.messages)
