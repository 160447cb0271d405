"""Answers the requests of Ollama's clients about models: their names, their capabilities, and the server's version."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ktcli.models.pooling import PoolingMode
from ktcli.server.http.answering import json_response, stamp
from ktcli.server.http.body import body_of
from ktcli.server.http.state import state_of
from ktcli.server.models.source import ModelFacts, ModelSource
from ktcli.store.modelfile import parameter_lines
from ktcli.store.preset import Preset

VERSION = "0.12.0"  # of the API that is spoken; some clients want at least 0.6.4, in digits
# llama.cpp's numbers, of metadata in GGUF files.
POOLING_TYPES = {PoolingMode.MEAN: 1, PoolingMode.FIRST: 2, PoolingMode.LAST: 3}
_NEVER = "9999-12-31T00:00:00Z"


class ModelAsked(msgspec.Struct):
    """A request about a model."""

    model: str = ""
    name: str = ""


async def version(request: Request) -> Response:
    """Returns the version of Ollama's API that is spoken."""
    return json_response({"version": VERSION})


async def tags(request: Request) -> Response:
    """Responds with the models of the library: the server's own first, then those in memory."""
    return json_response({"models": await state_of(request).rows(_row)})


async def running(request: Request) -> Response:
    """Responds with the models in memory."""
    rows = []
    for each in state_of(request).residency.loaded:
        row, engine = _row(each.source, each.facts, each.model.name), each.model.backend.engine
        vram = each.fit.vram_bytes
        size = {"size": each.fit.taken_bytes + vram, "size_vram": vram}
        about = {**size, "context_length": engine.context}
        rows.append(
            {**row, **about, "expires_at": _NEVER if each.expires is None else stamp(each.expires)}
        )
    return json_response({"models": rows})


async def show(request: Request) -> Response:
    """Responds with a model's facts and capabilities, whether it is in memory or not."""
    state, body = state_of(request), await body_of(request, ModelAsked)
    name = body.model or body.name
    source = await state.named(name)
    loaded = state.residency.find(source)
    context = loaded.model.backend.engine.context if loaded else None
    facts = await state.facts(source)
    can = await state.abilities_of(source, facts)
    info = {
        "general.architecture": facts.family,
        f"{facts.family}.context_length": context or facts.context,
        "general.basename": source.name,
        **_of_embeddings(facts),
    }
    about = {"details": _details(facts), "model_info": info, "capabilities": can.capabilities}
    said = {**about, "template": can.template, "modified_at": stamp(facts.made)}
    return json_response({**said, **_preset(await state.preset(name, source))})


def _of_embeddings(facts: ModelFacts) -> dict[str, Any]:
    """Returns what GGUF files say of an embedding model; nothing for one that generates text."""
    if facts.pooling is None:
        return {}
    return {
        f"{facts.family}.embedding_length": facts.hidden,
        f"{facts.family}.pooling_type": POOLING_TYPES[facts.pooling.mode],
    }


def _preset(preset: Preset) -> dict[str, str]:
    """Returns what requests get that ask for nothing else: the system text of the model's name, and its and the
    server's parameters as a Modelfile has them."""
    system = preset.get("system")
    lines = parameter_lines(preset)
    said = {"parameters": "\n".join(lines)} if lines else {}
    return {**said, "system": system} if system else said


def _row(source: ModelSource, facts: ModelFacts, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": stamp(facts.made),
        "size": facts.size_bytes,
        "digest": facts.identity,
        "capabilities": [facts.task],
        "details": _details(facts),
    }


def _details(facts: ModelFacts) -> dict[str, Any]:
    family = facts.family
    return {"format": "kt", "family": family, "families": [family], "parent_model": ""}
