"""`/v1/responses`: the options of a request, and its replies, which are stored for a while unless the request forbids
it."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ktcli.dialogue.answer import AnswerEvent, Ended, Said
from ktcli.engine.request import Finish
from ktcli.errors import ContextFull
from ktcli.sampling import SamplingSettings
from ktcli.server.http.answering import Answering, App, encode, json_response
from ktcli.server.http.body import body_of, decoded
from ktcli.server.http.kept import KeptSlot
from ktcli.server.http.openai.envelope import ALIVE, EVENTS, OpenAIReply
from ktcli.server.http.openai.output import OutputItems, Seal
from ktcli.server.http.openai.response_fields import ResponseBody
from ktcli.server.http.openai.stored import slot_of, turn_of
from ktcli.server.http.refusals import Refusal
from ktcli.server.http.state import caller_of, owner_of, state_of
from ktcli.server.http.waiting import StreamStyle
from ktcli.server.models.generation import Generation

# What a response says of a function, and of a schema, for which a request leaves these fields out.
_FUNCTION = {"description": None, "parameters": None, "strict": None}
_SCHEMA = {"description": None, "strict": None}


def response_document(
    body: ResponseBody, model: str, id: str = "", sampling: SamplingSettings | None = None
) -> dict[str, Any]:
    """Returns the response object of OpenAI's API, by field, for an answer in progress: its output is empty.

    Args:
        body: the request, whose fields it repeats.
        id: its id without `resp_`; empty: a random one.
        sampling: the settings that are used; None: the request failed before they were known.
    """
    used = sampling or SamplingSettings()
    effort = None if body.reasoning is None else body.reasoning.effort
    form = None if body.text is None else body.text.format
    return {
        "id": f"resp_{id or secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": used.frequency_penalty,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_tokens
        if body.max_output_tokens is None
        else body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": used.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": used.used_temperature,
        "text": {"format": _format(form)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_FUNCTION | each for each in body.tools or [] if each.get("type") == "function"],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": used.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def failure(refusal: Refusal) -> dict[str, Any]:
    """Returns the fields of the response object for a failed request: `status`, "failed", and `error` with its `code`
    and `message`."""
    error = {"code": refusal.code or "server_error", "message": refusal.message}
    return {"status": "failed", "error": error}


def _format(asked: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the format of an answer's text with every field that it has in a response."""
    if asked is None:
        return {"type": "text"}
    return _SCHEMA | asked if asked.get("type") == "json_schema" else asked


async def responses(request: Request) -> App:
    """Responds with the answer to a conversation.

    Sends a response object of OpenAI's API as JSON or, if `stream` is true, its server-sent events.
    """
    state = state_of(request)
    body = await body_of(request, ResponseBody)
    with await state.lease(body.model) as lease:
        model = lease.model
        settings = lease.settings
        options = body.response_options(settings)
        turn = await turn_of(request, body)
        asked = body.chat_request(settings, caller_of(request), turn)
        try:
            generation = await state.generation(lease, lease.of_messages(asked), options)
        except ContextFull as error:
            if not body.stream:
                raise
            # Codex makes a conversation shorter where a stream says this, and gives up where a status does.
            return Response(_failed_stream(body, model.name, Refusal.of(error)), media_type=EVENTS)
    place = slot_of(request, body, turn, f"resp_{generation.id}")
    seal = partial(state.seal.seal, owner=owner_of(request)) if body.seals else None
    return Answering(generation, ResponseReply(generation, body, place, seal), stream=body.stream)


async def input_tokens(request: Request) -> Response:
    """Responds with the number of tokens of a conversation as a prompt.

    Sends it as JSON in the field `input_tokens`.
    """
    state = state_of(request)
    body = await body_of(request, ResponseBody)
    with await state.lease(body.model) as lease:
        turn = await turn_of(request, body)
        asked = body.chat_request(lease.settings, caller_of(request), turn)
        prompt = await state.prompt(lease.model, lease.of_messages(asked))
    said = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
    return json_response(said)


