"""Flattens messages and their contents, as clients send them, into the form that a chat template expects.

Only text is supported. Other content of the last user message is refused by name; in earlier messages, and in results
of tools, a placeholder takes its place: a client sends its history again with each request, and one that is refused
once would be refused for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktcli.server.http.refusals import bad_field, bad_value
from ktcli.text.template import REASONING

_TEXTS = frozenset({"text", "input_text", "output_text", "summary_text", "refusal"})
_KINDS = {  # of blocks that a model which reads text cannot see
    "image": "an image",
    "image_url": "an image",
    "input_image": "an image",
    "audio": "a recording",
    "input_audio": "a recording",
    "video": "a video",
    "video_url": "a video",
    "document": "a document",
    "file": "a file",
    "input_file": "a file",
}


def text_of(content: Any, where: str, *, asked: bool = False, gap: str = "") -> str:
    """Returns the text of a message's content, which is a string, a block, a list of blocks, or null.

    Args:
        where: the path of the field, for errors.
        asked: whether the content belongs to the last user message.
        gap: the separator between the texts of blocks.
    Raises:
        Refusal: the content is malformed, or the last user message has an image, a recording, a video or a file.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping):
        return _block(content, where, asked) or ""
    if not isinstance(content, list):
        raise bad_field(where, "must be a string or a list of content blocks")
    texts = (_block(block, f"{where}[{at}]", asked) for at, block in enumerate(content))
    return gap.join(text for text in texts if text is not None)


def last_question(roles: Sequence[Any]) -> int:
    """Returns the index of the user message that is to be answered now, given the roles of all messages; -1: there is
    none.

    A user message is history if an answer or a tool result follows, or if it comes right after a tool result: agents
    put pictures there that a tool returned.
    """
    at = max((at for at, role in enumerate(roles) if role == "user"), default=-1)
    is_answered = any(role in ("assistant", "tool") for role in roles[at + 1 :])
    return -1 if is_answered or (at > 0 and roles[at - 1] == "tool") else at


def unseen(what: str) -> str:
    """Returns the text that takes the place of content that is not text: "[an image, which this model cannot see]" if
    `what` is "an image"."""
    return f"[{what}, which this model cannot see]"


def _block(block: Any, where: str, asked: bool) -> str | None:
    """Returns the text of a content block; None: it has none."""
    if isinstance(block, str):
        return block
    if not isinstance(block, Mapping):
        raise bad_field(where, "must be a content block")
    kind = block.get("type") if isinstance(block.get("type"), str) else ""
    text = block.get("refusal") if kind == "refusal" else block.get("text")
    if isinstance(text, str) and (kind in _TEXTS or kind not in _KINDS):
        return text
    if kind in _TEXTS:
        raise bad_field(f"{where}.text", "must be a string")
    if (found := _inner_text(block, where)) is not None:
        return found
    if kind not in _KINDS:
        return None
    if asked:
        said = f"{where} is {_KINDS[kind]}; this model accepts text only"
        raise bad_value(f"{where}.type", said)
    return unseen(_KINDS[kind])


def _inner_text(block: Mapping[str, Any], where: str) -> str | None:
    """Returns the text of a document or of a search result; None: the block is neither, or has no text."""
    kind, source = block.get("type"), block.get("source")
    if kind == "search_result":
        found = text_of(block.get("content"), f"{where}.content", gap="\n")
    elif kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        found = text_of(source.get("data"), f"{where}.source.data")
    elif kind == "document" and isinstance(source, Mapping) and source.get("type") == "content":
        found = text_of(source.get("content"), f"{where}.source.content", gap="\n")
    else:
        return None
    heads = (block.get("title"), source if isinstance(source, str) else None)
    return "\n".join([*(head for head in heads if isinstance(head, str)), found])


# What chat templates read of a message beside its content and calls.
_FIELDS = ("name", "tool_call_id", "tool_name")


def plain_message(message: Mapping[str, Any], where: str, *, asked: bool = False) -> dict[str, Any]:
    """Returns a message of OpenAI's API in the form of chat templates: `role`, `content` as one string, and those of
    `name`, `tool_call_id`, `tool_name`, `tool_calls` and `reasoning_content` that it has.

    Args:
        where: the path of the field, for errors.
        asked: whether it is the last user message.
    Raises:
        Refusal: the role or a call is malformed, or the content cannot be used, see `text_of`.
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
