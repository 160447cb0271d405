"""What `kt route` shows: the plan of a router, what it says once it is ready, and what it has done."""

from __future__ import annotations

import shlex
import time
from typing import Any

import msgspec

from ktcli.errors import counted
from ktcli.output import out, safe
from ktcli.server.router.plan import HIDDEN, ServerFacts, arguments
from ktcli.server.router.status import RoutedServer, RouterStatus
from ktcli.server.router.supervision import RouterSettings


def command_of(settings: RouterSettings) -> list[str]:
    """Returns the words of the command line that starts a router, its keys hidden."""
    urls = [each.url for each in settings.servers]
    words = arguments(urls, settings.plan, settings.place, settings.keys.hidden())
    return [settings.engine.name, *words]


def settings_document(settings: RouterSettings) -> dict[str, Any]:
    """Returns the settings of a router as the document for --json: model, address, command line, routing thresholds,
    and servers.
    """
    plan, place = settings.plan, settings.place
    return {
        "model": settings.model,
        "address": place.url,
        "metrics": f"http://127.0.0.1:{place.metrics_port}/metrics",
        "engine": settings.engine.label,
        "command": command_of(settings),
        "threshold": plan.threshold,
        "threshold_from": plan.why,
        "spill": plan.spill,
        "timeout_s": plan.timeout_s,
        "servers": [_server_document(each) for each in settings.servers],
        "absent": [each.url for each in settings.absent],
    }


def _server_document(server: ServerFacts) -> dict[str, Any]:
    return {
        "url": server.url,
        "model": server.model,
        "context": server.context,
        "streams": server.streams,
        "program": server.program or None,
        "token_s": server.token_s,
        "common_share": server.common,
        "cached_share": server.cached,
    }


def settings_words(settings: RouterSettings) -> str:
    """Returns the settings of a router as text: a table of its servers, the routing thresholds, and
    the command line.
    """
    head = ("SERVER", "MODEL", "CONTEXT", "STREAMS", "PROGRAM")
    rows = [
        (each.url, each.model, _count(each.context), _count(each.streams), each.program)
        for each in settings.servers
    ]
    table = out.table(rows, head, right=(2, 3))
    lines = "\n".join(f"{name:<10} {words}" for name, words in _rows(settings))
    command = " ".join(
        shlex.quote(word) if word != HIDDEN else word for word in command_of(settings)
    )
    return f"{table}\n\n{lines}\n\n{command}"


def first_lines(settings: RouterSettings) -> list[str]:
    """Returns the lines printed when a router is ready: its API address, servers, routing and counters."""
    place = settings.place
    rows = {
        "API": f"OpenAI {place.url}/v1",
        "servers": ", ".join(each.url for each in settings.servers),
        **dict(_rows(settings)),
        "counters": f"http://127.0.0.1:{place.metrics_port}/metrics (kt route status shows them)",
    }
    return [f"  {name:<10} {safe(words)}" for name, words in rows.items()]


def _rows(settings: RouterSettings) -> list[tuple[str, str]]:
    """The rows about the numbers of a router: each with where it comes from."""
    plan = settings.plan
    spill = f"{counted(plan.spill, 'request')} above the mean, a quarter of a server's streams"
    return [
        ("threshold", f"{plan.threshold:g} of a prompt: {plan.why}"),
        ("spill", spill),
        ("time-out", f"{plan.timeout_s:,} s for a request"),
    ]


def status_document(found: RouterStatus) -> dict[str, Any]:
    """Returns the status of a router as the document for --json, with the fields of `RouterStatus`: its settings,
    servers, and counts of requests.
    """
    document: dict[str, Any] = msgspec.to_builtins(found)
    return document


def status_words(found: RouterStatus) -> str:
    """Returns the status of a router as text: a table of its servers, and the counts of requests and of routing
    decisions.
    """
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.since))
    again = f", restarted {counted(found.restarts, 'time')}" if found.restarts else ""
    first = f"{found.model} at {found.address} since {since} ({found.version}){again}"
    head = ("SERVER", "STATE", "REQUESTS", "SHARE", "RUNNING", "CACHED", "LEFT OUT")
    table = out.table([_server_row(each) for each in found.servers], head, right=(2, 3, 4, 5, 6))
    rows = {
        "requests": f"{found.requests:,}, {found.failed:,} failed, {found.retries:,} retried elsewhere",
        "routing": f"{found.matched:,} to where their prompt was, {found.spilled:,} spilled to another server",
        "threshold": _threshold_words(found),
    }
    if found.mean_match is not None:
        rows["match"] = f"{found.mean_match:.0%} of a prompt on average"
    lines = "\n".join(f"{name:<10} {words}" for name, words in rows.items())
    return f"{safe(first)}\n\n{table}\n\n{lines}"


def _threshold_words(found: RouterStatus) -> str:
    said = f"{found.threshold:g}"
    if abs(found.suggested - found.threshold) < 0.05:
        return said
    return f"{said}; by what the servers have seen meanwhile {found.suggested:g} is better: start the router again"


def _server_row(server: RoutedServer) -> tuple[str, ...]:
    cached = "?" if server.cached is None else f"{server.cached:.0%}"
    share = f"{server.share:.0%}"
    counts = (f"{server.requests:,}", share, str(server.running), cached, f"{server.failures:,}")
    return (server.url, server.state, *counts)


def _count(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"
