"""Reads the messages, calls and tools of a row in OpenAI's and ShareGPT's form, and reports what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ktcli.samples.columns import USUAL_TAGS, Tags
from ktcli.samples.conversation import Message, TrainedConversation
from ktcli.samples.sample import BadData
from ktcli.smallfiles import MAX_NESTING, nests_beyond
from ktcli.text.files import without_surrogates
from ktcli.text.template import ANSWER_MARKS, REASONING

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KEPT = ("name", "tool_call_id")
_UNSAID = {ord(mark): "\ufffd" for mark in ANSWER_MARKS}
_OWN_NAMES = {"user": "human", "assistant": "gpt", "tool": "observation", "chatgpt": "gpt"}


def text_of(value: Any, where: str) -> str:
    """Returns a value that must be a string or null (the empty text), with reserved characters and lone surrogates
    replaced.

    Raises:
        BadData: it is not a string.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadData(f"{where} is {_kind(value)}, not text")
    return without_surrogates(value).translate(_UNSAID)


def parsed(value: Any, where: str) -> Any:
    """Returns a value as it is, or decoded if it is given as JSON text, as cells of CSV are; None for an empty text.

    Raises:
        BadData: the text is not JSON, or nested too deeply.
    """
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise BadData(f"{where} is not JSON: {value[:60]!r}") from None
    if nests_beyond([found], MAX_NESTING + 1):
        raise BadData(f"{where} is nested more than {MAX_NESTING} levels deep")
    return found


def list_of(value: Any, where: str) -> list[Any]:
    """Returns a value that must be a list, or the JSON text of one; null is an empty list.

    Raises:
        BadData: it is something else.
    """
    found = parsed(value, where)
    if found is None:
        return []
    if not isinstance(found, list):
        raise BadData(f"{where} is {_kind(found)}, not a list")
    return found


def tools_of(value: Any, where: str) -> tuple[Message, ...]:
    """Returns a row's tools in OpenAI's format; they may be given as JSON text, and as bare functions.

    Raises:
        BadData: one is no tool, or has no name.
    """
    found = []
    for at, tool in enumerate(list_of(value, where)):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadData(f"{where}[{at}] is not a tool with a name")
        parameters = function.get("parameters")
        if not isinstance(parameters, (Mapping, type(None))):
            raise BadData(f"{where}[{at}]: parameters is {_kind(parameters)}, not an object")
        found.append({"type": "function", "function": dict(function)})
    return tuple(found)


def of_openai(given: Any, tools: Any, where: str) -> TrainedConversation:
    """Returns the conversation in a row's messages with role and content, and its tools; all answers are trained but
    those of weight 0.

    Raises:
        BadData: one of them is not a message.
    """
    messages: list[Message] = []
    trained: list[bool] = []
    for at, each in enumerate(list_of(given, f"{where}: messages")):
        place = f"{where}: messages[{at}]"
        if not isinstance(each, Mapping):
            raise BadData(f"{place} is {_kind(each)}, not a message")
        messages.append(_message(each, place))
        weight = each.get("weight", 1)
        if weight not in (0, 1, None):
            raise BadData(f"{place}: weight is {str(weight)[:40]}, but must be 0 or 1")
        trained.append(messages[-1]["role"] == "assistant" and weight != 0)
    return TrainedConversation(tuple(messages), tuple(trained), tools_of(tools, f"{where}: tools"))


def of_sharegpt(given: Any, tags: Tags, system: Any, tools: Any, where: str) -> TrainedConversation:
    """Returns the conversation in a row's messages with from and value (or the names in `tags`), its system text and
    its tools; all answers are trained.

    Raises:
        BadData: one of them is not a message.
    """
    first = text_of(system, f"{where}: system")
    messages: list[Message] = [{"role": "system", "content": first}] if first else []
    for at, each in enumerate(list_of(given, f"{where}: conversations")):
        messages.append(_tagged(each, tags, f"{where}: conversations[{at}]"))
    trained = tuple(each["role"] == "assistant" for each in messages)
    return TrainedConversation(tuple(messages), trained, tools_of(tools, f"{where}: tools"))


# --- OpenAI's ---------------------------------------------------------------------------------------


def _message(given: Mapping[str, Any], where: str) -> Message:
    role = given.get("role")
    if role not in ROLES:
        raise BadData(
            f"{where} has the role {str(role)[:40]!r}", hint=f"known roles are {', '.join(ROLES)}"
        )
    if given.get("function_call"):
        raise BadData(
            f"{where} has a function_call", hint="write it in the current form, as tool_calls"
        )
    found: Message = {"role": role, "content": _content(given.get("content"), f"{where}: content")}
    for name in _KEPT:
        if given.get(name) is not None:
            found[name] = text_of(given[name], f"{where}: {name}")
    for name in REASONING:
        if given.get(name) is not None:
            found.setdefault("reasoning_content", text_of(given[name], f"{where}: {name}"))
    if given.get("tool_calls"):
        calls = list_of(given["tool_calls"], f"{where}: tool_calls")
        found["tool_calls"] = [
            _call(call, f"{where}: tool_calls[{at}]") for at, call in enumerate(calls)
        ]
    return found


def _content(value: Any, where: str) -> str:
    """Returns the text of a content, which may be a list of parts."""
    if not isinstance(value, list):
        return text_of(value, where)
    texts = []
    for at, part in enumerate(value):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text":
            raise BadData(f"{where}[{at}] has the type {str(kind)[:40]!r}; kt trains on text only")
        text = part.get("text") if isinstance(part, Mapping) else part
        texts.append(text_of(text, f"{where}[{at}]"))
    return "".join(texts)


def _call(given: Any, where: str) -> Message:
    """Returns a call in OpenAI's form; what is around its function may be missing."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadData(f"{where} is not a call with a name")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, Mapping, type(None))):
        raise BadData(f"{where}: arguments is {_kind(arguments)}, not an object")
    found: Message = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(given.get("id"), str):
        found["id"] = given["id"]
    return found


# --- ShareGPT's -------------------------------------------------------------------------------------


def _tagged(given: Any, tags: Tags, where: str) -> Message:
    if not isinstance(given, Mapping) or tags.role_tag not in given:
        raise BadData(f"{where} is not a message with {tags.role_tag} and {tags.content_tag}")
    role, content = given[tags.role_tag], given.get(tags.content_tag)
    known = {
        tags.user_tag: "user",
        tags.assistant_tag: "assistant",
        tags.observation_tag: "tool",
        tags.system_tag: "system",
    }
    if role == tags.function_tag:
        return {"role": "assistant", "content": "", "tool_calls": _calls(content, where)}
    found = known.get(role) if isinstance(role, str) else None
    if found is None and tags == USUAL_TAGS and isinstance(role, str):
        found = known.get(_OWN_NAMES.get(role, ""))
    if found is None:
        roles = ", ".join([*known, tags.function_tag])
        raise BadData(f"{where} has the role {str(role)[:40]!r}", hint=f"known roles are {roles}")
    return {"role": found, "content": text_of(content, f"{where}: {tags.content_tag}")}


def _calls(content: Any, where: str) -> list[Message]:
    """Returns the calls that the text of one message says: an object, or a list of them."""
    found = parsed(content, f"{where}, a function call,")
    calls: Sequence[Any] = found if isinstance(found, list) else [found]
    return [_call(call, where) for call in calls]


def _kind(value: Any) -> str:
    """Returns what a value of JSON is, in its words."""
    kinds = {str: "text", bool: "true or false", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), "a number")
