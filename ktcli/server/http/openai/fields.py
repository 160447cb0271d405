"""The bodies of OpenAI's requests, and their options for the engine.

Unknown fields are ignored; a field with an unsupported value is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ktcli.dialogue.answer import AnswerOptions
from ktcli.server.http.constraints import ToolChoice, with_tools
from ktcli.server.http.contents import last_question, plain_message
from ktcli.server.http.openai.sampled import LOGPROBS_MOST, Sampled, logprobs_of
from ktcli.server.http.refusals import (
    OWN_NAMES,
    FieldNames,
    bad_field,
    bad_value,
    require_at_most,
    require_within,
)
from ktcli.server.models.prompts import ChatRequest
from ktcli.text.settings import Settings
from ktcli.text.template import is_reserved

TOOLS_MOST = 256
PROMPTS_MOST = 128  # of one request, and the answers to them


class ChatBody(Sampled):
    """A request for a chat completion."""

    own_fields = frozenset({"max_completion_tokens"})

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def chat_options(self, settings: Settings) -> AnswerOptions:
        """Returns the options of the answer: those of `answer_options`, and the tools that the model may call.

        Raises:
            Refusal: a value cannot be used.
        """
        chances = logprobs_of(self.logprobs, self.top_logprobs)
        most, names = self.max_tokens, OWN_NAMES
        if self.max_completion_tokens is not None:
            most, names = self.max_completion_tokens, FieldNames(max_tokens="max_completion_tokens")
        options = self.answer_options(settings, most, chances, names)
        tools = self.offered
        return with_tools(options, tools, choice_of(self.tool_choice, self.parallel_tool_calls))

    def chat_request(self, settings: Settings, caller: str) -> ChatRequest:
        """Returns the conversation to be answered: its messages, and the template's variables, tools among them.

        Raises:
            Refusal: a message, a tool or another field is invalid.
        """
        if not self.messages:
            raise bad_field("messages", "must not be empty")
        last = last_question([each.get("role") for each in self.messages])
        messages = [
            plain_message(each, f"messages[{at}]", asked=at == last)
            for at, each in enumerate(self.messages)
        ]
        variables = {**settings.variables, **effort_variables(self.reasoning_effort)}
        variables |= own_variables(self.chat_template_kwargs)
        if self.offered:
            variables["tools"] = self.offered
        if self.add_generation_prompt is False:
            variables["add_generation_prompt"] = False
        return ChatRequest(messages, variables, caller, continues=self._continues(messages))

    def _continues(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether the answer goes on behind the last message.

        Raises:
            Refusal: it cannot.
        """
        field = "continue_final_message"
        if not self.continue_final_message:
            return False
        if self.add_generation_prompt:
            raise bad_field(field, "and add_generation_prompt cannot be used together")
        if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
            raise bad_field(field, "requires the last message to be an assistant message with text")
        return True

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as the request has them; empty if its `tool_choice` is none.

        Raises:
            Refusal: one of them is invalid, or there are too many.
        """
        return functions(self.tools, self.tool_choice)


class TextBody(Sampled):
    """A request for a completion of a text."""

    prompt: str | list[Any] = ""
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None

    def text_options(self, settings: Settings) -> AnswerOptions:
        """Returns the options of the completion: those of `answer_options`, for plain text without a chat format.

        Raises:
            Refusal: a value cannot be used.
        """
        if self.logprobs is not None:
            require_within("logprobs", self.logprobs, 0, LOGPROBS_MOST)
        if self.suffix and self.echo:
            raise bad_field("suffix", "and echo cannot be used together")
        most = 16 if self.max_tokens is None and self.n_predict is None else self.max_tokens
        options = self.answer_options(settings, most, self.logprobs, least=0)
        if not self.echo or self.logprobs is None:
            return replace(options, plain=True)
        return replace(options, plain=True, prompt_logprobs=self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts to be continued, each a string or a list of token ids.

        Raises:
            Refusal: a prompt is neither, or there are more than 128 prompts, or more than 128 answers to them, `n` to
                each.
        """
        said = self.prompt
        is_list = isinstance(said, list) and said and isinstance(said[0], str | list)
        several = said if is_list else [said]
        require_at_most("prompt", len(several), PROMPTS_MOST)
        choices = len(several) * (self.n or 1)
        if choices > PROMPTS_MOST:
            raise bad_field(
                "prompt", f"and n ask for {choices:,} answers; the limit is {PROMPTS_MOST}"
            )
        return [_prompt(each) for each in several]


def _prompt(said: Any) -> str | list[int]:
    """Returns one prompt. Raises: Refusal: it is neither a text nor token ids."""
    if isinstance(said, str):
        return said
    if not (ids := token_ids(said)):
        raise bad_field("prompt", "must be a string, a list of token ids, or a list of either")
    return ids


def token_ids(said: Any) -> list[int]:
    """Returns the token ids in a JSON list of integers, some of which may be written as floats; [] if `said` is
    anything else."""
    found = said if isinstance(said, list) else []
    found = [int(each) if isinstance(each, float) and each.is_integer() else each for each in found]
    return found if all(type(each) is int for each in found) else []


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Returns the variables of the chat template that ask for a reasoning effort, by name: `enable_thinking`,
    `thinking` and `reasoning_effort`; empty if `effort` is None, so that the model's default holds."""
    if effort is None:
        return {}
    thinks = effort not in ("none", "minimal")
    about = {"enable_thinking": thinks, "thinking": thinks}
    return {**about, "reasoning_effort": effort if thinks else "low"}


def own_variables(said: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the variables of the chat template, by name, that a client sets itself; empty if `said` is None.

    Raises:
        Refusal: one of them is a variable that only the server sets.
    """
    for name in said or ():
        if is_reserved(name):
            raise bad_field(
                "chat_template_kwargs",
                f"must not contain {name[:60]!r}, which the server sets itself",
            )
    return said or {}


def choice_of(said: str | dict[str, Any] | None, parallel: bool | None) -> ToolChoice:
    """Returns how the tools of a request may be used, from its fields `tool_choice` and `parallel_tool_calls`; where
    they are None, any tools may be called, several times, or none.

    Raises:
        Refusal: `tool_choice` is not a valid choice.
    """
    function = said.get("function") if isinstance(said, dict) else None
    named = function.get("name") if isinstance(function, dict) else None
    return ToolChoice.of(said, named, parallel)


def functions(tools: list[dict[str, Any]] | None, choice: Any) -> list[dict[str, Any]]:
    """Returns the tools of a request, checked but unchanged; empty if `choice` is "none".

    Raises:
        Refusal: there are more than 256, or one has no function name, or its parameters are not the schema of an
            object.
    """
    require_at_most("tools", len(tools or ()), TOOLS_MOST)
    for at, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_value(f"tools[{at}]", f"tools[{at}].function.name must be a string")
        require_parameters(function.get("parameters"), f"tools[{at}].function.parameters")
    return [] if choice == "none" else tools or []


def require_parameters(schema: Any, field: str) -> None:
    """Checks that `schema`, the parameters of a tool, is the JSON schema of an object, or None.

    Raises:
        Refusal: it is neither.
    """
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise bad_field(field, "must be a JSON schema object")
    kind = schema.get("type") or "object"
    if kind != "object":
        said = f"{field}.type must be 'object', not {str(kind)[:40]!r}"
        raise bad_value(field, said)
