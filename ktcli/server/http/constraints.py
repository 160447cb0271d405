"""The constraints of answers, the same in each API: their form, their tokens, their length, and the choice of tools.

Programs send them under the names of OpenAI, vLLM, SGLang and llama.cpp to whichever API they use. Fields that kt does
not know are ignored, but an answer that is not what was asked for helps nobody: those of other servers that constrain
answers in ways that kt does not support are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ktcli.answers.calls.values import Tools
from ktcli.answers.grammar.calls import WantedCalls
from ktcli.answers.grammar.form import Form, Notation
from ktcli.answers.grammar.whole import Shape
from ktcli.dialogue.answer import AnswerOptions
from ktcli.records import dataclass
from ktcli.server.http.refusals import OWN_NAMES, FieldNames, Refusal, bad_field, bad_value

# What vLLM's fields `structured_outputs` and `guided_…` are named behind.
_NOTATIONS = {
    "json": Notation.SCHEMA,
    "regex": Notation.REGEX,
    "choice": Notation.CHOICE,
    "grammar": Notation.GBNF,
}
GUIDES = tuple(_NOTATIONS)
_CHOICE = "tool_choice"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The ways in which the tools of a request may be used.

    Attributes:
        required: whether one must be called.
        name: the only one that may be; empty: any.
        several: whether there may be more than one call.
    """

    required: bool = False
    name: str = ""
    several: bool = True

    @classmethod
    def of(cls, said: Any, named: Any, parallel: bool | None) -> ToolChoice:
        """Returns how the tools of a request may be used, from the fields of OpenAI's API; where they are None, any
        tools may be called, several times, or none.

        Args:
            said: the field `tool_choice`.
            named: the name of the function in it, if it names one.
            parallel: the field `parallel_tool_calls`.
        Raises:
            Refusal: `tool_choice` is not auto, none, required, or an object that names a function.
        """
        several = parallel is not False
        if said in (None, "auto", "none"):
            return cls(several=several)
        if said == "required":
            return cls(required=True, several=several)
        if not isinstance(named, str) or not named:
            raise bad_field(
                "tool_choice", "must be auto, none, required, or an object that names a function"
            )
        return cls(required=True, name=named, several=False)


def form_of_format(said: Mapping[str, Any] | None, field: str) -> Form | None:
    """Returns the constraint on an answer's text, such as a JSON schema, that OpenAI's `response_format` asks for;
    None: any text is allowed.

    Args:
        said: the value of the field.
        field: the name of the field in errors.
    Raises:
        Refusal: the format has an unknown type.
    """
    kind = "text" if said is None else said.get("type") or "text"
    if said is None or kind == "text":
        return None
    if kind == "json_object" and said.get("schema") is None:
        return Form.of_object(field)
    if kind not in ("json_object", "json_schema"):
        raise bad_field(
            f"{field}.type", f"must be text, json_object or json_schema, not {str(kind)[:40]!r}"
        )
    inner = said if kind == "json_object" else said.get("json_schema")
    where = f"{field}.schema" if kind == "json_object" else f"{field}.json_schema.schema"
    return Form.of_schema(inner.get("schema") if isinstance(inner, Mapping) else None, where)


def form_of_guides(
    said: Mapping[str, Any], prefix: str, names: FieldNames = OWN_NAMES
) -> Form | None:
    """Returns the constraint on an answer's text that vLLM's fields json, regex, choice or grammar ask for; None: any
    text is allowed.

    Args:
        said: the value of each of these fields, None for those that are not there.
        prefix: precedes their names in kt's names of the fields.
        names: what the request calls the fields.
    Raises:
        Refusal: several of the fields are given.
    """
    given = [name for name in GUIDES if said.get(name) is not None]
    if not given:
        return None
    field, *others = (names[f"{prefix}{name}"] for name in given)
    if others:
        raise bad_value(others[0], f"{field} and {others[0]} cannot be used together")
    return Form(_NOTATIONS[given[0]], said[given[0]], field)


