"""Converts a conversation to the form that a model's chat template supports, whatever form its client sent.

Clients send back what servers of other models gave them: ids of another form, arguments that are no objects, system
texts in the middle. A template that refuses one of these would refuse every later turn as well, and one that leaves it
out would do so in silence. What a template can do is known (capabilities.py); only what it cannot is changed, so that
a conversation that it takes is rendered as it came.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ktcli.answers.calls.styles import GENERIC
from ktcli.text.capabilities import CallForm, Capabilities, IdForm
from ktcli.text.control import Marked
from ktcli.text.template import REASONING

Message = dict[str, Any]

_ROLES = {"developer": "system", "function": "tool"}  # other names of a role
_NINE = re.compile(r"[A-Za-z0-9]{9}")
_GAP = "\n\n"  # between texts that become one
_NO_QUESTION = "…"  # before an answer that comes first, where there has to be a question
_SPOKEN = ("user", "assistant")
_DEPTH_MOST = 40  # of arguments of calls; templates are given less than 50 in all
_END = "\ufdd0"  # of what the model is to go on with; Unicode says that no text has it


def normalized(
    messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], can: Capabilities
) -> tuple[list[Message], dict[str, Any]]:
    """Returns (messages, variables) for a chat template, changed to a form that it accepts without losing any text.

    Args:
        messages: as OpenAI's API has them, but with texts as contents; arguments of calls may be texts or objects.
        variables: further variables of the template, `tools` among them.
        can: the forms that the template accepts.
    """
    found = [_cleaned(message) for message in messages]
    found = _with_systems(found, can)
    if any(map(_is_about_calls, found)):
        form = can.calls
        found = list(_as_words(found) if form is None else _with_calls(found, form))
    found = _with_turns(found, can)
    given = dict(variables)
    if given.get("tools") and not all(map(_is_whole_tool, given["tools"])) and not can.sparse_tools:
        given["tools"] = [_whole_tool(tool) for tool in given["tools"]]
    return found, given


def spelled_out(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns a conversation's messages in the plainest form: alternating questions and answers, with everything else,
    such as tool calls, as text in them.
    """
    found = list(_as_words([_cleaned(message) for message in messages]))
    plain = [each if each["role"] in _SPOKEN else {**each, "role": "user"} for each in found]
    if plain and plain[0]["role"] == "assistant":
        plain.insert(0, {"role": "user", "content": _NO_QUESTION})
    return _merged([{"role": each["role"], "content": each["content"]} for each in plain])


def continued(
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    render: Callable[[Sequence[Message], Mapping[str, Any]], Marked],
) -> Marked | None:
    """Returns the text of the rendered conversation up to the end of its last message, which the model is to continue;
    None if the template does not render that message's text unchanged.
    """
    *before, last = messages
    open_turn = {**last, "content": f"{last['content']}{_END}"}
    found = render([*before, open_turn], {**variables, "add_generation_prompt": False})
    text, end, _ = found.marked.rpartition(_END)
    plain = text.replace(found.mark, "") if found.mark else text
    return Marked(text, found.mark) if end and plain.endswith(last["content"]) else None


# --- all messages -----------------------------------------------------------------------------------


def _cleaned(message: Mapping[str, Any]) -> Message:
    found = dict(message)
    found["role"] = _ROLES.get(found["role"], found["role"])
    if found.get("content") is None:
        found["content"] = ""
    if not found.get("tool_calls"):
        found.pop("tool_calls", None)
    return found


def _is_about_calls(message: Message) -> bool:
    return message["role"] == "tool" or "tool_calls" in message


def _joined(*texts: str) -> str:
    return _GAP.join(text for text in texts if text)


# --- system texts -----------------------------------------------------------------------------------


def _with_systems(messages: list[Message], can: Capabilities) -> list[Message]:
    """Makes the system texts at the beginning one; what the template does not render becomes part of the next
    question."""
    first = _opening(messages)
    opening, rest = messages[:first], messages[first:]
    if len(opening) > 1:
        text = _joined(*(each["content"] for each in opening))
        opening = [{**opening[0], "content": text}]
    later = any(each["role"] == "system" for each in rest)
    if opening and not (can.system if rest else can.only_system):
        return _asked_with([*opening, *rest])
    return [*opening, *(_asked_with(rest) if later and not can.later_system else rest)]


def _opening(messages: Sequence[Message]) -> int:
    """Returns the number of system texts at the beginning."""
    places = (at for at, each in enumerate(messages) if each["role"] != "system")
    return next(places, len(messages))


