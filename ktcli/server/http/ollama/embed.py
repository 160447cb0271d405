"""`/api/embed`, and the older `/api/embeddings`: embeddings for Ollama's clients."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request

from ktcli.server.http.answering import encode
from ktcli.server.http.body import body_of
from ktcli.server.http.embeddings import VectorsReply, embeddings_of
from ktcli.server.http.ollama.fields import keep_s_of
from ktcli.server.http.openai.embeddings import numbers
from ktcli.server.http.refusals import Refusal, require_within
from ktcli.server.http.state import caller_of, state_of
from ktcli.server.models.embedding import Embeddings
from ktcli.server.models.textids import EmbeddingRequest


class EmbedOptions(msgspec.Struct):
    """The field `options`, one of which affects embeddings."""

    num_ctx: int | None = None


class _EmbedFields(msgspec.Struct):
    """The fields that both requests have."""

    model: str = ""
    options: EmbedOptions | None = None
    keep_alive: float | str | None = None
    prompt_name: str | None = None

    @property
    def most(self) -> int:
        """The most tokens of a text; 0: as many as the model takes.

        Raises:
            Refusal: it is less than one.
        """
        asked = None if self.options is None else self.options.num_ctx
        if asked is not None:
            require_within("options.num_ctx", asked, 1, None)
        return asked or 0

    async def embeddings(
        self, request: Request, asked: EmbeddingRequest, dimensions: int | None = None
    ) -> tuple[str, Embeddings]:
        """Returns the name of the model, and the embeddings of the texts; raises as `embeddings_of`."""
        keep_s, state = keep_s_of(self.keep_alive), state_of(request)
        return await embeddings_of(state, self.model, asked, self.prompt_name, dimensions, keep_s)


class EmbedBody(_EmbedFields):
    """A request for embeddings of texts."""

    input: str | list[str] | None = None
    truncate: bool = True
    dimensions: int | None = None

    @property
    def texts(self) -> Sequence[str]:
        """The texts to embed; none if `input` is an empty string, which only loads the model.

        Raises:
            Refusal: the request has no `input`.
        """
        if self.input is None:
            raise Refusal(400, "input is required", "input", "missing")
        return [self.input] * bool(self.input) if isinstance(self.input, str) else self.input


class EmbeddingsPromptBody(_EmbedFields):
    """A request for the embedding of one text, in Ollama's older API."""

    prompt: str = ""


async def embed(request: Request) -> VectorsReply:
    """Returns a vector for each text, with the counts and times.

    Sends JSON with `model`, `embeddings` (a list of numbers for each text), `prompt_eval_count` (tokens),
    `total_duration` and `load_duration` (nanoseconds).
    """
    body, began_s = await body_of(request, EmbedBody), time.monotonic()
    texts, caller = body.texts, caller_of(request)
    asked = EmbeddingRequest(texts, caller, truncate=body.truncate, most=body.most)
    name, found = await body.embeddings(request, asked, body.dimensions)
    totals = {
        "total_duration": int(1e9 * (time.monotonic() - began_s)),
        "load_duration": 0,
        "prompt_eval_count": found.tokens,
    }
    begin = encode({"model": name})[:-1] + b',"embeddings":['
    return VectorsReply(found, begin, b"]," + encode(totals)[1:], lambda _, row: numbers(row))


async def embedding(request: Request) -> VectorsReply:
    """Responds with the vector of one text; that of an empty one, which only loads the model, is empty.

    Sends it as JSON in the field `embedding`, a list of numbers.
    """
    body = await body_of(request, EmbeddingsPromptBody)
    texts, caller = [body.prompt] * bool(body.prompt), caller_of(request)
    asked = EmbeddingRequest(texts, caller, truncate=True, most=body.most, field="prompt")
    _, found = await body.embeddings(request, asked)
    begin, end = (b'{"embedding":', b"}") if found.vectors else (b'{"embedding":[', b"]}")
    return VectorsReply(found, begin, end, lambda _, row: numbers(row))
