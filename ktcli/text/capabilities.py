"""Finds out what a chat template supports, once, by rendering small conversations with known words.

Published templates differ in what they take: arguments as an object or as text, one system text or several, ids of a
certain form, roles that alternate. Nothing in a template says which, so each question is asked by rendering: what comes
out has the words in their order, or the template cannot do it. Each answer is found when it is first needed, and kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from itertools import product
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.records import dataclass
from ktcli.text.template import ChatTemplate, ConversationRefused

Message = dict[str, Any]

# Words that no template has. Whole ones, since templates may trim.
_SYSTEM, _LATER, _ASKED, _NEXT, _SAID = "kqsystem", "kqlater", "kqasked", "kqnext", "kqsaid"
_TOOL, _KEY, _VALUE, _RESULT, _THOUGHT = "kqtool", "kqkey", "kqvalue", "kqresult", "kqthought"
_MOST_S = 0.3  # for all that is asked of a template; a large one takes 0.05
_ID, _NINE_ID = "call_kq1", "kqid00001"


class IdForm(Enum):
    """The form of the ids of calls that a template accepts."""

    UNSEEN = "unseen"  # it writes none
    ANY = "any"
    NINE = "nine"  # nine letters or digits
    NAMED = "named"  # it writes the id alone, so the id has to name the tool: functions.NAME:N


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of tool calls that a template accepts.

    Attributes:
        as_text: whether arguments are the text of a JSON object, else the object.
        content: the content of a message that calls and says nothing else.
        ids: the form of the ids.
        with_text: whether a message with a call and a thought may have a text as well.
        several: whether a message may have more than one call.
    """

    as_text: bool
    content: str | None
    ids: IdForm
    with_text: bool = True
    several: bool = True


