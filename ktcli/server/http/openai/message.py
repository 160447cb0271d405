"""Reads a message as OpenAI's clients send it: its text in one piece, its calls with the functions that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktcli.server.http.contents import text_of
from ktcli.server.http.refusals import Refusal
from ktcli.text.template import REASONING

# What chat templates read of a message beside its content and calls.
_FIELDS = ("name", "tool_call_id", "tool_name")


def plain_message(message: Mapping[str, Any], where: str, *, asked: bool = False) -> dict[str, Any]:
    """A message with its text in one piece and calls that name their functions.

    Args:
        where: the field that it is.
        asked: whether it is the last question.
    Raises:
        Refusal: it has no role, or is the last question and has parts that are no text.
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise Refusal(400, f"{where} has no role", f"{where}.role", "unsupported_value")
    found = {name: message[name] for name in _FIELDS if isinstance(message.get(name), str)}
    found["role"] = "system" if role == "developer" else role
    found["content"] = text_of(message.get("content"), f"{where}.content", asked=asked)
    if message.get("tool_calls"):
        found["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    elif isinstance(message.get("function_call"), Mapping):  # as it was called before
        found["tool_calls"] = _calls(
            [{"function": message["function_call"]}], f"{where}.function_call"
        )
    thought = next(
        (message[name] for name in REASONING if isinstance(message.get(name), str)), None
    )
    return found if thought is None else {**found, "reasoning_content": thought}


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls of tools, each of which names a function and has arguments."""
    if not isinstance(calls, list):
        raise Refusal(400, f"{where} is no list", where, "unsupported_value")
    found = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(400, f"{where}[{at}] names no function", where, "unsupported_value")
        found.append({**call, "function": {"arguments": {}, **function}})
    return found
