"""Runs a server: its event loop and its engine on threads of their own, prompts and signals on the main thread."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import uvicorn

from ktcli.assembly.listener import SILENT, Listener
from ktcli.chat.speaker import Speaker
from ktcli.engine.scheduler import Limits
from ktcli.server.app import application
from ktcli.server.house import House, Rules
from ktcli.server.jobs import Jobs
from ktcli.server.listening import IDLE_S, Connection
from ktcli.server.model import ServedModel
from ktcli.server.residency import Residency

PATIENCE_S = 10.0  # that answers may go on once the server is told to stop


@dataclass(frozen=True, slots=True)
class Service:
    """What is served, and how.

    Attributes:
        sockets: where it listens.
        listener: hears what goes wrong.
        log: called after each request with what is said of it.
        ready: called on the loop's thread when requests are answered.
    """

    speaker: Speaker
    sockets: Sequence[socket.socket]
    rules: Rules = field(default_factory=Rules)
    limits: Limits = field(default_factory=Limits)
    listener: Listener = SILENT
    log: Callable[[dict[str, Any]], None] = lambda entry: None
    ready: Callable[[], None] = lambda: None


class Serving:
    """A server that runs until it is told to stop.

    Attributes:
        house: what its handlers share; None: it has not begun.
    """

    def __init__(self, service: Service) -> None:
        self.house: House | None = None
        self._service = service
        self._jobs = Jobs()
        self._server: uvicorn.Server | None = None
        self._stopping = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Serves until `stop`, or a signal; on the main thread."""
        thread = threading.Thread(target=self._in_loop, name="kt-http", daemon=True)
        with self._signals():
            thread.start()
            self._jobs.run()
        thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Lets answers finish within `PATIENCE_S`, and ends; the second call cancels them."""
        server = self._server
        if server is not None:
            server.force_exit = self._stopping
            server.should_exit = True
        self._stopping = True

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            self.stop()

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _in_loop(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._jobs.stop()

    async def _serve(self) -> None:
        service = self._service
        model = ServedModel.start(service.speaker, service.limits)
        try:
            residency = Residency(model)
            self.house = House(residency, self._jobs, service.rules, service.listener, service.log)
            config = uvicorn.Config(
                application(self.house),
                http=Connection,
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(IDLE_S),
                timeout_graceful_shutdown=int(PATIENCE_S),
            )
            self._server = _Server(config, service.ready)
            if self._stopping:  # a signal came before
                return
            await self._server.serve(list(service.sockets))
        finally:
            await asyncio.get_running_loop().run_in_executor(None, model.thread.close)


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it has begun."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, *_: Any) -> None:
        """Leaves signals to whoever runs the main thread."""
