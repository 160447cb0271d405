"""Reads a Modelfile, in which users of Ollama define a model with its system text and sampling.

    # a comment
    FROM ./model.gguf
    PARAMETER temperature 0.2
    SYSTEM You are terse.

FROM, PARAMETER and SYSTEM are used; what else a Modelfile can have is named, not used, but for ADAPTER, without which
the model would be another one. Source: ollama's docs/modelfile and parser/parser.go. It is hostile input: bounded, and
each value checked as a preset is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import UsageError
from ktcli.records import dataclass
from ktcli.store.preset import Preset

_MAX_BYTES = 1 << 20
_MOST_LINES = 20_000
_SHOWN = 60  # characters of what is wrong
_FROM, _PARAMETER, _SYSTEM = "FROM", "PARAMETER", "SYSTEM"
_UNUSED = ("TEMPLATE", "LICENSE", "MESSAGE", "RENDERER", "PARSER", "REQUIRES")
_REFUSED = {"ADAPTER": "which kt cannot add to a model"}
_WORDS = {_FROM, _PARAMETER, _SYSTEM, *_UNUSED, *_REFUSED}
# Ollama's name of a parameter, and what a preset calls it.
_NAMES = {
    "temperature": "temperature",
    "top_k": "top-k",
    "top_p": "top-p",
    "min_p": "min-p",
    "repeat_penalty": "repetition-penalty",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max-tokens",
    "num_ctx": "context",
}
_NEGATIVE_IS_NONE = ("seed", "max-tokens")  # -1 draws a seed, and is no limit
_TEXTS = ("stop",)
_QUOTES = '"""'
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_LONGEST_NUMBER = 40


@dataclass(frozen=True, slots=True)
class Modelfile:
    """The contents of a Modelfile.

    Attributes:
        model: the value of FROM, a name or a path; relative ones are meant from the file's own folder.
        preset: what SYSTEM and PARAMETER set.
        unused: a sentence on each part that is not used.
    """

    model: str
    preset: Preset
    unused: tuple[str, ...] = ()


def read(path: Path) -> Modelfile:
    """Returns the contents of an Ollama Modelfile: the model, the preset values, and sentences on what is not used.

    Raises:
        UsageError: the file cannot be read, is not a Modelfile, or asks for what kt cannot do; the message names the
            line.
    """
    try:
        data = smallfiles.read_bounded(path, _MAX_BYTES)
        text = data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the Modelfile {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the Modelfile {path} is not UTF-8 text") from error
    try:
        return _meaning(text)
    except ValueError as error:
        hint = "FROM, PARAMETER and SYSTEM are used; an adapter has to be merged into the weights first"
        raise UsageError(f"the Modelfile {path}: {error}", hint=hint) from error


def usable(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Checks values for a preset, by the names of their settings; returns the valid ones in the same form, and a
    sentence about each of the others.
    """
    found, unused = dict[str, Any](), list[str]()
    for name, value in values.items():
        try:
            found |= Preset.of({name: value}).values
        except ValueError as error:
            unused.append(f"{error}; it is not used")
    return found, unused


def usable_parameters(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Checks Ollama's parameters for a preset; returns the usable ones as {name of kt's setting: value}, and a sentence
    about each of the others; a negative `seed` or `num_predict` means "not set", and is in neither.
    """
    found, unused = dict[str, Any](), list[str]()
    for name, value in given.items():
        if name.lower() in _NAMES:
            some, left = usable(_parameter(name, value))
            found |= some
            unused += left
        else:
            unused.append(_not_used(name))
    return found, unused


def parameter_lines(preset: Preset) -> list[str]:
    """Returns a preset's values as Ollama writes parameters, one "NAME VALUE" in each string; values that Ollama does
    not have are left out.
    """
    lines = []
    for name, known in _NAMES.items():
        value = preset.get(known)
        each = value if isinstance(value, tuple) else () if value is None else (value,)
        lines += [f"{name:<20} {json.dumps(one, ensure_ascii=False)}" for one in each]
    return lines


def _meaning(text: str) -> Modelfile:
    """Raises ValueError, whose message is a sentence without its beginning."""
    model, values, stops = "", dict[str, Any](), list[str]()
    unused = list[str]()
    for line, word, value in _instructions(text):
        if word in _REFUSED:
            raise ValueError(f"line {line} has {word}, {_REFUSED[word]}")
        if word in _UNUSED:
            unused.append(f"{word} is not used")
        elif word == _FROM:
            if model:
                raise ValueError(f"line {line} has a second FROM")
            model = value
        elif word == _SYSTEM:
            values |= _checked(line, {"system": value.strip() or None})
        else:
            name, _, said = value.partition(" ")
            if name.lower() not in _NAMES:
                unused.append(_not_used(name))
            elif name.lower() in _TEXTS:
                stops.append(_unquoted(said.strip()))
                values |= _checked(line, {"stop": stops})
            else:
                values |= _checked(line, _parameter(name, _number(_unquoted(said.strip()))))
    if not model:
        raise ValueError("it has no FROM, which names the model")
    return Modelfile(model, Preset.of(values), tuple(dict.fromkeys(unused)))


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields each instruction with its line, its word in upper case, and its value without quotes around all of it."""
    lines = text.removeprefix("\ufeff").splitlines()
    if len(lines) > _MOST_LINES:
        raise ValueError(f"it has more than {_MOST_LINES:,} lines")
    at = 0
    while at < len(lines):
        first, said = at, lines[at].strip()
        at += 1
        if not said or said.startswith("#"):
            continue
        parts = said.split(None, 1)
        word, value = parts[0].upper(), parts[1] if len(parts) > 1 else ""
        if word not in _WORDS:
            raise ValueError(
                f"line {first + 1} begins with {parts[0][:_SHOWN]!r}, which is not an instruction"
            )
        if not value:
            raise ValueError(f"line {first + 1} has {word} without a value")
        if (begin := value.find(_QUOTES)) >= 0:
            before, value = value[:begin], value[begin + len(_QUOTES) :]
            while _QUOTES not in value:
                if at == len(lines):
                    raise ValueError(f"line {first + 1} opens triple quotes that are never closed")
                value += f"\n{lines[at]}"
                at += 1
            value, _, rest = value.partition(_QUOTES)
            if rest.strip():
                raise ValueError(f"line {at} has {rest.strip()[:_SHOWN]!r} after its triple quotes")
            yield first + 1, word, f"{before}{value}"
        else:
            yield first + 1, word, value if word == _PARAMETER else _unquoted(value)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _number(text: str) -> int | float | str:
    """The number that a text is; the text itself: it is none."""
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return text
    value = float(text)
    return int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else value


def _parameter(name: str, value: Any) -> dict[str, Any]:
    """A parameter under the name that a preset has for it; none where its value means that it is not set."""
    known = _NAMES[name.lower()]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {} if known in _NEGATIVE_IS_NONE and is_number and value < 0 else {known: value}


def _checked(line: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return Preset.of(values).values
    except ValueError as error:
        raise ValueError(f"line {line}: {error}") from None


def _not_used(name: str) -> str:
    return f"the parameter {name[:_SHOWN]} is not used"
