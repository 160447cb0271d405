"""The names by which rows are read: the columns of a file, and the fields and roles of its messages.

The usual ones are those of the published formats; a `dataset_info.json` may give others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

from ktcli.records import dataclass
from ktcli.samples.sample import BadData

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of a file's columns; None: the default."""

    prompt: str | None = None
    query: str | None = None
    response: str | None = None
    history: str | None = None
    messages: str | None = None
    system: str | None = None
    tools: str | None = None


@dataclass(frozen=True, slots=True)
class Tags:
    """The names in the messages of a file: of their fields, and of the roles."""

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"


USUAL_COLUMNS, USUAL_TAGS = Columns(), Tags()
_PREFERENCES = "kt trains on answers, not on preferences between two"
_TEXT_ONLY = "kt trains on text only"
# Columns of LLaMA-Factory that kt does not read.
_REFUSED = {
    **dict.fromkeys(("chosen", "rejected", "kto_tag", "ranking"), _PREFERENCES),
    **dict.fromkeys(("images", "videos", "audios"), _TEXT_ONLY),
}


def read_columns(given: Any, where: str) -> Columns:
    """Returns the names of a file's columns from the object `columns` in an entry of `dataset_info.json`; a name that
    it does not give is None, which stands for the default.

    Args:
        where: the entry, for errors.
    Raises:
        BadData: a key is not known, or a name is not a text.
    """
    return _read(USUAL_COLUMNS, given, f"{where}: columns")


def read_tags(given: Any, where: str) -> Tags:
    """Returns the names of message fields and roles from the object `tags` in an entry of `dataset_info.json`; the
    usual ones where it gives none.

    Raises:
        BadData: as `read_columns`.
    """
    return _read(USUAL_TAGS, given, f"{where}: tags")


def _read(usual: T, given: Any, where: str) -> T:
    if given is None:
        return usual
    if not isinstance(given, Mapping):
        raise BadData(f"{where} is not an object")
    known = [field.name for field in fields(usual)]  # type: ignore[arg-type]
    for key, value in given.items():
        if key in _REFUSED and value is None:
            continue
        if key in _REFUSED and key not in known:
            raise BadData(f"{where}: {key} is not supported", hint=_REFUSED[key])
        if key not in known:
            near = get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
            raise BadData(f"{where}: {key[:60]!r} is not a known key", hint=hint)
        if value is not None and (not isinstance(value, str) or not value):
            raise BadData(f"{where}: {key} is {str(value)[:60]!r}, but must be a name")
    named = {key: value for key, value in given.items() if value is not None}
    return type(usual)(**named)
