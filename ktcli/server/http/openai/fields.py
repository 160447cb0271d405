"""The bodies of OpenAI's requests, and their options for the engine.

Unknown fields are ignored; a field with an unsupported value is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ktcli.answers.grammar.form import Form, Notation
from ktcli.answers.grammar.whole import Shape
from ktcli.dialogue.answer import AnswerOptions
from ktcli.sampling import SamplingSettings
from ktcli.server.http.contents import last_question
from ktcli.server.http.foreign import ForeignLimits, not_supported
from ktcli.server.http.openai.message import plain_message
from ktcli.server.http.refusals import Refusal, about
from ktcli.server.http.shapes import GUIDES, ToolChoice, form_of_format, form_of_guides, with_tools
from ktcli.server.models.prompts import ChatRequest
from ktcli.text.settings import Settings, override
from ktcli.text.template import is_reserved

NO_LIMIT = -1  # in place of a number of tokens, as vLLM and llama.cpp have it
ANY_SEED = -1
LOGPROBS_MOST = 20
STOPS_MOST = 16
CHOICES_MOST = 16
STOP_CHARS_MOST = 1000
STOP_IDS_MOST = 1024
SALT_CHARS_MOST = 256
TOOLS_MOST = 256
PROMPTS_MOST = 128  # of one request, and the answers to them
BIASES_MOST = 1024
_OWN_NAMES: Mapping[str, str] = {}
# What SGLang and llama.cpp call the forms of an answer.
_FORMS = {
    "regex": Notation.REGEX,
    "ebnf": Notation.GBNF,
    "grammar": Notation.GBNF,
    "json_schema": Notation.SCHEMA,
}
_NUMBERS = (
    "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed"
).split()


class StreamOptions(msgspec.Struct):
    """The field `stream_options`."""

    include_usage: bool = False


class Sampled(ForeignLimits):
    """The fields that completions of both kinds have."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    return_progress: bool = False
    ignore_eos: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: Any = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    n_predict: int | None = None
    prompt_logprobs: Any = None
    kt_persist: bool = False
    kv_transfer_params: Any = None

    @property
    def wants_usage(self) -> bool:
        """Tells whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self, own: SamplingSettings, names: Mapping[str, str] = _OWN_NAMES
    ) -> SamplingSettings:
        """Returns the model's own sampling settings, overridden by those of the request.

        Args:
            names: what a client calls the fields, where it is not as here.
        Raises:
            Refusal: a value is out of range.
        """
        found = own
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None:
                if name == "seed":
                    if value == ANY_SEED:
                        continue
                    value %= 2**64  # a signed one is meant as its 64 bits
                if name == "top_k":
                    value = max(0, value)  # -1 is off, too
                with about(names.get(name, name)):
                    found = override(found, **{name: value})
        _few("logit_bias", len(self.logit_bias or ()), BIASES_MOST)
        with about("logit_bias"):
            return replace(found, logit_bias=_biases(self.logit_bias))

    def answer_options(
        self,
        settings: Settings,
        most: int | None,
        logprobs: int | None,
        names: Mapping[str, str] = _OWN_NAMES,
        *,
        least: int = 1,
    ) -> AnswerOptions:
        """Returns the options of the answer: sampling, limits and constraints.

        Args:
            most: the most tokens, as asked for; NO_LIMIT: as many as there is room for.
            least: the least that `most` can be.
            names: what the client calls the fields, where it is not as here.
        Raises:
            Refusal: a value cannot be used.
        """
        self._refuse_what_is_not_kept_to()
        if (other := self.n_predict) is not None and _is_less(other, most):
            most, names = other, {**names, "max_tokens": "n_predict"}
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        stop = names.get("stop", "stop")
        _few(stop, len(stops), STOPS_MOST)
        if any(len(each) > STOP_CHARS_MOST for each in stops):
            said = f"{stop} has a string of more than {STOP_CHARS_MOST:,} characters"
            raise Refusal(400, said, stop, "unsupported_value")
        if most is not None and most != NO_LIMIT:
            _within(names.get("max_tokens", "max_tokens"), most, least, None)
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= SALT_CHARS_MOST:
            said = f"cache_salt must be 1 to {SALT_CHARS_MOST} characters long"
            raise Refusal(400, said, "cache_salt", "unsupported_value")
        choices = 1 if self.n is None else self.n
        _within("n", choices, 1, CHOICES_MOST)
        return AnswerOptions(
            self.sampling(settings.sampling, names),
            tuple(each for each in stops if each) or settings.stops,
            settings.max_tokens if most is None else None if most == NO_LIMIT else most,
            choices,
            logprobs,
            shape=None if (form := self.form) is None else Shape(form),
            salt=self.cache_salt or "",
            endless=self.ignore_eos,
            stop_ids=frozenset(self.stop_token_ids or ()),
            min_tokens=self._least_tokens(most),
            think_budget=settings.think_budget,
            persist=self.kt_persist or (most == 1 and bool(self.kv_transfer_params)),
        )

    def _refuse_what_is_not_kept_to(self) -> None:
        """Checks that the request has no field that must be kept to and cannot be. Raises: Refusal: it has one."""
        self.refuse_foreign_limits()
        if self.prompt_logprobs is not None and self.prompt_logprobs is not False:
            hint = "use /v1/completions with echo and logprobs"
            raise not_supported("prompt_logprobs", hint)
        _few("stop_token_ids", len(self.stop_token_ids or ()), STOP_IDS_MOST)

    def _least_tokens(self, most: int | None) -> int:
        """Returns the least number of tokens of an answer of `most` at most.

        Raises:
            Refusal: it cannot be kept to.
        """
        field, least = "min_tokens", self.min_tokens or 0
        _within(field, least, 0, None if most in (None, NO_LIMIT) else most)
        if least and self.form is not None:
            said = f"{field} and {self.form.field} cannot be used together"
            raise Refusal(400, said, field, "unsupported_value")
        return least

    @property
    def form(self) -> Form | None:
        """Returns the form that the text of an answer is constrained to; None: any text.

        Raises:
            Refusal: a field cannot be used, or there are several.
        """
        guided = {name: getattr(self, f"guided_{name}") for name in GUIDES}
        found = {
            "response_format": form_of_format(self.response_format),
            "structured_outputs": _structured(self.structured_outputs),
            "guided_…": form_of_guides(guided, "guided_"),
            **{name: self._form_of(name) for name in _FORMS},
        }
        given = [name for name, form in found.items() if form is not None]
        if len(given) > 1:
            words = f"{given[0]} and {given[1]} cannot be used together"
            raise Refusal(400, words, given[1], "unsupported_value")
        return found[given[0]] if given else None

    def _form_of(self, name: str) -> Form | None:
        """Returns the form that one of `_FORMS` asks for; None: it is not given, for which some send an empty text."""
        said = getattr(self, name)
        return None if said is None or said == "" else Form(_FORMS[name], said, name)


class ChatBody(Sampled):
    """A request for a chat completion."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def chat_options(self, settings: Settings) -> AnswerOptions:
        """Returns the options of the answer, see `answer_options`."""
        chances = logprobs_of(self.logprobs, self.top_logprobs)
        most, names = self.max_tokens, _OWN_NAMES
        if self.max_completion_tokens is not None:
            most, names = self.max_completion_tokens, {"max_tokens": "max_completion_tokens"}
        options = self.answer_options(settings, most, chances, names)
        if (budget := self.thinking_token_budget) is not None:
            _within("thinking_token_budget", budget, 0, None)
            options = replace(options, think_budget=budget)
        return with_tools(options, self.offered, self._choice)

    def chat_request(self, settings: Settings, caller: str) -> ChatRequest:
        """Returns the messages and template variables of the conversation.

        Raises:
            Refusal: a message is invalid.
        """
        if not self.messages:
            raise Refusal(400, "messages must not be empty", "messages", "unsupported_value")
        last = last_question([each.get("role") for each in self.messages])
        messages = [
            plain_message(each, f"messages[{at}]", asked=at == last)
            for at, each in enumerate(self.messages)
        ]
        variables = {**settings.variables, **self._variables()}
        if self.offered:
            variables["tools"] = self.offered
        if self.add_generation_prompt is False:
            variables["add_generation_prompt"] = False
        return ChatRequest(messages, variables, caller, continues=self._continues(messages))

    def _continues(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Tells whether the answer goes on behind the last message.

        Raises:
            Refusal: it cannot.
        """
        field = "continue_final_message"
        if not self.continue_final_message:
            return False
        if self.add_generation_prompt:
            said = f"{field} and add_generation_prompt cannot be used together"
            raise Refusal(400, said, field, "unsupported_value")
        if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
            said = f"{field} requires the last message to be an assistant message with text"
            raise Refusal(400, said, field, "unsupported_value")
        return True

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Returns the tools that the model may call.

        Raises:
            Refusal: one of them is invalid, or there are too many.
        """
        tools = functions(self.tools)
        return [] if self.tool_choice == "none" else tools

    @property
    def _choice(self) -> ToolChoice:
        """Returns how the tools are to be used.

        Raises:
            Refusal: in a way that is not supported.
        """
        said = self.tool_choice
        function = said.get("function") if isinstance(said, dict) else None
        named = function.get("name") if isinstance(function, dict) else None
        return ToolChoice.of(said, named, several=self.parallel_tool_calls is not False)

    def _variables(self) -> dict[str, Any]:
        return {
            **effort_variables(self.reasoning_effort),
            **own_variables(self.chat_template_kwargs),
        }


class TextBody(Sampled):
    """A request for a completion of a text."""

    prompt: str | list[Any] = ""
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    def text_options(self, settings: Settings) -> AnswerOptions:
        """Returns the options of the answer, see `answer_options`."""
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, LOGPROBS_MOST)
        if self.suffix and self.echo:
            words = "suffix and echo cannot be used together"
            raise Refusal(400, words, "suffix", "unsupported_value")
        if self.best_of not in (None, 1, self.n):
            raise not_supported("best_of")
        most = 16 if self.max_tokens is None and self.n_predict is None else self.max_tokens
        options = self.answer_options(settings, most, self.logprobs, least=0)
        if not self.echo or self.logprobs is None:
            return replace(options, plain=True)
        return replace(options, plain=True, prompt_logprobs=self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each as text or token ids.

        Raises:
            Refusal: they are neither, or there are too many.
        """
        said = self.prompt
        several = said if isinstance(said, list) and said and _is_prompt(said[0]) else [said]
        _few("prompt", len(several), PROMPTS_MOST)
        choices = len(several) * (self.n or 1)
        if choices > PROMPTS_MOST:
            words = f"prompt and n ask for {choices:,} answers; the limit is {PROMPTS_MOST}"
            raise Refusal(400, words, "prompt", "unsupported_value")
        return [_prompt(each) for each in several]


def _is_prompt(said: Any) -> bool:
    return isinstance(said, str | list)


def _prompt(said: Any) -> str | list[int]:
    """Returns one prompt. Raises: Refusal: it is neither a text nor token ids."""
    if isinstance(said, str):
        return said
    ids: list[Any] = said if isinstance(said, list) else [None]
    ids = [int(each) if isinstance(each, float) and each.is_integer() else each for each in ids]
    if not all(type(each) is int for each in ids):
        words = "prompt must be a string, a list of token ids, or a list of either"
        raise Refusal(400, words, "prompt", "unsupported_value")
    return ids


def logprobs_of(wanted: bool | None, likeliest: int | None) -> int | None:
    """Returns the number of likeliest tokens that come with each token; None: no log probabilities.

    Raises:
        Refusal: there are too many, or no log probabilities are wanted.
    """
    most = likeliest or 0
    _within("top_logprobs", most, 0, LOGPROBS_MOST)
    if most and not wanted:
        said = "top_logprobs requires logprobs to be true"
        raise Refusal(400, said, "top_logprobs", "unsupported_value")
    return most if wanted else None


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Returns the template variables of a reasoning effort; None: the model's default."""
    if effort is None:
        return {}
    thinks = effort not in ("none", "minimal")
    about = {"enable_thinking": thinks, "thinking": thinks}
    return {**about, "reasoning_effort": effort if thinks else "low"}


def own_variables(said: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the template variables that a client sets itself.

    Raises:
        Refusal: one of them is the renderer's.
    """
    for name in said or ():
        if is_reserved(name):
            words = (
                f"chat_template_kwargs must not contain {name[:60]!r}, which the server sets itself"
            )
            raise Refusal(400, words, "chat_template_kwargs", "unsupported_value")
    return said or {}


def functions(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the tools of a request, checked.

    Raises:
        Refusal: one names no function, or its parameters are not the schema of an object, or there are too many.
    """
    few_tools(tools or ())
    for at, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(
                400,
                f"tools[{at}].function.name must be a string",
                f"tools[{at}]",
                "unsupported_value",
            )
        require_parameters(function.get("parameters"), f"tools[{at}].function.parameters")
    return tools or []


def require_parameters(schema: Any, field: str) -> None:
    """Checks that the parameters of a tool are the JSON schema of an object, or None.

    Raises:
        Refusal: they are not.
    """
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise Refusal(400, f"{field} must be a JSON schema object", field, "unsupported_value")
    kind = schema.get("type") or "object"
    if kind != "object":
        said = f"{field}.type must be 'object', not {str(kind)[:40]!r}"
        raise Refusal(400, said, field, "unsupported_value")


def few_tools(tools: Sequence[Any]) -> None:
    """Checks the number of tools of a request.

    Raises:
        Refusal: there are too many.
    """
    _few("tools", len(tools), TOOLS_MOST)


def _structured(said: Mapping[str, Any] | None) -> Form | None:
    """Returns the form that vLLM's `structured_outputs` asks for; None: any text."""
    found = form_of_guides(said or {}, "structured_outputs.")
    wants_object = said is not None and said.get("json_object") is True
    return Form.of_object("structured_outputs") if found is None and wants_object else found


def _biases(said: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(id), bias) for id, bias in (said or {}).items())
    except ValueError as error:
        raise Refusal(
            400, "the keys of logit_bias must be token ids", "logit_bias", "unsupported_value"
        ) from error


def _is_less(most: int, other: int | None) -> bool:
    """Tells whether the first of two numbers of tokens is the one that limits an answer."""
    if other is None or most < NO_LIMIT:
        return True
    return most != NO_LIMIT and (other == NO_LIMIT or most < other)


def _few(field: str, count: int, most: int) -> None:
    if count > most:
        said = f"{field} has {count:,} entries; the limit is {most:,}"
        raise Refusal(400, said, field, "unsupported_value")


def _within(field: str, value: int, least: int, most: int | None) -> None:
    if value < least or (most is not None and value > most):
        range_ = f"at least {least}" if most is None else f"between {least} and {most}"
        raise Refusal(400, f"{field} must be {range_}, not {value}", field, "unsupported_value")
