"""Stored responses: `/v1/responses/ID` sends one, its input items, and removes it; and what a request for a response
continues, an earlier response and single items of them.

What is found for a request is JSON, and counts as if the client had sent it: in its size, and in the memory of all
bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ktcli.server.http.answering import encode, json_response
from ktcli.server.http.body import BODY, RESERVATION, require_decodable
from ktcli.server.http.kept import EACH_BYTES_MOST, KeptResponse, KeptResponses, KeptSlot
from ktcli.server.http.openai.response_fields import ResponseBody, Turn
from ktcli.server.http.refusals import Refusal, bad_field, no_path, not_found, text_in
from ktcli.server.http.state import owner_of, state_of

_LIMIT, _LIMIT_MOST = 20, 100  # of the items in one list, as OpenAI has them
_ORDERS = ("asc", "desc")


async def response(request: Request) -> Response:
    """Responds with a stored response.

    Sends its JSON document as it was stored; 404 if there is none with this id.
    """
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise bad_field(
            "stream", "is not supported here: a response is stored only once it is complete"
        )
    return Response(_found(request).document, media_type="application/json")


async def delete(request: Request) -> Response:
    """Removes a stored response.

    Sends JSON with its `id` and `deleted`; 404 if there is none with this id.
    """
    _found(request)
    id = request.path_params["id"]
    state_of(request).kept.drop(id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """Responds with the input items of a stored response, the latest first unless `order` is `asc`.

    Sends JSON with at most `limit` items (20 if not given) that come after the item `after`, in `data`, and `first_id`,
    `last_id` and `has_more`.
    """
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


Item = Mapping[str, Any]
_SHOWN_CHARS = 100  # of an id, in messages
_NAMED = "what previous_response_id and the item references name"


async def turn_of(request: Request, body: ResponseBody) -> Turn:
    """Returns the conversation that a request asks to have answered: its items, with stored ones in place of
    references, and the items of the stored responses that it continues.

    Raises:
        Refusal: a response or an item that the request names is not stored, or they are too large, or memory is short.
    """
    state, owner = state_of(request), owner_of(request)
    items = body.own_items
    recall = _Recall(state.kept, owner)
    before = recall.conversation(body.previous_response_id)
    references = {at: recall.item(each, at) for at, each in enumerate(items) if _refers(each)}
    found = [*before, *references.values()]
    opened = partial(state.seal.open, owner=owner)
    if not found:
        return Turn(items, (), opened)
    request.scope[RESERVATION].grow(len(request.scope[BODY]) + recall.size_bytes)
    made = await _decoded(b"[" + b",".join(found) + b"]")
    earlier = made[: len(made) - len(references)]
    others = dict(zip(references, made[len(earlier) :], strict=True))
    return Turn([others.get(at, each) for at, each in enumerate(items)], earlier, opened)


def slot_of(request: Request, body: ResponseBody, turn: Turn, id: str) -> KeptSlot:
    """Returns a slot in the store, reserved for a response whose answer begins; with `store: false` it stores nothing.

    Args:
        id: the id of the response.
    """
    if body.store is False:
        return KeptSlot()
    kept = state_of(request).kept
    kept.begin(id, owner_of(request), body.previous_response_id or "", encode(turn.items))
    return KeptSlot(kept, id)


class _Output(msgspec.Struct):
    output: list[msgspec.Raw] = []


class _Recall:
    """Finds kept items for one request.

    Attributes:
        size_bytes: the bytes of those found so far.
    """

    def __init__(self, kept: KeptResponses, owner: str) -> None:
        self._kept, self._owner = kept, owner
        self._outputs: dict[str, list[bytes]] = {}
        self.size_bytes = 0

    def conversation(self, id: str | None) -> list[bytes]:
        """Returns the items of a response and of all before it, one after the other.

        Raises:
            Refusal: one of the responses is not kept, or they are too large.
        """
        if id is None:
            return []
        responses = self._kept.conversation(id, self._owner)
        if responses is None:
            raise _not_kept("previous_response_id", f"response {id[:_SHOWN_CHARS]!r}")
        found: list[bytes] = []
        for each in responses:
            found += [each.input[1:-1], *_output_of(each)]
        for items in found:
            self._count(items, "previous_response_id")
        return [items for items in found if items]

    def item(self, reference: Item, at: int) -> bytes:
        """Returns the item that the reference at a place of the input names.

        Raises:
            Refusal: it is not kept, or too large with those before.
        """
        field, id = f"input[{at}].id", text_in(reference, "id", f"input[{at}]")
        _, _, rest = id.partition("_")
        name, _, number = rest.rpartition("_")
        output = self._output(f"resp_{name}")
        if not number.isdecimal() or not int(number[:9]) < len(output):
            raise _not_kept(field, f"item {id[:_SHOWN_CHARS]!r}")
        found = output[int(number[:9])]
        if msgspec.json.decode(found, type=_Named).id != id:
            raise _not_kept(field, f"item {id[:_SHOWN_CHARS]!r}")
        self._count(found, field)
        return found

    def _output(self, id: str) -> list[bytes]:
        if id not in self._outputs:
            found = self._kept.find(id, self._owner)
            self._outputs[id] = [] if found is None else _output_of(found)
        return self._outputs[id]

    def _count(self, data: bytes, field: str) -> None:
        self.size_bytes += len(data)
        if self.size_bytes > EACH_BYTES_MOST:
            said = f"{_NAMED} exceeds {EACH_BYTES_MOST >> 20} MiB"
            raise Refusal(413, said, field, "request_too_large")


class _Named(msgspec.Struct):
    id: str = ""


def _output_of(response: KeptResponse) -> list[bytes]:
    return [bytes(each) for each in msgspec.json.decode(response.document, type=_Output).output]


def _refers(item: Item) -> bool:
    """Returns whether an item refers to another one; OpenAI's clients may leave out its type."""
    kind = item.get("type")
    return kind == "item_reference" or (
        kind is None and "id" in item and len(item) == 1 + ("type" in item)
    )


def _not_kept(field: str, what: str) -> Refusal:
    stored = f"{field} names the {what}, which this server has not stored"
    return not_found(f"{stored}; send the whole conversation as input", field)


async def _decoded(data: bytes) -> list[dict[str, Any]]:
    """Returns kept items, decoded.

    Raises:
        Refusal: they would take too much memory.
    """
    try:
        await asyncio.to_thread(require_decodable, data)
    except Refusal as error:
        said = f"{_NAMED} is too large when decoded"
        raise Refusal(413, said, "previous_response_id", "request_too_large") from error
    return msgspec.json.decode(data, type=list[dict[str, Any]])
