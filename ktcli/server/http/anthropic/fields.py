"""The bodies of Anthropic's requests, and their options for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ktcli.answers.grammar.form import Form
from ktcli.dialogue.answer import AnswerOptions
from ktcli.server.http.constraints import (
    MOST_TOKENS,
    NO_LIMIT,
    AnswerConstraints,
    ToolChoice,
    refuse_elsewhere,
    with_form,
    with_tools,
)
from ktcli.server.http.contents import last_question, text_of
from ktcli.server.http.openai.fields import TOOLS_MOST, require_parameters
from ktcli.server.http.openai.sampled import Sampled
from ktcli.server.http.refusals import (
    FieldNames,
    bad_field,
    require_at_most,
    require_within,
    text_in,
)
from ktcli.server.models.prompts import ChatRequest
from ktcli.text.settings import Settings

# A line that clients put first and change with each request: with it nothing would ever be found in the cache.
_VOLATILE = "x-anthropic-billing-header:"
_ELSEWHERE = {
    "stop": "use stop_sequences",
    "format": "use output_config.format",
    "num_ctx": "use options.num_ctx of Ollama's API",
    **dict.fromkeys(MOST_TOKENS, "use max_tokens"),
    "min_new_tokens": "use min_tokens",
    "logprobs": "use OpenAI's API",
    "top_logprobs": "use OpenAI's API",
}
_IGNORED = frozenset({"redacted_thinking"})


class ThinkingOptions(msgspec.Struct):
    """The field `thinking`."""

    type: str = "disabled"
    budget_tokens: int | None = None


class MessagesBody(AnswerConstraints, kw_only=True):
    """A request for an answer, or for the count of its tokens."""

    messages: list[dict[str, Any]]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    thinking: ThinkingOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # what earlier clients call output_config.format
    stop: Any = None
    format: Any = None
    num_ctx: Any = None
    num_predict: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: Any = None
    top_logprobs: Any = None

    def answer_options(self, settings: Settings) -> AnswerOptions:
        """Returns the options of the answer (sampling, limits, constraints) from the request, or else from the model's
        `settings`.

        Raises:
            Refusal: a value cannot be used, or `max_tokens` is missing, or leaves nothing for an answer.
        """
        if self.max_tokens is None:
            raise bad_field("max_tokens", "is required")
        refuse_elsewhere(self, _ELSEWHERE)
        said = Sampled(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            **self.given_constraints(),
        )
        names = FieldNames(stop="stop_sequences")
        options = said.answer_options(settings, self.max_tokens, None, names)
        options = with_form(options, self._form())
        if (budget := self._budget(self.max_tokens)) is not None:
            options = replace(options, think_budget=budget)
        return with_tools(options, self.offered, self._choice)

    def chat_request(self, settings: Settings, caller: str) -> ChatRequest:
        """Returns the conversation to be answered: its messages in the form of OpenAI's API, and the variables of the
        chat template, such as `tools`.

        Raises:
            Refusal: a message or a tool is invalid, or there is no message.
        """
        if not self.messages:
            raise bad_field("messages", "must not be empty")
        system = _system(self.system)
        messages = [{"role": "system", "content": system}] if system else []
        last = last_question([_role_of(each) for each in self.messages])
        for at, message in enumerate(self.messages):
            messages += _plain(message, f"messages[{at}]", asked=at == last)
        if not messages:
            raise bad_field("messages", "have no text")
        ends = messages[-1]
        continues = ends["role"] == "assistant" and "tool_calls" not in ends
        variables = dict(settings.variables)
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            thinks = self.thinking.type == "enabled"
            variables |= replace(settings, thinking=thinks).variables
        if offered := self.offered:
            variables["tools"] = offered
        return ChatRequest(messages, variables, caller, continues=continues)

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call, in the form of OpenAI's API, without those that a server would run itself;
        empty if `tool_choice` is none.

        Raises:
            Refusal: there are more than 256, or one has no name, or its schema is not that of an object.
        """
        tools = self.tools or []
        require_at_most("tools", len(tools), TOOLS_MOST)
        known = [
            _tool(tool, f"tools[{at}]")
            for at, tool in enumerate(tools)
            if tool.get("input_schema") is not None or (tool.get("type") or "custom") == "custom"
        ]
        chosen = (self.tool_choice or {}).get("type") or "auto"
        return [] if chosen == "none" else known

    @property
    def _choice(self) -> ToolChoice:
        """Returns how the tools are to be used.

        Raises:
            Refusal: in a way that is not supported.
        """
        said = self.tool_choice or {}
        kind, several = said.get("type") or "auto", self.parallel_tool_calls is not False
        several = several and said.get("disable_parallel_tool_use") is not True
        if kind in ("auto", "none"):
            return ToolChoice(several=several)
        if kind == "any":
            return ToolChoice(required=True, several=several)
        name = said.get("name")
        if kind != "tool" or not isinstance(name, str) or not name:
            raise bad_field("tool_choice.type", "must be auto, none, any, or tool with a name")
        return ToolChoice(required=True, name=name, several=False)

    def _budget(self, most: int) -> int | None:
        """Returns the most tokens of thoughts in an answer of at most `most`; None: the model's default."""
        said, field = self.thinking, "thinking.budget_tokens"
        if said is None or said.type != "enabled" or said.budget_tokens is None:
            return None
        require_within(field, said.budget_tokens, 1, None)
        if said.budget_tokens >= most != NO_LIMIT:
            raise bad_field(
                field, f"must be less than max_tokens ({most}), not {said.budget_tokens}"
            )
        return said.budget_tokens

    def _form(self) -> Form | None:
        """Returns the form that the text is constrained to, JSON of a schema; None: any text."""
        said, field = (self.output_config or {}).get("format"), "output_config.format"
        if said is None:
            said, field = self.output_format, "output_format"
        if said is None:
            return None
        if not isinstance(said, dict) or said.get("type") != "json_schema":
            raise bad_field(f"{field}.type", "must be json_schema")
        return Form.of_schema(said.get("schema"), f"{field}.schema")


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = text_in(tool, "name", where)
    if tool.get("input_schema") is None:
        raise bad_field(f"{where}.input_schema", "is required")
    require_parameters(tool["input_schema"], f"{where}.input_schema")
    function = {"name": name, "parameters": tool["input_schema"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _role_of(message: Mapping[str, Any]) -> Any:
    """Returns the role of a message; "tool" where it has results of tools."""
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    results = (isinstance(each, dict) and each.get("type") == "tool_result" for each in blocks)
    return "tool" if any(results) else message.get("role")


def _system(said: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Returns the system text, without lines that change with each request."""
    parts = [said] if isinstance(said, str) else []
    if not isinstance(said, str):
        parts = [text_of(each, f"system[{at}]") for at, each in enumerate(said or ())]
    return "\n".join(part for part in parts if part and not part.startswith(_VOLATILE))


def _plain(message: Mapping[str, Any], where: str, *, asked: bool) -> Iterator[dict[str, Any]]:
    """Yields the messages of one message of Anthropic's API: results of tools become messages of their own.

    Args:
        asked: whether it is the last user message.
    """
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_field(
            f"{where}.role", f"must be user, assistant or system, not {str(role)[:40]!r}"
        )
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise bad_field(f"{where}.content", "must be a string or a list of content blocks")
    yield from _of_blocks(role, content, f"{where}.content", asked=asked)


def _of_blocks(
    role: str, content: Sequence[Any], where: str, *, asked: bool
) -> Iterator[dict[str, Any]]:
    """Yields the messages of the content blocks of a message, see `_plain`."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(content):
        said = block.get("type") if isinstance(block, dict) else None
        kind = said if isinstance(said, str) else ""
        inner = f"{where}[{at}]"
        if kind == "text":
            texts.append(text_in(block, "text", inner))
        elif kind == "thinking":
            thoughts.append(text_in(block, "thinking", inner))
        elif kind == "tool_use":
            calls.append(_call(block, inner))
        elif kind == "tool_result":
            yield {
                "role": "tool",
                **_id(block, "tool_use_id", "tool_call_id", inner),
                "content": text_of(block.get("content"), f"{inner}.content", gap="\n"),
            }
        elif kind not in _IGNORED and (text := text_of([block], inner, asked=asked)):
            texts.append(text)
    if texts or thoughts or calls:
        found: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if thoughts:
            found["reasoning_content"] = "\n".join(thoughts)
        if calls:
            found["tool_calls"] = calls
        yield found


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the call of a `tool_use` block."""
    function = {"name": text_in(block, "name", where), "arguments": block.get("input")}
    return {**_id(block, "id", "id", where), "type": "function", "function": function}


def _id(block: Mapping[str, Any], name: str, found: str, where: str) -> dict[str, str]:
    """Returns the id in a field of a block, under the name that messages have for it; empty where there is none."""
    return {} if block.get(name) is None else {found: text_in(block, name, where)}
