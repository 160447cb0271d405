"""`/v1/completions`: texts that go on."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request

from ktcli.chat.pieces import AnswerPiece
from ktcli.engine.request import Token
from ktcli.server.answering import Answering
from ktcli.server.body import body_of
from ktcli.server.generation import Ended, Generation, News, PromptProgress
from ktcli.server.house import caller_of, house_of
from ktcli.server.openai.chat import chance_of
from ktcli.server.openai.envelope import ALIVE, DONE, EVENTS, FINISH, encode, error_of, line, usage
from ktcli.server.openai.fields import TextBody
from ktcli.server.prompts import EncodedPrompt, PromptMaker
from ktcli.server.refusal import Refusal, about


async def completions(request: Request) -> Answering:
    """Goes on with a text."""
    house = house_of(request)
    body = await body_of(request, TextBody)
    caller, prompt = caller_of(request), body.one_prompt()

    def make(prompts: PromptMaker) -> EncodedPrompt:
        with about("prompt"):
            if isinstance(prompt, str):
                return prompts.of_text(prompt, caller)
            return prompts.of_ids(prompt, caller)

    with await house.lease(body.model) as lease:
        wish = body.text_wish(lease.model.voice.settings)
        generation = await house.generation(lease, make, wish)
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
        n = generation.wish.choices
        self._texts, self._finish = [""] * n, [""] * n
        self._chances: list[list[tuple[Token, int]]] = [[] for _ in range(n)]

    def begin(self) -> bytes:
        return b""

    def take(self, news: list[News]) -> bytes:
        return b"".join(self._said(each) for each in news)

    def end(self) -> bytes:
        if not self._body.wants_usage:
            return DONE
        return line({**self._head, "choices": [], "usage": usage(self._generation, 0)}) + DONE

    def failed(self, refusal: Refusal) -> bytes:
        return line(error_of(refusal)) + DONE

    def whole(self) -> bytes:
        choices = [
            self._choice(at, text, self._finish[at], self._chances[at])
            for at, text in enumerate(self._texts)
        ]
        return encode({**self._head, "choices": choices, "usage": usage(self._generation, 0)})

    def refused(self, refusal: Refusal) -> bytes:
        return encode(error_of(refusal))

    def _said(self, news: News) -> bytes:
        if isinstance(news, PromptProgress):
            return b""
        at = news.choice
        if isinstance(news, Ended):
            self._finish[at] = FINISH[news.finish]
            choice = self._choice(at, "", self._finish[at], [])
            return line({**self._head, "choices": [choice]})
        text = "".join(piece.text for piece in news.pieces if isinstance(piece, AnswerPiece))
        fresh = []
        if news.token is not None and news.token.chosen is not None:
            fresh = [(news.token, len(self._texts[at]))]
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
        tokenizer = self._generation.model.voice.tokenizer
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
