"""The document of a response before there is an answer: the request as the server understands it."""

from __future__ import annotations

import secrets
import time
from typing import Any

from ktcli.sampling import SamplingSettings
from ktcli.server.http.openai.response_fields import ResponseBody
from ktcli.server.http.refusals import Refusal

# What a response says of a function, and of a schema, for which a request leaves these fields out.
_FUNCTION = {"description": None, "parameters": None, "strict": None}
_SCHEMA = {"description": None, "strict": None}


def response_document(
    body: ResponseBody, model: str, id: str = "", sampling: SamplingSettings | None = None
) -> dict[str, Any]:
    """Returns the document of a response in progress.

    Args:
        id: its id without `resp_`; empty: a random one.
        sampling: that is used; None: the request failed before that was known.
    """
    used = sampling or SamplingSettings()
    effort = None if body.reasoning is None else body.reasoning.effort
    form = None if body.text is None else body.text.format
    return {
        "id": f"resp_{id or secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": used.frequency_penalty,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_tokens
        if body.max_output_tokens is None
        else body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": used.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": used.used_temperature,
        "text": {"format": _format(form)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_FUNCTION | each for each in body.tools or [] if each.get("type") == "function"],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": used.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def failure(refusal: Refusal) -> dict[str, Any]:
    """Returns the fields of a response that failed."""
    error = {"code": refusal.code or "server_error", "message": refusal.message}
    return {"status": "failed", "error": error}


def _format(asked: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the format of an answer's text with every field that it has in a response."""
    if asked is None:
        return {"type": "text"}
    return _SCHEMA | asked if asked.get("type") == "json_schema" else asked
