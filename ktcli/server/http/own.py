"""kt's own paths: health, status, metrics, tokenization, and cancelling requests; and what routers ask of a server, in
the words of SGLang that they read."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import partial
from math import ceil
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ktcli import __version__
from ktcli.assembly.presets import preset_over
from ktcli.engine.request import Candidate
from ktcli.native import PAGE_TOKENS
from ktcli.server.http.answering import json_response
from ktcli.server.http.body import body_of
from ktcli.server.http.constraints import NO_LIMIT
from ktcli.server.http.guard import require_owner
from ktcli.server.http.openai.chat import candidate_of
from ktcli.server.http.openai.fields import ChatBody
from ktcli.server.http.refusals import about, bad_value, not_found
from ktcli.server.http.state import ServerState, caller_of, state_of
from ktcli.server.models.model import LoadedModel
from ktcli.server.process.discovery import LoadedStatus, Status
from ktcli.server.process.draintime import DRAIN_MOST_S


class TokenizeBody(msgspec.Struct):
    """A request for the ids of a text, or of a conversation's prompt."""

    content: str | None = None
    prompt: str | None = None  # vLLM's name for it
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool = False
    add_special: bool | None = None
    add_special_tokens: bool | None = None  # vLLM's name for it
    with_pieces: bool = False
    return_token_strs: bool | None = None
    model: str = ""

    @property
    def begins(self) -> bool:
        """Whether the ids with which the model begins a text come first: as the request says, else only for `prompt`
        (vLLM), not for `content` (llama.cpp)."""
        if (said := self.add_special_tokens) is None:
            said = self.add_special
        return self.content is None if said is None else said

    @property
    def text(self) -> str | None:
        """The text to tokenize, in `content` or `prompt`; None: the request has neither."""
        return self.content if self.content is not None else self.prompt

    def chat(self) -> ChatBody:
        """Returns the request for a chat completion of the same conversation, whose prompt is to be tokenized."""
        names = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        return ChatBody(
            messages=self.messages or [], **{name: getattr(self, name) for name in names}
        )


