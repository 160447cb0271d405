"""The fields that constrain an answer, the same in each API: its form, its tokens, its length.

Programs send them under the names of vLLM, SGLang and llama.cpp to whichever API they use. Fields that kt does not know
are ignored, but an answer that is not what was asked for helps nobody: those of other servers that constrain answers in
ways that kt does not support are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ktcli.answers.grammar.form import Form, Notation
from ktcli.server.http.refusals import OWN_NAMES, FieldNames, Refusal, bad_value
from ktcli.server.http.shapes import GUIDES, form_of_format, form_of_guides

NO_LIMIT = -1  # in place of a number of tokens, as vLLM and llama.cpp have it


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
        """Checks that the request has none of these fields. Raises: Refusal: it has one."""
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
    """Checks that a request has no field that constrains an answer under the name of another API.

    Args:
        instead: such fields, and what to do instead of each.
    Raises:
        Refusal: it has one.
    """
    for name, way in instead.items():
        if getattr(body, name):
            raise not_supported(names[name], way)


def not_supported(field: str, instead: str = "") -> Refusal:
    """Returns the refusal of a field that is not supported.

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
        """Returns those of these fields that have a value, by their names."""
        found = {name: getattr(self, name) for name in AnswerConstraints.__struct_fields__}
        return {name: value for name, value in found.items() if value is not None}

    def form(self, names: FieldNames) -> Form | None:
        """Returns the form that the text of an answer is constrained to; None: any text.

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
