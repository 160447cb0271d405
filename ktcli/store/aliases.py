"""Keeps names that a person gave to models: `kt alias big qwen3-235b-a22b@int4-int8`, one file in the library.

    KT_HOME/aliases.json                          {"kt_aliases": 1, "aliases": {"big": "qwen3-235b-a22b@int4-int8"}}

An alias means another text, which may be an alias, too. It never hides a model: of a name that the catalogue or the
library has by now, the alias is not asked. The file is read as one that anybody may have written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ktcli import config, smallfiles
from ktcli.errors import KtError, NotFound, UsageError
from ktcli.store import catalog, places

MOST = 1000  # aliases
LONGEST_TARGET = 4096  # characters, as of any name of a model
_VERSION = 1
_MAX_BYTES = 8 << 20
_WAIT_S = 5.0  # for another process that changes them


@dataclass(frozen=True, slots=True)
class Alias:
    """A name, and the text that it stands for."""

    name: str
    target: str


def every() -> tuple[Alias, ...]:
    """Returns all aliases, in alphabetical order.

    Raises:
        KtError: the file cannot be read, or is no file of aliases.
    """
    return tuple(sorted(_read().values(), key=lambda each: each.name))


def target_of(name: str) -> str:
    """Returns the text that an alias stands for, upper or lower case; empty: it is none, or a model has this name.

    Raises:
        UsageError: it leads back to itself. KtError: the file cannot be read.
    """
    if places.is_taken(name):
        return ""
    known = _read()
    first = known.get(name.lower())
    if first is None:
        return ""
    _require_end(known, name)
    return first.target


def is_hidden(alias: Alias) -> bool:
    """Tells whether a model has the name by now, so that the alias is not asked."""
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


def save(name: str, target: str) -> str:
    """Saves an alias for a text; returns the text that it stood for before, empty: none.

    Raises:
        UsageError: the name cannot be one, or would stand for itself. KtError: the library cannot be written.
    """
    require_free(name)
    with _changing():
        known = _read()
        before = known.get(name.lower())
        known[name.lower()] = Alias(name, target)
        if len(known) > MOST:
            raise UsageError(
                f"there are already {MOST} aliases, the maximum", hint="kt alias --rm NAME"
            )
        _require_end(known, name)
        _write(known)
    return before.target if before else ""


def remove(name: str) -> Alias:
    """Removes an alias, and nothing else; returns it.

    Raises:
        NotFound: there is none; the hint has the nearest.
    """
    with _changing():
        known = _read()
        gone = known.pop(name.lower(), None)
        if gone is None:
            near = catalog.nearest(name, tuple(each.name for each in known.values()))
            hint = f"did you mean: {', '.join(near)}" if near else "kt alias lists them"
            raise NotFound(f"there is no alias {name[:120]!r}", hint=hint)
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
    table = {each.name: each.target for each in sorted(known.values(), key=lambda each: each.name)}
    text = json.dumps({"kt_aliases": _VERSION, "aliases": table}, indent=2)
    try:
        smallfiles.write(_path(), f"{text}\n")
    except OSError as error:
        raise KtError(
            f"cannot write {_path()}: {error.strerror}", hint="set KT_HOME to another folder"
        ) from error


def _read() -> dict[str, Alias]:
    """The aliases by their names in lower case."""
    try:
        data = smallfiles.read_bounded(_path(), _MAX_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _bad(f"cannot be read: {error.strerror or error}") from error
    try:
        document = smallfiles.json_object(data)
    except ValueError as error:
        raise _bad(str(error)) from error
    version, table = document.get("kt_aliases"), document.get("aliases")
    if version != _VERSION or isinstance(version, bool):
        raise _bad(f"has version {str(version)[:40]}; this kt reads version {_VERSION}")
    if not isinstance(table, dict) or len(table) > MOST:
        raise _bad(f"has no table of at most {MOST} aliases")
    for name, target in table.items():
        if not places.is_name(name):
            raise _bad(f"has the name {name[:60]!r}, which is not a valid alias")
        if not isinstance(target, str) or not 0 < len(target) <= LONGEST_TARGET or "\0" in target:
            raise _bad(f"gives {name} a target that cannot be a model name")
    return {name.lower(): Alias(name, target) for name, target in table.items()}


def _bad(what: str) -> KtError:
    path = _path()
    return KtError(f"the file of aliases {path} {what}", hint=f"repair it, or remove it: rm {path}")
