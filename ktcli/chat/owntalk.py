"""A conversation with an engine in this process, which serves nobody else meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ktcli.chat.partner import Held
from ktcli.chat.worktimes import Clocks
from ktcli.engine.drafting import DraftWish
from ktcli.engine.request import Answer, Event, GenerationRequest
from ktcli.engine.sampler import Sampler
from ktcli.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from ktcli.chat.grammar.compiler import GrammarCompiler
    from ktcli.chat.speaker import Speaker


class OwnTalk:
    """See `Talk`: a scheduler with one request, on one timeline.

    Attributes:
        sequence: what the engine holds of the conversation.
        began: the engine's clocks when it took the last request.
    """

    def __init__(self, speaker: Speaker, draft: DraftWish) -> None:
        self._speaker = speaker
        self._drafting = draft.of(speaker.engine)
        self._scheduler = Scheduler(speaker.engine)
        self._grammars: GrammarCompiler | None = None  # made for the first answer of a form
        self.sequence = speaker.engine.sequence()
        self.began: Clocks = ()

    def submit(
        self, request: GenerationRequest, sampler: Sampler, held: Held | None = None
    ) -> Answer:
        """Takes a request, see `Talk.submit`."""
        if held is not None:
            # Most chats ask for no form, and their first word need not wait for what compiles grammars.
            from ktcli.chat.grammar.compiler import GrammarCompiler

            if self._grammars is None:
                self._grammars = GrammarCompiler.of(self._speaker)
            request = replace(request, constraint=self._grammars.held(held))
        self.began = self._speaker.engine.operations()
        return self._scheduler.submit(
            request, sampler=sampler, sequence=self.sequence, drafting=self._drafting
        )

    def step(self) -> list[Event]:
        """Does a step of the engine."""
        return self._scheduler.step()
