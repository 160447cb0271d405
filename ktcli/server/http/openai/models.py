"""`/v1/models`: the models of the library, in one document for the clients of OpenAI and of Anthropic."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ktcli.server.http.answering import json_response, stamp
from ktcli.server.http.openai.envelope import error_of
from ktcli.server.http.refusals import Refusal
from ktcli.server.http.state import ServerState, state_of
from ktcli.server.models.source import ModelFacts, ModelSource


async def models(request: Request) -> Response:
    """Responds with the models of the library: the server's own first, then those in memory.

    Sends JSON whose `data` has for each its `id`, `created`, `max_model_len` (tokens) and more. A strict server lists
    only its own.
    """
    state = state_of(request)
    rows = await state.rows(lambda source, facts, name: _row(state, source, facts, name))
    said = {"object": "list", "data": rows, "has_more": False}
    ends = {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]} if rows else {}
    said |= {"first_id": None, "last_id": None, **ends}
    return json_response(said)


async def model(request: Request) -> Response:
    """Responds with the row of the model that the path names, as the list has it; 404 if there is none.

    The row is JSON with its `id`, `created`, `max_model_len` (tokens) and more.
    """
    name, state = request.path_params["name"], state_of(request)
    found = await state.catalogue.find(name)
    if found is None:
        refusal = Refusal(404, f"model not found: {name[:200]!r}", "model", "model_not_found")
        return json_response(error_of(refusal), 404)
    return json_response(_row(state, found, await state.facts(found), name))


def _row(state: ServerState, source: ModelSource, facts: ModelFacts, name: str) -> dict[str, Any]:
    loaded = state.residency.find(source)
    context = loaded.model.backend.engine.context if loaded else facts.context
    about = {"n_ctx": context, "n_vocab": facts.vocab, "size": facts.size_bytes}
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created_at": stamp(facts.made),
        "created": facts.made,
        "owned_by": "kt",
        "max_model_len": context,
        "loaded": loaded is not None,
        "capabilities": [facts.task],
        "meta": {**about, "n_ctx_train": facts.context},
    }
