"""Runs an engine's scheduler on a separate thread; requests may come from any thread.

What it tells an event loop is delivered there for a whole step together, so that a step wakes the loop once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ktcli.engine import Engine
from ktcli.engine.request import Answer, Event, Finish, Finished, GenerationRequest
from ktcli.engine.sampler import Sampler
from ktcli.engine.scheduler import Limits, Scheduler
from ktcli.errors import Busy, DeviceError, KtError
from ktcli.server.models.timelines import Timelines
from ktcli.server.process.drain import shutting_down
from ktcli.threads import Daemon

T = TypeVar("T")
OnEvent = Callable[[Event], None]
# After which a scheduler that could do nothing is asked again: nobody says that a constraint is compiled or an answer
# cancelled. It lasts no longer than compiling does.
_STALLED_S = 0.002
_AGAIN = "try again in a moment"


class EngineThread:
    """The thread that makes an engine's steps.

    Args:
        after_step: called after each step whose events were delivered, on the engine's thread.
    Attributes:
        scheduler: what it runs; others may look at its counts.
        failure: why no step can be made any more: the GPU failed; None: nothing has.
    """

    def __init__(
        self, engine: Engine, limits: Limits, after_step: Callable[[], None] = lambda: None
    ) -> None:
        self.scheduler = Scheduler(engine, limits)
        self.failure: DeviceError | None = None
        self._after_step = after_step
        self._callbacks: dict[Answer, OnEvent] = {}
        self._timelines = Timelines(engine)
        self._work = threading.Condition()
        self._jobs: list[Callable[[], None]] = []  # for between two steps
        # Until when answers may go on; None: nobody has closed it.
        self._ends_s: float | None = None
        self._thread = Daemon(self._run, name="kt-engine")
        self._thread.start()

    def submit(
        self,
        request: GenerationRequest,
        on_event: OnEvent,
        sampler: Sampler | None = None,
        conversation: str = "",
        *,
        goes_on: bool = False,
    ) -> Answer:
        """Submits a request to the engine; returns its answer, which is still empty. `on_event` is called with the
        answer's events on the engine's thread, one after the other.

        Args:
            sampler: the sampler whose random sequence the answer continues; None: a new one.
            conversation: the name of the conversation whose cached sequence is kept for its next answer, see
                `Timelines`; empty: none is kept.
            goes_on: whether it is the rest of an answer whose last event is being handled, see `Scheduler.submit`: it
                may end while the thread ends.
        Raises:
            Busy: the thread is ending, or the GPU has failed.
            QueueFull, ContextFull, UsageError: see `Scheduler.submit`.
        """
        with self._work:
            if self._ends_s is not None and not goes_on:
                raise shutting_down()
            if self.failure is not None:
                raise Busy(str(self.failure), hint=_AGAIN)
            sequence = self._timelines.take(conversation)
            try:
                answer = self.scheduler.submit(
                    request, sampler=sampler, sequence=sequence, goes_on=goes_on
                )
            except BaseException:
                self._timelines.give_up(sequence)
                raise
            self._timelines.begin(answer, conversation, sequence)
            self._callbacks[answer] = on_event
            self._work.notify()
        return answer

    def between_steps(self, call: Callable[[], T]) -> Future[T]:
        """Has a function called on the engine's thread between two steps; returns the future of its result.

        Raises:
            Busy: the thread ends.
        """
        done: Future[T] = Future()

        def job() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        with self._work:
            if self._ends_s is not None:
                raise shutting_down()
            self._jobs.append(job)
            self._work.notify()
        return done

    def close(self, timeout_s: float = 0.0) -> None:
        """Ends the thread and waits until it has ended; answers in progress may continue for `timeout_s` seconds, then
        they are cancelled."""
        with self._work:
            self._ends_s = time.monotonic() + timeout_s
            self._work.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._work:
                while (
                    self.scheduler.idle
                    and self._ends_s is None
                    and not (self._timelines.due or self._jobs)
                ):
                    self._work.wait()
                if self.scheduler.stalled:
                    self._work.wait(_STALLED_S)
                self._timelines.sweep()
                ends, jobs = self._ends_s, self._jobs
                self._jobs = []
            while jobs:  # what one returns is not kept here: freeing it may take longer than a step
                jobs.pop(0)()
            if ends is not None and (self.scheduler.idle or time.monotonic() >= ends):
                break
            self._tell(self._step())
        self._tell(self.scheduler.close())
        self._timelines.close()

    def _step(self) -> list[Event]:
        """Runs one step and returns its events; all answers end where it fails unexpectedly, or the GPU does."""
        events: list[Event] = []
        try:
            events = self.scheduler.step()
            failure: Exception | None = _device_failure(events)
        except Exception as error:
            failure = error
        return events if failure is None else self._all_ended(failure, events)

    def _all_ended(self, error: Exception, events: Sequence[Event]) -> list[Event]:
        """Ends all answers for a reason; returns the events of the last step, and those with which answers end."""
        said = error if isinstance(error, KtError) else KtError(f"the engine failed: {error}")
        if isinstance(error, DeviceError):  # whose hint is about the command line of a server
            said = DeviceError(str(error), hint=_AGAIN)
        before = [each for each in events if not _of_device(each)]
        ended = {each.answer for each in before if isinstance(each, Finished)}
        with self._work:
            if isinstance(error, DeviceError):
                self.failure = error.bare()
            self.scheduler.close()
            # Among them those that a step ended before it raised an error, whose events were not delivered.
            left = [answer for answer in self._callbacks if answer not in ended]
        return [*before, *(Finished(answer, Finish.FAILED, said) for answer in left)]

    def _tell(self, events: list[Event]) -> None:
        with self._work:
            calls = [(self._callbacks[event.answer], event) for event in events]
            for event in events:
                if isinstance(event, Finished):
                    del self._callbacks[event.answer]
                    # Whoever else is at work may need the room.
                    keep = event.finish is not Finish.FAILED and self.scheduler.idle
                    self._timelines.end(event.answer, keep=keep)
        for on_event, event in calls:
            try:
                on_event(event)
            except Exception:  # a callback reports its own faults; other answers go on
                event.answer.cancel()
        self._after_step()


def _of_device(event: Event) -> bool:
    """Returns whether an answer has ended because a GPU failed."""
    return isinstance(event, Finished) and isinstance(event.error, DeviceError)


def _device_failure(events: Sequence[Event]) -> Exception | None:
    """Returns the failure of a GPU that ended answers; None: there was none."""
    return next(
        (each.error for each in events if isinstance(each, Finished) and _of_device(each)), None
    )


class LoopQueue:
    """A queue of calls from one thread to an event loop.

    Args:
        loop: the loop in which they are called.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: list[Callable[[], None]] = []

    def put(self, receive: Callable[[T], None], value: T) -> None:
        """Queues the call `receive(value)` for the event loop until `flush`."""
        self._calls.append(partial(receive, value))

    def flush(self) -> None:
        """Schedules the queued calls in the event loop, in order; drops them if the loop is closed."""
        if self._calls:
            calls, self._calls = self._calls, []
            try:
                self._loop.call_soon_threadsafe(_call_all, calls)
            except RuntimeError:  # the loop is closed: nobody waits for them
                return


def _call_all(calls: list[Callable[[], None]]) -> None:
    """Makes calls, all of them: an error of one is raised behind the last."""
    error: Exception | None = None
    for each in calls:
        try:
            each()
        except Exception as raised:
            error = error or raised
    if error is not None:
        raise error
