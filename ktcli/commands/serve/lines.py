"""The messages of `kt serve`: what it serves, once it is ready, and its log for people: a line for each request, and
what the libraries of a server log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ktcli.errors import gib
from ktcli.native import PAGE_TOKENS
from ktcli.output import out, safe
from ktcli.planner.plan import Plan

if TYPE_CHECKING:
    from ktcli.server.kvevents.address import EventsAddress

# What other commands of kt ask a server through its socket: kt ps, kt stop, and chats that look for their model.
_PROBES = frozenset({"/health", "/server", "/engine"})
# What routers and supervisors ask every second or two, from anywhere.
_POLLED = frozenset({"/health", "/loads", "/v1/loads"})


def first_lines(
    model: str,
    pack: str,
    plan: Plan,
    address: str,
    streams: int,
    ollama: str,
    *,
    embeds: bool = False,
) -> list[str]:
    """Returns the lines printed when a server is ready: its address and APIs, the model, context, memory and predicted
    speed.

    Args:
        pack: the name of the conversion.
        plan: the plan by which the model was loaded.
        address: the server's address: "http://127.0.0.1:11435".
        streams: the number of conversations that are answered at the same time.
        ollama: the address for clients of Ollama.
        embeds: whether the model makes embeddings.
    """
    device = f" and {gib(plan.device.need.total)} of the GPU" if plan.device else ""
    memory = f"{gib(plan.need_bytes)} of {gib(plan.host.available_bytes)}{device}"
    what, rate = ("text", plan.speed.prefill) if embeds else ("conversation", plan.speed.decode)
    each = f", for each of {streams} {what}s at once" if streams > 1 else ""
    speed = f"{plan.rate(rate)} tokens/s" if embeds else plan.speed_words
    rows = {
        "page": address,
        "APIs": f"OpenAI {address}/v1, Anthropic {address}, Ollama {ollama}",
        "model": pack if pack.startswith(model) else f"{model} ({pack})",
        "context": f"{plan.context:,} tokens{each}",
        "memory": memory,
        "speed": f"{speed} predicted for one {what} (kt plan {model} says why)",
    }
    return [f"  {name:<8} {words}" for name, words in rows.items()]


def event_lines(model: str, address: str, events: EventsAddress) -> list[str]:
    """Returns the lines printed about KV events: the options with which vllm-router subscribes to them.

    Args:
        address: the server's: "http://127.0.0.1:11435".
        events: the address where the events are published.
    """
    said = [
        f"--policy kv_aware --kv-event-model {model} --kv-event-block-size {PAGE_TOKENS} --kv-penalty-host 1",
        f"--kv-event-source {address}={events.endpoint}",
        f"--kv-event-replay-source {address}={events.replay.endpoint}",
    ]
    return [f"  events   {events.endpoint}; vllm-router {' '.join(said)}"]


def is_probe(entry: Mapping[str, Any]) -> bool:
    """Returns whether a request is left out of the log, by its log entry: a GET of kt's own commands through the Unix
    socket, or a successful GET of /health, /loads or /v1/loads.
    """
    if entry["method"] != "GET":
        return False
    through_socket = entry["client"] == "local" and entry["path"] in _PROBES
    return through_socket or (entry["status"] == 200 and entry["path"] in _POLLED)


def log_request(entry: dict[str, Any]) -> None:
    """Prints the log line of an HTTP request: time, client, method, path, status, seconds, and tokens in and out."""
    tokens = ""
    if "tokens" in entry:
        cached = f" ({entry['cached_tokens']:,} cached)" if entry["cached_tokens"] else ""
        tokens = f", {entry['prompt_tokens']:,} tokens{cached} in, {entry['tokens']:,} out"
    who = f"{entry['client']} ({entry['key']})" if "key" in entry else entry["client"]
    said = f"{who} {entry['method']} {entry['path']} {entry['status']}"
    said = safe(said)  # a path may hold an end of a line
    out.note(f"{time.strftime('%H:%M:%S')} {said} in {entry['seconds']:.2f} s{tokens}")


class LibraryLog(logging.Handler):
    """Says what the libraries of a server log as everything else is said, without tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a log record of a library as a warning."""
        error = record.exc_info[1] if record.exc_info else None
        more = "" if error is None else f" ({type(error).__name__}: {error})"
        out.warn(safe(f"{record.getMessage()}{more}"))


@contextmanager
def libraries_heard() -> Iterator[None]:
    """Opens a context in which log records of libraries, of level WARNING or above, are printed as warnings."""
    handler, root = LibraryLog(logging.WARNING), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
