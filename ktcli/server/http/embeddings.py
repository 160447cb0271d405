"""Embeddings of the texts of a request, in any API: the model's pooling, its limits, and the errors."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from ktcli.models.pooling import TextPooling
from ktcli.records import dataclass
from ktcli.server.http.answering import NOTED, Receive, Scope, Send, send_body, send_start
from ktcli.server.http.refusals import Refusal, about, bad_value
from ktcli.server.http.state import ServerState
from ktcli.server.models.embedding import EmbeddingRun, Embeddings, F32Array
from ktcli.server.models.textids import EmbeddingRequest, require_few, shortened
from ktcli.server.tracing.spans import INFERENCE

_ROWS = 32  # vectors that are written at once
USUAL = "qwen3-embedding-0.6b"  # the model of the catalogue that refusals name


async def embeddings_of(
    state: ServerState,
    model: str,
    asked: EmbeddingRequest,
    prompt_name: str | None,
    dimensions: int | None = None,
    keep_s: float | None = None,
) -> tuple[str, Embeddings]:
    """Returns the name of the model that was used, and its embeddings of the request's texts: the vectors and token
    counts.

    Args:
        model: the name of the model in the request.
        asked: the texts, and how to embed them.
        prompt_name: the name of the model's prompt that goes before each text; None: its default prompt.
        dimensions: the length of the vectors; None: the model's own.
        keep_s: the seconds for which the model stays in memory afterwards; None: as before.
    Raises:
        Refusal: the model makes no embeddings, or a field cannot be used.
        KtError: see `EmbeddingRun.compute`.
    """
    source = await state.named(model)
    facts = await state.facts(source)
    if (pooling := facts.pooling) is None:
        raise _not_embedding(model, source.name)
    with about("dimensions"):
        length = shortened(pooling, dimensions, facts.hidden, source.name)
    with about(asked.field):
        require_few(len(asked.texts), length or facts.hidden, asked.field)
    prompt = _prompt(pooling, prompt_name, source.name)
    request = replace(asked, prompt=prompt, dimensions=length)
    with await state.lease(model, keep_s) as lease, about(asked.field):
        run, began_s = EmbeddingRun(lease.model, pooling, request), time.monotonic()
        state.attached.add(run)
        found = await run.compute(state.jobs)
        state.metrics.embedded(found.tokens, found.reused, time.monotonic() - began_s)
        return lease.model.name, found


def _prompt(pooling: TextPooling, name: str | None, model: str) -> str:
    """Returns the text before each text.

    Raises:
        Refusal: the model has no prompt of that name.
    """
    if name is None:
        name = pooling.default_prompt
        return pooling.prompts[name] if name else ""
    if name not in pooling.prompts:
        known = ", ".join(repr(each[:60]) for each in pooling.prompts) or "none"
        said = f"prompt_name: {model} has no prompt {name[:60]!r}; its prompts: {known}"
        raise bad_value("prompt_name", said)
    return pooling.prompts[name]


def _not_embedding(asked: str, own: str) -> Refusal:
    """Returns the refusal of a model that generates text."""
    who = (
        own
        if not asked or asked.lower() == own.lower()
        else f"{asked[:200]!r} means {own} here, which"
    )
    said = f"{who} generates text, not embeddings: its files do not mention pooling"
    beside = f"run kt convert {USUAL} on the server once, then name {USUAL} in the request"
    return bad_value("model", f"{said}; to have both, {beside}")


@dataclass(frozen=True, slots=True)
class VectorsReply:
    """An ASGI application that sends embeddings as one JSON document, a few vectors at a time: as text they take ten
    times the memory.

    Attributes:
        begin, end: the document before the first vector and behind the last one.
        row: returns the JSON of a vector, given its number.
    """

    found: Embeddings
    begin: bytes
    end: bytes
    row: Callable[[int, F32Array], bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = {"prompt_tokens": self.found.tokens, "cached_tokens": self.found.reused}
        scope[NOTED] |= {**counts, "tokens": 0}
        scope[INFERENCE] = self.found.inference
        with contextlib.suppress(TimeoutError):  # the client takes nothing any more
            await send_start(send, 200, "application/json", {})
            await send_body(send, self.begin)
            for first in range(0, len(self.found.vectors), _ROWS):
                await send_body(send, await asyncio.to_thread(self._rows, first))
            await send_body(send, self.end, more=False)

    def _rows(self, first: int) -> bytes:
        """Returns the JSON of some vectors, with the commas before them."""
        some = enumerate(self.found.vectors[first : first + _ROWS], first)
        rows = b",".join(self.row(number, vector) for number, vector in some)
        return b"," + rows if first else rows
