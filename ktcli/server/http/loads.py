"""What routers ask of a server, in the words of SGLang that they read: how busy it is, and what it is."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ktcli import __version__
from ktcli.native import PAGE_TOKENS
from ktcli.server.http.answering import json_response
from ktcli.server.http.state import ServerState, state_of


async def loads(request: Request) -> Response:
    """Responds with the server's load.

    That is its running and waiting requests, and the tokens of the KV pages in use, of all models together. Pages
    that are only cached are not in use: a full cache is no reason to go elsewhere.
    """
    state = state_of(request)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    said = {"timestamp": now, "version": __version__, "dp_rank_count": 1, "loads": [_load(state)]}
    return json_response(said)


async def server_info(request: Request) -> Response:
    """Responds with the facts of the server.

    These are its own model, the context, its parallelism, and the planned speed of one answer, from which `kt
    route` derives how long a request may last.
    """
    state = state_of(request)
    own = state.catalogue.own
    load, loaded = _load(state), state.residency.find(own)
    said = {
        "version": __version__,
        "model_path": own.name,
        "served_model_name": own.name,
        "context_length": loaded.model.backend.engine.context if loaded else None,
        "max_total_num_tokens": load["max_total_num_tokens"],
        "max_running_requests": load["max_running_requests"],
        "page_size": PAGE_TOKENS,
        "decode_tok_s": state.rules.decode_tok_s,
        "tp_size": 1,
        "dp_size": 1,
        "status": state.status,
    }
    return json_response(said)


def _load(state: ServerState) -> dict[str, Any]:
    """Returns the load of the server as one rank of SGLang's."""
    residency = state.residency
    running, waiting = residency.counts()
    pools = [each.model.backend.engine.pools.pages for each in residency.loaded]
    pages, held = sum(each.count for each in pools), sum(each.held for each in pools)
    most = residency.limits.active * max(1, len(pools))
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": held * PAGE_TOKENS,
        "max_total_num_tokens": pages * PAGE_TOKENS,
        "token_usage": held / pages if pages else 0.0,
        "utilization": running / most,
        "max_running_requests": most,
    }
