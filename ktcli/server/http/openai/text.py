"""`/v1/completions`: continues texts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from ktcli.answers.events import AnswerPiece
from ktcli.dialogue.answer import AnswerEvent, AnswerOptions, Ended, PromptProgress, Said
from ktcli.dialogue.prompts import EncodedPrompt
from ktcli.engine.request import Candidate, Token
from ktcli.errors import UsageError
from ktcli.server.http.answering import Answering, encode
from ktcli.server.http.body import body_of
from ktcli.server.http.openai.chat import candidate_of, chance_of
from ktcli.server.http.openai.envelope import (
    DONE,
    FINGERPRINT,
    FINISH,
    OpenAIReply,
    line,
    usage,
)
from ktcli.server.http.openai.fields import TextBody
from ktcli.server.http.refusals import about
from ktcli.server.http.state import caller_of, state_of
from ktcli.server.models.generation import Generation, Generations
from ktcli.server.models.model import ServedModel
from ktcli.server.models.prompts import PromptMaker, PromptSource
from ktcli.text.tokenizer import Tokenizer


async def completions(request: Request) -> Answering:
    """Responds with the continuation of a text.

    Sends a text completion as JSON or, if `stream` is true, its chunks as server-sent events.
    """
    state = state_of(request)
    body = await body_of(request, TextBody)
    caller, made = caller_of(request), list[Generation]()
    try:
        with await state.lease(body.model) as lease:
            options = body.text_options(lease.settings)
            if body.suffix:
                options = infill_options(lease.model, options)
            for prompt in body.prompts():
                make = continuation(prompt, caller, body.suffix or "")
                made.append(await state.generation(lease, make, options))
    except BaseException:
        for each in made:
            each.cancel()
        raise
    generations = Generations(made)
    return Answering(generations, TextReply(generations, body, options), stream=body.stream)


def infill_options(model: ServedModel, options: AnswerOptions) -> AnswerOptions:
    """Returns `options` for an answer that fills the gap between two texts: it is plain text, and also ends where the
    model would begin the next file."""
    infill = model.prompts.infill
    ends = frozenset() if infill is None else infill.ends
    return replace(options, plain=True, stop_ids=options.stop_ids | ends)


def continuation(prompt: str | list[int], caller: str, suffix: str) -> PromptSource:
    """Returns a function that makes the prompt for continuing `prompt` (a text or token ids) or, if there is a
    `suffix`, for the text between `prompt` and `suffix`."""

    def make(prompts: PromptMaker) -> EncodedPrompt:
        if suffix:
            with about("suffix"):
                if not isinstance(prompt, str):
                    raise UsageError("suffix requires the prompt to be a string")
                return prompts.of_infill(prompt, suffix, caller)
        with about("prompt"):
            if isinstance(prompt, str):
                return prompts.of_text(prompt, caller)
            return prompts.of_ids(prompt, caller)

    return make


class TextReply(OpenAIReply):
    """The answers as completions of a text."""

    def __init__(self, generation: Generations, body: TextBody, options: AnswerOptions) -> None:
        self._generation, self._body, self._each = generation, body, options.choices
        self._head = {
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": generation.name,
            "system_fingerprint": FINGERPRINT,
        }
        n = options.choices * len(generation.prompts)
        self._texts, self._finish = [""] * n, [""] * n
        self._chances: list[list[_Chance]] = [[] for _ in range(n)]
        # Chances of the prompts, which the answers to each share; the first token has none.
        self._read: list[list[Token]] = [[] for _ in generation.prompts]
        self._echoed: set[int] = set()  # the choices of a stream whose prompts are out
        self._tokenizer = generation.model.texts.tokenizer

    def end(self) -> bytes:
        """Returns the end of a stream: a chunk with the usage if it was asked for, then `[DONE]`."""
        if not self._body.wants_usage:
            return DONE
        return line({**self._head, "choices": [], "usage": usage(self._generation, 0)}) + DONE

    def whole(self) -> bytes:
        """Returns the completion as one JSON document: all choices, and the usage."""
        choices = []
        for at, text in enumerate(self._texts):
            before, chances = self._echo(at)
            moved = [(token, len(before) + place) for token, place in self._chances[at]]
            said = self._choice(at, before + text, self._finish[at], chances + moved)
            choices.append(said)
        return encode({**self._head, "choices": choices, "usage": usage(self._generation, 0)})

    def _said(self, event: AnswerEvent) -> bytes:
        at = event.choice
        if isinstance(event, PromptProgress):
            self._read[at // self._each] += event.chances
            return b""
        echo = b""
        if self._body.echo and at not in self._echoed:
            self._echoed.add(at)
            before, chances = self._echo(at)
            echo = line({**self._head, "choices": [self._choice(at, before, None, chances)]})
        return echo + self._added(event)

    def _added(self, event: Said | Ended) -> bytes:
        """Returns the chunk that an event adds to a stream."""
        at = event.choice
        if isinstance(event, Ended):
            self._finish[at] = FINISH[event.finish]
            choice = self._choice(at, "", self._finish[at], [])
            return line({**self._head, "choices": [choice]})
        text = "".join(piece.text for piece in event.events if isinstance(piece, AnswerPiece))
        fresh: list[_Chance] = []
        if event.token is not None and event.token.chosen is not None:
            fresh = [(event.token, len(self._texts[at]))]
            self._chances[at] += fresh
        self._texts[at] += text
        if not text and not fresh:
            return b""
        before = len(self._generation.prompts[at // self._each].text) if self._body.echo else 0
        moved = [(token, before + place) for token, place in fresh]
        return line({**self._head, "choices": [self._choice(at, text, None, moved)]})

    def _echo(self, at: int) -> tuple[str, list[_Chance]]:
        """Returns the prompt of a choice, and its tokens with their chances, if both are wanted."""
        if not self._body.echo:
            return "", []
        prompt, tokenizer = self._generation.prompts[at // self._each], self._tokenizer
        if self._body.logprobs is None:
            return prompt.text, []
        found: list[_Chance] = [(int(prompt.ids[0]), 0)]
        place = len(_text_of(tokenizer, int(prompt.ids[0])))
        for token in self._read[at // self._each]:
            found.append((token, place))
            place += len(_text_of(tokenizer, token.id))
        return prompt.text, found

    def _choice(
        self, index: int, text: str, finish: str | None, tokens: list[_Chance]
    ) -> dict[str, Any]:
        said = {"index": index, "text": text, "finish_reason": finish, "logprobs": None}
        if self._body.logprobs is not None and (tokens or finish is None):
            said["logprobs"] = self._logprobs(tokens)
        return said

    def _logprobs(self, tokens: list[_Chance]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token, place in tokens:
            found["text_offset"].append(place)
            if isinstance(token, int):  # nothing is before it
                found["tokens"].append(_text_of(self._tokenizer, token))
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            each = chance_of(self._tokenizer, token)
            found["tokens"].append(each["token"])
            found["token_logprobs"].append(each["logprob"])
            likeliest = {top["token"]: top["logprob"] for top in each["top_logprobs"]}
            found["top_logprobs"].append(likeliest)
        return found


# A token with its chance, or the id of one that has none, and where its text begins.
_Chance = tuple[Token | int, int]


def _text_of(tokenizer: Tokenizer, id: int) -> str:
    """Returns the text of one token, as `chance_of` tells it."""
    return str(candidate_of(tokenizer, Candidate(id, 0.0))["token"])
