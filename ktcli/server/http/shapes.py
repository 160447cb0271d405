"""Reads constraints on answers from requests: `response_format`, vLLM's guided fields, and the choice of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ktcli.answers.calls.values import Tools
from ktcli.answers.grammar.calls import WantedCalls
from ktcli.answers.grammar.form import Form, Notation
from ktcli.answers.grammar.whole import Shape
from ktcli.dialogue.answer import AnswerOptions
from ktcli.records import dataclass
from ktcli.server.http.refusals import OWN_NAMES, FieldNames, bad_field, bad_value

# What vLLM's fields `structured_outputs` and `guided_…` are named behind.
_NOTATIONS = {
    "json": Notation.SCHEMA,
    "regex": Notation.REGEX,
    "choice": Notation.CHOICE,
    "grammar": Notation.GBNF,
}
GUIDES = tuple(_NOTATIONS)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The ways in which the tools of a request may be used.

    Attributes:
        required: whether one must be called.
        name: the only one that may be; empty: any.
        several: whether there may be more than one call.
        field: the field that says so.
    """

    required: bool = False
    name: str = ""
    several: bool = True
    field: str = "tool_choice"

    @classmethod
    def of(cls, said: Any, named: Any, parallel: bool | None) -> ToolChoice:
        """Returns the choice that OpenAI's `tool_choice` asks for.

        Args:
            named: the name of the function in it, where this API has that.
            parallel: the field `parallel_tool_calls`.
        Raises:
            Refusal: it is none.
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
    """Returns the form that OpenAI's `response_format` asks for; None: any text.

    Args:
        field: what errors call it.
    Raises:
        Refusal: it cannot be used.
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
    """Returns the form that vLLM's fields ask for; None: any text.

    Args:
        said: the value of each of GUIDES, None for those that are not there.
        prefix: what stands before them in kt's names of these fields.
        names: what the request calls the fields.
    Raises:
        Refusal: it cannot be used, or there are several.
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
    """Returns options that constrain the text of an answer to a form; None: to none beside theirs.

    Args:
        names: what the request calls the fields.
    Raises:
        Refusal: they have one, or a least number of tokens.
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
    """Returns options with tools; where a form is asked for, a call is required, or all tools are strict, the answer is
    constrained to it.

    Args:
        names: what the request calls the fields.
    Raises:
        Refusal: a tool is required that is not offered.
    """
    if choice.required and not offered:
        raise bad_field(choice.field, "requires a call, but the request has no tools")
    if not offered:
        return options
    tools = Tools.of(offered)
    free = not choice.required  # else the grammar sees to it
    options = replace(options, tools=tools, one_call=free and not choice.several)
    if choice.name and choice.name not in tools.parameters:
        raise bad_field(choice.field, f"names {choice.name[:60]!r}, which is not one of the tools")
    wanted = [choice.name] if choice.name else list(tools.parameters)
    some = Tools({name: tools.parameters[name] for name in wanted})
    calls = WantedCalls(some, choice.several, choice.field)
    if choice.required:
        return _shaped(options, Shape(None, calls), names)
    if options.shape is not None:
        return replace(options, shape=replace(options.shape, calls=calls))
    if all(tool["function"].get("strict") is True for tool in offered):
        return replace(options, shape=Shape(None, replace(calls, field="tools", free=True)))
    return options
