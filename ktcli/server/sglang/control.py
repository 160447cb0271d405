"""What `kt ps` and `kt stop` are told of an engine, through its Unix socket."""

from __future__ import annotations

import socket
from typing import Any

from ktcli.errors import UsageError
from ktcli.server.process.controlsocket import ControlAnswers
from ktcli.server.process.discovery import LoadedStatus, Status
from ktcli.server.process.draintime import DRAIN_MOST_S
from ktcli.server.sglang.supervision import EngineSupervisor

_RUNNING, _WAITING = "sglang:num_running_reqs", "sglang:num_queue_reqs"


def answer_at(listening: socket.socket, supervisor: EngineSupervisor) -> None:
    """Starts to answer requests for an engine's status at a socket, until the socket is closed."""
    answers = {
        ("GET", "/server"): lambda _: engine_status(supervisor),
        ("POST", "/server/drain"): lambda body: _set_drain(supervisor, body),
    }
    ControlAnswers(listening, answers).start()


def engine_status(supervisor: EngineSupervisor) -> Status:
    """Returns the status of an engine for `kt ps`."""
    settings, process = supervisor.settings, supervisor.process
    counters = process.counters() if process is not None and supervisor.is_ready else None
    running, waiting = (
        int(counters.total(name) or 0) if counters else 0 for name in (_RUNNING, _WAITING)
    )
    memory = process.memory_bytes() if process is not None else 0
    loaded = LoadedStatus(
        settings.name, settings.context, memory, running, waiting, supervisor.since
    )
    return Status(
        settings.name,
        address=settings.address,
        context=settings.context if supervisor.is_ready else 0,
        running=running,
        waiting=waiting,
        since=supervisor.since,
        models=[loaded] if supervisor.is_ready else [],
        loading=not supervisor.is_ready,
        drain_s=int(supervisor.drain_s),
        engine=settings.engine.label,
    )


def _set_drain(supervisor: EngineSupervisor, body: Any) -> dict[str, float]:
    """Sets the time that answers may take to finish. Raises: UsageError: it is none."""
    seconds = body.get("seconds") if isinstance(body, dict) else None
    if not isinstance(seconds, int | float) or not 0 <= seconds <= DRAIN_MOST_S:
        raise UsageError(f"seconds must be a number from 0 to {DRAIN_MOST_S}")
    supervisor.drain_s = float(seconds)
    return {"drain_s": supervisor.drain_s}