class Capabilities:
    """The capabilities of a chat template: the forms of conversation that it accepts.

    Args:
        template: renders the conversations; the variables that the model's own settings give it are not told.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._spent_s = 0.0  # on asking it

    @cached_property
    def system(self) -> bool:
        """Whether the chat template renders a system text at the beginning of a conversation."""
        return self._keeps([_says("system", _SYSTEM), _says("user", _ASKED)], _SYSTEM, _ASKED)

    @cached_property
    def only_system(self) -> bool:
        """Whether the chat template renders a conversation of only a system text."""
        return self._keeps([_says("system", _SYSTEM)], _SYSTEM)

    @cached_property
    def later_system(self) -> bool:
        """Whether the chat template renders a system text in the middle of a conversation at that place."""
        said = [
            _says("system", _SYSTEM),
            _says("user", _ASKED),
            _says("assistant", _SAID),
            _says("system", _LATER),
            _says("user", _NEXT),
        ]
        return self._keeps(said, _SYSTEM, _ASKED, _SAID, _LATER, _NEXT)

    @cached_property
    def repeated_roles(self) -> bool:
        """Whether the chat template accepts two turns of one role, user or assistant, one after the other."""
        users = [_says("user", _ASKED), _says("user", _NEXT)]
        answers = [_says("user", _ASKED), _says("assistant", _SAID), _says("assistant", _LATER)]
        ends = [*answers, _says("user", _NEXT)]
        return self._keeps(users, _ASKED, _NEXT) and self._keeps(ends, _SAID, _LATER, _NEXT)

    @cached_property
    def answer_first(self) -> bool:
        """Whether the chat template accepts a conversation that begins with an answer."""
        return self._keeps([_says("assistant", _SAID), _says("user", _ASKED)], _SAID, _ASKED)

    @cached_property
    def sparse_tools(self) -> bool:
        """Whether the chat template accepts tools without a description, and without parameters or their properties."""
        bare, empty = _tool(describes=False), _tool(describes=False)
        empty["function"]["parameters"] = {"type": "object"}
        texts = [self._rendered([_says("user", _ASKED)], tools=[each]) for each in (bare, empty)]
        return all(text is not None and "None" not in text for text in texts)

    @cached_property
    def calls(self) -> CallForm | None:
        """The form of tool calls that the chat template accepts; None if it does not render them with arguments and
        results.
        """
        ways = product((IdForm.ANY, IdForm.NINE), (False, True), ("", None))
        for ids, as_text, content in ways:
            form = CallForm(as_text, content, ids)
            if (found := self._called(form)) is not None:
                form = replace(form, ids=self._ids(form, found))
                return replace(form, with_text=self._with_text(form), several=self._several(form))
        return None

    # -- asking --------------------------------------------------------------------------------------

    def _called(self, form: CallForm) -> str | None:
        """Returns the text of a call and its result; None: something of them is missing."""
        id = _NINE_ID if form.ids is IdForm.NINE else _ID
        found = self._rendered(list(_calling(form, id)), tools=[_tool(describes=True)])
        if found is None or not all(word in found for word in (_VALUE, _RESULT)):
            return None
        if _TOOL not in found.partition(_ASKED)[2] and id not in found:
            return None
        # Python's own form of a mapping is none that a model was trained on.
        return None if f"'{_KEY}'" in found or f'\\"{_KEY}' in found else found

    def _ids(self, form: CallForm, found: str) -> IdForm:
        if form.ids is IdForm.NINE:
            return IdForm.NINE
        behind = found.partition(_ASKED)[2]
        if _ID not in behind:
            return IdForm.UNSEEN
        return IdForm.ANY if _TOOL in behind else IdForm.NAMED

    def _with_text(self, form: CallForm) -> bool:
        said = list(_calling(form, _id_of(form)))
        said[1] |= {"content": _SAID, "reasoning_content": _THOUGHT}
        found = self._rendered(said, tools=[_tool(describes=True)])
        return found is not None and _SAID in found and _VALUE in found

    def _several(self, form: CallForm) -> bool:
        said = list(_calling(form, _id_of(form)))
        other = _call(form, _id_of(form)[:-1] + "2", f"{_VALUE}2")
        said[1]["tool_calls"].append(other)
        said.insert(3, _result(other["id"], f"{_RESULT}2"))
        found = self._rendered(said, tools=[_tool(describes=True)])
        return found is not None and f"{_VALUE}2" in found and f"{_RESULT}2" in found

    def _keeps(self, messages: Sequence[Message], *words: str) -> bool:
        """Returns whether the words are rendered, each behind the one before."""
        found = self._rendered(messages)
        if found is None:
            return False
        places = [found.find(word) for word in words]
        return -1 not in places and places == sorted(places)

    def _rendered(self, messages: Sequence[Message], **more: Any) -> str | None:
        """Returns the text of a conversation; None: the template refuses it, or has had its time."""
        if self._spent_s > _MOST_S:
            return None
        began_s = time.thread_time()
        try:
            return self._template.render(messages, **more)
        except ConversationRefused:
            return None
        except BadCheckpoint:  # it was stopped, as it would be again
            self._spent_s = _MOST_S
            return None
        finally:
            self._spent_s += time.thread_time() - began_s


def _says(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _id_of(form: CallForm) -> str:
    if form.ids is IdForm.NINE:
        return _NINE_ID
    return f"functions.{_TOOL}:0" if form.ids is IdForm.NAMED else _ID


def _call(form: CallForm, id: str, value: str) -> Message:
    arguments: Mapping[str, str] | str = {_KEY: value}
    if form.as_text:
        arguments = json.dumps(arguments)
    function = {"name": _TOOL, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def _calling(form: CallForm, id: str) -> Iterator[Message]:
    """Yields a conversation with a call and its result."""
    yield _says("user", _ASKED)
    yield {"role": "assistant", "content": form.content, "tool_calls": [_call(form, id, _VALUE)]}
    yield _result(id, _RESULT)


def _result(id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "name": _TOOL, "content": text}


def _tool(*, describes: bool) -> Message:
    function: Message = {"name": _TOOL}
    if describes:
        kinds = {_KEY: {"type": "string", "description": "a word"}}
        parameters = {"type": "object", "properties": kinds, "required": [_KEY]}
        function |= {"description": "a tool", "parameters": parameters}
    return {"type": "function", "function": function}
