"""Stores the names that users gave to models: `kt alias big qwen3-235b-a22b@int4-int8`, one file in the library.

    KT_HOME/aliases.json    {"kt_aliases": 1, "aliases": {"big": "qwen3-235b-a22b@int4-int8"}}
                            {"kt_aliases": 2, "aliases": {"coder": {"model": "big", "temperature": 0.2}}}

An alias means another text, which may be an alias, too, and may preset values for answers (see `preset`). It never
hides a model: of a name that the catalogue or the library has by now, the alias is not asked. The file is read as one
that anybody may have written: an entry that makes no sense is told when somebody asks for it, kept as it is, and takes
nothing from the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktcli import config, smallfiles
from ktcli.errors import KtError, NotFound, UsageError, gib
from ktcli.records import dataclass
from ktcli.store import catalog, ollama, places
from ktcli.store.preset import NOTHING, Preset

MOST = 1000  # aliases
LONGEST_TARGET = 4096  # characters, as of any name of a model
# Versions of the file: without presets, which earlier kts read, and with them.
_PLAIN, _PRESETS = 1, 2
_MODEL = "model"  # the key of what an alias with a preset stands for
_SHOWN = 60  # characters of what is wrong
_MOST_DIGITS = 40  # of a whole number in the file; more make no number that means anything
_MAX_BYTES = 8 << 20
_WAIT_S = 5.0  # for another process that changes them


@dataclass(frozen=True, slots=True)
class Alias:
    """A name, the text that it stands for, and its preset.

    Attributes:
        fault: what is wrong with its entry in the file, as a part of a sentence; it then stands for nothing.
        kept: the entry, where it has a fault: it is written back as it is.
    """

    name: str
    target: str
    preset: Preset = NOTHING
    fault: str = ""
    kept: Any = None


def every() -> tuple[Alias, ...]:
    """Returns all aliases (names that users gave to models), in alphabetical order.

    Raises:
        KtError: the file cannot be read, or is no file of aliases.
    """
    return tuple(sorted(_read().values(), key=lambda each: each.name))


def target_of(name: str) -> str:
    """Returns the text, such as a model's name, for which the alias `name` (in any case) is defined; "" if there is no
    such alias, or if a model in the library has this name.

    Raises:
        UsageError: the alias leads back to itself. KtError: the file of aliases, or its entry there, cannot be read.
    """
    if places.is_taken(name):
        return ""
    known = _read()
    first = known.get(name.lower())
    if first is None:
        return ""
    if first.fault:
        raise _faulty(first)
    _require_end(known, name)
    return first.target


def preset_of(model: str) -> Preset:
    """Returns the values for answers (sampling, system text, context …) that a model's name presets. An alias's own
    values come before those of the alias or Ollama model that it stands for. Without any, the preset is empty.

    Raises:
        KtError: as `target_of`; or the model of Ollama's cannot be read.
    """
    found, name = NOTHING, _stem(model)
    while places.is_name(name) and not is_hidden(Alias(name, "")):  # else the file need not be read
        known = _read()
        if (step := known.get(name.lower())) is None:
            break
        if step.fault:
            raise _faulty(step)
        _require_end(known, name)
        found, name = found.over(step.preset), _stem(step.target)
    return found.over(ollama.find(name).preset) if ollama.is_named(name) else found


def _stem(model: str) -> str:
    """The name of a model without the formats of a conversion."""
    return model.partition("@")[0]


def is_hidden(alias: Alias) -> bool:
    """Returns whether an alias is not used because a model of the catalogue or the library has the same name."""
    return catalog.find(alias.name) is not None or places.is_taken(alias.name)


def require_free(name: str) -> None:
    """Raises UsageError if a name cannot be an alias.

    Raises:
        UsageError: it cannot be the name of a model, or a model has it.
    """
    if not places.is_name(name):
        raise UsageError(
            f"{name[:120]!r} cannot be an alias",
            hint=f"use letters, digits, dots, dashes and underscores, at most {places.LONGEST_NAME} of them",
        )
    if is_hidden(Alias(name, "")):
        raise UsageError(
            f"{name} is the name of a model, which an alias may not hide",
            hint="choose another name",
        )


def save(name: str, target: str, preset: Preset = NOTHING) -> str:
    """Saves the alias `name` for the text `target`, replacing an older one of this name; returns the older one's text,
    "" if there was none.

    Raises:
        UsageError: the name cannot be an alias, or would stand for itself, or there are too many aliases.
        KtError: the library cannot be written.
    """
    require_free(name)
    with _changing():
        known = _read()
        before = known.get(name.lower())
        known[name.lower()] = Alias(name, target, preset)
        if len(known) > MOST:
            raise UsageError(
                f"there are already {MOST} aliases, the maximum", hint="kt alias --rm NAME"
            )
        _require_end(known, name)
        _write(known)
    return before.target if before else ""


def change(name: str, preset: Preset) -> Alias:
    """Sets the values of `preset` in an alias's preset and keeps its other values; returns the changed alias.

    Raises:
        NotFound: there is no such alias. KtError: its entry cannot be read, or the library cannot be written.
    """
    with _changing():
        known = _read()
        before = known.get(name.lower())
        if before is None:
            raise absent(name, known.values(), f"kt alias {name[:96]} MODEL makes it")
        if before.fault:
            raise _faulty(before)
        after = known[name.lower()] = replace(before, preset=preset.over(before.preset))
        _write(known)
    return after


def absent(name: str, known: Iterable[Alias], instead: str) -> NotFound:
    """Returns the error to raise for an alias that does not exist; its hint is the nearest name in `known`, or
    `instead` where none is near.
    """
    near = catalog.nearest(name, tuple(each.name for each in known))
    hint = f"did you mean: {', '.join(near)}" if near else instead
    return NotFound(f"there is no alias {name[:120]!r}", hint=hint)


def remove(name: str) -> Alias:
    """Removes an alias, but not the model that it stands for; returns the removed alias.

    Raises:
        NotFound: there is no such alias; the hint has the nearest. KtError: the library cannot be written.
    """
    with _changing():
        known = _read()
        gone = known.pop(name.lower(), None)
        if gone is None:
            raise absent(name, known.values(), "kt alias lists them")
        _write(known)
    return gone


def _require_end(known: Mapping[str, Alias], name: str) -> None:
    """Refuses a name that leads back to itself."""
    passed = [name.lower()]
    while (step := known.get(passed[-1])) is not None and not is_hidden(step):
        following = step.target.partition("@")[0].lower()
        if following in passed:
            way = " -> ".join([*passed, following])
            raise UsageError(
                f"the alias {name} refers back to itself: {way[:300]}",
                hint=f"kt alias {name} MODEL, or kt alias --rm {name}",
            )
        passed.append(following)


def _path() -> Path:
    return config.home() / "aliases.json"


def _changing() -> AbstractContextManager[None]:
    smallfiles.make_folder(config.home() / "locks")
    lock = places.lock_path("aliases")
    return smallfiles.lock(lock, "changing the aliases", wait_s=_WAIT_S)


def _write(known: Mapping[str, Alias]) -> None:
    ordered = sorted(known.values(), key=lambda each: each.name)
    table = {each.name: _entry(each) for each in ordered}
    version = _PLAIN if all(isinstance(each, str) for each in table.values()) else _PRESETS
    text = json.dumps({"kt_aliases": version, "aliases": table}, indent=2) + "\n"
    if len(text) > _MAX_BYTES:
        raise UsageError(
            f"the aliases would take {gib(len(text))}, more than kt reads",
            hint="kt alias --rm NAME",
        )
    try:
        smallfiles.write(_path(), text)
    except OSError as error:
        raise KtError(
            f"cannot write {_path()}: {error.strerror}", hint="set KT_HOME to another folder"
        ) from error


def _entry(alias: Alias) -> Any:
    """An alias as the file has it."""
    if alias.fault:
        return alias.kept
    return {_MODEL: alias.target, **alias.preset.document()} if alias.preset else alias.target


def _read() -> dict[str, Alias]:
    """The aliases by their names in lower case."""
    try:
        data = smallfiles.read_bounded(_path(), _MAX_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _bad(f"cannot be read: {error.strerror or error}") from error
    try:
        document = smallfiles.json_object(data, parse_int=_whole)
    except ValueError as error:
        raise _bad(str(error)) from error
    version, table = document.get("kt_aliases"), document.get("aliases")
    if isinstance(version, bool) or version not in (_PLAIN, _PRESETS):
        known = f"{_PLAIN} and {_PRESETS}"
        raise _bad(f"has version {str(version)[:40]}; this kt reads versions {known}")
    if not isinstance(table, dict) or len(table) > MOST:
        raise _bad(f"has no aliases object, or one with more than {MOST} entries")
    return {name.lower(): _alias(name, entry) for name, entry in table.items()}


def _whole(text: str) -> int | str:
    """A whole number of the file; one of so many digits that Python refuses all of the file for it stays a text."""
    return int(text) if len(text) <= _MOST_DIGITS else text


def _alias(name: str, entry: Any) -> Alias:
    """One entry of the file, whatever it is."""
    target, values = entry, dict[str, Any]()
    if isinstance(entry, dict):
        target = entry.get(_MODEL)
        values = {key: value for key, value in entry.items() if key != _MODEL}
    try:
        if not places.is_name(name):
            raise ValueError("its name is not a valid alias")
        if not isinstance(target, str) or not 0 < len(target) <= LONGEST_TARGET or "\0" in target:
            raise ValueError("its target cannot be a model name")
        return Alias(name, target, Preset.of(values))
    except ValueError as error:
        return Alias(name, "", fault=str(error), kept=entry)


def _faulty(alias: Alias) -> KtError:
    shown = alias.name if places.is_name(alias.name) else repr(alias.name[:_SHOWN])
    return KtError(
        f"the alias {shown} in {_path()} cannot be used: {alias.fault}",
        hint=f"kt alias {shown} MODEL makes it again, kt alias --rm {shown} removes it",
    )


def _bad(what: str) -> KtError:
    path = _path()
    return KtError(f"the file of aliases {path} {what}", hint=f"repair it, or remove it: rm {path}")
