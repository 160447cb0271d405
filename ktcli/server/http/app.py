"""Creates the ASGI application: the routes of all APIs, and each one's form of errors."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ktcli.errors import KtError
from ktcli.server.attached import api as engineapi
from ktcli.server.attached.wire import PATH
from ktcli.server.http import own
from ktcli.server.http.answering import App, encode
from ktcli.server.http.anthropic.fields import MessagesBody
from ktcli.server.http.anthropic.messages import STREAM as ANTHROPIC
from ktcli.server.http.anthropic.messages import count_tokens, messages
from ktcli.server.http.anthropic.messages import error_of as anthropic_error
from ktcli.server.http.guard import Guard
from ktcli.server.http.ollama import embed as ollama_embed
from ktcli.server.http.ollama import models as ollama
from ktcli.server.http.ollama.chat import STREAM as OLLAMA
from ktcli.server.http.ollama.chat import chat, generate
from ktcli.server.http.ollama.fields import GenerateBody, OllamaChatBody
from ktcli.server.http.openai import stored
from ktcli.server.http.openai.chat import (
    apply_template,
    chat_completions,
    chat_input_tokens,
    render,
)
from ktcli.server.http.openai.embeddings import EmbeddingsBody, embeddings
from ktcli.server.http.openai.envelope import STREAM as OPENAI
from ktcli.server.http.openai.envelope import error_of
from ktcli.server.http.openai.fields import ChatBody, TextBody
from ktcli.server.http.openai.models import model, models
from ktcli.server.http.openai.response_fields import ResponseBody
from ktcli.server.http.openai.responses import STREAM as RESPONSES
from ktcli.server.http.openai.responses import input_tokens, responses
from ktcli.server.http.openai.text import completions
from ktcli.server.http.openapi import BodyRoute, openapi
from ktcli.server.http.own import loads, server_info
from ktcli.server.http.page import files as page
from ktcli.server.http.refusals import Refusal, refusal_of
from ktcli.server.http.state import ServerState
from ktcli.server.http.waiting import Handler, StreamStyle, waiting

Endpoint = Callable[[Request], Awaitable[Response]]


def application(state: ServerState) -> App:
    """Returns the ASGI application that serves all APIs of a server, with `Guard` before the routes."""
    below = "/v1/responses/{id}"
    routes = [
        *_ROUTES,
        _others(below, ["GET"], stored.response, _ROUTES, in_schema=True),
        _others(below, ["DELETE"], stored.delete, _ROUTES, in_schema=True),
    ]
    routes.append(Route("/openapi.json", openapi(routes, has_key=bool(state.rules.keys))))
    routes += [
        _others("/v1/responses/{other:path}", ["GET", "POST", "DELETE"], stored.others, routes),
        _others("/api/{other:path}", ["GET", "POST", "DELETE"], ollama.unsupported, routes),
    ]
    kinds = (HTTPException, Refusal, KtError, Exception)
    handlers = dict.fromkeys(kinds, _failed)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # `Guard` has taken them off
    app.state.server = state

    def log(entry: dict[str, Any]) -> None:
        state.metrics.asked(entry)
        state.log(entry)

    return Guard(app, state.rules, state.drain, refused, log, state.trace)


def _others(
    path: str,
    methods: list[str],
    handler: Endpoint,
    known: Sequence[Route],
    *,
    in_schema: bool = False,
) -> Route:
    """Returns a route for all paths below a prefix; one that has a route of its own gets 405 for other methods."""
    of = {each.path: sorted(each.methods or ()) for each in known}

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        if (there := of.get(request.url.path)) is not None:
            raise HTTPException(405, headers={"Allow": ", ".join(there)})
        return await handler(request)

    return Route(path, handle, methods=methods, include_in_schema=in_schema)


def refused(path: str, refusal: Refusal) -> tuple[bytes, dict[str, str]]:
    """Returns the JSON body and the headers (by name) of an error response, in the format of the API to which a path
    belongs: Ollama's, Anthropic's or OpenAI's."""
    if path.startswith("/api/"):
        said: dict[str, Any] = {"error": refusal.message}
    elif path.startswith("/v1/messages"):
        said = anthropic_error(refusal)
    else:
        said = error_of(refusal)
    return encode(said), {**refusal.headers, "content-type": "application/json"}


async def _failed(request: Request, error: Exception) -> Response:
    refusal = refusal_of(request, error)
    body, headers = refused(request.url.path, refusal)
    more = getattr(error, "headers", None) or {}  # `Allow`, of a 405
    return Response(body, refusal.status, {**more, **headers})


def _post(
    path: str,
    handler: Handler,
    body: type[msgspec.Struct] | None = None,
    style: StreamStyle | None = None,
    *,
    streams: bool = False,
) -> BodyRoute:
    """Returns the route of a handler that may take its time, see `waiting`."""
    handle = waiting(handler, style)
    return BodyRoute(path, handle, body, streams=streams or style is not None)


# Those with a fixed path; what else there is below a prefix comes after them.
_ROUTES = [
    Route("/health", own.health),
    Route("/server", own.server),
    Route("/version", own.version),
    Route(PATH, engineapi.facts, include_in_schema=False),
    Route(f"{PATH}/load", waiting(engineapi.load), methods=["POST"], include_in_schema=False),
    Route(
        f"{PATH}/generate", waiting(engineapi.generate), methods=["POST"], include_in_schema=False
    ),
    Route("/server/drain", own.drain, methods=["POST"], include_in_schema=False),
    Route("/loads", loads),
    Route("/v1/loads", loads),
    Route("/server_info", server_info),
    Route("/props", own.props),
    Route("/metrics", own.metrics),
    _post("/tokenize", own.tokenize, own.TokenizeBody),
    _post("/detokenize", own.detokenize, own.DetokenizeBody),
    Route("/cancel/{id}", own.cancel, methods=["POST"]),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    _post("/v1/chat/completions", chat_completions, ChatBody, OPENAI),
    _post("/v1/chat/completions/render", render, ChatBody),
    _post("/v1/chat/completions/input_tokens", chat_input_tokens),
    _post("/apply-template", apply_template, ChatBody),
    _post("/v1/completions", completions, TextBody, OPENAI),
    _post("/v1/embeddings", embeddings, EmbeddingsBody),
    _post("/v1/responses", responses, ResponseBody, RESPONSES),
    _post("/v1/responses/input_tokens", input_tokens, ResponseBody),
    Route("/v1/responses/{id}/input_items", stored.input_items),
    Route("/", page.root),
    Route("/page/{name:path}", page.part, include_in_schema=False),
    Route("/api/version", ollama.version),
    Route("/api/tags", ollama.tags),
    Route("/api/ps", ollama.running),
    BodyRoute("/api/show", ollama.show, ollama.ModelAsked),
    _post("/api/chat", chat, OllamaChatBody, OLLAMA),
    _post("/api/generate", generate, GenerateBody, OLLAMA),
    _post("/api/pull", ollama.pull, ollama.PullBody, streams=True),
    BodyRoute("/api/delete", ollama.delete, ollama.DeleteBody, "DELETE"),
    BodyRoute("/api/copy", ollama.copy, ollama.CopyBody),
    _post("/api/embed", ollama_embed.embed, ollama_embed.EmbedBody),
    _post("/api/embeddings", ollama_embed.embedding, ollama_embed.EmbeddingsPromptBody),
    _post("/v1/messages", messages, MessagesBody, ANTHROPIC),
    _post("/v1/messages/count_tokens", count_tokens, MessagesBody),
]
