"""The preset of a name for answers: the system text, the sampling, where an answer ends, as in Modelfiles.

A preset has values of settings, under their names, and is read as one that anybody may have written: each value has
the type and the range of its setting, and no character that a terminal obeys. Only what is said is kept; the rest is
the settings' and the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ktcli.records import dataclass
from ktcli.settings import SETTINGS, SHOWN_CHARS, Domain, real_numbers, words_like

MOST_STOPS = 16  # texts, as many as a request may have
_STOP, _PENALTY = "stop", "repetition-penalty"
_SYSTEM_SHOWN = 60  # characters of a system text on one line
_OBEYED = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]"
# What a preset can have, in the order in which it is shown, and the type of each value.
KINDS: dict[str, type] = {
    "system": str,
    "temperature": float,
    "top-k": int,
    "top-p": float,
    "min-p": float,
    _PENALTY: float,
    "seed": int,
    _STOP: str,
    "max-tokens": int,
    "think": bool,
    "think-budget": int,
    "context": int,
}
# What is no setting, and what may be only the end of a line.
_OWN = {
    _PENALTY: real_numbers(0.01, 100),
    _STOP: words_like(r"(?s:.{1,1000})", "a text of 1 to 1,000 characters"),
}


@dataclass(frozen=True, slots=True)
class Preset:
    """The values that a name presets, by the names of their settings; `stop` is a tuple of texts."""

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Preset:
        """Returns the preset with these values, by the names of their settings, each checked; None and [] are unset.

        Raises:
            ValueError: one is not valid; the message is a part of a sentence: "temperature is 'x', which is not …".
        """
        found = {}
        for name, value in given.items():
            if name not in KINDS:
                raise ValueError(f"{_shown(name)} is not something that a preset can set")
            if value is not None and value != []:
                found[name] = _stops(value) if name == _STOP else _value(name, value)
        return cls({name: found[name] for name in KINDS if name in found})

    def __bool__(self) -> bool:
        return bool(self.values)

    def get(self, name: str) -> Any:
        """Returns the preset's value of the setting `name`; None: it is not set."""
        return self.values.get(name)

    def over(self, other: Preset) -> Preset:
        """Returns a preset with the values of this one, completed by those that only `other` sets."""
        both = {**other.values, **self.values}
        return Preset({name: both[name] for name in KINDS if name in both})

    def document(self) -> dict[str, Any]:
        """Returns the preset's values as a JSON object that `of` reads."""
        return {
            name: list(value) if name == _STOP else value for name, value in self.values.items()
        }

    def words(self) -> str:
        """Returns the preset's values for people, on one line: 'temperature 0.2, system "You are …"'."""
        return ", ".join(f"{name} {_said(value)}" for name, value in self.values.items())


NOTHING = Preset()


def _stops(value: Any) -> tuple[str, ...]:
    """The texts that end an answer: one, or a list of them."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise ValueError(f"{_STOP} is {_shown(value)}, which is not a string or a list of strings")
    if len(texts) > MOST_STOPS:
        raise ValueError(f"{_STOP} has {len(texts):,} strings; the limit is {MOST_STOPS}")
    return tuple(_value(_STOP, each) for each in texts)


def _value(name: str, value: Any) -> Any:
    """One value, as its setting reads it."""
    kind, domain = KINDS[name], _domain(name)
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{name} is {_shown(value)}, which is neither true nor false")
    wrong = ValueError(f"{name} is {_shown(value)}, which is {domain.wrong}")
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{name} is {_shown(value)}, which is not a string")
        if re.search(_OBEYED, value):
            raise ValueError(f"{name} has a control character: {_shown(value)}")
        text = value
    else:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong
        if isinstance(value, float) and kind is int and value.is_integer():
            value = int(value)
        text = str(value)[:400]
    try:
        return domain.read(text)
    except ValueError:
        raise wrong from None


def _domain(name: str) -> Domain:
    return _OWN.get(name) or SETTINGS[name].domain


def _shown(value: Any) -> str:
    """A wrong value in a sentence, however long it is."""
    try:
        return repr(value[:SHOWN_CHARS] if isinstance(value, str) else value)[: SHOWN_CHARS + 20]
    except ValueError:  # a number of thousands of digits
        return "a number with too many digits"


def _said(value: Any) -> str:
    if isinstance(value, str):
        line = " ".join(value.split())
        return f'"{line[:_SYSTEM_SHOWN]}{"…" if len(line) > _SYSTEM_SHOWN else ""}"'
    if isinstance(value, tuple):
        return " ".join(repr(each[:_SYSTEM_SHOWN]) for each in value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
