"""The application: which path leads to which handler, and how errors look in each API."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ktcli.errors import KtError
from ktcli.server.attached import api as engineapi
from ktcli.server.attached.wire import PATH
from ktcli.server.http import own
from ktcli.server.http.answering import App
from ktcli.server.http.anthropic.messages import STREAM as ANTHROPIC
from ktcli.server.http.anthropic.messages import count_tokens, messages
from ktcli.server.http.anthropic.messages import error_of as anthropic_error
from ktcli.server.http.guard import Guard
from ktcli.server.http.ollama import library as ollama_library
from ktcli.server.http.ollama import models as ollama
from ktcli.server.http.ollama.chat import STREAM as OLLAMA
from ktcli.server.http.ollama.chat import chat, generate
from ktcli.server.http.openai.chat import chat_completions
from ktcli.server.http.openai.envelope import STREAM as OPENAI
from ktcli.server.http.openai.envelope import encode, error_of
from ktcli.server.http.openai.models import model, models
from ktcli.server.http.openai.responses import STREAM as RESPONSES
from ktcli.server.http.openai.responses import input_tokens, kept, responses
from ktcli.server.http.openai.text import completions
from ktcli.server.http.openapi import openapi
from ktcli.server.http.page import files as page
from ktcli.server.http.refusals import Refusal
from ktcli.server.http.state import ServerState, state_of
from ktcli.server.http.waiting import Handler, StreamStyle, patient

Endpoint = Callable[[Request], Awaitable[Response]]


def application(state: ServerState) -> App:
    """The ASGI application of a server."""
    routes = [
        Route("/health", own.health),
        Route("/server", own.server),
        Route(PATH, engineapi.facts, include_in_schema=False),
        Route(f"{PATH}/load", _patient(engineapi.load), methods=["POST"], include_in_schema=False),
        Route(
            f"{PATH}/generate",
            _patient(engineapi.generate),
            methods=["POST"],
            include_in_schema=False,
        ),
        Route("/metrics", own.metrics),
        Route("/tokenize", _patient(own.tokenize), methods=["POST"]),
        Route("/detokenize", _patient(own.detokenize), methods=["POST"]),
        Route("/cancel/{id}", own.cancel, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", _patient(chat_completions, OPENAI), methods=["POST"]),
        Route("/v1/completions", _patient(completions, OPENAI), methods=["POST"]),
        Route("/v1/responses", _patient(responses, RESPONSES), methods=["POST"]),
        Route("/v1/responses/input_tokens", _patient(input_tokens), methods=["POST"]),
        Route("/", page.root),
        Route("/page/{name}", page.part, include_in_schema=False),
        Route("/api/version", ollama.version),
        Route("/api/tags", ollama.tags),
        Route("/api/ps", ollama.running),
        Route("/api/show", ollama.show, methods=["POST"]),
        Route("/api/chat", _patient(chat, OLLAMA), methods=["POST"]),
        Route("/api/generate", _patient(generate, OLLAMA), methods=["POST"]),
        Route("/api/pull", _patient(ollama_library.pull), methods=["POST"]),
        Route("/api/delete", ollama_library.delete, methods=["DELETE"]),
        Route("/api/copy", ollama_library.copy, methods=["POST"]),
        Route("/api/embed", ollama_library.embed, methods=["POST"], include_in_schema=False),
        Route("/api/embeddings", ollama_library.embed, methods=["POST"], include_in_schema=False),
        Route("/v1/messages", _patient(messages, ANTHROPIC), methods=["POST"]),
        Route("/v1/messages/count_tokens", _patient(count_tokens), methods=["POST"]),
    ]
    routes.append(Route("/openapi.json", openapi(routes, has_key=bool(state.rules.key))))
    routes += [
        _others("/v1/responses/{other:path}", ["GET", "POST", "DELETE"], kept, routes),
        _others("/api/{other:path}", ["POST", "DELETE"], ollama_library.unsupported, routes),
    ]
    kinds = (HTTPException, Refusal, KtError, Exception)
    handlers = dict.fromkeys(kinds, _failed)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.server = state
    return Guard(app, state.rules, state.drain, refused, state.log)


def _others(path: str, methods: list[str], handler: Endpoint, known: Sequence[Route]) -> Route:
    """The route of paths that have none of their own; where one has, another method is refused as everywhere."""
    of = {each.path: sorted(each.methods or ()) for each in known}

    async def handle(request: Request) -> Response:
        if (there := of.get(request.url.path)) is not None:
            raise HTTPException(405, headers={"Allow": ", ".join(there)})
        return await handler(request)

    return Route(path, handle, methods=methods, include_in_schema=False)


def _patient(handler: Handler, style: StreamStyle | None = None) -> Handler:
    """A handler that waits for a model with its client; see `patient`."""
    return patient(handler, style, _refusal)


def refused(path: str, refusal: Refusal) -> tuple[bytes, dict[str, str]]:
    """The body and headers of a refusal in the API that a path belongs to."""
    if path.startswith("/api/"):
        said: dict[str, Any] = {"error": refusal.message}
    elif path.startswith("/v1/messages"):
        said = anthropic_error(refusal)
    else:
        said = error_of(refusal)
    return encode(said), {**refusal.headers, "content-type": "application/json"}


def _of_mistake(error: Exception) -> str:
    """A mistake of kt's own, for whoever runs the server: where it was made, not what the client said."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{frame.name} ({frame.lineno})" for frame in reversed(frames[-4:]))
    return f"kt made a mistake ({type(error).__name__} in {where}); the server goes on"


def _refusal(request: Request, error: Exception) -> Refusal:
    """What a client is told of an error; mistakes of kt's own are told to whoever runs the server, too."""
    if isinstance(error, HTTPException):
        said = {404: f"there is no {request.url.path[:200]} here", 405: "not this method"}
        return Refusal(error.status_code, said.get(error.status_code, error.detail))
    refusal = Refusal.of(error)
    if refusal.code == "internal_error":
        state_of(request).listener.warn(_of_mistake(error))
    return refusal


async def _failed(request: Request, error: Exception) -> Response:
    refusal = _refusal(request, error)
    body, headers = refused(request.url.path, refusal)
    more = (
        getattr(error, "headers", None) or {}
    )  # which methods there are, where it is not this one
    return Response(body, refusal.status, {**more, **headers})
