"""Answers `/engine`, through which `kt chat` uses this server's models: only through the Unix socket.

Prompts are ids that nobody checked for control tokens; whoever can open that socket may load the models as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from ktcli.engine.constraint import Constraint
from ktcli.engine.request import Answer, Event, Finish, GenerationRequest, PromptRead, Token
from ktcli.engine.sampler import Sampler
from ktcli.errors import KtError
from ktcli.server.attached.wire import (
    PROTOCOL,
    Began,
    EngineFacts,
    EngineRequest,
    Failure,
    LoadableEngine,
    Message,
    NextId,
    Over,
    ReadOn,
)
from ktcli.server.http.answering import (
    ALIVE_S,
    NOTED,
    App,
    Receive,
    Scope,
    Send,
    cancelled_at_end,
    encode,
    json_response,
    send_body,
    send_start,
)
from ktcli.server.http.body import body_of
from ktcli.server.http.guard import require_owner
from ktcli.server.http.metrics import Metrics
from ktcli.server.http.refusals import Refusal, require_within
from ktcli.server.http.state import ServerState, recorded_space, state_of
from ktcli.server.models.constraining import submitted
from ktcli.server.models.model import Lease, ServedModel
from ktcli.server.models.source import ModelSource

_MOST_DRAWN = 1 << 62


async def facts(request: Request) -> Response:
    """Responds with what the server knows of the model whose pack the query parameter `pack` names, as JSON: the facts
    of its engine (`EngineFacts`) if it is in memory, else only its name (`LoadableEngine`)."""
    state, source = await _named(request)
    loaded = state.residency.find(source)
    said = LoadableEngine(source.name) if loaded is None else _facts_of(loaded.model)
    return json_response(said)


async def load(request: Request) -> Response:
    """Loads the model whose pack the query parameter `pack` names, if it is not in memory; responds with the facts of
    its engine (`EngineFacts`) as JSON."""
    state, source = await _named(request)
    with await state.residency.lease(source) as lease:
        said = _facts_of(lease.model)
    return json_response(said)


async def _named(request: Request) -> tuple[ServerState, ModelSource]:
    """Returns the state, and the model whose conversion a request names."""
    require_owner(request)
    state = state_of(request)
    return state, await _source(state, request.query_params.get("pack", ""))


async def _source(state: ServerState, pack: str) -> ModelSource:
    """Returns the model of the library with this conversion.

    Raises:
        Refusal: there is none.
    """
    for each in await state.models():
        loaded = state.residency.find(each)
        if loaded is not None and loaded.model.backend.pack == pack:
            return each
        with contextlib.suppress(KtError):  # a damaged model is none
            if loaded is None and (await state.facts(each)).identity == pack:
                return each
    raise Refusal(404, "model not found: it is no longer served here", "pack", "model_not_found")


def _facts_of(model: ServedModel) -> EngineFacts:
    backend, engine = model.backend, model.backend.engine
    return EngineFacts(
        PROTOCOL,
        backend.name,
        backend.pack,
        engine.context,
        engine.spec.context,
        engine.spec.vocab,
        backend.recurrent,
        engine.step_times is not None,
    )


async def generate(request: Request) -> App:
    """Returns the ASGI application that answers a prompt of token ids. It streams one JSON `Message` per line: the
    request began, part of the prompt was read, the next token id, or the end of the answer."""
    require_owner(request)
    asked, state = await body_of(request, EngineRequest), state_of(request)
    require_within("drawn", asked.drawn, 0, _MOST_DRAWN)
    if asked.max_tokens is not None:
        require_within("max_tokens", asked.max_tokens, 1, None)
    with await state.residency.lease(await _source(state, asked.pack)) as lease:

        def submit(constraints: Sequence[Constraint]) -> EngineAnswering:
            request = _generation(asked, *constraints)
            made = EngineAnswering(lease.again(), request, asked, state.metrics)
            if state.recorder is not None:
                made.ended = state.recorder.begin(recorded_space(lease), request.prompt)
            state.attached.add(made)
            return made

        if (wanted := asked.constraint) is None:
            return submit(())
        grammars = lease.model.grammars
        compile = lambda: [grammars.constraint(wanted)]  # noqa: E731
        return await submitted(grammars, wanted.form.field, compile, submit)


def _generation(asked: EngineRequest, constraint: Constraint | None = None) -> GenerationRequest:
    return GenerationRequest(
        asked.ids,
        asked.sampling,
        frozenset(asked.stop_ids),
        asked.max_tokens,
        caller=asked.caller,
        depths=asked.depths,
        marks=asked.marks,
        shared=asked.shared,
        draft=asked.draft,
        said=asked.said,
        constraint=constraint,
        forced=asked.forced,
    )


class EngineAnswering:
    """An ASGI application that sends an answer's ids, step by step. A client that leaves ends it within one step."""

    def __init__(
        self, lease: Lease, request: GenerationRequest, asked: EngineRequest, metrics: Metrics
    ) -> None:
        self._lease, self._metrics, self._model = lease, metrics, lease.model
        self._engine = lease.model.backend.engine
        self._began_s = time.monotonic()
        self._token_s: float | None = None  # when the last token came
        self._messages: list[Message] = [Began(list(self._engine.operations()))]
        self._came = asyncio.Event()
        self.ended: Callable[[int], None] = lambda tokens: None
        self._over = False
        self._said = False  # whether an id was told
        sampler = Sampler(asked.sampling)
        sampler.skip(asked.drawn)
        try:
            self.answer: Answer = self._model.thread.submit(
                request, self._on_event, sampler, asked.caller
            )
        except BaseException:
            lease.release()
            raise

    def cancel(self) -> None:
        """Cancels the answer: the engine ends it at its next step."""
        self.answer.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with cancelled_at_end(receive, self.cancel):
                await self._stream(send)
        finally:
            stats = self.answer.stats
            counts = {"prompt_tokens": stats.prompt_tokens, "cached_tokens": stats.reused_tokens}
            scope[NOTED] |= {**counts, "tokens": stats.tokens}

    async def _stream(self, send: Send) -> None:
        await send_start(send, 200, "application/jsonl", {"Cache-Control": "no-cache"})
        while not self._over or self._messages:
            messages, self._messages = self._messages, []
            # Empty lines keep the connection alive.
            await send_body(send, b"".join(map(_line, messages)) or b"\n")
            if not self._messages and not self._over:
                self._came.clear()
                try:
                    async with asyncio.timeout(ALIVE_S):
                        await self._came.wait()
                except TimeoutError:
                    continue
        await send_body(send, b"", more=False)

    def _receive(self, message: Message) -> None:
        """Takes a message of the engine's thread, in the event loop."""
        now = time.monotonic()
        if isinstance(message, NextId):
            first = self._token_s is None
            since = self._began_s if self._token_s is None else self._token_s
            self._metrics.times["time_to_first_token" if first else "inter_token_latency"].observe(
                now - since
            )
            self._token_s = now
        elif isinstance(message, Over):
            self._over = True
            self._metrics.ended(message.stats, Finish(message.finish), now - self._began_s)
            self.ended(message.stats.tokens)
            self._lease.release()
            del self._engine, self._model  # their memory may be given back now
        self._messages.append(message)
        self._came.set()

    # -- on the engine's thread ------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        answer = event.answer
        stats = replace(answer.stats)  # it goes on counting
        message: Message
        if isinstance(event, PromptRead):
            message = ReadOn(event.done, event.total, stats)
        elif isinstance(event, Token):
            message = NextId(event.id, stats, event.how)
            if not self._said:
                self._said = True
                message.clocks, message.depths = list(self._engine.operations()), answer.depths
        else:
            said, error = Failure(), event.error
            if error is not None:
                said = Failure(str(error), error.hint if isinstance(error, KtError) else "")
            clocks, drawn = list(self._engine.operations()), answer.sampler.drawn
            message = Over(event.finish.value, stats, clocks, drawn, said)
        self._model.queue.put(self._receive, message)


def _line(message: Message) -> bytes:
    return encode(message) + b"\n"
