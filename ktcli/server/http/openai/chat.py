"""`/v1/chat/completions`: the options of a request, and its replies."""

from __future__ import annotations

import secrets
import time
from dataclasses import field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ktcli.answers.events import AnswerPiece, CallArguments, CallBegins, CallEvent
from ktcli.dialogue.answer import AnswerEvent, Ended, PromptProgress, Said
from ktcli.dialogue.prompts import EncodedPrompt
from ktcli.engine.request import Candidate, Finish, Token
from ktcli.records import dataclass
from ktcli.server.http.answering import Answering, encode, json_response
from ktcli.server.http.body import body_of
from ktcli.server.http.openai.envelope import (
    DONE,
    FINGERPRINT,
    FINISH,
    OpenAIReply,
    line,
    timings,
    usage,
)
from ktcli.server.http.openai.fields import ChatBody
from ktcli.server.http.state import caller_of, state_of
from ktcli.server.models.generation import Generation
from ktcli.text.tokenizer import Tokenizer


async def chat_completions(request: Request) -> Answering:
    """Responds with the answer to a conversation.

    Sends a chat completion as JSON or, if `stream` is true, its chunks as server-sent events.
    """
    state = state_of(request)
    body = await body_of(request, ChatBody)
    with await state.lease(body.model) as lease:
        settings = lease.settings
        options = body.chat_options(settings)
        asked = body.chat_request(settings, caller_of(request))
        generation = await state.generation(lease, lease.of_messages(asked), options)
    return Answering(generation, ChatReply(generation, body), stream=body.stream)


async def render(request: Request) -> Response:
    """Returns the prompt of a conversation, as text and as token ids, without answering it.

    Sends JSON with `model`, `prompt` (text), `token_ids` and `count` (of the ids).
    """
    name, prompt = await _rendered(request)
    ids = list(prompt.ids)
    said = {"model": name, "prompt": prompt.text, "token_ids": ids, "count": len(ids)}
    return json_response(said)


async def apply_template(request: Request) -> Response:
    """Returns the text of the prompt of a conversation, as llama.cpp's server does.

    Sends it as JSON in the field `prompt`.
    """
    _, prompt = await _rendered(request)
    return json_response({"prompt": prompt.text})


async def chat_input_tokens(request: Request) -> Response:
    """Returns the number of tokens of the prompt of a conversation.

    Sends it as JSON in the field `input_tokens`.
    """
    _, prompt = await _rendered(request)
    said = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
    return json_response(said)


async def _rendered(request: Request) -> tuple[str, EncodedPrompt]:
    """Returns the name of the model that a request for an answer names, and the prompt that it would have."""
    state = state_of(request)
    body = await body_of(request, ChatBody)
    with await state.lease(body.model) as lease:
        settings = lease.settings
        body.chat_options(settings)  # what could not be answered is refused here, too
        asked = body.chat_request(settings, caller_of(request))
        prompt = await state.prompt(lease.model, lease.of_messages(asked))
        return lease.name, prompt


@dataclass(slots=True)
class _ChoiceText:
    """One answer so far."""

    text: str = ""
    thoughts: str = ""
    finish: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    chances: list[dict[str, Any]] = field(default_factory=list)