def _asked_with(messages: list[Message]) -> list[Message]:
    """Puts system texts into the question before them where its answer comes next, else before the next question."""
    found: list[Message] = []
    waiting: list[str] = []
    for each in messages:
        if each["role"] == "system":
            waiting.append(each["content"])
            continue
        if waiting and each["role"] == "user":
            each = {**each, "content": _joined(*waiting, each["content"])}
            waiting = []
        elif waiting and each["role"] == "assistant":
            _ask(found, waiting)
            waiting = []
        found.append(each)
    if waiting:
        _ask(found, waiting)
    return found


def _ask(messages: list[Message], texts: Sequence[str]) -> None:
    """Adds texts to the question at the end of some messages, or a question that they are."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] == "user":
        messages[-1] = {**last, "content": _joined(last["content"], *texts)}
    else:
        messages.append({"role": "user", "content": _joined(*texts)})


# --- turns ------------------------------------------------------------------------------------------


def _with_turns(messages: list[Message], can: Capabilities) -> list[Message]:
    """Makes roles alternate, and a question come first, where the template wants that."""
    alike = any(_are_alike(before, behind) for before, behind in pairwise(messages))
    if alike and not can.repeated_roles:
        messages = _merged(messages)
    first = _opening(messages)
    if messages[first:] and messages[first]["role"] == "assistant" and not can.answer_first:
        question = {"role": "user", "content": _NO_QUESTION}
        messages = [*messages[:first], question, *messages[first:]]
    return messages


def _are_alike(before: Message, behind: Message) -> bool:
    return before["role"] == behind["role"] and before["role"] in _SPOKEN


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Makes turns of one role that follow each other one turn; what calls is not followed by a text of its own."""
    groups: list[list[Message]] = []
    for each in messages:
        last = groups[-1][-1] if groups else None
        if last is not None and _are_alike(last, each) and "tool_calls" not in last:
            groups[-1].append(each)
        else:
            groups.append([each])
    return [_one_of(group) if len(group) > 1 else group[0] for group in groups]


def _one_of(turns: Sequence[Message]) -> Message:
    """Returns the turn that some turns of one role are together, with all their texts and thoughts."""
    whole = {key: value for each in turns for key, value in each.items()}
    whole["content"] = _joined(*(each["content"] or "" for each in turns))
    for name in REASONING:
        if any(each.get(name) for each in turns):
            whole[name] = _joined(*(str(each.get(name) or "") for each in turns))
    return whole


# --- calls ------------------------------------------------------------------------------------------


def _with_calls(messages: Sequence[Message], form: CallForm) -> Iterator[Message]:
    """Yields messages whose calls and results have the template's form."""
    ids = _Ids(form)
    known = deque(_answered(each, ids) if _is_about_calls(each) else each for each in messages)
    while known:
        each = known.popleft()
        if "tool_calls" not in each:
            yield each
            continue
        calls = [_formed(call, form) for call in each["tool_calls"]]
        text = each["content"]
        if text and any(each.get(name) for name in REASONING) and not form.with_text:
            yield {"role": "assistant", "content": text}
            text = ""
        whole = {**each, "content": text or form.content, "tool_calls": calls}
        if form.several or len(calls) == 1:
            yield whole
            continue
        results = []
        while known and known[0]["role"] == "tool":
            results.append(known.popleft())
        yield from _one_by_one(whole, results, form)


def _one_by_one(whole: Message, results: list[Message], form: CallForm) -> Iterator[Message]:
    """Yields each call of a message with its results, one after the other."""
    left: dict[Any, list[Message]] = {}
    for each in results:
        left.setdefault(each.get("tool_call_id"), []).append(each)
    for number, call in enumerate(whole["tool_calls"]):
        alone = {"role": "assistant", "content": form.content, "tool_calls": [call]}
        yield {**whole, "tool_calls": [call]} if number == 0 else alone
        yield from left.pop(call.get("id"), ())
    for rest in left.values():
        yield from rest


