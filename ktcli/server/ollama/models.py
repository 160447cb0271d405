"""What Ollama's clients ask about models: which there are, what they can do, and which version they talk to."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ktcli.server.house import House, body_of, house_of
from ktcli.server.ollama.chat import now
from ktcli.server.openai.envelope import encode
from ktcli.server.refusal import Refusal

VERSION = "0.12.0"  # of the API that is spoken; some clients want at least 0.6.4, in digits


class ModelAsked(msgspec.Struct):
    """A request about a model."""

    model: str = ""
    name: str = ""


async def version(request: Request) -> Response:
    """The version of the API."""
    return _json({"version": VERSION})


async def tags(request: Request) -> Response:
    """Lists the models."""
    return _json({"models": _rows(house_of(request))})


async def running(request: Request) -> Response:
    """Lists the models that are loaded."""
    house = house_of(request)
    context = house.model.speaker.engine.context
    more = {"expires_at": "9999-12-31T00:00:00Z", "size_vram": 0, "context_length": context}
    return _json({"models": [{**row, **more} for row in _rows(house)]})


async def show(request: Request) -> Response:
    """Says what a model is and can do."""
    house, body = house_of(request), await body_of(request, ModelAsked)
    with await house.lease(body.model or body.name) as lease:
        speaker = lease.model.speaker
    voice, spec = speaker.voice, speaker.engine.spec
    can = ["completion"]
    can += ["tools"] if voice.calls is not None else []
    can += ["thinking"] if voice.thinks else []
    family = getattr(spec, "family", "")
    info = {
        "general.architecture": family,
        f"{family}.context_length": speaker.engine.context,
        "general.basename": speaker.name,
    }
    about = {"details": _details(house), "model_info": info, "capabilities": can}
    return _json({**about, "template": voice.template.source, "modified_at": now()})


async def unsupported(request: Request) -> Response:
    """Refuses what this server does not do."""
    raise Refusal(400, f"{request.url.path} is not supported; kt pull, kt rm and kt list do it")


def _rows(house: House) -> list[dict[str, Any]]:
    served = house.model
    size = served.speaker.engine.weights_bytes
    about = {
        "modified_at": now(),
        "size": size,
        "digest": served.speaker.pack,
        "details": _details(house),
    }
    return [{"name": name, "model": name, **about} for name in (served.name, *house.rules.aliases)]


def _details(house: House) -> dict[str, Any]:
    family = getattr(house.model.speaker.engine.spec, "family", "")
    return {"format": "kt", "family": family, "families": [family], "parent_model": ""}


def _json(document: Any) -> Response:
    return Response(encode(document), media_type="application/json")
