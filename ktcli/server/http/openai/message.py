"""Reads a message as OpenAI's clients send it: its text in one piece, and its calls with the functions that they
name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktcli.server.http.contents import text_of
from ktcli.server.http.refusals import bad_field, bad_value
from ktcli.text.template import REASONING

# What chat templates read of a message beside its content and calls.
_FIELDS = ("name", "tool_call_id", "tool_name")


def plain_message(message: Mapping[str, Any], where: str, *, asked: bool = False) -> dict[str, Any]:
    """Returns a message in the form of chat templates: its text as one string, and calls with function names.

    Args:
        where: the path of the field, for errors.
        asked: whether it is the last user message.
    Raises:
        Refusal: it has no role, or is the last user message and has parts that are not text.
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_field(f"{where}.role", "must be a string")
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
    """Returns calls of tools, each with a function name and arguments."""
    if not isinstance(calls, list):
        raise bad_field(where, "must be a list")
    found = []
    for at, call in enumerate(calls):
        function = _function(call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_value(where, f"{where}[{at}].function.name must be a string")
        found.append({**call, "type": "function", "function": {"arguments": {}, **function}})
        found[-1].pop("custom", None)
    return found


def _function(call: Any) -> Any:
    """Returns the name and arguments of a call; those of a custom tool, which takes a text, are an object of it."""
    if not isinstance(call, dict):
        return None
    if isinstance(custom := call.get("custom"), dict) and "function" not in call:
        return {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    return call.get("function")