class _Ids:
    """Gives calls and their results ids of a template's form, the same for both."""

    def __init__(self, form: CallForm) -> None:
        self._form = form.ids
        # Where one call comes at a time, results find theirs by an id, whether the template writes it or not.
        self._needs_ids = form.ids is not IdForm.UNSEEN or not form.several
        self._count = 0
        # The id as rendered of each call without a result: the tool's name.
        self._open: dict[str, str] = {}
        self._known: dict[str, str] = {}  # the id as sent: as rendered

    def of_call(self, call: Mapping[str, Any]) -> str | None:
        """Returns the id of the next call; None: it has none and needs none."""
        name, sent = str(call["function"].get("name")), _id_in(call, "id")
        found = self._made(sent, name)
        self._count += 1
        if sent:
            self._known[sent] = found or sent
        if found or sent:
            self._open[found or sent] = name
        return found

    def of_result(self, message: Mapping[str, Any]) -> str | None:
        """Returns the id of a result: that of its call, else of the earliest call that has no result yet."""
        sent = _id_in(message, "tool_call_id")
        name = message.get("name") or message.get("tool_name")
        if sent in self._known:
            self._open.pop(self._known[sent], None)
            return self._known[sent]
        if sent and self._form in (IdForm.UNSEEN, IdForm.ANY):
            return sent
        own = next((id for id, tool in self._open.items() if tool == name), None)
        if own is None:
            own = next(iter(self._open), None)
        if own is None:
            return self._made(sent, str(name or "tool"))
        del self._open[own]
        return own

    def _made(self, sent: str, name: str) -> str | None:
        if self._form is IdForm.NAMED:
            is_own = re.fullmatch(rf"functions\.{re.escape(name)}:\d+", sent)
            return sent if is_own else f"functions.{name}:{self._count}"
        if self._form is IdForm.NINE:
            if _NINE.fullmatch(sent):
                return sent
            return hashlib.sha256((sent or f"call {self._count}").encode()).hexdigest()[:9]
        if sent or not self._needs_ids:
            return sent or None
        return f"call_kt_{self._count}"


def _id_in(message: Mapping[str, Any], field: str) -> str:
    """Returns the id in a field; empty: there is none."""
    found = message.get(field)
    return found if isinstance(found, str) else ""


def _answered(message: Message, ids: _Ids) -> Message:
    """Returns a message whose calls, or whose result, have ids of the template's form."""
    if message["role"] == "tool":
        id = ids.of_result(message)
        return {**message, "tool_call_id": id} if id is not None else message
    calls = []
    for call in message["tool_calls"]:
        id = ids.of_call(call)
        calls.append({**call, "id": id} if id is not None else call)
    return {**message, "tool_calls": calls}


def _formed(call: Mapping[str, Any], form: CallForm) -> Message:
    function = call["function"]
    given = function.get("arguments")
    arguments = _text_of(given) if form.as_text else _object_of(given)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _object_of(arguments: Any) -> dict[str, Any]:
    """Returns the arguments as an object; what is none is the value of one pair, so that the model sees what it
    wrote."""
    if isinstance(arguments, Mapping):
        is_deep = _is_deep(arguments)
        return {"arguments": _text_of(arguments)} if is_deep else dict(arguments)
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return {"arguments": arguments}
        if isinstance(found, dict) and not _is_deep(found):
            return found
        return {} if found is None else {"arguments": arguments}
    return {} if arguments is None else {"arguments": _text_of(arguments)}


def _is_deep(value: Any) -> bool:
    """Returns whether a value is nested deeper than any template would write."""
    level = [value]
    for _ in range(_DEPTH_MOST):
        level = [part for each in level for part in _parts(each)]
    return bool(level)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def _text_of(arguments: Any) -> str:
    if isinstance(arguments, str):
        return "{}" if arguments.strip() in ("", "null") else arguments
    return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)


def _as_words(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields messages in which calls and results are words of answers and questions, for templates that know none."""
    for each in messages:
        if each["role"] == "tool":
            text = f"<tool_response>\n{each['content']}\n</tool_response>"
            yield {"role": "user", "content": text}
        elif "tool_calls" in each:
            said = [
                f"{GENERIC.begin}\n{_call_text(call)}\n{GENERIC.end}" for call in each["tool_calls"]
            ]
            rest = {key: value for key, value in each.items() if key != "tool_calls"}
            yield {**rest, "content": "\n".join(filter(None, (each["content"], *said)))}
        else:
            yield each


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    said = {"name": function.get("name"), "arguments": _object_of(function.get("arguments"))}
    return json.dumps(said, ensure_ascii=False)


# --- tools ------------------------------------------------------------------------------------------


def _is_whole_tool(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function", {})
    parameters = function.get("parameters")
    whole = isinstance(parameters, Mapping) and isinstance(parameters.get("properties"), Mapping)
    return whole and function.get("description") is not None


def _whole_tool(tool: Mapping[str, Any]) -> Message:
    """Returns a tool with the fields that a template takes for granted."""
    function = tool.get("function", {})
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    whole = {**function, "description": function.get("description") or "", "parameters": parameters}
    return {**tool, "function": whole}