class DrainBody(msgspec.Struct):
    """A request to change how long answers may take to finish."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=DRAIN_MOST_S)]


class DetokenizeBody(msgspec.Struct):
    """A request for the text of ids."""

    tokens: list[int]
    model: str = ""


async def health(request: Request) -> Response:
    """Responds with the server's health and its counts of requests.

    Sends JSON with `status` (see `ServerState.status`), `running` and `waiting`. The HTTP status is 503 unless `status`
    is "ok".
    """
    state = state_of(request)
    running, waiting = state.residency.counts()
    said = {"status": state.status, "running": running, "waiting": waiting}
    return json_response(said, 200 if state.status == "ok" else 503)


async def server(request: Request) -> Response:
    """Returns the status of this server: its model, its address, its counts of requests, and the models in memory.

    Sends a `Status` as JSON.
    """
    state = state_of(request)
    residency, own = state.residency, state.catalogue.own
    running, waiting = residency.counts()
    loaded = [_of_loaded(each) for each in residency.loaded]
    context = next((each.context for each in loaded if each.name == own.name), 0)
    aliases, address = list(state.rules.aliases), state.rules.address
    said = Status(own.name, aliases, address, context, running, waiting, state.since, loaded)
    drain_s = ceil(state.drain.seconds)
    return json_response(
        msgspec.structs.replace(said, loading=state.status == "loading", drain_s=drain_s)
    )


def _of_loaded(loaded: LoadedModel) -> LoadedStatus:
    scheduler, engine = loaded.model.thread.scheduler, loaded.model.backend.engine
    return LoadedStatus(
        loaded.model.name,
        engine.context,
        loaded.fit.taken_bytes,
        scheduler.active,
        scheduler.waiting,
        loaded.model.created,
        loaded.expires,
    )


async def drain(request: Request) -> Response:
    """Sets how long answers may take to finish once the server is shut down; through the Unix socket only.

    Sends the new seconds as JSON in the field `drain_s`.
    """
    require_owner(request)
    body, state = await body_of(request, DrainBody), state_of(request)
    state.drain.seconds = body.seconds
    return json_response({"drain_s": body.seconds})


async def version(request: Request) -> Response:
    """Returns the version of kt.

    Sends it as JSON in the field `version`.
    """
    return json_response({"version": __version__})


async def props(request: Request) -> Response:
    """Responds with the server's properties and default settings, as llama.cpp's server does.

    Sends JSON with `default_generation_settings`, `total_slots`, `chat_template` and more. The `model` of the query may
    be one that is not in memory; it is not loaded.
    """
    state = state_of(request)
    name = request.query_params.get("model", "")
    source = await state.named(name)
    facts, loaded = await state.facts(source), state.residency.find(source)
    abilities = await state.abilities_of(source, facts)
    asked = preset_over(await state.preset(name, source), abilities.settings)
    sampling = asked.sampling
    settings = {
        "temperature": sampling.used_temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "n_predict": asked.max_tokens or NO_LIMIT,
    }
    context = loaded.model.backend.engine.context if loaded else facts.context
    said = {
        "default_generation_settings": {"n_ctx": context, "params": settings},
        "total_slots": state.residency.limits.active,
        "model_alias": source.name,
        "model_path": source.name,
        "chat_template": abilities.template,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"kt {__version__}",
    }
    return json_response(said)


async def metrics(request: Request) -> Response:
    """Returns the counters in the text format of Prometheus."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    state = state_of(request)
    return Response(generate_latest(state.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def tokenize(request: Request) -> Response:
    """Responds with the token ids of a text, or of a conversation's prompt.

    Sends JSON with `tokens` (the ids), `count` and `max_model_len`. Control tokens in a text are plain text unless
    `parse_special` is true. For the ids that the model puts before a text see `TokenizeBody.begins`.
    """
    body, state = await body_of(request, TokenizeBody), state_of(request)
    text = body.text
    if (text is None) == (body.messages is None):
        raise bad_value("prompt", "either prompt or messages is required")
    with await state.lease(body.model) as lease:
        prompts, context = lease.model.prompts, lease.model.backend.engine.context
        if text is None:
            asked = body.chat().chat_request(lease.settings, caller_of(request))
            ids = list((await state.prompt(lease.model, lease.of_messages(asked))).ids)
        else:
            begin = prompts.begin if body.begins else ()
            read = partial(prompts.ids_of, text, special=body.parse_special)
            ids = [*begin, *await state.jobs.result(read)]
        said = {"tokens": ids, "count": len(ids), "max_model_len": context}
        if body.with_pieces or body.return_token_strs:
            tokenizer = lease.model.texts.tokenizer
            tokens = await state.jobs.result(
                lambda: [candidate_of(tokenizer, Candidate(id, 0.0)) for id in ids]
            )
            said |= _spelled(ids, tokens, body)
    return json_response(said)


def _spelled(ids: list[int], tokens: list[dict[str, Any]], body: TokenizeBody) -> dict[str, Any]:
    """Returns the texts of tokens: in llama.cpp's form in place of the ids, and in vLLM's beside them."""
    found: dict[str, Any] = {}
    if body.return_token_strs:
        found["token_strs"] = [each["token"] for each in tokens]
    if body.with_pieces:  # a part of a character is a list of its bytes
        found["tokens"] = [
            {"id": id, "piece": text if list(text.encode()) == data else data}
            for id, each in zip(ids, tokens, strict=True)
            for text, data in [(each["token"], each["bytes"])]
        ]
    return found


async def detokenize(request: Request) -> Response:
    """Returns the text of token ids.

    Sends it as JSON, both in `content` and in `prompt`.
    """
    body, state = await body_of(request, DetokenizeBody), state_of(request)
    with await state.lease(body.model) as lease, about("tokens"):
        prompts = lease.model.prompts
        text = await state.jobs.result(lambda: prompts.text_of(body.tokens))
    return json_response({"content": text, "prompt": text})


async def cancel(request: Request) -> Response:
    """Cancels a request of the same caller at the next step, by its id with or without the prefix of an API.

    Sends JSON with `id` and `cancelled`; 404 if no such request is in progress.
    """
    state, id = state_of(request), request.path_params["id"]
    found = state.answering.get(re.sub(r"^.*[-_]", "", id))
    if found is None or found.over or found.prompt.caller != caller_of(request):
        raise not_found(f"no request with the id {id[:100]!r} is in progress")
    found.cancel()
    return json_response({"id": id, "cancelled": True})


async def loads(request: Request) -> Response:
    """Responds with the server's load.

    Sends JSON whose `loads` has one object: the running and waiting requests and the tokens of the KV pages in use, of
    all models together. Pages that are only cached are not in use.
    """
    state = state_of(request)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    said = {"timestamp": now, "version": __version__, "dp_rank_count": 1, "loads": [_load(state)]}
    return json_response(said)


async def server_info(request: Request) -> Response:
    """Responds with the facts of the server.

    Sends JSON with its own model, the context, its parallelism, and the planned speed of one answer (`decode_tok_s`),
    from which `kt route` derives how long a request may last.
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
