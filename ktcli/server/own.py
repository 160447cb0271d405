"""kt's own paths: health, metrics, and tokens of a text."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ktcli.server.house import body_of, house_of
from ktcli.server.neighbours import Status
from ktcli.server.refusal import Refusal


class TextToCut(msgspec.Struct):
    """A request for the ids of a text."""

    content: str = ""
    prompt: str = ""  # vLLM's name for it
    parse_special: bool = False


class IdsToRead(msgspec.Struct):
    """A request for the text of ids."""

    tokens: list[int]


async def health(request: Request) -> Response:
    """Says that the server lives, and what it does."""
    scheduler = house_of(request).model.thread.scheduler
    said = {"status": "ok", "running": scheduler.active, "waiting": scheduler.waiting}
    return _json(said)


async def server(request: Request) -> Response:
    """Says what this server is: its model, its address and what it does."""
    house = house_of(request)
    served, scheduler = house.model, house.model.thread.scheduler
    return _json(
        Status(
            served.name,
            list(house.rules.aliases),
            house.rules.address,
            served.speaker.engine.context,
            scheduler.active,
            scheduler.waiting,
            served.created,
        )
    )


async def metrics(request: Request) -> Response:
    """The counters, in Prometheus' words."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    house = house_of(request)
    return Response(generate_latest(house.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def tokenize(request: Request) -> Response:
    """The ids of a text; control tokens are words in it, unless they are asked for."""
    body, house = await body_of(request, TextToCut), house_of(request)
    voice, text = house.model.speaker.voice, body.content or body.prompt
    cut = voice.tokenizer.encode if body.parse_special else voice.control.encode_text
    ids = await asyncio.wrap_future(house.jobs.ask(lambda: cut(text)))
    return _json(
        {"tokens": ids, "count": len(ids), "max_model_len": house.model.speaker.engine.context}
    )


async def detokenize(request: Request) -> Response:
    """The text of ids."""
    body, house = await body_of(request, IdsToRead), house_of(request)
    vocab = house.model.speaker.engine.spec.vocab
    if bad := next((id for id in body.tokens if not 0 <= id < vocab), None):
        raise Refusal(
            400,
            f"token id {bad} is outside the vocabulary of {vocab}",
            "tokens",
            "unsupported_value",
        )
    tokenizer = house.model.speaker.voice.tokenizer
    text = await asyncio.wrap_future(
        house.jobs.ask(lambda: tokenizer.decode(body.tokens, special=True))
    )
    return _json({"content": text, "prompt": text})


def _json(document: Any) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")
