"""Answers `/engine`, by which `kt chat` uses this server's model; only through the Unix socket, which only the server's
owner can open. Prompts are ids that nobody checked for control tokens: whoever may send them may load the model, too.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ktcli.chat.grammar.compiler import GrammarConstraint
from ktcli.chat.partner import Held
from ktcli.engine.request import (
    Answer,
    Event,
    Finish,
    GenerationRequest,
    PromptRead,
    Token,
)
from ktcli.engine.sampler import Sampler
from ktcli.errors import KtError
from ktcli.server.answering import ALIVE_S, Receive, Scope, Send, send_body, send_start
from ktcli.server.enginewire import (
    Began,
    Chosen,
    EngineFacts,
    EngineRequest,
    Failure,
    Message,
    Over,
    ReadOn,
)
from ktcli.server.guard import NOTED, App, is_owner
from ktcli.server.house import body_of, compiled, house_of
from ktcli.server.metrics import Metrics
from ktcli.server.model import ServedModel
from ktcli.server.refusal import Refusal
from ktcli.server.residency import Lease

_MOST_DRAWN = 1 << 62


async def facts(request: Request) -> Response:
    """What a chat must know of the model."""
    _require_owner(request)
    with await house_of(request).lease("") as lease:
        speaker = lease.model.speaker
        engine = speaker.engine
        said = EngineFacts(
            speaker.name,
            speaker.pack,
            engine.context,
            engine.spec.context,
            engine.spec.vocab,
            engine.pools.states is not None,
            engine.step_times is not None,
        )
    return Response(msgspec.json.encode(said), media_type="application/json")


async def generate(request: Request) -> App:
    """Answers a prompt of ids."""
    _require_owner(request)
    asked, house = await body_of(request, EngineRequest), house_of(request)
    if not 0 <= asked.drawn <= _MOST_DRAWN:
        raise Refusal(400, f"drawn is {asked.drawn}", "drawn", "unsupported_value")
    with await house.lease("") as lease:
        model = lease.model
        if model.speaker.pack != asked.pack:
            raise Refusal(
                409, f"{model.name} is served here now, another model", "pack", "other_model"
            )
        constraint = await _constraint(model, asked)
        return EngineAnswering(lease.again(), _generation(asked, constraint), asked, house.metrics)


def _require_owner(request: Request) -> None:
    if not is_owner(request.scope):
        raise Refusal(404, f"there is no {request.url.path[:200]} here")


async def _constraint(model: ServedModel, asked: EngineRequest) -> GrammarConstraint | None:
    if (said := asked.held) is None:
        return None
    held = Held(said.form, said.prompt, tuple(said.said))
    return await compiled(model.grammars, said.form.field, lambda: model.grammars.held(held))


def _generation(asked: EngineRequest, constraint: GrammarConstraint | None) -> GenerationRequest:
    return GenerationRequest(
        asked.ids,
        asked.sampling,
        frozenset(asked.stop_ids),
        asked.max_tokens,
        caller=asked.caller,
        depths=asked.depths,
        marks=asked.marks,
        draft=asked.draft,
        constraint=constraint,
    )


class EngineAnswering:
    """An ASGI application that sends an answer's ids, step by step. A client that leaves ends it within one step."""

    def __init__(
        self, lease: Lease, request: GenerationRequest, asked: EngineRequest, metrics: Metrics
    ) -> None:
        self._lease, self._metrics, self._model = lease, metrics, lease.model
        self._engine = lease.model.speaker.engine
        self._began_s = time.monotonic()
        self._heard_s: float | None = None  # when the last token came
        self._letters: list[Message] = [Began(list(self._engine.operations()))]
        self._came = asyncio.Event()
        self._over = False
        self._said = 0
        sampler = Sampler(asked.sampling)
        sampler.skip(asked.drawn)
        try:
            self.answer: Answer = self._model.thread.submit(request, self._hear, sampler)
        except BaseException:
            lease.release()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(self._cancel_when_gone(receive))
        try:
            await self._stream(send)
        except TimeoutError:  # the client takes nothing any more
            pass
        finally:
            self.answer.cancel()
            leaving.cancel()
            stats = self.answer.stats
            counts = (stats.prompt_tokens, stats.reused_tokens, stats.tokens)
            scope[NOTED] |= dict(
                zip(("prompt_tokens", "cached_tokens", "tokens"), counts, strict=True)
            )

    async def _cancel_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.answer.cancel()

    async def _stream(self, send: Send) -> None:
        await send_start(send, 200, "application/jsonl", {"Cache-Control": "no-cache"})
        while not self._over or self._letters:
            letters, self._letters = self._letters, []
            # Empty lines show that the server lives.
            await send_body(send, b"".join(map(_line, letters)) or b"\n")
            if not self._letters and not self._over:
                self._came.clear()
                try:
                    async with asyncio.timeout(ALIVE_S):
                        await self._came.wait()
                except TimeoutError:
                    continue
        await send_body(send, b"", more=False)

    def _receive(self, letter: Message) -> None:
        """Takes what the engine's thread says, in the event loop."""
        now = time.monotonic()
        if isinstance(letter, Chosen):
            first = self._heard_s is None
            since = self._began_s if self._heard_s is None else self._heard_s
            (self._metrics.first_token if first else self._metrics.gap).observe(now - since)
            self._heard_s = now
        elif isinstance(letter, Over):
            self._over = True
            self._metrics.ended(letter.stats, Finish(letter.finish), now - self._began_s)
            self._lease.release()
        self._letters.append(letter)
        self._came.set()

    # -- on the engine's thread ------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        answer = event.answer
        stats = replace(answer.stats)  # it goes on counting
        letter: Message
        if isinstance(event, PromptRead):
            letter = ReadOn(event.done, event.total, stats)
        elif isinstance(event, Token):
            self._said += 1
            position = len(answer.request.prompt) + self._said - 1
            letter = Chosen(event.id, stats, self._engine.depth_at(position))
            if self._said == 1:
                letter.clocks, letter.depths = list(self._engine.operations()), answer.depths
        else:
            said, error = Failure(), event.error
            if error is not None:
                said = Failure(str(error), error.hint if isinstance(error, KtError) else "")
            clocks, drawn = list(self._engine.operations()), answer.sampler.drawn
            letter = Over(event.finish.value, stats, clocks, drawn, said)
        self._model.mail.write(self._receive, letter)


def _line(letter: Message) -> bytes:
    return msgspec.json.encode(letter) + b"\n"
