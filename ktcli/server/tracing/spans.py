"""Makes the spans of a request once it has been answered: of the HTTP request, and below it of the model's work, with
counts and times, no text.

Names and attributes are those of OpenTelemetry's semantic conventions for HTTP servers and generative AI. A request
that came with a `traceparent` continues that trace. Nothing is made while a model computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from ktcli import __version__
from ktcli.dialogue.answer import Ended
from ktcli.engine.request import Finish
from ktcli.records import dataclass

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    Attributes = dict[str, str | int | float | list[str]]

INFERENCE = "kt.inference"  # the key of a scope under which a handler leaves its Inference

_FINISHES = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.CONTEXT: "length",
    Finish.CANCELLED: "cancelled",
    Finish.FAILED: "error",
}


@dataclass(frozen=True, slots=True)
class Inference:
    """The facts of a model's work for one request, for its trace.

    Attributes:
        model: its name as served.
        id: of the answers; empty: embeddings have none.
        began_s, first_s, ended_s: when it began, the first token came (None: none did) and it ended, `time.monotonic`.
        prompt_tokens, cached_tokens, tokens: of all prompts, those of them that were in the cache, and of all answers.
        finishes: why each answer ended, in OpenAI's words, or "cancelled" or "error".
    """

    model: str
    id: str
    began_s: float
    first_s: float | None
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    finishes: Sequence[str] = ()


def finish_of(ended: Ended) -> str:
    """Returns the reason why an answer ended: "stop", "tool_calls", "length", "cancelled" or "error"."""
    whole = ended.calls and ended.finish is Finish.STOP
    return "tool_calls" if whole else _FINISHES[ended.finish]


# What programs ask again and again, to see whether the server is there.
_UNTRACED = frozenset({"/health", "/metrics", "/server", "/engine"})
_METHODS = frozenset("GET HEAD POST PUT DELETE CONNECT OPTIONS TRACE PATCH".split())
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}  # of all other paths "chat"
_TEXT = 200  # characters of a client's header

Scope = MutableMapping[str, Any]
Trace = Callable[[Scope, float], None]


def trace_of(provider: TracerProvider) -> Trace:
    """Returns a function that records an ended request as OpenTelemetry spans, unless its path is one that programs
    poll (`/health`, `/metrics`, `/server`, `/engine`). It takes the request's ASGI scope, as `Guard` leaves it, and the
    time at which the request began (`time.monotonic`)."""
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

    tracer: Any = provider.get_tracer("ktcli", __version__)

    def trace(scope: Scope, began_s: float) -> None:
        if scope["path"] in _UNTRACED:
            return
        about, inference = http_attributes(scope), scope.get(INFERENCE)
        parent, kind = extract(Headers(scope=scope)), SpanKind.SERVER
        wall_ns = _wall_clock()
        span = tracer.start_span(_name(about), parent, kind, about, start_time=wall_ns(began_s))
        ends = [(span, about, time.monotonic())]
        if inference is not None:
            said = inference_attributes(inference, scope["path"])
            name = f"{said['gen_ai.operation.name']} {inference.model}"
            inside, kind, begins = set_span_in_context(span), SpanKind.INTERNAL, inference.began_s
            below = tracer.start_span(name, inside, kind, said, start_time=wall_ns(begins))
            ends.insert(0, (below, said, inference.ended_s))
        for each, attributes, end_s in ends:
            if "error.type" in attributes:
                each.set_status(Status(StatusCode.ERROR))
            each.end(wall_ns(end_s))

    return trace


def _wall_clock() -> Callable[[float], int]:
    """Returns a function that returns the nanoseconds since 1970 of a time of `time.monotonic`: of one look at both
    clocks, between whose readings others may run, so that times keep their order.
    """
    between_ns = time.time_ns() - time.monotonic_ns()
    return lambda seconds: between_ns + int(seconds * 1e9)


def _name(about: Attributes) -> str:
    """Returns the name of the span of a request: its method and route, neither of which a client can make up."""
    method = str(about["http.request.method"]).replace("_OTHER", "HTTP")
    return f"{method} {about['http.route']}" if "http.route" in about else method


def http_attributes(scope: Scope) -> Attributes:
    """Returns the attributes of a span for an HTTP request and its response, by OpenTelemetry's names.

    Args:
        scope: the ASGI scope of the request, as `Guard` leaves it.
    """
    headers, noted = Headers(scope=scope), scope["kt.noted"]
    method, status = scope["method"], noted["status"]
    found: Attributes = {
        "http.request.method": method if method in _METHODS else "_OTHER",
        "http.response.status_code": status,
        "url.path": scope["path"][:_TEXT],
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
        "client.address": (scope.get("client") or ("local",))[0],
    }
    if (route := getattr(scope.get("route"), "path", None)) is not None:
        found["http.route"] = route
    host, port = scope.get("server") or ("", None)
    if port is not None:
        found |= {"server.address": host, "server.port": port}
    if "user-agent" in headers:
        found["user_agent.original"] = headers["user-agent"][:_TEXT]
    if "request_id" in noted:
        found["http.response.header.x-request-id"] = [noted["request_id"]]
    if status >= 500:
        found["error.type"] = str(status)
    return found


def inference_attributes(inference: Inference, path: str) -> Attributes:
    """Returns the attributes of a span for a model's work (model, token counts, finish reasons), by OpenTelemetry's
    names.

    Args:
        path: of the request.
    """
    found: Attributes = {
        "gen_ai.operation.name": _OPERATIONS.get(path, "chat"),
        "gen_ai.provider.name": "kt",
        "gen_ai.request.model": inference.model,
        "gen_ai.response.model": inference.model,
        "gen_ai.usage.input_tokens": inference.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": inference.cached_tokens,
        "gen_ai.usage.output_tokens": inference.tokens,
    }
    if inference.id:
        found["gen_ai.response.id"] = inference.id
    if inference.finishes:
        found["gen_ai.response.finish_reasons"] = list(inference.finishes)
    if inference.first_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = inference.first_s - inference.began_s
    if "error" in inference.finishes:
        found["error.type"] = "_OTHER"
    return found
