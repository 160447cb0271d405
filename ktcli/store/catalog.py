"""The models kt knows by a short name: one TOML file each, in `profiles/models/` and in the user's own folder.

    ~/.config/kt/catalog.d/NAME.toml              beside the settings file; the same form as ours

`profile` reads them. A file of a user that cannot be read hides nothing else: it is told where all models are shown,
and where its own name is asked for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ktcli import settingsfile
from ktcli.errors import KtError, NotFound
from ktcli.records import dataclass
from ktcli.resources import data_path
from ktcli.store import places
from ktcli.store.profile import HUBS, ModelProfile, builtin_path, read_profile
from ktcli.unsupported import unsupported_named

__all__ = ["ModelProfile", "builtin_path"]

_MOST_FILES = 500  # of a user


@dataclass(frozen=True, slots=True)
class Published:
    """A repository of a model type that kt runs, without a profile.

    Attributes:
        repositories: hub ("hf", "ms") → repository id.
    """

    model_type: str
    repositories: Mapping[str, str]

    @property
    def reference(self) -> str:
        """The repository as any command takes it: its id on Hugging Face, "org/repo"."""
        return self.repositories["hf"]


@cache
def published() -> tuple[Published, ...]:
    """Returns the published repositories of models that kt runs but that have no profile, sorted by id."""
    table = tomllib.loads(data_path("profiles", "published.toml").read_text(encoding="utf-8"))
    found = [
        Published(row["model_type"], {hub: row[hub] for hub in HUBS if hub in row})
        for row in table["model"]
    ]
    return tuple(sorted(found, key=lambda each: each.reference.lower()))


def folder() -> Path:
    """Returns the path of the folder of the user's own model profiles, which need not exist."""
    return settingsfile.path().parent / "catalog.d"


def names() -> tuple[str, ...]:
    """Returns the short names of all models with a profile, the user's own included, in alphabetical order."""
    return tuple(sorted({*_shipped(), *_own()}))


def faults() -> tuple[KtError, ...]:
    """Returns the errors in the user's own model profiles, one for each file that cannot be used."""
    return tuple(each for each in _all_own().values() if isinstance(each, KtError))


def find(name: str) -> ModelProfile | None:
    """Returns the profile of the model with this short name, in upper or lower case; None if there is none that can be
    read.
    """
    lower = name.lower()
    return _load(lower) if lower in _shipped() else _own().get(lower)


def get(name: str) -> ModelProfile:
    """Returns the profile of the model with this short name, in upper or lower case.

    Raises:
        NotFound: there is none; the hint has the nearest names. KtError: the user's profile of this name cannot be
            read.
    """
    profile = find(name)
    if profile is None:
        raise unknown(name)
    return profile


def by_repository(hub: str, repository: str) -> ModelProfile | None:
    """Returns the profile of the model whose weights are this repository of a hub ("hf" or "ms"); profiles that ship
    with kt come before the user's own. None: there is none.
    """
    wanted = repository.lower()
    for name in sorted(names(), key=lambda each: each not in _shipped()):
        profile = get(name)
        if profile.repositories.get(hub, "").lower() == wanted:
            return profile
    return None


def unknown(name: str, also: tuple[str, ...] = ()) -> KtError:
    """Returns the error for a model's name that the catalogue does not know, or whose profile cannot be read; the hint
    has similar names.

    Args:
        also: names of the library, which may be suggested too.
    """
    if isinstance(own := _all_own().get(name.lower()), KtError):
        return own
    if (refused := unsupported_named(name)) is not None:
        return NotFound(refused.sentence, hint="kt plan lists models that run here")
    repositories = (each.reference for each in published())
    near = nearest(name, (*names(), *also, *repositories))
    hint = f"did you mean: {', '.join(near)}" if near else "kt list --all shows the names kt knows"
    return NotFound(f"there is no model {name!r}", hint=hint)


def nearest(name: str, known: tuple[str, ...]) -> list[str]:
    """Returns at most three of the names in `known` that contain `name` or resemble it, models with routed experts
    first; the best match is always among them. [] if none is similar.
    """
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
    """Returns whether a name of the catalogue is that of a model without routed experts."""
    profile = find(name)
    return profile is not None and profile.expert_parameters == 0


def repositories_like(hub: str, repository: str) -> list[str]:
    """Returns the ids of at most three repositories of the catalogue on a hub ("hf", "ms") whose ids resemble
    `repository`, models with routed experts first; [] if none does.
    """
    from difflib import get_close_matches

    known = {p.repositories[hub]: p for p in map(get, names()) if hub in p.repositories}
    close = get_close_matches(repository, sorted(known), n=3, cutoff=0.7)
    return sorted(close, key=lambda each: known[each].expert_parameters == 0)


def matching(words: str) -> tuple[ModelProfile, ...]:
    """Returns the profiles of models, in alphabetical order, that have each of the words, upper or lower case, in the
    name, the title, the model type or the id of a repository.
    """
    return tuple(profile for profile in map(get, names()) if _says(words, _spoken_of(profile)))


def published_matching(words: str) -> tuple[Published, ...]:
    """Returns the published repositories of models without a profile that have each of the words, upper or lower case,
    in the model type or an id.
    """
    return tuple(
        each
        for each in published()
        if _says(words, "\n".join((each.model_type, *each.repositories.values())))
    )


def _says(words: str, text: str) -> bool:
    return all(word in text.lower() for word in words.lower().split())


def _spoken_of(profile: ModelProfile) -> str:
    model_type = str(profile.config.get("model_type", ""))
    said = (profile.name, profile.title, model_type, *profile.repositories.values())
    return "\n".join(said)


@cache
def _shipped() -> frozenset[str]:
    return frozenset(path.stem for path in data_path("profiles", "models").glob("*.toml"))


@cache
def _load(name: str) -> ModelProfile:
    """A profile that ships with kt."""
    return read_profile(data_path("profiles", "models") / f"{name}.toml", shipped=True)


def _own() -> dict[str, ModelProfile]:
    """The user's profiles that can be read."""
    return {name: each for name, each in _all_own().items() if isinstance(each, ModelProfile)}


def _all_own() -> dict[str, ModelProfile | KtError]:
    """The user's profiles, or what is wrong with each."""
    try:
        files = sorted(folder().glob("*.toml"))[:_MOST_FILES]
        stamps = tuple((each, each.stat().st_mtime_ns) for each in files)
    except OSError:
        return {}
    return _read_own(stamps)


@cache
def _read_own(files: tuple[tuple[Path, int], ...]) -> dict[str, ModelProfile | KtError]:
    """Reads profiles of a user; the times of the files are there so that a change is seen."""
    return {path.stem.lower(): _read_one(path) for path, _ in files}


def _read_one(path: Path) -> ModelProfile | KtError:
    shown = settingsfile.shown(path)
    if not places.is_name(path.stem) or path.stem != path.stem.lower():
        return KtError(
            f"{shown}: the file name is not a valid model name",
            hint="name it NAME.toml, using lower-case letters, digits, dots, dashes and underscores",
        )
    if path.stem in _shipped():
        return KtError(
            f"{shown}: {path.stem} is a built-in profile, which no other file may replace",
            hint="rename the file",
        )
    try:
        return read_profile(path, shipped=False)
    except KtError as error:
        return error
