"""The fields that constrain an answer, the same in each API: its form, its tokens, its length.

Programs send them under the names of vLLM, SGLang and llama.cpp to whichever API they use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktcli.answers.grammar.form import Form, Notation
from ktcli.server.http.foreign import ForeignLimits, not_supported
from ktcli.server.http.refusals import FieldNames, bad_value
from ktcli.server.http.shapes import GUIDES, form_of_format, form_of_guides

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
