"""Sends the chat page and its parts, with a policy that lets a browser load nothing from other servers."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from ktcli.server.http.page.libraries import LIBRARIES
from ktcli.server.http.refusals import no_path
from ktcli.server.http.state import state_of

_FOLDER = Path(__file__).parent
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".LICENSE": "text/plain",
}
_MODULES = """
    answering api app attachments conversation conversations copying elements exchange legacy libraries log markdown
    mathematics mathletters messages models preferences records sampling sanitizing settings sidebar store tables
    tabs textview
""".split()
_VENDORED = tuple(f"vendor/{name}" for each in LIBRARIES for _, name, _ in each.files)
PARTS = {
    name: _TYPES[Path(name).suffix]
    for name in (
        "index.html",
        "style.css",
        "text.css",
        *(f"{each}.js" for each in _MODULES),
        *_VENDORED,
    )
}
PATHS = frozenset({"/", *(f"/page/{name}" for name in PARTS)})
# Markup becomes elements in one place only, the library that cleans it: browsers that know trusted types enforce it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_CHANGES, _STAYS = "no-cache", "private, max-age=31536000, immutable"


async def root(request: Request) -> Response:
    """Responds with the page to browsers, and with a line of text to other clients, as Ollama does."""
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse("kt is running")
    below = state_of(request).rules.root_path
    if below and request.scope.get("raw_path") == below.encode():
        return RedirectResponse(f"{below}/")  # what the page loads is beside it
    return _sent("index.html")


async def part(request: Request) -> Response:
    """Responds with the file of the chat page that the path names. Raises: Refusal: there is none."""
    name = request.path_params["name"]
    if name not in PARTS:
        raise no_path(request)
    return _sent(name)


def _sent(name: str) -> Response:
    # A library's file has its version in its name.
    cache = _STAYS if name in _VENDORED else _CHANGES
    return Response(
        (_FOLDER / name).read_bytes(),
        media_type=PARTS[name],
        headers={**_HEADERS, "Cache-Control": cache},
    )
