"""Fields of other servers that constrain answers in ways that kt does not support.

Fields that kt does not know are ignored, but an answer that is not what was asked for helps nobody: in each API these
are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ktcli.server.http.refusals import OWN_NAMES, FieldNames, Refusal, bad_value

NO_LIMIT = -1  # in place of a number of tokens, as vLLM and llama.cpp have it
_NAMES = (
    "bad_words allowed_token_ids logits_processors use_beam_search truncate_prompt_tokens "
    "include_stop_str_in_output structural_tag guided_whitespace_pattern stop_regex no_stop_trim "
    "custom_logit_processor bad_words_ids force_words_ids no_repeat_ngram_size t_max_predict_ms n_indent audio"
).split()


class ForeignLimits(msgspec.Struct):
    """Fields of other servers that would limit an answer and are refused; null, false and empty values are allowed, and
    -1, which is no limit."""

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
    max_new_tokens: Any = None
    min_new_tokens: Any = None
    functions: Any = None
    function_call: Any = None

    def refuse_foreign_limits(self, names: FieldNames = OWN_NAMES) -> None:
        """Checks that the request has none of these fields. Raises: Refusal: it has one."""
        for name in _NAMES:
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
