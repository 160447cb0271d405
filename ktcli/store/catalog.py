"""The models kt knows by a short name: one TOML file each in `profiles/models/`.

A profile holds what is needed before anything is downloaded: where the model comes from, its size, and
its whole `config.json`, from which plans and benchmarks are made.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ktcli.errors import KtError, NotFound
from ktcli.resources import data_path


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model of the catalogue.

    Attributes:
        name: the short name.
        title: the name its makers use.
        repositories: hub ("hf", "ms") → repository id; empty for a built-in model.
        builtin: folder in `profiles/` of a model that ships with kt.
        parameters, expert_parameters: counts for the model that runs, by its makers; None if not given.
        download_bytes: bytes of all tensors in the safetensors files of the repository. These are more than
            the model: layers that predict further tokens come with it, and so does a head that lies beside
            the embedding it is tied to. Headers and small files, a thousandth at most, are not counted.
        experts, dense: formats a conversion uses unless told otherwise.
        table: the profile's [config] table; empty for a built-in model, see `config`.
    """

    name: str
    title: str
    license: str
    repositories: Mapping[str, str]
    builtin: str
    parameters: int | None
    expert_parameters: int | None
    download_bytes: int | None
    experts: str
    dense: str
    table: Mapping[str, Any]

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's `config.json`.

        Raises:
            NotFound, KtError: a built-in model is missing or damaged.
        """
        return _builtin_config(self.builtin) if self.builtin else self.table


def names() -> tuple[str, ...]:
    """Every short name, in alphabetical order."""
    return tuple(sorted(path.stem for path in data_path("profiles", "models").glob("*.toml")))


def find(name: str) -> ModelProfile | None:
    """The profile of a short name, upper or lower case; None if there is none."""
    lower = name.lower()
    return _load(lower) if lower in names() else None


def get(name: str) -> ModelProfile:
    """The profile of a short name.

    Raises:
        NotFound: there is none; the hint has the nearest names.
    """
    profile = find(name)
    if profile is None:
        raise unknown(name)
    return profile


def by_repository(hub: str, repository: str) -> ModelProfile | None:
    """The profile whose weights are this repository."""
    wanted = repository.lower()
    for name in names():
        profile = _load(name)
        if profile.repositories.get(hub, "").lower() == wanted:
            return profile
    return None


def unknown(name: str, also: tuple[str, ...] = ()) -> NotFound:
    """The error for a name that means nothing; `also` are names of the library."""
    near = nearest(name, (*names(), *also))
    hint = f"did you mean: {', '.join(near)}" if near else "kt list --all shows the names kt knows"
    return NotFound(f"there is no model {name!r}", hint=hint)


def nearest(name: str, known: tuple[str, ...]) -> list[str]:
    """At most three names that look like `name`: models with routed experts, best first, then the nearest of all."""
    from difflib import get_close_matches

    lower = name.lower()
    unique = sorted(set(known))
    inside = [candidate for candidate in unique if len(lower) >= 3 and lower in candidate.lower()]
    inside.sort(key=len)
    close = get_close_matches(lower, unique, n=9, cutoff=0.55)
    found = list(dict.fromkeys([*inside, *close]))
    first = sorted(found, key=_is_dense)[:3]
    if found and found[0] not in first:
        first[-1] = found[0]
    return first


def _is_dense(name: str) -> bool:
    """Whether a name of the catalogue is that of a model without routed experts."""
    profile = find(name)
    return profile is not None and profile.expert_parameters == 0


def repositories_like(hub: str, repository: str) -> list[str]:
    """At most three repositories of the catalogue that look like one, those with routed experts first."""
    from difflib import get_close_matches

    known = {p.repositories[hub]: p for p in map(_load, names()) if hub in p.repositories}
    close = get_close_matches(repository, sorted(known), n=3, cutoff=0.7)
    return sorted(close, key=lambda each: known[each].expert_parameters == 0)


def matching(words: str) -> tuple[ModelProfile, ...]:
    """The models of which each of the words, upper or lower case, is in the name, the title, the model type or the id
    of a repository, in alphabetical order."""
    wanted = words.lower().split()
    return tuple(
        profile
        for name in names()
        if all(word in _spoken_of(profile := _load(name)) for word in wanted)
    )


def _spoken_of(profile: ModelProfile) -> str:
    model_type = str(profile.config.get("model_type", ""))
    said = (profile.name, profile.title, model_type, *profile.repositories.values())
    return "\n".join(said).lower()


@cache
def _load(name: str) -> ModelProfile:
    path = data_path("profiles", "models") / f"{name}.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KtError(
            f"the profile {path.name} cannot be read: {error}", hint="install kt again"
        ) from error
    sizes, formats = table.get("sizes", {}), table.get("formats", {})
    builtin = table.get("builtin", "")
    return ModelProfile(
        name=name,
        title=table["title"],
        license=table["license"],
        repositories=table.get("repositories", {}),
        builtin=builtin,
        parameters=sizes.get("parameters"),
        expert_parameters=sizes.get("expert_parameters"),
        download_bytes=sizes.get("download_bytes"),
        experts=formats["experts"],
        dense=formats["dense"],
        table={} if builtin else _config(table),
    )


def _config(table: Mapping[str, Any]) -> dict[str, Any]:
    """The [config] table, with the nulls that TOML cannot write."""
    return {**table["config"], **dict.fromkeys(table.get("config_nulls", ()))}


def _builtin_config(folder: str) -> dict[str, Any]:
    path = builtin_path(f"{folder}/config.json")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KtError(
            f"the built-in model's {path} cannot be read: {error}", hint="install kt again"
        ) from error
    return config


def builtin_path(folder: str) -> Path:
    """The folder, or a file in it, of a model that ships with kt.

    Raises:
        NotFound: this installation lacks it.
    """
    try:
        return data_path("profiles", folder)
    except FileNotFoundError as error:
        raise NotFound(
            f"the built-in model is missing: there is no {folder}", hint="install kt again"
        ) from error
