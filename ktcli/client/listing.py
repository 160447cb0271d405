"""Reads the list of models that a server says it has: `/v1/models`, from whatever server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ktcli.records import dataclass

_NAME_CHARS = 1000
_MOST_MODELS = 10_000
_MOST_CONTEXT = 1 << 31
_READ_PROGRESS = ("kt", "llamacpp")  # owners whose servers say how far a prompt is read


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in a server's list of models.

    Attributes:
        name: what it is asked for by.
        context: the positions that a conversation can have; None: the server does not say.
        says_progress: whether its server can say how far a prompt is read.
    """

    name: str
    context: int | None = None
    says_progress: bool = False


def listed_models(document: Any) -> list[ListedModel] | None:
    """Returns the models of a server's list, each name once; None: the document is no such list."""
    rows = document.get("data") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        return None
    found: dict[str, ListedModel] = {}
    for row in rows[:_MOST_MODELS]:
        name = row.get("id") if isinstance(row, dict) else None
        if isinstance(name, str) and 0 < len(name) <= _NAME_CHARS and name not in found:
            said = ListedModel(name, _context(row), row.get("owned_by") in _READ_PROGRESS)
            found[name] = said
    return list(found.values())


def _context(row: dict[str, Any]) -> int | None:
    """Returns the context in a row: vLLM, SGLang and kt have the first name, gateways the second, llama-server the
    third."""
    meta = row.get("meta")
    said: Sequence[Any] = (
        row.get("max_model_len"),
        row.get("context_length"),
        meta.get("n_ctx") if isinstance(meta, dict) else None,
    )
    return next((each for each in said if type(each) is int and 0 < each < _MOST_CONTEXT), None)
