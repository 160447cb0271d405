"""The models in memory: loaded when a request names them, closed when they are idle or another model needs the room.

One task does all loading and closing, one thing at a time and on a thread beside the event loop; a
model's texts are read on the main thread, which alone can stop a template. A request gets a lease of its model. Where
that is not in memory the request waits its turn: who waits longest is served first. If its model does not fit beside
those that are there, the one that nobody has used for longest is closed; while all are used, new requests for them wait
behind it, or it would wait for ever. A model whose GPU failed is given to nobody any more; once those who used it know
that, it is closed and loaded again, where that can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from ktcli.assembly.beside import HeldMemory, MemoryFit
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.talking import give_back_memory
from ktcli.engine.scheduler import Limits
from ktcli.engine.waiting import require_room
from ktcli.errors import DeviceError
from ktcli.hardware.memory import resident_bytes
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.records import dataclass
from ktcli.server.http.refusals import Refusal
from ktcli.server.models.jobs import Jobs
from ktcli.server.models.model import Lease, LoadedModel, ServedModel
from ktcli.server.models.source import FOREVER, ModelSource
from ktcli.server.process.drain import shutting_down
from ktcli.threadpool import Threads

T = TypeVar("T")


class Counts(NamedTuple):
    """The numbers of running requests, and of those that wait for their first step or for their model."""

    running: int
    waiting: int


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request that waits for its model."""

    source: ModelSource
    keep_s: float | None
    lease: asyncio.Future[Lease]


