"""The bodies of Ollama's requests, and their options for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ktcli.answers.grammar.form import Form
from ktcli.dialogue.answer import AnswerOptions
from ktcli.errors import ContextFull
from ktcli.server.http.constraints import (
    MOST_TOKENS,
    NO_LIMIT,
    AnswerConstraints,
    not_supported,
    refuse_elsewhere,
    with_form,
    with_tools,
)
from ktcli.server.http.contents import last_question, plain_message, unseen
from ktcli.server.http.openai.fields import choice_of, functions
from ktcli.server.http.openai.sampled import Sampled, logprobs_of
from ktcli.server.http.refusals import FieldNames, about, bad_field, require_within
from ktcli.server.models.keepalive import keep_seconds
from ktcli.server.models.prompts import ChatRequest
from ktcli.text.settings import Settings


def keep_s_of(keep_alive: float | str | None) -> float | None:
    """Returns the seconds for which a request's `keep_alive` keeps a model in memory; None: as long as before.

    Raises:
        Refusal: `keep_alive` is not a duration.
    """
    with about("keep_alive"):
        return None if keep_alive is None else keep_seconds(keep_alive, "keep_alive")


class Options(AnswerConstraints):
    """The field `options`."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    num_ctx: int | None = None
    stop: str | list[str] | None = None


_ELSEWHERE = {
    "stop": "use options.stop",
    "num_ctx": "use options.num_ctx",
    **dict.fromkeys(["num_predict", "max_tokens", *MOST_TOKENS], "use options.num_predict"),
    "min_new_tokens": "use min_tokens",
    "stop_sequences": "use options.stop",
}
_ELSEWHERE_AMONG_OPTIONS = {
    "max_new_tokens": "use options.num_predict",
    "min_new_tokens": "use options.min_tokens",
}
# What OpenAI's API has under the same names.
_SAMPLED = ("temperature top_k top_p min_p presence_penalty frequency_penalty seed stop").split()
_NAMES = {
    **{
        name: f"options.{name}"
        for name in Options.__struct_fields__
        if name not in AnswerConstraints.__struct_fields__
    },
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
}


class OllamaBody(AnswerConstraints):
    """The common fields of requests for a chat and for a text."""

    model: str = ""
    stream: bool = True
    format: Any = None
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stop: Any = None
    num_ctx: Any = None
    num_predict: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    stop_sequences: Any = None

    @property
    def keep_s(self) -> float | None:
        """The seconds for which the model stays in memory after the request; None: as long as before. Raises: as
        `keep_s_of`."""
        return keep_s_of(self.keep_alive)

    @property
    def names(self) -> FieldNames:
        """The request's names of fields by kt's names of them, such as `options.stop` for `stop`."""
        given = (self.options or Options()).given_constraints()
        return FieldNames(_NAMES, **{name: f"options.{name}" for name in given})

    def answer_options(self, settings: Settings) -> AnswerOptions:
        """Returns the options of the answer (sampling, limits, constraints) from the request, or else from the model's
        `settings`.

        Raises:
            Refusal: a value cannot be used.
        """
        given, names = self.options or Options(), self.names
        refuse_elsewhere(self, _ELSEWHERE)
        refuse_elsewhere(given, _ELSEWHERE_AMONG_OPTIONS, names)
        if given.num_ctx is not None:
            require_within("options.num_ctx", given.num_ctx, 1, None)
        said = Sampled(
            repetition_penalty=given.repeat_penalty,
            **{name: getattr(given, name) for name in _SAMPLED},
            **{**self.given_constraints(), **given.given_constraints()},
        )
        most = given.num_predict
        if most is not None and most < 0:  # -1: for ever; -2: until the context is full
            most = NO_LIMIT
        options = said.answer_options(
            settings, most, logprobs_of(self.logprobs, self.top_logprobs), names, least=0
        )
        return with_form(options, self._form(), names)

    def context(self, most: int) -> int | None:
        """Returns the most tokens that prompt and answer may have together: the request's `num_ctx`, but at most
        `most`; None: the request has no `num_ctx`.

        Args:
            most: the context of the model.
        """
        asked = None if self.options is None else self.options.num_ctx
        return None if asked is None else min(asked, most)

    def within(self, options: AnswerOptions, tokens: int, most: int) -> AnswerOptions:
        """Returns `options` with the answer limited to the tokens that the prompt leaves of the request's `num_ctx`
        (see `context`); unchanged if the request has none.

        Args:
            tokens: the length of the prompt.
            most: the context of the model.
        Raises:
            ContextFull: there is no room for an answer.
        """
        if (context := self.context(most)) is None:
            return options
        if tokens >= context:
            raise ContextFull(
                f"the conversation has {tokens:,} tokens and options.num_ctx is {context:,},"
                " which leaves no room for an answer"
            )
        asked, room = options.max_tokens, context - tokens
        return replace(options, max_tokens=room if asked is None else min(asked, room))

    def _form(self) -> Form | None:
        """Returns the form that the text is constrained to: any object, or JSON of a schema; None: any text."""
        if not self.format:
            return None
        is_json = self.format == "json"
        return Form.of_object("format") if is_json else Form.of_schema(self.format, "format")

    def variables(self, settings: Settings) -> dict[str, Any]:
        """Returns the variables of the chat template, by name: those of `settings`, with the request's `think` in place
        of theirs for whether and how much (`reasoning_effort`) to think."""
        if self.think is None:
            return settings.variables
        thinking = self.think is not False and self.think != "none"
        said = replace(settings, thinking=thinking).variables
        return {**said, "reasoning_effort": self.think} if isinstance(self.think, str) else said


class OllamaChatBody(OllamaBody):
    """A request for the next message of a conversation."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def chat_options(self, settings: Settings) -> AnswerOptions:
        """Returns the options of the answer: those of `answer_options`, and the tools that the model may call.

        Raises:
            Refusal: a value cannot be used.
        """
        choice = choice_of(self.tool_choice, self.parallel_tool_calls)
        return with_tools(self.answer_options(settings), self._offered, choice, self.names)

    @property
    def _offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return functions(self.tools, self.tool_choice)

    def chat_request(self, settings: Settings, caller: str) -> ChatRequest:
        """Returns the conversation to be answered: its messages, and the template's variables, tools among them.

        Raises:
            Refusal: a message or a tool is invalid.
        """
        last = last_question([each.get("role") for each in self.messages])
        messages = [
            _plain(each, f"messages[{at}]", asked=at == last)
            for at, each in enumerate(self.messages)
        ]
        variables = self.variables(settings)
        if tools := self._offered:
            variables = {**variables, "tools": tools}
        return ChatRequest(messages, variables, caller)


class GenerateBody(OllamaBody):
    """A request for an answer to a text."""

    prompt: str = ""
    system: str = ""
    raw: bool = False
    suffix: str = ""
    images: list[str] | None = None

    def chat_request(self, settings: Settings, caller: str) -> ChatRequest:
        """Returns the prompt as a conversation: a system message if there is a system text, the prompt as a user
        message, and the template's variables.

        Raises:
            Refusal: a field is not supported.
        """
        if self.images:
            raise not_supported("images")
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return ChatRequest(messages, self.variables(settings), caller)


def _plain(message: Mapping[str, Any], where: str, *, asked: bool) -> dict[str, Any]:
    images = message.get("images")
    if images and asked:
        raise bad_field(f"{where}.images", "has an image; this model accepts text only")
    found = plain_message(message, where)
    if isinstance(images, list):
        found["content"] = "\n".join([*(unseen("an image") for _ in images), found["content"]])
    return found
