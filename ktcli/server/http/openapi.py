"""`/openapi.json`: the paths of a server and the fields that it reads, generated from the routes and structures."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ktcli import __version__
from ktcli.server.http.answering import encode

_COMPONENTS = "#/components/schemas/"
_JSON, _EVENTS, _LINES = "application/json", "text/event-stream", "application/x-ndjson"
_OTHER_TYPES = {"/metrics": ["text/plain"], "/": ["text/html", "text/plain"]}
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    """Returns the schema of an object that has all of these properties."""
    return {"type": "object", "required": [*properties], "properties": properties}


_ERRORS = {
    "Error": _object(
        error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)
    ),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "OllamaError": _object(error=_TEXT),
}


class BodyRoute(Route):
    """A route whose handler reads the body of a request.

    Attributes:
        body: the structure of the body; None: the document does not say.
        streams: whether the handler may send a stream.
    """

    def __init__(
        self,
        path: str,
        handler: Callable[[Request], Awaitable[object]],
        body: type[msgspec.Struct] | None,
        method: str = "POST",
        *,
        streams: bool = False,
    ) -> None:
        super().__init__(path, handler, methods=[method])
        self.body, self.streams = body, streams


def bodies_of(routes: Sequence[Route]) -> list[type[msgspec.Struct]]:
    """Returns the types of the request bodies of those routes that have one, in the order of the routes."""
    return [each.body for each in routes if isinstance(each, BodyRoute) and each.body is not None]


def openapi(routes: Sequence[Route], *, has_key: bool) -> Callable[[Request], Awaitable[Response]]:
    """Returns the handler that responds with the OpenAPI document of these routes, as JSON."""
    document = encode(openapi_document(routes, has_key=has_key))

    async def openapi_json(request: Request) -> Response:
        """Returns this document."""
        return Response(document, media_type=_JSON)

    return openapi_json


def openapi_document(routes: Sequence[Route], *, has_key: bool) -> dict[str, Any]:
    """Returns the OpenAPI document (paths, bodies and errors) of these routes, without those whose `include_in_schema`
    is false.

    Args:
        has_key: whether requests need an API key.
    """
    _, schemas = msgspec.json.schema_components(
        bodies_of(routes), ref_template=_COMPONENTS + "{name}"
    )
    components: dict[str, Any] = {"schemas": {**schemas, **_ERRORS}}
    paths: dict[str, Any] = {}
    for route in routes:
        if route.include_in_schema:
            for method in sorted((route.methods or set()) - {"HEAD"}):
                at = paths.setdefault(re.sub(r":\w+}", "}", route.path), {})
                at[method.lower()] = _operation(route, method)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "kt", "version": __version__, "description": "A model that kt serves."},
        "paths": paths,
        "components": components,
    }
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(route: Route, method: str) -> dict[str, Any]:
    """Returns the operation of one path and method."""
    body = route.body if isinstance(route, BodyRoute) else None
    content: dict[str, Any] = {kind: {"schema": {}} for kind in _media_types(route)}
    error = {
        "description": "The request was refused or failed.",
        "content": {_JSON: {"schema": {"$ref": _COMPONENTS + _error_of(route.path)}}},
    }
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{route.path}").strip("_"),
        "summary": (inspect.getdoc(route.endpoint) or "").partition("\n")[0],
        "responses": {"200": {"description": "The answer.", "content": content}, "4XX": error, "5XX": error},
    }  # fmt: skip
    if names := route.param_convertors:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ]
    if body is not None:
        schema = {"$ref": _COMPONENTS + body.__name__}
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return found


def _media_types(route: Route) -> list[str]:
    """Returns the media types of the responses of a path."""
    if not (isinstance(route, BodyRoute) and route.streams):
        return _OTHER_TYPES.get(route.path, [_JSON])
    return [_JSON, _LINES if route.path.startswith("/api/") else _EVENTS]


def _error_of(path: str) -> str:
    if path.startswith("/api/"):
        return "OllamaError"
    return "AnthropicError" if path.startswith("/v1/messages") else "Error"
