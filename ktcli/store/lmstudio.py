"""Finds models in LM Studio's folder by their names: `lmstudio:NAME`. Files are used where they lie, and never changed.

    MODELS/PUBLISHER/REPOSITORY/*.gguf

NAME is PUBLISHER/REPOSITORY, the name of a file with or without .gguf, or a part of either that only one model has.
MODELS is the folder "models" of LM Studio's home, or the one that its settings.json names as "downloadsFolder"; the
home is what ~/.lmstudio-home-pointer names, else ~/.lmstudio, else ~/.cache/lm-studio of older versions. Source: LM
Studio's docs (app/basics/import-model) and lms, its command line (findLMStudioHome).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ktcli import smallfiles
from ktcli.errors import NotFound, UsageError
from ktcli.ggufname import GGUF, is_model
from ktcli.numbered import numbered_set

PREFIX = "lmstudio:"
_HOMES = ("~/.lmstudio", "~/.cache/lm-studio")
_POINTER = "~/.lmstudio-home-pointer"
_POINTER_BYTES, _SETTINGS_BYTES = 1 << 13, 1 << 20
_LONGEST = 500  # characters of a name
_MOST = 20_000  # folders and files that are looked at
_SHOWN = 3


def is_named(text: str) -> bool:
    """Returns whether a text names a model in LM Studio's store, existing or not: it begins with "lmstudio:"."""
    return text.lower().startswith(PREFIX)


def find(text: str) -> Path:
    """Returns the path of the folder or GGUF file in LM Studio's store that a name "lmstudio:NAME" means.

    Raises:
        UsageError: `text` is not valid, or several models match. NotFound: no model matches; the hint names some.
    """
    said = text[len(PREFIX) :].strip("/").lower()
    if not said or len(said) > _LONGEST or ".." in said.split("/"):
        raise UsageError(
            f"{text[:120]!r} is not the name of a model in LM Studio",
            hint="write it as lms ls shows it: lmstudio:PUBLISHER/REPOSITORY, or the name of a file",
        )
    said = said.removesuffix(GGUF)
    folders = _folders()
    files = {f"{name}/{stem}": file for name, of in folders.items() for stem, file in _files(of)}
    both = [(way, table) for way in (_last_is(said), _has(said)) for table in (folders, files)]
    for is_meant, table in [(said.__eq__, folders), *both]:
        met = {known: path for known, path in table.items() if is_meant(known.lower())}
        if len(met) == 1:
            return next(iter(met.values()))
        if met:
            raise UsageError(
                f"{len(met)} models of LM Studio are called {said[:80]!r}",
                hint=f"write one of: {_listed(met)}",
            )
    hint = f"there are: {_listed(folders)}" if folders else f"kt looks in {_models_folder()}"
    raise NotFound(f"there is no model {said[:120]!r} in LM Studio's folder", hint=hint)


def _last_is(said: str) -> Callable[[str], bool]:
    """Returns whether a name ends with these parts."""
    return lambda known: f"/{known}".endswith(f"/{said}")


def _has(said: str) -> Callable[[str], bool]:
    return lambda known: said in known


def _folders() -> dict[str, Path]:
    """The folders with GGUF files, or of a checkpoint, by PUBLISHER/REPOSITORY."""
    top = _models_folder()
    found = {
        f"{publisher.name}/{repository.name}": repository
        for publisher in _items(top)
        if publisher.is_dir()
        for repository in _items(publisher)
        if repository.is_dir() and (_files(repository) or (repository / "config.json").is_file())
    }
    return dict(list(found.items())[:_MOST])


def _files(folder: Path) -> list[tuple[str, Path]]:
    """The GGUF models of a folder, each by its name without the suffix; of a numbered set the first file."""
    found = [each for each in _items(folder) if each.name.lower().endswith(GGUF)]
    there = [each for each in found if is_model(each.name) and each.is_file()]
    sets = {numbered_set(each.name)[0]: each for each in reversed(there)}
    return [(name[: -len(GGUF)], file) for name, file in sorted(sets.items())]


def _items(folder: Path) -> list[Path]:
    """What lies in a folder, by name; nothing where it cannot be read."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [folder / name for name in names[:_MOST] if not name.startswith(".")]


def _models_folder() -> Path:
    home = _home()
    said = smallfiles.known_object(home / "settings.json", _SETTINGS_BYTES).get("downloadsFolder")
    return Path(said) if isinstance(said, str) and _is_path(said) else home / "models"


def _home() -> Path:
    try:
        data = smallfiles.read_bounded(Path(os.path.expanduser(_POINTER)), _POINTER_BYTES)
        said = data.decode("utf-8").strip()
    except (OSError, ValueError):
        said = ""
    if _is_path(said):
        return Path(said)
    homes = [Path(os.path.expanduser(each)) for each in _HOMES]
    return next((each for each in homes if each.is_dir()), homes[0])


def _is_path(said: str) -> bool:
    return said.startswith("/") and "\0" not in said and said.isprintable()


def _listed(known: Iterable[str]) -> str:
    names = [f"{PREFIX}{name}" for name in known]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
