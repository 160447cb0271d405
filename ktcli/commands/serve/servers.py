"""`kt ps` and `kt stop`: list and stop the running servers and routers of this library."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec

from ktcli.commands.cli.declarations import argument, option
from ktcli.errors import NotFound, UsageError, gib
from ktcli.output import out
from ktcli.server.process.discovery import FoundServer, running_servers
from ktcli.server.process.discovery import stop as end
from ktcli.server.process.draintime import DRAIN_MOST_S


def ps() -> None:
    """List the running servers of this library.

    Further models that a server has loaded are listed on lines of their own. Routers (kt route) are
    listed, too.

    Examples:

      kt ps
      kt ps --json
    """
    found = running_servers()
    out.result([_document(each) for each in found], lambda: _table(found))
    if not found:
        out.note("no server is running; start one with: kt serve NAME")


def stop(
    name: Annotated[
        str | None, argument("NAME", "Model or port of the server. Default: the only one running.")
    ] = None,
    every: Annotated[bool, option("--all", "Stop every server of this library.")] = False,
    drain: Annotated[
        float | None,
        option(
            "--drain SECONDS",
            "How long answers may take to finish. Default: as the server was started, usually 10.",
            min=0,
            max=DRAIN_MOST_S,
        ),
    ] = None,
) -> None:
    """Stop servers of this library.

    Answers in progress have ten seconds to finish, or as many as kt serve --drain said; new
    requests are refused meanwhile. The command returns once the server has stopped and its memory
    is free.

    Examples:

      kt stop
      kt stop qwen3-30b-a3b
      kt stop --all
      kt stop --drain 120
    """
    if name is not None and every:
        raise UsageError("NAME and --all cannot be used together")
    chosen = running_servers() if every else [_only(name, running_servers())]
    for server in chosen:
        end(server, drain)
        out.note(f"stopped {server.name} (port {server.socket.stem})")
    out.result({"stopped": [_document(each) for each in chosen]}, "")


def _only(name: str | None, running: list[FoundServer]) -> FoundServer:
    """The server that is meant.

    Raises:
        NotFound: there is none. UsageError: there are several.
    """
    meant = [each for each in running if name is None or each.is_meant_by(name)]
    if not meant:
        what = (
            "no server is running" if name is None else f"no running server matches {name[:200]!r}"
        )
        raise NotFound(what, hint="kt ps lists the running servers")
    if len(meant) > 1:
        ports = ", ".join(each.socket.stem for each in meant)
        raise UsageError(
            f"Which one? Servers run on ports {ports}",
            hint=f"kt stop {meant[0].socket.stem} stops the first one; kt stop --all stops all of them",
        )
    return meant[0]


def _document(server: FoundServer) -> dict[str, Any]:
    said = server.status
    return {
        "model": said.model if said else None,
        "aliases": said.aliases if said else [],
        "address": said.address if said else None,
        "socket": str(server.socket),
        "pid": server.pid,
        "memory_bytes": server.memory_bytes,
        "context": said.context if said else None,
        "running": said.running if said else None,
        "waiting": said.waiting if said else None,
        "since": said.since if said else None,
        "loading": said.loading if said else None,
        "servers": said.servers if said else [],
        "engine": said.engine if said else "",
        "models": msgspec.to_builtins(said.models) if said else [],
    }


def _table(running: list[FoundServer]) -> str:
    if not running:
        return ""
    head = ("MODEL", "ADDRESS", "PROCESS", "MEMORY", "SINCE", "RUNNING", "WAITING")
    rows = [row for each in running for row in (_row(each), *_more(each))]
    return out.table(rows, head, right=(2, 3, 5, 6))


def _row(server: FoundServer) -> tuple[str, ...]:
    memory = "?" if server.memory_bytes is None else gib(server.memory_bytes)
    if (said := server.status) is None:
        return ("(loading)", f"port {server.socket.stem}", str(server.pid), memory, "", "", "")
    here = any(each.name == said.model for each in said.models)
    if said.servers:
        routed = f"{said.model} (router of {len(said.servers)})"
        since = _minute(said.since)
        return (routed, said.address, str(server.pid), memory, since, "", "")
    if said.engine and here:
        memory = gib(said.models[0].memory_bytes)
    beside = f" ({said.engine})" if said.engine else ""
    state = beside if here else " (loading)" if said.loading else " (not in memory)"
    counts = (str(said.running), str(said.waiting))
    name = f"{said.model}{state}"
    return (name, said.address, str(server.pid), memory, _minute(said.since), *counts)


def _more(server: FoundServer) -> list[tuple[str, ...]]:
    """The rows of the further models that a server has in memory, with what they take of its memory."""
    said = server.status
    return [
        (
            f"+ {each.name}",
            "",
            "",
            gib(each.memory_bytes),
            _minute(each.since),
            str(each.running),
            str(each.waiting),
        )
        for each in (said.models if said else ())
        if said and each.name != said.model
    ]


def _minute(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