def with_form(
    options: AnswerOptions, form: Form | None, names: FieldNames = OWN_NAMES
) -> AnswerOptions:
    """Returns `options` with the text of the answer constrained to `form`; unchanged if that is None.

    Args:
        names: what the request calls the fields.
    Raises:
        Refusal: the options have a constraint already, or a minimum number of tokens.
    """
    if form is None:
        return options
    if options.shape is not None:
        raise bad_field(form.field, f"and {options.shape.field} cannot be used together")
    return _shaped(options, Shape(form), names)


def _shaped(options: AnswerOptions, shape: Shape, names: FieldNames) -> AnswerOptions:
    """Returns options with a shape. Raises: Refusal: it would end an answer that is to be longer."""
    if options.min_tokens:
        field = names["min_tokens"]
        raise bad_field(field, f"and {shape.field} cannot be used together")
    return replace(options, shape=shape)


def with_tools(
    options: AnswerOptions,
    offered: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    names: FieldNames = OWN_NAMES,
) -> AnswerOptions:
    """Returns `options` with the tools that the model may call; unchanged if none is offered. If the options constrain
    the text, a call is required, or all tools are strict, the answer's calls are constrained to valid ones.

    Args:
        offered: the tools, in the form of OpenAI's API.
        choice: how they may be used.
        names: what the request calls the fields.
    Raises:
        Refusal: a call is required, but no tool is offered, or not the one that `choice` names, or `min_tokens` is set.
    """
    if choice.required and not offered:
        raise bad_field(_CHOICE, "requires a call, but the request has no tools")
    if not offered:
        return options
    tools = Tools.of(offered)
    free = not choice.required  # else the grammar sees to it
    options = replace(options, tools=tools, one_call=free and not choice.several)
    if choice.name and choice.name not in tools.parameters:
        raise bad_field(_CHOICE, f"names {choice.name[:60]!r}, which is not one of the tools")
    wanted = [choice.name] if choice.name else list(tools.parameters)
    some = Tools({name: tools.parameters[name] for name in wanted})
    calls = WantedCalls(some, choice.several, _CHOICE)
    if choice.required:
        return _shaped(options, Shape(None, calls), names)
    if options.shape is not None:
        return replace(options, shape=replace(options.shape, calls=calls))
    if all(tool["function"].get("strict") is True for tool in offered):
        return replace(options, shape=Shape(None, replace(calls, field="tools", free=True)))
    return options


NO_LIMIT = -1  # in place of a number of tokens, as vLLM and llama.cpp have it


# What other APIs call the most tokens of an answer.
MOST_TOKENS = "num_predict max_completion_tokens max_output_tokens max_new_tokens".split()


class _UnsupportedLimits(msgspec.Struct):
    """Fields of other servers that would limit an answer in ways that kt does not support."""

    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    include_stop_str_in_output: Any = None
    structural_tag: Any = None
    guided_whitespace_pattern: Any = None
    stop_regex: Any = None
    no_stop_trim: Any = None
    custom_logit_processor: Any = None
    bad_words_ids: Any = None
    force_words_ids: Any = None
    no_repeat_ngram_size: Any = None
    t_max_predict_ms: Any = None
    n_indent: Any = None
    audio: Any = None


class ForeignLimits(_UnsupportedLimits):
    """Fields of other servers that would limit an answer and are refused; null, false and empty values are allowed, and
    -1, which is no limit."""

    max_new_tokens: Any = None
    min_new_tokens: Any = None
    functions: Any = None
    function_call: Any = None

    def refuse_foreign_limits(self, names: FieldNames = OWN_NAMES) -> None:
        """Raises an error if the request has a field of another server that would limit its answer, such as
        `bad_words`.

        Args:
            names: what the request calls the fields.
        Raises:
            Refusal: such a field has a value that limits the answer; null, false, empty and -1 do not.
        """
        for name in _UnsupportedLimits.__struct_fields__:
            value = getattr(self, name)
            if value and value != NO_LIMIT:
                raise not_supported(names[name])
        if self.functions and self.function_call != "none":
            raise not_supported(names["functions"], "use tools")
        if self.function_call not in (None, "none", "auto"):
            raise not_supported(names["function_call"], "use tools")