class ChatReply(OpenAIReply):
    """The answers as chat completions."""

    def __init__(self, generation: Generation, body: ChatBody) -> None:
        self._generation, self._body = generation, body
        self._head = {
            "id": f"chatcmpl-{generation.id}",
            "created": int(time.time()),
            "model": generation.name,
            "system_fingerprint": FINGERPRINT,
        }
        self._tokenizer = generation.model.texts.tokenizer
        self._choices = [_ChoiceText() for _ in range(generation.options.choices)]
        self._thought_tokens = 0
        self._progressed = False  # whether the stream has said how much of the prompt was cached
        self._began_s = time.monotonic()

    def begin(self) -> bytes:
        """Returns the beginning of a stream: for each choice, a chunk with its role."""
        # Null, as llama.cpp sends: it says that no text has come yet, where "" looks like a piece of it.
        return b"".join(
            self._chunk(choice, {"role": "assistant", "content": None})
            for choice in range(len(self._choices))
        )

    def end(self) -> bytes:
        """Returns the end of a stream: a chunk with the usage if it was asked for, then `[DONE]`."""
        if not self._body.wants_usage:
            return DONE
        last = {"usage": usage(self._generation, self._thought_tokens), **self._timings()}
        return line({**self._head, "object": _CHUNK, "choices": [], **last}) + DONE

    def whole(self) -> bytes:
        """Returns the chat completion as one JSON document: all choices, the usage, and the timings."""
        choices = [self._finished(at, each) for at, each in enumerate(self._choices)]
        used = usage(self._generation, self._thought_tokens)
        return encode(
            {**self._head, "object": "chat.completion", "choices": choices, "usage": used}
            | self._timings()
        )

    def _said(self, event: AnswerEvent) -> bytes:
        if isinstance(event, PromptProgress):
            return self._progress(event) if self._body.return_progress else b""
        choice = self._choices[event.choice]
        if isinstance(event, Ended):
            whole = event.calls and event.finish is Finish.STOP
            choice.finish = "tool_calls" if whole else FINISH[event.finish]
            return self._chunk(event.choice, {}, choice.finish)
        return self._delta(choice, event)

    def _delta(self, choice: _ChoiceText, said: Said) -> bytes:
        delta: dict[str, Any] = {}
        for piece in said.events:
            if not isinstance(piece, AnswerPiece):
                self._called(choice, piece, delta.setdefault("tool_calls", []))
                continue
            names = ("reasoning_content", "reasoning") if piece.thought else ("content",)
            for name in names:
                delta[name] = delta.get(name, "") + piece.text
        if not delta.get("tool_calls", True):
            del delta["tool_calls"]
        choice.text += delta.get("content", "")
        choice.thoughts += delta.get("reasoning", "")
        if said.token is not None and "reasoning" in delta:
            self._thought_tokens += 1
        chances = None
        if said.token is not None and said.token.chosen is not None:
            chances = [chance_of(self._tokenizer, said.token)]
            choice.chances += chances
        if not delta and not chances:
            return b""
        return self._chunk(said.choice, delta, None, chances)

    @staticmethod
    def _called(choice: _ChoiceText, event: CallEvent, deltas: list[dict[str, Any]]) -> None:
        """Adds an event of a call to the answer, and to the delta of the stream."""
        if isinstance(event, CallBegins):
            id = event.id or f"call_{secrets.token_hex(12)}"
            function = {"name": event.name, "arguments": ""}
            choice.calls.append({"id": id, "type": "function", "function": function})
            deltas.append(
                {"index": event.number, "id": id, "type": "function", "function": {**function}}
            )
        elif isinstance(event, CallArguments):
            choice.calls[event.number]["function"]["arguments"] += event.text
            if deltas and deltas[-1]["index"] == event.number:
                deltas[-1]["function"]["arguments"] += event.text
            else:
                deltas.append({"index": event.number, "function": {"arguments": event.text}})

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        finish: str | None = None,
        chances: list[dict[str, Any]] | None = None,
    ) -> bytes:
        said: dict[str, Any] = {"index": choice, "delta": delta, "finish_reason": finish}
        said["logprobs"] = None if chances is None else {"content": chances, "refusal": None}
        return line({**self._head, "object": _CHUNK, "choices": [said]})

    def _progress(self, event: PromptProgress) -> bytes:
        """Returns a chunk that says how far the prompt is read; before the first one, another with what was cached."""
        begins = b"" if self._progressed else self._read(0)
        self._progressed = True
        return begins + self._read(event.done)

    def _read(self, done: int) -> bytes:
        cached = self._generation.reused_tokens
        said = {
            "total": len(self._generation.prompt.ids),
            "cache": cached,
            "processed": cached + done,
            "time_ms": int(1000 * (time.monotonic() - self._began_s)),
        }
        return line({**self._head, "object": _CHUNK, "choices": [], "prompt_progress": said})

    def _finished(self, index: int, choice: _ChoiceText) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.thoughts:
            message["reasoning_content"] = message["reasoning"] = choice.thoughts
        if choice.calls:
            message["tool_calls"] = choice.calls
            message["content"] = choice.text or None
        chances = {"content": choice.chances, "refusal": None} if self._body.logprobs else None
        return {
            "index": index,
            "message": message,
            "finish_reason": choice.finish,
            "logprobs": chances,
        }

    def _timings(self) -> dict[str, Any]:
        return {"timings": timings(self._generation.answers[0].stats)}


_CHUNK = "chat.completion.chunk"


def chance_of(tokenizer: Tokenizer, token: Token) -> dict[str, Any]:
    """Returns an entry of a chat completion's `logprobs`: the fields of `candidate_of` for the token, and in
    `top_logprobs` those of the likeliest tokens in its place."""
    assert token.chosen is not None
    likeliest = [candidate_of(tokenizer, each) for each in token.likeliest]
    return {**candidate_of(tokenizer, token.chosen), "top_logprobs": likeliest}


def candidate_of(tokenizer: Tokenizer, candidate: Candidate) -> dict[str, Any]:
    """Returns a token's text (`token`), log probability (`logprob`, at least -9999) and bytes (`bytes`, a list of
    integers), in the form of chat completions."""
    data = tokenizer.bytes_of(candidate.id) if tokenizer.byte_level else b""
    text = (
        data.decode("utf-8", "replace") if data else tokenizer.decode([candidate.id], special=True)
    )
    data = data or text.encode("utf-8", "replace")
    return {"token": text, "logprob": max(candidate.logprob, -9999.0), "bytes": list(data)}
