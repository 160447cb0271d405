"""Fields of other servers that constrain answers in ways that kt does not support.

Fields that kt does not know are ignored, but an answer that is not what was asked for helps nobody: in each API these
are refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ktcli.server.http.refusals import Refusal

_NAMES = (
    "bad_words allowed_token_ids logits_processors use_beam_search truncate_prompt_tokens "
    "include_stop_str_in_output structural_tag guided_whitespace_pattern"
).split()


class ForeignLimits(msgspec.Struct):
    """The fields that are refused; null, false and what is empty ask for nothing."""

    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    include_stop_str_in_output: Any = None
    structural_tag: Any = None
    guided_whitespace_pattern: Any = None
    functions: Any = None
    function_call: Any = None

    def refuse_foreign_limits(self) -> None:
        """Checks that the request has none of these fields. Raises: Refusal: it has one."""
        for name in _NAMES:
            if getattr(self, name):
                raise not_supported(name)
        if self.functions and self.function_call != "none":
            raise not_supported("functions", "use tools")
        if self.function_call not in (None, "none", "auto"):
            raise not_supported("function_call", "use tools")


def not_supported(field: str, instead: str = "") -> Refusal:
    """Returns the refusal of a field that is not supported.

    Args:
        instead: what to do instead; empty: nothing is known.
    """
    said = f"{field} is not supported" + (f": {instead}" if instead else "")
    return Refusal(400, said, field, "unsupported_value")