class EventStream:
    """Numbers the events of a stream."""

    def __init__(self) -> None:
        self._number = 0

    def event(self, kind: str, **about: Any) -> bytes:
        """Returns the next server-sent event of the stream: its `kind`, the next sequence number, and further
        fields."""
        said = {"type": kind, "sequence_number": self._number, **about}
        self._number += 1
        return f"event: {kind}\ndata: ".encode() + encode(said) + b"\n\n"


class ResponseReply(OpenAIReply):
    """The answer as a response object.

    Args:
        place: where it is kept.
        seal: returns thoughts as a sealed text; None: none is wanted.
    """

    def __init__(
        self, generation: Generation, body: ResponseBody, place: KeptSlot, seal: Seal | None
    ) -> None:
        self._generation, self._place = generation, place
        sampling = generation.options.sampling
        self._document = response_document(body, generation.name, generation.id, sampling)
        self._stream = EventStream()
        tokenizer = generation.model.texts.tokenizer
        self._items = OutputItems(self._stream.event, tokenizer, generation.id, seal)
        self._cut = False  # whether the answer is not at its own end

    def begin(self) -> bytes:
        """Returns the beginning of a stream: the events `response.created` and `response.in_progress`."""
        names = ("response.created", "response.in_progress")
        return b"".join(self._stream.event(name, response=self._document) for name in names)

    def _said(self, event: AnswerEvent) -> bytes:
        if isinstance(event, Said):
            return self._items.take(event)
        if isinstance(event, Ended):
            self._cut = event.finish is not Finish.STOP
            return self._items.close("incomplete" if self._cut else "completed")
        return b""

    def end(self) -> bytes:
        """Returns the end of a stream: `response.completed`, or `response.incomplete` if the answer was cut off; stores
        the response unless `store` is false."""
        name = "response.incomplete" if self._cut else "response.completed"
        return self._stream.event(name, response=msgspec.Raw(self._finished()))

    def failed(self, refusal: Refusal) -> bytes:
        """Returns the end of a stream that failed: the event `response.failed`."""
        self._place.give_up()
        document = {**self._document, **failure(refusal), "output": self._items.items}
        return self._stream.event("response.failed", response=document)

    def whole(self) -> bytes:
        """Returns the finished response object as one JSON document, and stores it unless `store` is false."""
        return self._finished()

    def refused(self, refusal: Refusal) -> bytes:
        """Returns the body of an error response: the JSON document of an error in OpenAI's API; nothing is stored."""
        self._place.give_up()
        return super().refused(refusal)

    def _finished(self) -> bytes:
        """Returns the finished response as JSON, which is kept."""
        why = {"reason": "max_output_tokens"} if self._cut else None
        document = {
            **self._document,
            "completed_at": None if self._cut else int(time.time()),
            "status": "incomplete" if self._cut else "completed",
            "incomplete_details": why,
            "output": self._items.items,
            "usage": self._usage(),
        }
        data = encode(document)
        self._place.fill(data)
        return data

    def _usage(self) -> dict[str, Any]:
        read, said = len(self._generation.prompt.ids), self._generation.tokens
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": self._generation.reused_tokens},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": self._items.thought_tokens},
            "total_tokens": read + said,
        }


def failed_early(body: bytes, refusal: Refusal) -> bytes:
    """Returns the body of the stream for a request that failed before its answer began: the events `response.created`
    and `response.failed`."""
    asked = decoded(body, ResponseBody)
    return _failed_stream(asked, asked.model, refusal)


STREAM = StreamStyle(EVENTS, ALIVE, failed_early)


def _failed_stream(body: ResponseBody, model: str, refusal: Refusal) -> bytes:
    """Returns a stream that has only the error."""
    stream, document = EventStream(), response_document(body, model)
    document |= {"instructions": None, "tools": []}  # which may be what was too long
    begins = stream.event("response.created", response=document)
    return begins + stream.event("response.failed", response={**document, **failure(refusal)})