class Residency:
    """The models in memory. Made and used in one event loop.

    Args:
        jobs: for the main thread.
        limits: of each model; as many requests as may wait for one may wait for models to be loaded.
        listener: receives notes of models that are loaded and closed, and warnings.
        lost: called when the GPU failed that was asked for: no model can be loaded any more.
    Attributes:
        limits: of each model.
        failure: why no model was ever in memory; None: one was, or is still to be loaded.
    """

    def __init__(
        self,
        jobs: Jobs,
        limits: Limits,
        listener: Listener = SILENT,
        lost: Callable[[DeviceError], object] = lambda error: None,
    ) -> None:
        self.failure: Exception | None = None
        self._jobs, self.limits, self._listener, self._lost = jobs, limits, listener, lost
        # Models that are loaded again after their GPU failed, how long they stay then, and why that could not be.
        self._recovering: dict[str, asyncio.Task[None]] = {}
        self._kept_s: dict[str, float] = {}
        self._unrecovered: dict[str, Exception] = {}
        self._loaded: dict[str, LoadedModel] = {}
        self._waiters: deque[_Waiter] = deque()
        self._changed = asyncio.Event()
        self._thread = Threads(1, "kt-models")
        self._empty_bytes = _resident_bytes()
        # The model of the first who waits, where leases of others keep it out; empty: nothing does.
        self._held_up = ""
        self._has_loaded = False
        self._stopping = False
        self._worker = asyncio.create_task(self._run())

    @property
    def loaded(self) -> Sequence[LoadedModel]:
        """The models in memory, in the order in which they were loaded."""
        return tuple(self._loaded.values())

    def counts(self) -> Counts:
        """Returns the numbers of running and waiting requests of all models together."""
        schedulers = [each.model.thread.scheduler for each in self._loaded.values()]
        waiting = len(self._waiters) + sum(each.waiting for each in schedulers)
        return Counts(sum(each.active for each in schedulers), waiting)

    @property
    def leases(self) -> int:
        """The number of leases in use, of all models together."""
        return sum(each.leases for each in self._loaded.values())

    def find(self, source: ModelSource) -> LoadedModel | None:
        """Returns the model with this source that is in memory; None: it is not in memory."""
        return self._loaded.get(source.key)

    def recovering(self, source: ModelSource) -> bool:
        """Returns whether a model's GPU failed, and it is about to be loaded again."""
        return source.key in self._recovering or self._has_failed(source)

    def unrecovered(self, source: ModelSource) -> Exception | None:
        """Returns the error with which loading a model again failed after its GPU had failed; None: there is none."""
        return self._unrecovered.get(source.key)

    async def lease(self, source: ModelSource, keep_s: float | None = None) -> Lease:
        """Returns a lease of a model, once it is in memory: it is loaded if necessary, and stays until the lease is
        released.

        Args:
            keep_s: the seconds for which the model stays in memory afterwards; None: as before.
        Raises:
            QueueFull: too many requests wait for models. Busy: the server shuts down.
            Refusal: the model cannot be loaded.
        """
        loaded = self._usable(source)
        if loaded is not None and not self._held_up and not self._stopping:
            return _lease(loaded, keep_s)
        require_room(len(self._waiters), self.limits.waiting)
        return await self._wait_for(source, keep_s)

    async def _wait_for(self, source: ModelSource, keep_s: float | None) -> Lease:
        """Returns a lease of a model, however many wait already; raises as `lease`."""
        if self._stopping:
            raise shutting_down()
        waiter = _Waiter(source, keep_s, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._changed.set()
        try:
            return await waiter.lease
        except asyncio.CancelledError:
            # It may have come at the very moment at which the client left.
            if (
                waiter.lease.done()
                and not waiter.lease.cancelled()
                and not waiter.lease.exception()
            ):
                waiter.lease.result().release()
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
            self._changed.set()

    def drop(self, source: ModelSource) -> None:
        """Has a model unloaded as soon as no request uses it; does nothing if it is not in memory."""
        if source.key in self._kept_s:
            self._kept_s[source.key] = 0.0
        if (loaded := self._loaded.get(source.key)) is not None:
            loaded.keep_s = 0.0
            self._changed.set()

    def stop(self) -> None:
        """Cancels all requests that wait for a model and the current load; models in memory keep answering."""
        self._stopping = True
        self._changed.set()
        for waiter in self._waiters:
            if not waiter.lease.done():
                waiter.lease.set_exception(shutting_down())

    async def close(self) -> None:
        """Unloads all models; answers in progress are cancelled."""
        self.stop()
        await asyncio.gather(self._worker, *self._recovering.values())
        try:
            for loaded in self.loaded:
                await self._close(loaded)
        finally:
            self._thread.shutdown(wait=False)

    # --- the task that loads and closes ------------------------------------------------------------

    async def _run(self) -> None:
        """Loads the models that requests wait for and closes those that are no longer used, until `stop`."""
        while not self._stopping:
            self._changed.clear()
            if not (
                await self._close_failed() or await self._serve_next() or await self._close_due()
            ):
                await self._wait()

    async def _wait(self) -> None:
        """Waits until something has changed, or a model may be closed."""
        left = min((each.due_s for each in self._idle()), default=FOREVER) - time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if left == FOREVER else max(0.0, left)):
                await self._changed.wait()

    def _idle(self) -> list[LoadedModel]:
        """Returns the models that can answer and that nobody uses."""
        return [each for each in self._loaded.values() if each.is_idle]

    async def _serve_next(self) -> bool:
        """Serves who waits longest, and everybody else who can be; returns whether anything was done."""
        waiting = (each for each in self._waiters if not each.lease.done())
        # Those of a model that failed, and that somebody still uses, keep nobody else waiting.
        waiter = next((each for each in waiting if not self._has_failed(each.source)), None)
        if waiter is None:
            self._held_up = ""
            return False
        if waiter.source.key in self._loaded:
            self._held_up = ""
            self._grant_leases()
            return True
        try:
            return await self._bring(waiter.source)
        except Exception as error:
            self._fail(waiter.source, error)
        if not self._stopping:
            await self._beside(give_back_memory)  # what had been loaded of it
        return True

    async def _bring(self, source: ModelSource) -> bool:
        """Loads a model, or closes another one that is in its way; returns whether it did.

        Raises:
            KtError: it cannot be loaded.
        """
        if self._held_up == source.key and not self._idle():
            return False  # nothing has changed for it
        fit = await self._beside(partial(source.fit, self._held()))
        fit.require_alone(source.name)
        if fit.fits or not self._loaded:
            self._held_up = ""
            self._grant_leases()
            await self._load(source, fit)
            return True
        idle = self._idle()
        self._held_up = "" if idle else source.key
        if idle:
            await self._close(min(idle, key=lambda each: each.used_s))
        return bool(idle)

    async def _load(self, source: ModelSource, fit: MemoryFit) -> None:
        facts = await self._beside(source.facts)
        tokenizer = await self._beside(source.read_tokenizer)
        texts = await self._jobs.result(lambda: source.read_text_model(tokenizer))
        opened = await self._beside(lambda: source.open(texts, fit, lambda: self._stopping))
        model = ServedModel(opened.backend, self.limits, opened.read_adapter)
        self._has_loaded = True
        self._unrecovered.pop(source.key, None)
        keep_s = self._kept_s.pop(source.key, source.keep_s)
        self._loaded[source.key] = LoadedModel(
            source, model, opened, fit, facts, keep_s, self._changed
        )
        self._grant_leases()

    async def _close(self, loaded: LoadedModel) -> None:
        """Takes a model out of memory."""
        del self._loaded[loaded.source.key]
        self._held_up = ""  # there is more room
        model, opened = loaded.model, loaded.opened
        failed = loaded.failure is not None
        for close in (model.close, opened.close):
            try:
                await self._beside(close)
            except Exception as error:  # the model has to go all the same
                if not (failed and isinstance(error, DeviceError)):  # which was said
                    said = error or type(error).__name__
                    self._listener.warn(f"{model.name} was closed with an error: {said}")
        opened.forget()
        model.forget()
        if not self._stopping:
            await self._beside(give_back_memory)

    async def _close_due(self) -> bool:
        """Closes the models whose time is over; returns whether there were any."""
        now = time.monotonic()
        due = [each for each in self._idle() if each.due_s <= now]
        for each in due:
            if each.is_idle:
                self._listener.note(f"{each.model.name} was unloaded because it was idle")
                await self._close(each)
        return bool(due)

    async def _close_failed(self) -> bool:
        """Closes the models whose GPU failed, once nobody uses them; returns whether there were any."""
        failed = [each for each in self.loaded if each.failure is not None and not each.leases]
        for each in failed:
            await self._recover(each)
        return bool(failed)

    async def _recover(self, loaded: LoadedModel) -> None:
        """Closes a model whose GPU failed, and has it loaded again where that can be."""
        source, error = loaded.source, loaded.failure
        assert error is not None
        where = source.after_failure(error)
        if where:
            self._listener.warn(f"{error}: {source.name} continues {where}")
        else:
            self._unrecovered[source.key] = error
            self.stop()
            self._lost(error)
        if where and loaded.keep_s and not self._stopping:
            self._kept_s[source.key] = loaded.keep_s
            self._recovering[source.key] = asyncio.create_task(self._again(source))
        await self._close(loaded)

    async def _again(self, source: ModelSource) -> None:
        """Loads a model again, before anybody asks for it."""
        try:
            (await self._wait_for(source, None)).release()
        except Exception as error:  # everybody who asks for the model is told, too
            self._unrecovered[source.key] = error
        finally:
            self._kept_s.pop(source.key, None)
            del self._recovering[source.key]

    def _has_failed(self, source: ModelSource) -> bool:
        """Returns whether a model in memory answers nothing any more."""
        return source.key in self._loaded and self._usable(source) is None

    def _usable(self, source: ModelSource) -> LoadedModel | None:
        """Returns a model if it is in memory and its GPU has not failed."""
        loaded = self._loaded.get(source.key)
        return None if loaded is None or loaded.failure is not None else loaded

    def _grant_leases(self) -> None:
        """Gives their leases to all whose model is in memory."""
        for waiter in self._waiters:
            loaded = self._usable(waiter.source)
            if loaded is not None and not waiter.lease.done():
                waiter.lease.set_result(_lease(loaded, waiter.keep_s))

    def _fail(self, source: ModelSource, error: Exception) -> None:
        """Tells all who wait for a model that it cannot be loaded."""
        refusal = Refusal.of(error)
        if refusal.status != 503:  # the request is not to blame, and another model may be asked
            refusal = replace(refusal, status=503, code="load_failed")
        if self._has_loaded:
            self._listener.warn(f"{source.name} cannot be loaded: {error or type(error).__name__}")
        else:
            self.failure = error
        for waiter in self._waiters:
            if waiter.source.key == source.key and not waiter.lease.done():
                waiter.lease.set_exception(replace(refusal))

    def _held(self) -> HeldMemory:
        taken = sum(each.fit.taken_bytes for each in self._loaded.values())
        grown = max(0, _resident_bytes() - self._empty_bytes)
        return HeldMemory(
            taken, max(0, taken - grown), any(each.fit.device for each in self._loaded.values())
        )

    async def _beside(self, work: Callable[[], T]) -> T:
        """Runs a function on the thread for models and returns its value."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _lease(loaded: LoadedModel, keep_s: float | None) -> Lease:
    if keep_s is not None:
        loaded.keep_s = keep_s
    return Lease(loaded)


def _resident_bytes() -> int:
    return resident_bytes(SYSTEM_ROOT) or 0
