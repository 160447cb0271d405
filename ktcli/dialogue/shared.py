"""One engine for several conversations and prompts of one thread: their requests are computed together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ktcli.dialogue.backend import Clocks
from ktcli.engine import Engine
from ktcli.engine.request import Answer, Event, Finish, Finished, GenerationRequest
from ktcli.engine.sampler import Sampler
from ktcli.engine.scheduler import Limits, Scheduler
from ktcli.engine.sequence import Sequence
from ktcli.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from ktcli.answers.grammar.form import AnswerConstraint

Hear = Callable[[Event], object]


class _Submitted(NamedTuple):
    """A request that was submitted: who hears of it, and the conversation that it belongs to with its timeline."""

    hear: Hear
    conversation: object | None
    sequence: Sequence | None


class SharedScheduler:
    """A scheduler that passes each event to the submitter of its request; for one thread.

    The timeline of the conversation that asked last is kept until somebody else asks. Of the others, of which there can
    be any number, whole pages stay in the cache as long as nobody needs the room.

    Args:
        engine: the engine, which nobody else runs meanwhile.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self._limits = engine, limits
        self._scheduler = Scheduler(engine, limits)
        self._submitted: dict[Answer, _Submitted] = {}
        self._events: deque[Event] = deque()  # that are not told yet: who hears one may raise
        self._kept: tuple[object, Sequence] | None = None
        self._stepping = False

    @property
    def has_room(self) -> bool:
        """Whether the queue of waiting requests has room for one more."""
        return self._scheduler.waiting < self._limits.waiting

    def submit(
        self,
        request: GenerationRequest,
        hear: Hear,
        sampler: Sampler | None = None,
        *,
        conversation: object | None = None,
        goes_on: bool = False,
    ) -> Answer:
        """Submits a request to the engine; returns the state of its answer. `step` calls `hear` with each event of it.

        Args:
            sampler: goes on with this random sequence; None: a new one.
            conversation: the conversation that the request belongs to, for whose next request the engine keeps prompt
                and answer unless it has other requests by then; None: none.
            goes_on: whether it is the rest of an answer that has just ended, see `Scheduler.submit`.
        Raises:
            QueueFull, ContextFull, UsageError: see `Scheduler.submit`.
        """
        sequence = self._timeline(conversation)
        try:
            answer = self._scheduler.submit(
                request, sampler=sampler, sequence=sequence, goes_on=goes_on
            )
        except BaseException:
            _close(sequence)
            raise
        self._submitted[answer] = _Submitted(hear, conversation, sequence)
        return answer

    def step(self) -> None:
        """Runs a step of the engine and passes each event to the submitter of its request; does nothing if it is called
        within a step.
        """
        if self._stepping:
            return
        self._stepping = True
        try:
            self._events += self._scheduler.step()
            self._tell()
        finally:
            self._stepping = False

    def close(self) -> None:
        """Cancels every request, and passes the event of its end to its submitter."""
        self._events += self._scheduler.close()
        self._tell()
        self.forget()

    def forget(self, conversation: object | None = None) -> None:
        """Releases what the engine keeps of the conversation that asked last; if `conversation` is given, only if it is
        that one.
        """
        if self._kept is not None and conversation in (None, self._kept[0]):
            _close(self._kept[1])
            self._kept = None

    def _timeline(self, conversation: object | None) -> Sequence | None:
        """Returns the timeline on which a conversation goes on; one that is another's is let go."""
        kept = self._kept
        if kept is not None and kept[0] is conversation:
            self._kept = None
            return kept[1]
        self.forget()
        return None if conversation is None else self.engine.sequence()

    def _tell(self) -> None:
        while self._events:
            event = self._events.popleft()
            of = self._submitted[event.answer]
            if isinstance(event, Finished):
                del self._submitted[event.answer]
                if of.sequence is not None:
                    self._end(event, of.conversation, of.sequence)
            of.hear(event)

    def _end(self, event: Finished, conversation: object, sequence: Sequence) -> None:
        """Keeps the timeline of an answer that has ended, unless others may need its room."""
        if event.finish is Finish.FAILED or not self._scheduler.idle:
            _close(sequence)
        else:
            self.forget()
            self._kept = conversation, sequence


def _close(sequence: Sequence | None) -> None:
    """Closes a timeline."""
    if sequence is not None:
        with suppress(DeviceError):  # one that failed has nothing to give back
            sequence.close()


class SharedSession:
    """The session of a conversation on an engine that others use, too, see `ChatSession`.

    Attributes:
        began: the engine's clocks when it took the last request.
    """

    def __init__(self, scheduler: SharedScheduler) -> None:
        self._scheduler = scheduler
        self._answer: Answer | None = None
        self._events: deque[Event] = deque()  # of this answer
        self.began: Clocks = ()

    def submit(
        self,
        request: GenerationRequest,
        sampler: Sampler,
        constraint: AnswerConstraint | None = None,
    ) -> Answer:
        """Submits a request to the engine; returns the state of its answer, see `ChatSession.submit`.

        Raises:
            UsageError: a constraint is given, which a shared engine does not support.
        """
        if constraint is not None:
            raise UsageError("answers from a shared engine cannot be constrained")
        self.began, self._events = self._scheduler.engine.operations(), deque()
        hear = self._events.append
        self._answer = self._scheduler.submit(request, hear, sampler, conversation=self)
        return self._answer

    def step(self) -> list[Event]:
        """Returns the events of the last request that have arrived, such as its next tokens; runs a step of the engine
        first if there are none, or the request was cancelled.
        """
        if not self._events or (self._answer is not None and self._answer.cancelled):
            self._scheduler.step()
        events = list(self._events)
        self._events.clear()
        return events

    def keep(self) -> None:
        """Releases the conversation's sequence in the engine; its whole cache pages stay, and other prompts can reuse
        them.
        """
        self._scheduler.forget(self)

    def close(self) -> None:
        """Releases the conversation's sequence in the engine; requests in progress end by themselves."""
        self._scheduler.forget(self)

    def abandon(self) -> None:
        """Releases the conversation's sequence at the engine's next operation, see `ChatSession.abandon`."""
        self._scheduler.engine.pools.later(self.close)
