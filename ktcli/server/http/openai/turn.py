"""Finds what a request for a response continues: an earlier response, and single items of stored responses.

What is found is JSON, and counts as if the client had sent it: in its size, and in the memory of all bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from ktcli.server.http.answering import encode
from ktcli.server.http.body import BODY, RESERVATION, require_decodable
from ktcli.server.http.kept import EACH_BYTES_MOST, KeptResponse, KeptResponses, KeptSlot
from ktcli.server.http.openai.response_fields import ResponseBody, Turn
from ktcli.server.http.refusals import Refusal, not_found, text_in
from ktcli.server.http.state import owner_of, state_of

Item = Mapping[str, Any]
_SHOWN_CHARS = 100  # of an id, in messages
_NAMED = "what previous_response_id and the item references name"


async def turn_of(request: Request, body: ResponseBody) -> Turn:
    """Returns the items of a request, those before it first, with the items themselves for references to them.

    Raises:
        Refusal: something that it names is not kept, or is too large with everything else.
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
    """Returns the slot of a response that begins; with `store: false` it is not stored.

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