def refuse_elsewhere(
    body: msgspec.Struct, instead: Mapping[str, str], names: FieldNames = OWN_NAMES
) -> None:
    """Raises an error if a request has a field with which another API constrains answers.

    Args:
        instead: what to use instead of each such field, by its name.
        names: what the request calls the fields.
    Raises:
        Refusal: one of these fields has a value that is not null, false, 0 or empty.
    """
    for name, way in instead.items():
        if getattr(body, name):
            raise not_supported(names[name], way)


def not_supported(field: str, instead: str = "") -> Refusal:
    """Returns the HTTP error that says that a field of a request is not supported.

    Args:
        instead: what to do instead; empty: nothing is known.
    """
    said = f"{field} is not supported" + (f": {instead}" if instead else "")
    return bad_value(field, said)


# What SGLang and llama.cpp call the forms of an answer.
_FORMS = {
    "regex": Notation.REGEX,
    "ebnf": Notation.GBNF,
    "grammar": Notation.GBNF,
    "json_schema": Notation.SCHEMA,
}
# Members of vLLM's `structured_outputs` that constrain an answer and are refused.
_NOT_STRUCTURED = (
    "structural_tag whitespace_pattern disable_any_whitespace disable_additional_properties".split()
)


class AnswerConstraints(ForeignLimits):
    """The fields that constrain an answer."""

    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    ignore_eos: bool | None = None
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
    thinking_token_budget: int | None = None
    prompt_logprobs: Any = None
    best_of: int | None = None

    def given_constraints(self) -> dict[str, Any]:
        """Returns the values of the fields of `AnswerConstraints` that are not None, by the names of the fields."""
        found = {name: getattr(self, name) for name in AnswerConstraints.__struct_fields__}
        return {name: value for name, value in found.items() if value is not None}

    def form(self, names: FieldNames) -> Form | None:
        """Returns the constraint on the answer's text, such as a JSON schema or a grammar, that the fields ask for;
        None: any text is allowed.

        Args:
            names: what the request calls the fields.
        Raises:
            Refusal: a field cannot be used, or there are several.
        """
        openai, vllm = names["response_format"], names["structured_outputs"]
        guided = {name: getattr(self, f"guided_{name}") for name in GUIDES}
        found = {
            openai: form_of_format(self.response_format, openai),
            vllm: _structured(self.structured_outputs, vllm),
            "guided_": form_of_guides(guided, "guided_", names),
            **{names[name]: self._form_of(name, names[name]) for name in _FORMS},
        }
        given = {
            form.field if name == "guided_" else name: form
            for name, form in found.items()
            if form is not None
        }
        if len(given) > 1:
            first, second, *_ = given
            raise bad_value(second, f"{first} and {second} cannot be used together")
        return next(iter(given.values()), None)

    def _form_of(self, name: str, field: str) -> Form | None:
        """Returns the form that one of `_FORMS` asks for; None: it is not given, for which some send an empty text."""
        said = getattr(self, name)
        return None if said is None or said == "" else Form(_FORMS[name], said, field)


def _structured(said: Mapping[str, Any] | None, field: str) -> Form | None:
    """Returns the form that vLLM's `structured_outputs` asks for; None: any text.

    Raises:
        Refusal: it asks for more.
    """
    for name in _NOT_STRUCTURED:
        if said is not None and said.get(name):
            raise not_supported(f"{field}.{name}")
    found = form_of_guides(said or {}, f"{field}.")
    wants_object = said is not None and said.get("json_object") is True
    return Form.of_object(field) if found is None and wants_object else found
