"""Runs a server: its event loop and its engines on separate threads, prompts and signals on the main thread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

import uvicorn

from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.request import Wanted
from ktcli.engine.scheduler import Limits
from ktcli.errors import DeviceError
from ktcli.records import dataclass
from ktcli.server.http.app import application
from ktcli.server.http.state import Rules, ServerState
from ktcli.server.models.catalogue import Catalogue, ModelIndex
from ktcli.server.models.jobs import Jobs
from ktcli.server.models.libraryeditor import LibraryEditor
from ktcli.server.models.residency import Residency
from ktcli.server.models.source import ModelSource
from ktcli.server.process.drain import cut_off
from ktcli.server.process.endsignals import StartingTerminal, signals_handled
from ktcli.server.process.listening import IDLE_S, Connection
from ktcli.server.process.requestrecorder import RequestRecorder
from ktcli.server.tracing.spans import Trace
from ktcli.text.model import read_text_model
from ktcli.text.tokenizer import load_tokenizer
from ktcli.threadpool import Threads
from ktcli.threads import Daemon

_TICK_S = 1.0
FILE_THREADS = 2  # for what would hold the loop up: the library is read, large bodies are looked at
_GRACE_S = 2  # for connections whose requests are through


@dataclass(frozen=True, slots=True)
class Service:
    """The options of a server: the model, the addresses and the limits.

    Attributes:
        own: the model that is loaded at the start, and answers to names that mean no other.
        sockets: where it listens.
        library: reads which other models can be loaded.
        wanted: how models that clients pull are to be loaded; None: none are pulled.
        limits: of each model.
        listener: receives warnings.
        log: called after each request with its log entry.
        trace: called after each request with its scope, and when it began; None: nobody traces requests.
        ready: called on the loop's thread when the model is loaded.
        recorder: records requests, and is closed at the end; None: nobody asked for it.
        reload: called on the loop's thread at SIGHUP: reads files again; None: SIGHUP ends the process as ever.
    """

    own: ModelSource
    sockets: Sequence[socket.socket]
    rules: Rules = field(default_factory=Rules)
    library: Callable[[], ModelIndex] = ModelIndex
    wanted: Wanted | None = None
    limits: Limits = field(default_factory=Limits)
    listener: Listener = SILENT
    log: Callable[[dict[str, Any]], None] = lambda entry: None
    trace: Trace | None = None
    ready: Callable[[], None] = lambda: None
    reload: Callable[[], None] | None = None
    recorder: RequestRecorder | None = None


class Serving:
    """A server that runs until it is stopped.

    Attributes:
        state: what its handlers share; None: it has not begun.
    """

    def __init__(self, service: Service) -> None:
        self.state: ServerState | None = None
        self._service = service
        self._jobs = Jobs()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._stopping = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs the server until `stop`, or a signal; to be called on the main thread.

        Raises:
            KtError: the model cannot be loaded, or the GPU that was asked for has failed.
        """
        thread = Daemon(self._in_loop, name="kt-http")
        with self._signals():
            thread.start()
            self._jobs.run()
        thread.join()
        if self._service.recorder is not None:
            self._service.recorder.close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ends the server once answers have finished or `Rules.drain_s` is over; the second call ends them at once."""
        server, loop = self._server, self._loop
        if server is not None:
            server.force_exit = self._stopping
            server.should_exit = True
        self._stopping = True
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._wake)

    def _reload(self) -> None:
        """Reads files again; before there is a loop they have just been read."""
        if self._service.reload is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._service.reload)

    def _give_up(self, error: DeviceError) -> None:
        """Ends the server: the GPU failed that was asked for, and only a new process can use it again."""
        if not self._stopping:
            self._error = error
            self.stop()

    def _wake(self) -> None:
        """Wakes everything that waits, so that it sees the shutdown."""
        server, state = self._server, self.state
        if state is not None:
            if server is not None and server.force_exit:
                state.drain.give_up()
            state.drain.begun = True
            state.residency.stop()
        if server is not None:
            server.told.set()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        terminal = StartingTerminal()

        def handle(number: int) -> None:
            if number == signal.SIGHUP and not terminal.is_closed:
                self._reload()
            else:
                self.stop()

        told = [signal.SIGINT, signal.SIGTERM]
        told += [] if self._service.reload is None else [signal.SIGHUP]
        with signals_handled(handle, told):
            yield

    def _in_loop(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._jobs.stop()

    async def _serve(self) -> None:
        service = self._service
        self._loop = asyncio.get_running_loop()
        files = Threads(FILE_THREADS, "kt-files")
        for _ in range(FILE_THREADS):  # all begin now, so that requests leave no threads behind
            files.submit(time.sleep, 0.01)
        self._loop.set_default_executor(files)
        residency = Residency(self._jobs, service.limits, service.listener, self._give_up)
        catalogue = Catalogue(service.own, service.rules.aliases, service.library)
        self.state = ServerState(
            residency,
            catalogue,
            self._jobs,
            service.rules,
            None if service.wanted is None else LibraryEditor(service.wanted, self._check),
            service.listener,
            service.log,
            service.recorder,
            service.trace,
        )
        loading = asyncio.create_task(self._load(residency))
        try:
            config = uvicorn.Config(
                application(self.state),
                http=Connection,
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # any program here could call itself another client
                timeout_keep_alive=int(IDLE_S),
                timeout_graceful_shutdown=_GRACE_S,
            )
            self._server = _Server(config, self._drained)
            if not self._stopping:  # a signal came before
                await self._server.serve(list(service.sockets))
        finally:
            await residency.close()
            await loading

    async def _drained(self) -> None:
        """Waits until the answers have finished; those that take too long end with an error that says why."""
        state = self.state
        assert state is not None
        if (n := state.drain.running) and state.drain.seconds:
            answers = "1 answer has" if n == 1 else f"{n} answers have"
            said = f"{answers} up to {state.drain.seconds:g} s to finish; press Ctrl-C again to stop at once"
            state.listener.note(said)
        if not await state.drain.finished():
            for each in list(state.answering.values()):
                each.fail(cut_off())
            for chat in list(state.attached):
                chat.cancel()
            await state.drain.told()

    def _check(self, name: str, folder: Path) -> None:
        """Reads a model's texts, all but the tokenizer on the main thread, which alone can stop a template.

        Raises:
            KtError: they are damaged.
        """
        tokenizer = load_tokenizer(folder)
        self._jobs.ask(lambda: read_text_model(name, folder, tokenizer=tokenizer)).result()

    async def _load(self, residency: Residency) -> None:
        """Loads the model that the server was started with; if that cannot be, the server ends."""
        service = self._service
        try:
            with await residency.lease(service.own):
                pass
        except Exception as error:
            if not self._stopping:
                self._error = residency.failure or error
                self.stop()
            return
        if self.state is not None:
            self.state.begun = True
        service.ready()


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to whoever runs the main thread.

    Args:
        drained: waits until what is being answered has finished; until then it still listens.
    Attributes:
        told: set when it is to shut down: uvicorn itself polls ten times a second.
    """

    def __init__(self, config: uvicorn.Config, drained: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self.told = asyncio.Event()
        self._drained = drained

    async def main_loop(self) -> None:
        """Waits until the server is to end; updates uvicorn's date header each second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self.told.wait()
        await self._drained()

    def handle_exit(self, *_: Any) -> None:
        """Leaves signals to whoever runs the main thread."""
