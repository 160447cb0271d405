"""Reads the values of settings, from YAML or from a command line, and says in one sentence what one must be.

PyYAML reads `1e-4` as text and `1.0e-4` as a number, and a command line has only text: a reader takes both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import date
from typing import Any

Reader = Callable[[Any], Any]

_SHOWN = 60  # characters of a wrong value
_MOST_NAMES = 10_000
_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NOTHING = ("", "null", "~")


class WrongValue(ValueError):
    """A value that a setting cannot have; the message completes "KEY ..."."""


def is_nothing(value: Any) -> bool:
    """Returns whether the value of a setting means its default: None, or a text that is empty, "null" or "~"."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING)


def whole(low: int, high: int) -> Reader:
    """Returns a function that reads a value of a setting as a whole number from `low` to `high`, both inclusive; it
    raises WrongValue for any other.
    """

    def read(value: Any) -> int:
        number = _number(value)
        if number is None or number != int(number) or not low <= number <= high:
            raise WrongValue(
                f"must be a whole number from {low:,} to {high:,}, not {_shown(value)}"
            )
        return int(number)

    return read


def real(low: float, high: float, *, above: bool = False) -> Reader:
    """Returns a function that reads a value of a setting as a number from `low` to `high`, both inclusive (`above`:
    `low` exclusive); it raises WrongValue for any other.
    """
    begins = f"above {low:g} and at most" if above else f"from {low:g} to"

    def read(value: Any) -> float:
        number = _number(value)
        if number is None or not low <= number <= high or (above and number == low):
            raise WrongValue(f"must be a number {begins} {high:g}, not {_shown(value)}")
        return number

    return read


def switch(value: Any) -> bool:
    """Returns the bool that a value of a setting means: a bool, or a text such as "true", "no", "on".

    Raises:
        WrongValue: the value means neither true nor false.
    """
    found = value if isinstance(value, bool) else _SWITCHES.get(str(value).strip().lower())
    if found is None:
        raise WrongValue(f"must be true or false, not {_shown(value)}")
    return found


def text(value: Any) -> str:
    """Returns a value of a setting as text: a text as it is, a number written out.

    Raises:
        WrongValue: the value is not a text or a number, or has characters that no path can have (zero bytes, halves of
            characters).
    """
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not _is_plain(value):
        raise WrongValue(f"must be a text, not {_shown(value)}")
    return str(value)


def one_of(*words: str) -> Reader:
    """Returns a function that reads a value of a setting as one of `words`; it raises WrongValue for any other."""

    def read(value: Any) -> str:
        if value is False and "no" in words:
            return "no"  # as which YAML reads it
        if str(value) not in words:
            raise WrongValue(f"must be {' or '.join(words)}, not {_shown(value)}")
        return str(value)

    return read


def names(value: Any) -> tuple[str, ...]:
    """Returns the names in a value of a setting: a list of texts, or a comma-separated text.

    Raises:
        WrongValue: the value is something else, or has no name in it.
    """
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        raise WrongValue(f"must be names separated by commas, not {_shown(value)}")
    if not all(map(_is_plain, listed)):
        raise WrongValue(f"must be names of characters, not {_shown(value)}")
    found = tuple(each.strip() for each in listed if each.strip())
    if not 0 < len(found) <= _MOST_NAMES:
        raise WrongValue(f"must have from 1 to {_MOST_NAMES:,} names, not {len(found):,}")
    return found


def shares(value: Any) -> tuple[float, ...]:
    """Returns the numbers in a value of a setting, a list or a comma-separated text, each above 0 and at most 1.

    Raises:
        WrongValue: the value is something else.
    """
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or len(listed) > _MOST_NAMES:
        raise WrongValue(f"must be numbers separated by commas, not {_shown(value)}")
    return tuple(map(real(0, 1, above=True), listed))


def switch_or_text(value: Any) -> bool | str:
    """Returns a value of a setting as a bool if it means true or false (see `switch`), else as text.

    Raises:
        WrongValue: the value is neither, as `text` has it: a list, for example.
    """
    try:
        return switch(value)
    except WrongValue:
        return text(value)


def _number(value: Any) -> float | None:
    """The finite number that a value is, or that its text means; None: none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _is_plain(value: Any) -> bool:
    """Returns whether a text can be encoded, and be a file name: YAML can write zero bytes, and halves of
    characters.
    """
    try:
        return b"\0" not in str(value).encode()
    except UnicodeEncodeError:
        return False


def _shown(value: Any) -> str:
    said = str(value) if isinstance(value, date) else repr(value)  # YAML reads 2026-01-01 as one
    return said if len(said) <= _SHOWN else f"{said[: _SHOWN - 1]}…"
