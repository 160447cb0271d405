"""`/v1/models`: the models that are served, in one document for the clients of OpenAI and of Anthropic."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ktcli.server.house import House, house_of
from ktcli.server.openai.envelope import encode, error_of
from ktcli.server.refusal import Refusal


async def models(request: Request) -> Response:
    """Lists them."""
    rows = _rows(house_of(request))
    said = {"object": "list", "data": rows, "has_more": False}
    said |= {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]}
    return Response(encode(said), media_type="application/json")


async def model(request: Request) -> Response:
    """Shows one."""
    name = request.path_params["name"]
    found = next((row for row in _rows(house_of(request)) if row["id"] == name), None)
    if found is None:
        refusal = Refusal(404, f"there is no model {name[:200]!r} here", "model", "model_not_found")
        return Response(encode(error_of(refusal)), 404, media_type="application/json")
    return Response(encode(found), media_type="application/json")


def _rows(house: House) -> list[dict[str, Any]]:
    served = house.model
    engine = served.speaker.engine
    about = {"n_ctx": engine.context, "n_vocab": engine.spec.vocab, "size": engine.weights_bytes}
    return [
        {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(served.created)),
            "created": served.created,
            "owned_by": "kt",
            "max_model_len": engine.context,
            "meta": {**about, "n_ctx_train": engine.spec.context},
        }
        for name in (served.name, *house.rules.aliases)
    ]
