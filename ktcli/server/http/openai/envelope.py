"""What all replies of OpenAI's API have in common: lines of a stream, usage, timings, errors."""

from __future__ import annotations

from typing import Any

from ktcli import __version__
from ktcli.engine.request import Finish, Stats
from ktcli.server.http.answering import WireReply, encode
from ktcli.server.http.refusals import Refusal
from ktcli.server.http.waiting import StreamStyle
from ktcli.server.models.generation import Generation, Generations

EVENTS = "text/event-stream"
ALIVE = b": waiting\n\n"  # a comment, which clients ignore
DONE = b"data: [DONE]\n\n"
# Of the program that answers: where it changes, the same seed may say something else.
FINGERPRINT = f"build-{__version__}"
FINISH = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.CONTEXT: "length",
    Finish.CANCELLED: "length",
}


def line(document: Any) -> bytes:
    """Returns a document as one server-sent event of a stream: its JSON behind `data: `."""
    return b"data: " + encode(document) + b"\n\n"


def error_of(refusal: Refusal) -> dict[str, Any]:
    """Returns the document of an error in OpenAI's API: `error` with its `message`, `type`, `param` (the field) and
    `code`."""
    said = {
        "message": refusal.message,
        "type": refusal.kind,
        "param": refusal.field or None,
        "code": refusal.code or None,
    }
    return {"error": said}


def failed_stream(body: bytes, refusal: Refusal) -> bytes:
    """Returns the body of the stream for a request that failed before its answers began: an event with the error, then
    `[DONE]`."""
    return line(error_of(refusal)) + DONE


STREAM = StreamStyle(EVENTS, ALIVE, failed_stream)


class OpenAIReply(WireReply):
    """The answers in a format of OpenAI's API."""

    media_type, alive = EVENTS, ALIVE

    def failed(self, refusal: Refusal) -> bytes:
        """Returns the end of a stream that failed: the error, then `[DONE]`."""
        return failed_stream(b"", refusal)

    def refused(self, refusal: Refusal) -> bytes:
        """Returns the body of an error response: the JSON document of an error in OpenAI's API."""
        return encode(error_of(refusal))


def usage(generation: Generation | Generations, thought_tokens: int) -> dict[str, Any]:
    """Returns OpenAI's `usage` of a request: `prompt_tokens`, `completion_tokens`, `total_tokens`, and of these the
    cached ones (`prompt_tokens_details`) and those of thoughts (`completion_tokens_details`)."""
    prompt, said = generation.prompt_tokens, generation.tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {
            "cached_tokens": generation.reused_tokens,
            "cached_tokens_details": generation.reused_by_tier,
        },
        "completion_tokens_details": {"reasoning_tokens": thought_tokens},
    }


def timings(stats: Stats) -> dict[str, float]:
    """Returns llama.cpp's `timings` of an answer, by name: the cached tokens (`cache_n`), and for the rest of the
    prompt (`prompt_`) and for the answer (`predicted_`) the tokens (`n`), milliseconds (`ms`, `per_token_ms`) and
    tokens per second (`per_second`)."""
    n, ms = stats.prefilled_tokens, 1000 * stats.prompt_s
    said, said_ms = stats.tokens, 1000 * stats.eval_s
    return {
        "cache_n": stats.reused_tokens,
        "prompt_n": n,
        "prompt_ms": ms,
        "prompt_per_token_ms": ms / n if n else 0.0,
        "prompt_per_second": 1000 * n / ms if ms else 0.0,
        "predicted_n": said,
        "predicted_ms": said_ms,
        "predicted_per_token_ms": said_ms / said if said else 0.0,
        "predicted_per_second": 1000 * said / said_ms if said_ms else 0.0,
    }
