"""Turns what a server says of an error into a sentence and an exit code, whatever form it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktcli.errors import ContextFull, KtError, NotFound, ServerBusy, ServerFailed, UsageError
from ktcli.store.retrying import seconds_asked

KEY_HINT = "put its key into a file that only you can read, and pass it with --server-key-file"
_SHOWN = 600  # characters of what a server says
_STATUS_OF = {"rate_limit_error": 429, "overloaded_error": 503}  # types of errors in a stream
_FULL = ("context_length_exceeded", "exceed_context_size_error")  # OpenAI and kt; llama-server
_FULL_WORDS = (  # vLLM and SGLang have no code for it
    "maximum context length",
    "model's context length",
    "maximum model length",
)
_AGAIN = (408, 500, 502, 504)


def refusal(who: str, status: int, said: Any, headers: Mapping[str, str], *, key: bool) -> KtError:
    """Returns the error to raise for an unsuccessful HTTP response: ContextFull, NotFound, ServerBusy, UsageError for a
    missing or rejected API key, else ServerFailed.

    Args:
        who: the server, for the message.
        said: the JSON body of the response; None: it is no JSON.
        key: whether the request had an API key.
    """
    words = _words(said)
    if 300 <= status < 400:
        where = headers.get("Location", "")[:200]
        return ServerFailed(
            f"{who} redirects to {where!r}; kt does not follow, so that key and conversation stay with the server"
            " that you named",
            hint="if you trust that address, pass it with --server",
        )
    if status in (401, 403):
        said = f"{who} rejected the API key" if key else f"{who} needs an API key"
        return UsageError(said, hint=KEY_HINT)
    words = words or f"it responded with status {status}"
    if _is_full(said, words):
        return ContextFull(f"{who}: {words}")
    if status in (429, 503):
        again_s = seconds_asked(headers.get("Retry-After", "")) or 0.0
        return ServerBusy(f"{who} is busy: {words}", again_s=again_s)
    if status == 404:
        return NotFound(f"{who}: {words}")
    if status in _AGAIN:
        return ServerFailed(f"{who} failed: {words}", again_s=0.0)
    return ServerFailed(f"{who} refused the request: {words}")


def failure(who: str, said: Mapping[str, Any]) -> KtError:
    """Returns the error to raise for an error that a server reports within the stream of an answer: ContextFull,
    ServerBusy, else ServerFailed.

    Args:
        who: the server, for the message.
        said: the JSON object of the event, with the key `error`.
    """
    of = _error_of(said)
    code = of.get("code")
    status = code if type(code) is int else _STATUS_OF.get(str(of.get("type")), 0)
    words = _words(said) or "it does not say why"
    if _is_full(said, words):
        return ContextFull(f"{who}: {words}")
    if status in (429, 503):
        return ServerBusy(f"{who} is busy: {words}", again_s=0.0)
    return ServerFailed(f"{who} failed during the answer: {words}")


def _error_of(said: Any) -> Mapping[str, Any]:
    """Returns the object `error` of a document; {}: there is none."""
    error = said.get("error") if isinstance(said, dict) else None
    return error if isinstance(error, dict) else {}


def _is_full(said: Any, words: str) -> bool:
    of = _error_of(said)
    return (
        of.get("code") in _FULL
        or of.get("type") in _FULL
        or any(each in words for each in _FULL_WORDS)
    )


def _words(said: Any) -> str:
    """Returns the message of an error: `error.message` of OpenAI, `message` or `detail` of others; empty: none."""
    error = said.get("error") if isinstance(said, dict) else None
    places = (
        error.get("message") if isinstance(error, dict) else error,
        said.get("message") if isinstance(said, dict) else None,
        said.get("detail") if isinstance(said, dict) else None,
    )
    found = next((each for each in places if isinstance(each, str) and each.strip()), "")
    return " ".join(found[:_SHOWN].split())
