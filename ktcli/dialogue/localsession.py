"""A conversation with an engine in this process that serves no other conversation at the same time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ktcli.dialogue.backend import Clocks
from ktcli.engine import Engine
from ktcli.engine.drafting import DraftOptions
from ktcli.engine.request import Answer, Event, GenerationRequest
from ktcli.engine.sampler import Sampler
from ktcli.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from ktcli.answers.format import AnswerFormat
    from ktcli.answers.grammar.compiler import GrammarCompiler
    from ktcli.answers.grammar.form import AnswerConstraint


class LocalSession:
    """A session with a scheduler, and one sequence, of its own, see `ChatSession`.

    Attributes:
        sequence: what the engine holds of the conversation.
        began: the engine's clocks when it took the last request.
    """

    def __init__(self, engine: Engine, answers: AnswerFormat, draft: DraftOptions) -> None:
        self._engine, self._answers = engine, answers
        self._drafting = draft.of(engine)
        self._scheduler = Scheduler(engine)
        self._grammars: GrammarCompiler | None = None  # made for the first answer of a form
        self.sequence = engine.sequence()
        self.keep, self.close = self.sequence.keep, self.sequence.close
        self.abandon = partial(engine.pools.later, self.close)  # refers to no session
        self.began: Clocks = ()

    def submit(
        self,
        request: GenerationRequest,
        sampler: Sampler,
        constraint: AnswerConstraint | None = None,
    ) -> Answer:
        """Submits a request to the engine; returns the state of its answer, see `ChatSession.submit`."""
        if constraint is not None:
            # Most chats ask for no form, and their first word need not wait for what compiles grammars.
            from ktcli.answers.grammar.compiler import GrammarCompiler

            if self._grammars is None:
                self._grammars = GrammarCompiler.of(self._answers, self._engine.spec.vocab)
            request = replace(request, constraint=self._grammars.constraint(constraint))
        self.began = self._engine.operations()
        return self._scheduler.submit(
            request, sampler=sampler, sequence=self.sequence, drafting=self._drafting
        )

    def step(self) -> list[Event]:
        """Runs one step of the engine; returns its events, such as the next tokens."""
        return self._scheduler.step()
