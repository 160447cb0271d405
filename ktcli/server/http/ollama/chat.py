"""`/api/chat` and `/api/generate`: streams are lines of JSON, the last of which has the counts and times."""

from __future__ import annotations

import json
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ktcli.answers.events import AnswerPiece, CallArguments, CallBegins, CallEvent
from ktcli.dialogue.answer import AnswerEvent, AnswerOptions, Ended, Said
from ktcli.engine.request import Finish
from ktcli.server.http.answering import Answering, WireReply, encode, json_response, stamp
from ktcli.server.http.body import body_of
from ktcli.server.http.ollama.fields import GenerateBody, OllamaBody, OllamaChatBody
from ktcli.server.http.openai.chat import chance_of
from ktcli.server.http.openai.text import continuation, infill_options
from ktcli.server.http.refusals import Refusal
from ktcli.server.http.state import ServerState, caller_of, state_of
from ktcli.server.http.waiting import StreamStyle
from ktcli.server.models.generation import Generation
from ktcli.server.models.model import Lease
from ktcli.server.models.prompts import PromptSource

LINES = "application/x-ndjson"
ALIVE = b" "  # before a line, where JSON ignores it


async def chat(request: Request) -> Answering | Response:
    """Responds with the answer to a conversation; without messages it only loads or unloads the model.

    Sends lines of JSON with parts of the `message`, the last one with `done`, token counts and times, or all as one
    document if `stream` is false.
    """
    state = state_of(request)
    body = await body_of(request, OllamaChatBody)
    if not body.messages:
        return await _moved(state, body, {"message": {"role": "assistant", "content": ""}})
    with await state.lease(body.model, body.keep_s) as lease:
        settings = lease.settings
        options = body.chat_options(settings)
        asked = body.chat_request(settings, caller_of(request))
        generation = await _generation(state, lease, body, lease.of_messages(asked), options)
    return _answering(generation, body, in_chat=True)


async def generate(request: Request) -> Answering | Response:
    """Responds with the answer to a text; with an empty prompt it only loads or unloads the model.

    Sends lines of JSON with parts of the `response`, the last one with `done`, token counts and times, or all as one
    document if `stream` is false.
    """
    state = state_of(request)
    body = await body_of(request, GenerateBody)
    caller = caller_of(request)
    if not body.prompt:
        return await _moved(state, body, {"response": ""})
    with await state.lease(body.model, body.keep_s) as lease:
        settings = lease.settings
        options = body.answer_options(settings)
        make = lease.of_messages(body.chat_request(settings, caller))
        if body.suffix or body.raw:
            make = continuation(body.prompt, caller, body.suffix)
        if body.suffix:
            options = infill_options(lease.model, options)
        generation = await _generation(state, lease, body, make, options)
    return _answering(generation, body, in_chat=False)


async def _generation(
    state: ServerState, lease: Lease, body: OllamaBody, make: PromptSource, options: AnswerOptions
) -> Generation:
    """Returns the generation of an answer that stays within `num_ctx`; see `ServerState.generation`."""
    prompt = await state.prompt(lease.model, make)
    options = body.within(options, len(prompt.ids), lease.model.backend.engine.context)
    return await state.answer(lease, prompt, options, body.names)


def _answering(generation: Generation, body: OllamaBody, *, in_chat: bool) -> Answering:
    context = body.context(generation.model.backend.engine.context)
    reply = OllamaReply(generation, in_chat=in_chat, context=context)
    return Answering(generation, reply, stream=body.stream)


async def _moved(state: ServerState, body: OllamaBody, said: dict[str, Any]) -> Response:
    """Loads or unloads the model that a request names, and returns the response that says so."""
    source, keep_s = await state.named(body.model), body.keep_s
    if keep_s == 0:
        state.residency.drop(source)
    else:
        with await state.residency.lease(source, keep_s):
            pass
    reason = "unload" if keep_s == 0 else "load"
    head = {"model": source.name, "created_at": stamp()}
    document = {**head, **said, "done": True, "done_reason": reason}
    return json_response(document)


def failed_early(body: bytes, refusal: Refusal) -> bytes:
    """Returns the body of the stream for a request that failed before its answer began: one line of JSON with the
    error."""
    return encode({"error": refusal.message}) + b"\n"


