"""The ids that a tokenizer's post-processor adds around a text, according to `tokenizer.json`: for embeddings.

A conversation wants none, since a template writes its own. The post-processor itself never runs: of a template, and of
the two that BERT's descendants have, the ids before and behind the text are read as data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktcli.records import dataclass

_MOST = 16  # ids on each side, and parts of a template; published ones have 1


@dataclass(frozen=True, slots=True)
class AroundText:
    """The ids before and behind a text."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()


NOTHING_AROUND = AroundText()


def read_around(document: Mapping[str, Any]) -> AroundText:
    """Returns the ids, at most 16 on each side, that the post-processor of a decoded `tokenizer.json` puts before and
    behind a text; none if it is damaged.
    """
    step = document.get("post_processor")
    inner = step.get("processors") if isinstance(step, dict) else None
    for each in inner[:_MOST] if isinstance(inner, list) else [step]:
        if isinstance(each, dict) and (found := _of_step(each)) is not None:
            return found
    return NOTHING_AROUND


def _of_step(step: Mapping[str, Any]) -> AroundText | None:
    """Returns the ids of one step of a post-processor; None: it puts none."""
    if step.get("type") in ("BertProcessing", "RobertaProcessing"):
        return AroundText(_pair(step.get("cls")), _pair(step.get("sep")))
    single, tokens = step.get("single"), step.get("special_tokens")
    if step.get("type") != "TemplateProcessing" or not isinstance(tokens, dict):
        return None
    if not isinstance(single, list) or len(single) > _MOST:
        return None
    sides: tuple[list[int], list[int]] = [], []
    behind = False
    for part in single:
        if isinstance(part, dict) and "Sequence" in part:
            behind = True
        elif isinstance(part, dict) and isinstance(token := part.get("SpecialToken"), dict):
            row = tokens.get(str(token.get("id")))
            sides[behind].extend(_ids(row.get("ids") if isinstance(row, dict) else None))
    return AroundText(tuple(sides[0][:_MOST]), tuple(sides[1][:_MOST]))


def _pair(token: Any) -> tuple[int, ...]:
    """Returns the id of a [text, id] pair."""
    return _ids(token[1:2]) if isinstance(token, list) else ()


def _ids(values: Any) -> tuple[int, ...]:
    good = isinstance(values, Sequence) and not isinstance(values, str)
    return tuple(each for each in values[:_MOST] if type(each) is int and each >= 0) if good else ()
