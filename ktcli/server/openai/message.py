"""Reads a message as OpenAI's clients send it: its text in one piece, its calls as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktcli.server.refusal import Refusal


def plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message as chat templates take it, but for the arguments of calls: its text is in one piece.

    Args:
        where: the field that it is.
    Raises:
        Refusal: it has no role, or parts that are no text.
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise Refusal(400, f"{where} has no role", f"{where}.role", "unsupported_value")
    found = dict(message)
    found["role"] = "system" if role == "developer" else role
    found["content"] = _text(message.get("content"), f"{where}.content")
    if found["content"] is None:
        found["content"] = ""
    if found.get("tool_calls"):
        found["tool_calls"] = _calls(found["tool_calls"], f"{where}.tool_calls")
    if found.get("reasoning") is not None and found.get("reasoning_content") is None:
        found["reasoning_content"] = found["reasoning"]
    return found


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(400, f"{where} is no text", where, "unsupported_value")
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(
            text, str
        ):
            raise Refusal(
                400, f"{where}[{at}] is of the type {str(kind)[:40]!r}, only text can be read",
                f"{where}[{at}].type", "unsupported_value",
            )  # fmt: skip
        parts.append(text)
    return "".join(parts)


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