STREAM = StreamStyle(LINES, ALIVE, failed_early, default=True)


class OllamaReply(WireReply):
    """The answer as lines of JSON.

    Args:
        context: the most tokens of the prompt and the answer, where the request said how many.
    """

    media_type, alive = LINES, ALIVE

    def __init__(
        self, generation: Generation, *, in_chat: bool, context: int | None = None
    ) -> None:
        self._generation, self._in_chat = generation, in_chat
        self._context = context
        self._text = self._thoughts = self._reason = ""
        self._calls: list[dict[str, Any]] = []
        self._chances: list[dict[str, Any]] = []
        self._call: tuple[str, str] = ("", "")  # name and arguments of the one that is open
        self._began_s = time.monotonic()

    def end(self) -> bytes:
        """Returns the last line of a stream: a JSON object with `done`, the token counts, and the times in
        nanoseconds."""
        return self._line("", "", [], self._totals())

    def failed(self, refusal: Refusal) -> bytes:
        """Returns the end of a stream that failed: a line with the error."""
        return self.refused(refusal) + b"\n"

    def whole(self) -> bytes:
        """Returns the answer as one JSON document, with the token counts, and the times in nanoseconds."""
        more = {"logprobs": self._chances} if self._chances else {}
        totals = {**more, **self._totals()}
        return self._line(self._text, self._thoughts, self._calls, totals).rstrip()

    def refused(self, refusal: Refusal) -> bytes:
        """Returns the body of an error response: the JSON document of an error in Ollama's API."""
        return encode({"error": refusal.message})

    def _said(self, event: AnswerEvent) -> bytes:
        if isinstance(event, Ended):
            self._reason = "stop" if event.finish is Finish.STOP else "length"
        if not isinstance(event, Said):
            return b""
        text = thoughts = ""
        calls: list[dict[str, Any]] = []
        for piece in event.events:
            if not isinstance(piece, AnswerPiece):
                calls += self._called(piece)
            elif piece.thought:
                thoughts += piece.text
            else:
                text += piece.text
        self._text, self._thoughts = self._text + text, self._thoughts + thoughts
        self._calls += calls
        more: dict[str, Any] = {"done": False}
        if event.token is not None and event.token.chosen is not None:
            more["logprobs"] = [chance_of(self._generation.model.texts.tokenizer, event.token)]
            self._chances += more["logprobs"]
        shown = text or thoughts or calls or "logprobs" in more
        return self._line(text, thoughts, calls, more) if shown else b""

    def _called(self, event: CallEvent) -> list[dict[str, Any]]:
        """Returns a call once it is complete, else nothing."""
        name, arguments = self._call
        if isinstance(event, CallBegins):
            self._call = event.name, ""
        elif isinstance(event, CallArguments):
            self._call = name, arguments + event.text
        else:
            return [{"function": {"name": name, "arguments": _object(arguments)}}]
        return []

    def _line(
        self, text: str, thoughts: str, calls: list[dict[str, Any]], more: dict[str, Any]
    ) -> bytes:
        said: dict[str, Any]
        if self._in_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thoughts:
                message["thinking"] = thoughts
            if calls:
                message["tool_calls"] = calls
            said = {"message": message}
        else:
            said = {"response": text, **({"thinking": thoughts} if thoughts else {})}
        head = {"model": self._generation.name, "created_at": stamp()}
        return encode({**head, **said, **more}) + b"\n"

    def _totals(self) -> dict[str, Any]:
        """Returns the counts, and the durations in nanoseconds."""
        stats = self._generation.answers[0].stats
        held = {} if self._context is None else {"context_length": self._context}
        return {
            **held,
            "done": True,
            "done_reason": self._reason,
            "total_duration": int(1e9 * (time.monotonic() - self._began_s)),
            "load_duration": 0,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": int(1e9 * stats.prompt_s),
            "eval_count": stats.tokens,
            "eval_duration": int(1e9 * stats.eval_s),
        }


def _object(said: str) -> Any:
    try:
        return json.loads(said or "{}")
    except (ValueError, RecursionError):
        return {}
