"""Sends the chat page and its parts, with a policy by which a browser loads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ktcli.server.http.refusals import Refusal

_FOLDER = Path(__file__).parent
_SCRIPT = "text/javascript"
PARTS = {
    "index.html": "text/html",
    "style.css": "text/css",
    **dict.fromkeys(("app.js", "api.js", "markdown.js", "store.js"), _SCRIPT),
}
PATHS = frozenset({"/", *(f"/page/{name}" for name in PARTS)})
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


async def root(request: Request) -> Response:
    """Returns the page to browsers, and a line of text to other clients, as Ollama does."""
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse("kt is running")
    return _sent("index.html")


async def part(request: Request) -> Response:
    """Returns a file of the page."""
    name = request.path_params["name"]
    if name not in PARTS:
        raise Refusal(404, f"Not Found: {request.url.path[:200]}", "", "not_found")
    return _sent(name)


def _sent(name: str) -> Response:
    return Response((_FOLDER / name).read_bytes(), media_type=PARTS[name], headers=_HEADERS)
