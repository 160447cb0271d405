"""`/v1/embeddings`: a vector for each text."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from starlette.requests import Request

from ktcli.server.http.answering import encode
from ktcli.server.http.body import body_of
from ktcli.server.http.constraints import not_supported
from ktcli.server.http.embeddings import VectorsReply, embeddings_of
from ktcli.server.http.openai.fields import token_ids
from ktcli.server.http.refusals import Refusal, bad_field
from ktcli.server.http.state import caller_of, state_of
from ktcli.server.models.embedding import F32Array
from ktcli.server.models.textids import EmbeddingRequest, Text

FORMATS = "float", "base64"


class EmbeddingsBody(msgspec.Struct):
    """A request for embeddings."""

    input: str | list[Any] | None = None
    model: str = ""
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    prompt_name: str | None = None  # of sentence-transformers, and of TEI
    truncate_prompt_tokens: Any = None

    @property
    def texts(self) -> list[Text]:
        """The texts to embed, each a string or a list of token ids.

        Raises:
            Refusal: there are no texts, or one is empty, or neither a string nor a list of ids.
        """
        said = self.input
        if said is None or said == []:
            raise Refusal(400, "input is required", "input", "missing")
        several = isinstance(said, list) and isinstance(said[0], str | list)
        return [_text(each) for each in (said if isinstance(said, list) and several else [said])]

    def require_known(self) -> None:
        """Checks that no field asks for something that kt does not support.

        Raises:
            Refusal: `encoding_format` is neither float nor base64, or `truncate_prompt_tokens` is given.
        """
        if self.encoding_format not in (None, *FORMATS):
            raise bad_field(
                "encoding_format", f"must be float or base64, not {self.encoding_format[:40]!r}"
            )
        if self.truncate_prompt_tokens is not None:
            raise not_supported("truncate_prompt_tokens", "use /api/embed with truncate")


def _text(said: Any) -> Text:
    """Returns one text, or the ids of one. Raises: Refusal: it is neither, or empty."""
    if isinstance(said, str) and said:
        return said
    if not (ids := token_ids(said)):
        raise bad_field(
            "input",
            "must be a string or a list of token ids, or a list of either, and must not be empty",
        )
    return ids


async def embeddings(request: Request) -> VectorsReply:
    """Returns a vector for each text.

    Sends JSON with `data`, which has an `embedding` (numbers or base64) for each text, `model` and `usage`.
    """
    state, body = state_of(request), await body_of(request, EmbeddingsBody)
    body.require_known()
    asked = EmbeddingRequest(body.texts, caller_of(request))
    name, found = await embeddings_of(state, body.model, asked, body.prompt_name, body.dimensions)
    row = _in_base64 if body.encoding_format == "base64" else _in_numbers
    usage = {
        "prompt_tokens": found.tokens,
        "total_tokens": found.tokens,
        "prompt_tokens_details": {"cached_tokens": found.reused},
    }
    end = b"]," + encode({"model": name, "usage": usage})[1:]
    return VectorsReply(found, b'{"object":"list","data":[', end, row)


_ROW = b'{"object":"embedding","index":%d,"embedding":%b}'


def _in_base64(number: int, vector: F32Array) -> bytes:
    return _ROW % (number, b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes()))


def _in_numbers(number: int, vector: F32Array) -> bytes:
    return _ROW % (number, numbers(vector))


def numbers(vector: F32Array) -> bytes:
    """Returns a vector as a JSON list of numbers, in bytes."""
    return encode(vector.tolist())
