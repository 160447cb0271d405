"""`/v1/messages`: the options of a request, and its replies; a stream consists of blocks, one open at a time."""

from __future__ import annotations

import json
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ktcli.answers.events import AnswerPiece, CallArguments, CallBegins, CallEvent
from ktcli.dialogue.answer import AnswerEvent, Ended, Said
from ktcli.engine.request import Finish
from ktcli.server.http.answering import Answering, WireReply, encode, json_response
from ktcli.server.http.anthropic.fields import MessagesBody
from ktcli.server.http.body import body_of
from ktcli.server.http.openai.envelope import ALIVE, EVENTS
from ktcli.server.http.refusals import Refusal
from ktcli.server.http.state import caller_of, state_of
from ktcli.server.http.waiting import StreamStyle
from ktcli.server.models.generation import Generation


async def messages(request: Request) -> Answering:
    """Responds with the answer to a conversation.

    Sends a message of Anthropic's API as JSON or, if `stream` is true, its server-sent events.
    """
    state = state_of(request)
    body = await body_of(request, MessagesBody)
    with await state.lease(body.model) as lease:
        settings = lease.settings
        options = body.answer_options(settings)
        asked = body.chat_request(settings, caller_of(request))
        generation = await state.generation(lease, lease.of_messages(asked), options)
    return Answering(generation, MessageReply(generation), stream=body.stream)


async def count_tokens(request: Request) -> Response:
    """Responds with the number of tokens of a conversation as a prompt.

    Sends it as JSON in the field `input_tokens`.
    """
    state = state_of(request)
    body = await body_of(request, MessagesBody)
    with await state.lease(body.model) as lease:
        asked = body.chat_request(lease.settings, caller_of(request))
        prompt = await state.prompt(lease.model, lease.of_messages(asked))
    said = {"input_tokens": len(prompt.ids)}
    return json_response(said)


def error_of(refusal: Refusal) -> dict[str, Any]:
    """Returns the document of an error in Anthropic's API: `type` is "error", and `error` has its `type` and
    `message`."""
    return {"type": "error", "error": {"type": refusal.kind, "message": refusal.message}}


def failed_early(body: bytes, refusal: Refusal) -> bytes:
    """Returns the body of the stream for a request that failed before its answer began: one event with the error."""
    return _event(error_of(refusal))


STREAM = StreamStyle(EVENTS, ALIVE, failed_early)


def _event(document: dict[str, Any]) -> bytes:
    return f"event: {document['type']}\ndata: ".encode() + encode(document) + b"\n\n"


class MessageReply(WireReply):
    """The answer as a message with content blocks."""

    media_type = EVENTS
    alive = _event({"type": "ping"})

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._blocks: list[dict[str, Any]] = []
        self._open = False  # whether the last block goes on
        self._reason: str | None = None
        self._stop: str | None = None

    def begin(self) -> bytes:
        """Returns the beginning of a stream: the event `message_start` as bytes."""
        return _event({"type": "message_start", "message": self._message([])})

    def end(self) -> bytes:
        """Returns the end of a stream: closes the open block, then `message_delta` and `message_stop`."""
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return self._close() + _event(last) + _event({"type": "message_stop"})

    def failed(self, refusal: Refusal) -> bytes:
        """Returns the end of a stream that failed: an event with the error."""
        return _event(error_of(refusal))

    def whole(self) -> bytes:
        """Returns the answer as a message of Anthropic's API, encoded as one JSON document."""
        self._close()
        return encode(self._message(self._blocks))

    def refused(self, refusal: Refusal) -> bytes:
        """Returns the body of an error response: the JSON document of an error in Anthropic's API."""
        return encode(error_of(refusal))

    def _said(self, event: AnswerEvent) -> bytes:
        if isinstance(event, Ended):
            self._note_end(event)
            return b""
        if not isinstance(event, Said):
            return b""
        return b"".join(
            self._piece(piece) if isinstance(piece, AnswerPiece) else self._called(piece)
            for piece in event.events
        )

    def _note_end(self, ended: Ended) -> None:
        reasons = {
            Finish.LENGTH: "max_tokens",
            Finish.CANCELLED: "max_tokens",
            Finish.CONTEXT: "model_context_window_exceeded",
        }
        self._reason = reasons.get(ended.finish, "end_turn")
        if ended.stopped:
            self._reason, self._stop = "stop_sequence", ended.stopped
        elif ended.calls and ended.finish is Finish.STOP:
            self._reason = "tool_use"

    def _piece(self, piece: AnswerPiece) -> bytes:
        kind, name = ("thinking", "thinking") if piece.thought else ("text", "text")
        data = b""
        if not self._open or self._blocks[-1]["type"] != kind:
            block = {"type": kind, name: ""}
            data = self._begin({**block, "signature": ""} if piece.thought else block)
        self._blocks[-1][name] += piece.text
        return data + self._delta({"type": f"{kind}_delta", name: piece.text})

    def _called(self, event: CallEvent) -> bytes:
        if isinstance(event, CallBegins):
            id = event.id or f"toolu_{secrets.token_hex(12)}"
            return self._begin({"type": "tool_use", "id": id, "name": event.name, "input": {}})
        if isinstance(event, CallArguments):
            block = self._blocks[-1]
            block["input"] = (block["input"] or "") + event.text  # it is read when it is whole
            return self._delta({"type": "input_json_delta", "partial_json": event.text})
        return self._close()

    def _begin(self, block: dict[str, Any]) -> bytes:
        data = self._close()
        self._blocks.append(block)
        self._open = True
        at = len(self._blocks) - 1
        return data + _event({"type": "content_block_start", "index": at, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        at = len(self._blocks) - 1
        return _event({"type": "content_block_delta", "index": at, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        block, at = self._blocks[-1], len(self._blocks) - 1
        if block["type"] == "tool_use":
            block["input"] = _object(block["input"])
        # Clients wait for the signature of a thought before they keep it; here it is empty.
        signed = block["type"] == "thinking"
        data = self._delta({"type": "signature_delta", "signature": ""}) if signed else b""
        return data + _event({"type": "content_block_stop", "index": at})

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._generation.id}",
            "type": "message",
            "role": "assistant",
            "model": self._generation.name,
            "content": blocks,
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        cached = self._generation.reused_tokens
        return {
            "input_tokens": len(self._generation.prompt.ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._generation.tokens,
        }


def _object(said: Any) -> dict[str, Any]:
    """Returns the arguments of a call as an object; {} where the call was cut off."""
    try:
        found = json.loads(said or "{}")
    except (TypeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
