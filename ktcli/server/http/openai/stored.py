"""`/v1/responses/ID`: a stored response, its input items, and its removal."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ktcli.server.http.answering import json_response
from ktcli.server.http.kept import KeptResponse
from ktcli.server.http.refusals import bad_field, no_path, not_found
from ktcli.server.http.state import owner_of, state_of

_LIMIT, _LIMIT_MOST = 20, 100  # of the items in one list, as OpenAI has them
_ORDERS = ("asc", "desc")


async def response(request: Request) -> Response:
    """Responds with a stored response."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise bad_field(
            "stream", "is not supported here: a response is stored only once it is complete"
        )
    return Response(_found(request).document, media_type="application/json")


async def delete(request: Request) -> Response:
    """Removes a stored response."""
    _found(request)
    id = request.path_params["id"]
    state_of(request).kept.drop(id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """Responds with the input items of a stored response, the latest first unless `order` is `asc`."""
    items = _with_ids(_found(request), request.path_params["id"])
    asked = request.query_params
    order, limit, after = (
        asked.get("order", "desc"),
        asked.get("limit", str(_LIMIT)),
        asked.get("after"),
    )
    if order not in _ORDERS:
        raise bad_field("order", f"must be asc or desc, not {order[:40]!r}")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _LIMIT_MOST:
        raise bad_field("limit", f"must be between 1 and {_LIMIT_MOST}, not {limit[:40]!r}")
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((at for at, each in enumerate(items) if each["id"] == after), None)
        if place is None:
            raise not_found(f"after names no item: {after[:100]!r}", "after")
        items = items[place + 1 :]
    page = items[: int(limit)]
    ends = (
        {"first_id": page[0]["id"], "last_id": page[-1]["id"]}
        if page
        else {"first_id": None, "last_id": None}
    )
    return json_response(
        {"object": "list", "data": page, **ends, "has_more": len(page) < len(items)}
    )


async def others(request: Request) -> Response:
    """Refuses every other path below a response with the status 404."""
    raise no_path(request)


def _found(request: Request) -> KeptResponse:
    """Returns the response that a path names. Raises: Refusal: it is not kept, or another key asked for it."""
    id = request.path_params["id"]
    found = state_of(request).kept.find(id, owner_of(request))
    if found is None:
        raise not_found(f"this server has no response {id[:100]!r}")
    return found


def _with_ids(found: KeptResponse, id: str) -> list[dict[str, Any]]:
    """Returns the items of a request, each with an id and a type, and messages with a list of parts."""
    items = msgspec.json.decode(found.input, type=list[dict[str, Any]])
    name = id.removeprefix("resp_")
    return [{"id": f"in_{name}_{at}", **_whole(each)} for at, each in enumerate(items)]


def _whole(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        return item
    found = {"type": "message", "status": "completed", **item}
    if isinstance(content := item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": content}]
    return found
