"""Computes embeddings of texts: their ids on the main thread, their hidden rows in the engine, in turn with other
requests.

Whole texts are checked and cut into ids first, some at a time, so that no other client's prompt waits long. Then a
few of them are with the engine at once: it computes short ones together, and others' requests between them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.pooling import PooledRows
from ktcli.engine.request import Answer, Event, Finish, Finished, GenerationRequest
from ktcli.errors import KtError, UsageError
from ktcli.models.pooling import TextPooling
from ktcli.records import dataclass
from ktcli.server.models.jobs import Jobs
from ktcli.server.models.model import ServedModel
from ktcli.server.models.textids import TOKENS_MOST, EmbeddingRequest, TextCutter, TextIds
from ktcli.server.process.drain import shutting_down
from ktcli.server.tracing.spans import Inference

_AT_ONCE = 32  # texts that are with the engine at once, of one request

F32Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The embeddings of a request.

    Attributes:
        vectors: one for each text, in order.
        tokens: the tokens of all texts, with those around them.
        reused: those of them that were in the cache.
        inference: what a trace says of it.
    """

    vectors: Sequence[F32Array]
    tokens: int
    reused: int
    inference: Inference


@dataclass(eq=False, slots=True, weakref_slot=True)
class EmbeddingRun:
    """One request for embeddings in progress, for the event loop.

    Args:
        pooling: of the model.
    """

    model: ServedModel
    pooling: TextPooling
    asked: EmbeddingRequest
    _answers: set[Answer] = field(default_factory=set)  # that the engine works on
    _cancelled: bool = False

    def cancel(self) -> None:
        """Cancels the request; the engine ends it at its next step."""
        self._cancelled = True
        for each in self._answers:
            each.cancel()

    async def compute(self, jobs: Jobs) -> Embeddings:
        """Returns the embedding vectors of all texts of the request, in order, with the token counts.

        Args:
            jobs: the queue of the main thread.
        Raises:
            UsageError, ContextFull: a text cannot be embedded; its number is named.
            QueueFull, Busy, KtError: see `EngineThread.submit`; or the engine fails.
        """
        began_s = time.monotonic()
        cutter = TextCutter(self.model, self.pooling, self.asked)
        prompts: list[TextIds] = []
        for some in cutter.parts():
            prompts += await jobs.result(partial(cutter.cut, some))
            if sum(each.ids.size for each in prompts) > TOKENS_MOST:
                raise UsageError(
                    f"the texts have more than {TOKENS_MOST:,} tokens, the limit for one request"
                )
        try:
            found = await self._computed(prompts)
        finally:
            self.cancel()
        vectors, reused = [each for each, _ in found], sum(each for _, each in found)
        tokens, ended_s = sum(each.ids.size for each in prompts), time.monotonic()
        name = self.model.name
        done = Inference(name, "", began_s, None, ended_s, tokens, reused, 0)
        return Embeddings(vectors, tokens, reused, done)

    async def _computed(self, prompts: Sequence[TextIds]) -> list[tuple[F32Array, int]]:
        """Returns the embeddings of all texts, in order, each with the number of its tokens that were in the cache;
        only so many texts are with the engine at once."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(prompt: TextIds) -> tuple[F32Array, int]:
            async with room:
                answer = await self._one(prompt)
            return self._vector(answer), answer.stats.reused_tokens

        tasks = [asyncio.ensure_future(one(each)) for each in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for each in tasks:
                each.cancel()

    async def _one(self, prompt: TextIds) -> Answer:
        """Returns the answer of the engine to one prompt, which has its hidden rows."""
        ended: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()

        def hear(event: Event) -> None:  # on the engine's thread
            if isinstance(event, Finished):
                self.model.queue.put(_settle, (ended, event))

        rows = PooledRows(self.pooling.mode, prompt.since)
        request = GenerationRequest(
            prompt.ids.tolist(), max_tokens=0, caller=self.asked.caller, pooled=rows
        )
        answer = self.model.thread.submit(request, hear)
        self._answers.add(answer)
        if self._cancelled:
            answer.cancel()
        finished = await ended
        self._answers.remove(answer)
        if finished.finish in (Finish.FAILED, Finish.CANCELLED):
            raise finished.error or shutting_down()
        return answer

    def _vector(self, answer: Answer) -> F32Array:
        """Returns the embedding: the pooled row, shortened, and normalized if the model's are.

        Raises:
            KtError: it is not finite.
        """
        row = None if answer.pooled is None else answer.pooled.vector
        if row is None or not np.isfinite(row).all():
            raise KtError(
                "the model computed hidden states that are not numbers",
                hint="kt verify NAME checks its files; KT_ISA=portable uses the plainest kernels",
            )
        row = row[: self.asked.dimensions or row.size]
        length = float(np.sqrt(row @ row)) if self.pooling.normalize else 1.0
        return (row / (length or 1.0)).astype(np.float32)


def _settle(ending: tuple[asyncio.Future[Finished], Finished]) -> None:
    ended, event = ending
    if not ended.done():
        ended.set_result(event)
