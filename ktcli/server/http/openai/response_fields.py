"""The bodies of requests for a response, and their options for the engine.

Items that the client sends are messages, thoughts, calls and their results; chat templates know messages, so thoughts
and calls that follow one another become one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ktcli.answers.grammar.form import Form
from ktcli.dialogue.answer import AnswerOptions
from ktcli.records import dataclass
from ktcli.server.http.constraints import ToolChoice, refuse_elsewhere, with_form, with_tools
from ktcli.server.http.contents import last_question, plain_message
from ktcli.server.http.openai.fields import (
    TOOLS_MOST,
    effort_variables,
    own_variables,
    require_parameters,
)
from ktcli.server.http.openai.sampled import LOGPROBS_MOST, Sampled
from ktcli.server.http.refusals import (
    OWN_NAMES,
    FieldNames,
    about,
    bad_field,
    require_at_most,
    require_within,
    text_in,
)
from ktcli.server.models.prompts import ChatRequest
from ktcli.text.settings import Settings

METADATA_MOST, METADATA_NAME_CHARS, METADATA_CHARS = 16, 64, 512
NAME_CHARS_MOST = 256  # of what a client calls its user, and its cache
WITH_LOGPROBS = "message.output_text.logprobs"
WITH_SEALED = "reasoning.encrypted_content"
Message = dict[str, Any]
_INSTEAD = {
    "conversation": "use previous_response_id, or send the whole conversation as input",
    "prompt": "send its text as instructions or input",
    "background": "send the request with stream, and read the answer as it comes",
}


def _open_nothing(sealed: str) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Turn:
    """The conversation that a request asks to have answered.

    Attributes:
        items: those of the request.
        earlier: those that it goes on with.
        open: returns the thoughts that this server sealed; None: it did not seal this text.
    """

    items: Sequence[Mapping[str, Any]]
    earlier: Sequence[Mapping[str, Any]] = ()
    open: Callable[[str], str | None] = _open_nothing


class ReasoningOptions(msgspec.Struct):
    """The field `reasoning`."""

    effort: str | None = None


class TextOptions(msgspec.Struct):
    """The field `text`."""

    format: dict[str, Any] | None = None


class ResponseBody(Sampled):
    """A request for a response, or for the count of its tokens."""

    own_fields = frozenset({"max_output_tokens"})

    input: str | list[dict[str, Any]] = ""
    instructions: str | None = None
    max_output_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None

    @property
    def likeliest(self) -> int | None:
        """The number of most likely tokens whose log probabilities are returned with each token; None: no log
        probabilities."""
        wanted = self.top_logprobs is not None or self.logprobs
        wanted = wanted or WITH_LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    @property
    def own_items(self) -> list[dict[str, Any]]:
        """The input items of the request itself, without those of earlier responses; a string becomes one user
        message, an empty one none."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}] if self.input else []
        return self.input

    @property
    def seals(self) -> bool:
        """Whether the request asks for the thoughts in encrypted form as well."""
        return WITH_SEALED in (self.include or ())

    def response_options(self, settings: Settings) -> AnswerOptions:
        """Returns the options of the answer: those of `answer_options`, the format of its text, and the tools that the
        model may call.

        Raises:
            Refusal: a value cannot be used.
        """
        self._refuse_what_is_not_there()
        require_metadata(self.metadata or {})
        for name in ("safety_identifier", "prompt_cache_key"):
            if len(getattr(self, name) or "") > NAME_CHARS_MOST:
                raise bad_field(name, f"must be at most {NAME_CHARS_MOST} characters long")
        if self.max_tool_calls is not None:
            require_within("max_tool_calls", self.max_tool_calls, 1, None)
        require_within("top_logprobs", self.top_logprobs or 0, 0, LOGPROBS_MOST)
        if self.n not in (None, 1):
            raise bad_field("n", f"must be 1, not {self.n}: a response has one answer")
        names = FieldNames(max_tokens="max_output_tokens")
        most = self.max_output_tokens
        if most is None:
            most, names = self.max_tokens, OWN_NAMES
        options = self.answer_options(settings, most, self.likeliest, names)
        options, tools, said = with_form(options, self._text_form()), self.offered, self.tool_choice
        function = said if isinstance(said, dict) and said.get("type") == "function" else {}
        choice = ToolChoice.of(said, function.get("name"), self.parallel_tool_calls)
        return with_tools(options, tools, choice)

    def chat_request(
        self, settings: Settings, caller: str, turn: Turn | None = None
    ) -> ChatRequest:
        """Returns the conversation to be answered: its messages, and the template's variables, tools among them.

        Args:
            turn: the items to be answered, see `turn_of`; None: those of the request alone.
        Raises:
            Refusal: an item, a tool or another field is invalid.
        """
        self._refuse_what_is_not_there()
        turn = turn or Turn(self.own_items)
        if not turn.items:
            raise bad_field("input", "must not be empty")
        messages = list(_messages(turn))
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not messages:
            raise bad_field("input", "has no text")
        variables = {**settings.variables}
        if self.reasoning is not None:
            variables |= effort_variables(self.reasoning.effort)
        variables |= own_variables(self.chat_template_kwargs)
        if offered := self.offered:
            variables["tools"] = offered
        return ChatRequest(messages, variables, caller)

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The functions that the model may call, in the form of chat completions, without tools that a server would run
        itself; empty if `tool_choice` is none.

        Raises:
            Refusal: there are more than 256, or one has no name, or its parameters are not the schema of an object.
        """
        tools = self.tools or []
        require_at_most("tools", len(tools), TOOLS_MOST)
        found = []
        for at, tool in enumerate(tools):
            if tool.get("type") != "function":
                continue
            text_in(tool, "name", f"tools[{at}]")
            require_parameters(tool.get("parameters"), f"tools[{at}].parameters")
            function = {name: tool[name] for name in _OF_FUNCTION if tool.get(name) is not None}
            found.append({"type": "function", "function": function})
        return [] if self.tool_choice == "none" else found

    def _text_form(self) -> Form | None:
        """Returns the form that the text is constrained to; None: any text."""
        said = None if self.text is None else self.text.format
        kind, field = "text" if said is None else said.get("type") or "text", "text.format"
        if said is None or kind == "text":
            return None
        if kind == "json_object":
            return Form.of_object(field)
        if kind != "json_schema":
            raise bad_field(
                f"{field}.type", f"must be text, json_object or json_schema, not {str(kind)[:40]!r}"
            )
        with about(f"{field}.schema"):
            return Form.of_schema(said.get("schema"), f"{field}.schema")

    def _refuse_what_is_not_there(self) -> None:
        """Checks that the request needs nothing that this server does not have. Raises: Refusal: it does."""
        refuse_elsewhere(self, _INSTEAD)
        if self.truncation not in (None, "disabled"):
            raise bad_field("truncation", f"must be 'disabled', not {self.truncation[:40]!r}")


def require_metadata(said: Mapping[str, Any]) -> None:
    """Raises an error if a request's metadata exceeds the limits of OpenAI's API: each response repeats it.

    Raises:
        Refusal: there are too many entries, or one is too long.
    """
    require_at_most("metadata", len(said), METADATA_MOST)
    for name, value in said.items():
        if len(name) > METADATA_NAME_CHARS or len(str(value)) > METADATA_CHARS:
            raise bad_field(
                "metadata",
                f"is limited to names of {METADATA_NAME_CHARS} and values of {METADATA_CHARS} characters",
            )


_OF_FUNCTION = ("name", "description", "parameters", "strict")


def _messages(turn: Turn) -> Iterator[Message]:
    """Yields the messages of a conversation; thoughts, text and calls of one answer become one message. Items that say
    nothing to a model, such as those of tools that servers run themselves, are left out."""
    said: Message = {}
    items = [*turn.earlier, *turn.items]
    roles = ["tool" if "output" in each else each.get("role") or "assistant" for each in items]
    last = last_question(roles)
    for at, item in enumerate(items):
        where, kind = f"input[{at - len(turn.earlier)}]", _kind(item)
        if kind == "reasoning":
            fresh: Message = {"reasoning_content": _thoughts(item, turn.open)}
        elif kind in _CALLS:
            fresh = {"tool_calls": [_call(item, where)]}
        elif kind == "message" and item.get("role") == "assistant":
            fresh = plain_message(item, where)
        elif (other := _other(item, kind, where, asked=at == last)) is not None:
            if said:
                yield _whole(said)
            said = {}
            yield other
            continue
        else:
            continue
        if said and _begins_anew(said, fresh):
            yield _whole(said)
            said = {}
        calls = said.get("tool_calls", []) + fresh.get("tool_calls", [])
        said = {**said, **fresh, **({"tool_calls": calls} if calls else {})}
    if said:
        yield _whole(said)


def _kind(item: Mapping[str, Any]) -> str:
    said = item.get("type") or "message"
    return said if isinstance(said, str) else ""


def _begins_anew(said: Message, fresh: Message) -> bool:
    """Returns whether an item begins a new message: within one, thoughts come before a text, and a text before
    calls.
    """
    if "tool_calls" in fresh:
        return False
    return "tool_calls" in said or "content" in said or "content" not in fresh


def _whole(said: Message) -> Message:
    return {
        "role": "assistant",
        "content": "",
        **{k: v for k, v in said.items() if k in _OF_ANSWER},
    }


_OF_ANSWER = ("content", "reasoning_content", "tool_calls")


def _other(item: Mapping[str, Any], kind: Any, where: str, *, asked: bool) -> Message | None:
    """Returns the message of an item that is not the model's; None: the item is not a message.

    Args:
        asked: whether it is the last user message.
    Raises:
        Refusal: it stands for something that this server does not have.
    """
    if kind == "function_call_output" or ("output" in item and "call_id" in item):
        output = plain_message({"role": "tool", "content": item.get("output")}, f"{where}.output")
        return {**output, **_id(item, "tool_call_id", where)}
    if kind != "message":
        return None
    found = plain_message(item, where, asked=asked)
    return {"role": found["role"], "content": found["content"]}


# What a model wrote to call something; a custom tool takes a text.
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    said = item.get(_CALLS[item["type"]], "{}")
    if item["type"] == "custom_tool_call":
        said = {"input": said}
    function = {"name": text_in(item, "name", where), "arguments": said}
    call = {**_id(item, "id", where), "type": "function", "function": function}
    message = plain_message({"role": "assistant", "tool_calls": [call]}, where)
    found: dict[str, Any] = message["tool_calls"][0]
    return found


def _id(item: Mapping[str, Any], name: str, where: str) -> dict[str, str]:
    """Returns the id of a call under the name that messages have for it; empty where the client sends none."""
    return {} if item.get("call_id") is None else {name: text_in(item, "call_id", where)}


def _thoughts(item: Mapping[str, Any], open: Callable[[str], str | None]) -> str:
    """Returns the text of a reasoning item: what this server sealed in it, or else its content, or its summary."""
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and (opened := open(sealed)) is not None:
        return opened
    for name in ("content", "summary"):
        parts = item.get(name)
        texts = (
            [part.get("text") for part in parts if isinstance(part, dict)]
            if isinstance(parts, list)
            else []
        )
        if found := "\n\n".join(text for text in texts if isinstance(text, str)):
            return found
    return ""
