"""Removes from a text everything that identifies a person or a machine, for reports that others will read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TOKENS = re.compile(r"\b(?:hf|ms|sk|ghp|github_pat)[_-][A-Za-z0-9_-]{8,}")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_HOMES = re.compile(r"(?:/home|/Users|/root)\b(?:/[^\s/\"':]+)?")
_ADDRESSES = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{1,15}://)[^\s/@\"']*@")
_LEAST = 4  # characters of a secret's value: shorter ones are words


def redacted(found: Any, names: Mapping[str, str]) -> Any:
    """Returns a JSON document with private names, tokens, home folders and credentials replaced in all its string
    values; keys are kept.

    Args:
        names: replacements by the text to replace.
    """
    if isinstance(found, Mapping):
        return {key: redacted(value, names) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [redacted(value, names) for value in found]
    return redacted_text(found, names) if isinstance(found, str) else found


def redacted_text(text: str, names: Mapping[str, str]) -> str:
    """Returns `text` with the texts in `names` replaced by their values where no letter or digit is beside them, and
    with access tokens, home folders, and credentials in URLs masked or removed.
    """
    for name in sorted(names, key=len, reverse=True):
        if name:
            pattern = rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"
            text = re.sub(pattern, lambda _, word=names[name]: word, text)  # type: ignore[misc]
    text = _ADDRESSES.sub(r"\1", _TOKENS.sub("TOKEN", text))
    return _HOMES.sub("~", text)


def names_of(environment: Mapping[str, str], user: str, host: str, home: str) -> dict[str, str]:
    """Returns the texts to remove from a report, each with its replacement: the home folder ("~"), the user and host
    names, and the values of environment variables whose names suggest a secret ("TOKEN").
    """
    names = {home: "~", user: "USER", host: "HOST", host.partition(".")[0]: "HOST"}
    for key, value in environment.items():
        if _SECRET.search(key) and len(value) >= _LEAST:
            names[value] = "TOKEN"
    return {name: word for name, word in names.items() if len(name.strip("/")) > 1}
