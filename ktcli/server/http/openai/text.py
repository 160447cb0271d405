"""`/v1/completions`: texts that go on."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request

from ktcli.answers.events import AnswerPiece
from ktcli.dialogue.answer import AnswerEvent, Ended, PromptProgress
from ktcli.dialogue.prompts import EncodedPrompt
from ktcli.engine.request import Token
from ktcli.server.http.answering import Answering
from ktcli.server.http.body import body_of
from ktcli.server.http.openai.chat import chance_of
from ktcli.server.http.openai.envelope import (
    ALIVE,
    DONE,
    EVENTS,
    FINISH,
    encode,
    error_of,
    line,
    usage,
)
from ktcli.server.http.openai.fields import TextBody
from ktcli.server.http.refusals import Refusal, about
from ktcli.server.http.state import caller_of, state_of
from ktcli.server.models.generation import Generation
from ktcli.server.models.prompts import PromptMaker


async def completions(request: Request) -> Answering:
    """Goes on with a text."""
    state = state_of(request)
    body = await body_of(request, TextBody)
    caller, prompt = caller_of(request), body.one_prompt()

    def make(prompts: PromptMaker) -> EncodedPrompt:
        with about("prompt"):
            if isinstance(prompt, str):
                return prompts.of_text(prompt, caller)
            return prompts.of_ids(prompt, caller)

    with await state.lease(body.model) as lease:
        options = body.text_options(lease.model.texts.settings)
        generation = await state.generation(lease, make, options)
    return Answering(generation, TextReply(generation, body), stream=body.stream)


class TextReply:
    """The answers as completions of a text."""

    media_type, alive = EVENTS, ALIVE

    def __init__(self, generation: Generation, body: TextBody) -> None:
        self._generation, self._body = generation, body
        self._head = {
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": generation.model.name,
        }
        n = generation.options.choices
        self._texts, self._finish = [""] * n, [""] * n
        self._chances: list[list[tuple[Token, int]]] = [[] for _ in range(n)]

    def begin(self) -> bytes:
        """Returns the beginning of a stream, which is empty."""
        return b""

    def take(self, events: list[AnswerEvent]) -> bytes:
        """Takes events; returns the chunks that they make."""
        return b"".join(self._said(each) for each in events)

    def end(self) -> bytes:
        """Returns the end of a stream: a chunk with the usage if it was asked for, then `[DONE]`."""
        if not self._body.wants_usage:
            return DONE
        return line({**self._head, "choices": [], "usage": usage(self._generation, 0)}) + DONE

    def failed(self, refusal: Refusal) -> bytes:
        """Returns the end of a stream that failed: the error, then `[DONE]`."""
        return line(error_of(refusal)) + DONE

    def whole(self) -> bytes:
        """Returns the completion as one JSON document: all choices, and the usage."""
        choices = [
            self._choice(at, text, self._finish[at], self._chances[at])
            for at, text in enumerate(self._texts)
        ]
        return encode({**self._head, "choices": choices, "usage": usage(self._generation, 0)})

    def refused(self, refusal: Refusal) -> bytes:
        """Returns the JSON document of an error."""
        return encode(error_of(refusal))

    def _said(self, event: AnswerEvent) -> bytes:
        if isinstance(event, PromptProgress):
            return b""
        at = event.choice
        if isinstance(event, Ended):
            self._finish[at] = FINISH[event.finish]
            choice = self._choice(at, "", self._finish[at], [])
            return line({**self._head, "choices": [choice]})
        text = "".join(piece.text for piece in event.events if isinstance(piece, AnswerPiece))
        fresh = []
        if event.token is not None and event.token.chosen is not None:
            fresh = [(event.token, len(self._texts[at]))]
            self._chances[at] += fresh
        self._texts[at] += text
        if not text and not fresh:
            return b""
        return line({**self._head, "choices": [self._choice(at, text, None, fresh)]})

    def _choice(
        self, index: int, text: str, finish: str | None, tokens: list[tuple[Token, int]]
    ) -> dict[str, Any]:
        said = {"index": index, "text": text, "finish_reason": finish, "logprobs": None}
        if self._body.logprobs is not None and (tokens or finish is None):
            said["logprobs"] = self._logprobs(tokens)
        return said

    def _logprobs(self, tokens: list[tuple[Token, int]]) -> dict[str, Any]:
        tokenizer = self._generation.model.texts.tokenizer
        chances = [chance_of(tokenizer, token) for token, _ in tokens]
        likeliest = [
            {top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in chances
        ]
        return {
            "tokens": [each["token"] for each in chances],
            "token_logprobs": [each["logprob"] for each in chances],
            "top_logprobs": likeliest,
            "text_offset": [at for _, at in tokens],
        }
