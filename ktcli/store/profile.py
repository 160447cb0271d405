"""Reads a profile: the TOML file of one model, which ships with kt or which a user wrote in the same form.

A profile holds what is needed before anything is downloaded: where the model comes from, its size, and its whole
`config.json`. It is read as hostile input: whatever is wrong is told with the file, the line and the key.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktcli import settingsfile, smallfiles
from ktcli.errors import BadCheckpoint, KtError, NotFound
from ktcli.records import dataclass
from ktcli.resources import data_path
from ktcli.store import places

HUBS = {"hf": "Hugging Face", "ms": "ModelScope"}
REPOSITORY = rf"({places.NAME})/({places.NAME})"
EXPERTS, DENSE = "int4", "int8"  # formats where a profile does not name them
_MAX_BYTES = 1 << 20
_LONGEST = 200  # characters of a title or a licence
_MONTH = re.compile(r"20[0-9]{2}-(0[1-9]|1[0-2])")
_FORMAT = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TABLES = ("repositories", "sizes", "formats", "config")
_SIZES = ("parameters", "expert_parameters", "download_bytes")


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model of the catalogue.

    Attributes:
        name: the short name.
        title: the name its makers use.
        repositories: hub ("hf", "ms") → repository id; empty for a built-in model.
        builtin: folder in `profiles/` of a model that ships with kt.
        released: the month in which its weights appeared, "2026-04"; empty: not given.
        parameters, expert_parameters: counts for the model that runs, by its makers; None if not given.
        download_bytes: bytes of all tensors in the safetensors files of the repository. These are more than
            the model: layers that predict further tokens come with it, and so does a head that lies beside
            the embedding it is tied to. Headers and small files, a thousandth at most, are not counted.
        experts, dense: formats a conversion uses unless told otherwise.
        table: the profile's [config] table; empty for a built-in model, see `config`.
        origin: the file of a user that it is from; None: it ships with kt.
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
    origin: Path | None = None
    released: str = ""

    @property
    def config(self) -> Mapping[str, Any]:
        """The contents of the model's `config.json`, as a JSON object.

        Raises:
            NotFound, KtError: a built-in model is missing or damaged.
        """
        return _builtin_config(self.builtin) if self.builtin else self.table

    def fault(self, error: KtError) -> KtError:
        """Returns the error to raise when no model can be built from the profile, as `error` says: if a user wrote the
        profile, one that names the file, line and key, where they can be found; otherwise `error` itself.
        """
        if self.origin is None:
            return error
        try:
            text = smallfiles.read_bounded(self.origin, _MAX_BYTES).decode("utf-8", "replace")
        except OSError:
            return error
        said = str(error)
        candidates = [("config", key) for key in self.table] + [
            ("formats", key) for key in ("experts", "dense") if repr(getattr(self, key)) in said
        ]
        named = [each for each in candidates if each[0] == "formats" or _says(said, each[1])]
        if not named and not isinstance(error, BadCheckpoint):
            return error
        table, key = named[-1] if named else ("config", "")
        return _ProfileText(self.origin, text).error(table, key, said)


@dataclass(frozen=True, slots=True)
class _ProfileText:
    """A file that is read, for errors that name a line in it."""

    path: Path
    text: str
    hint: str = "correct the file, or move it away"

    def error(self, table: str, key: str, what: str) -> KtError:
        line = _line_of(self.text, table, key)
        name = ".".join(each for each in (table, key) if each)
        where = f"{settingsfile.shown(self.path)}, line {line}"
        return KtError(f"{where}: {name}: {what}" if name else f"{where}: {what}", hint=self.hint)

    def text_of(self, found: Mapping[str, Any], table: str, key: str, default: str = "") -> str:
        """A text of one line; without a default it must be there."""
        value = found.get(key, default)
        if not isinstance(value, str) or not value.isprintable() or len(value) > _LONGEST:
            raise self.error(table, key, f"must be one line of text, at most {_LONGEST} characters")
        if not value:
            raise self.error(table, key, "is missing")
        return value

    def table_of(self, found: Mapping[str, Any], name: str, keys: tuple[str, ...]) -> Any:
        """A table whose keys are known; an empty `keys` takes any."""
        table = found.get(name, {})
        if not isinstance(table, dict):
            raise self.error("", name, "must be a table")
        for key in table:
            if keys and key not in keys:
                raise self.error(
                    name, key, f"is not a profile key; known keys are {', '.join(keys)}"
                )
        return table


def typed(hub: str, repository: str) -> str:
    """Returns a repository as users type it: "org/repo" on Hugging Face, elsewhere with the hub's short name,
    "ms:org/repo".
    """
    return repository if hub == "hf" else f"{hub}:{repository}"


def read_profile(path: Path, *, shipped: bool) -> ModelProfile:
    """Returns the model's profile in a TOML file, which is named after the model.

    Raises:
        KtError: the file cannot be read, or is not a profile; the message has file, line and key.
    """
    hint = "install kt again" if shipped else "correct the file, or move it away"
    try:
        text = smallfiles.read_bounded(path, _MAX_BYTES).decode("utf-8")
        found = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        why = (getattr(error, "strerror", None) or str(error))[:300]
        raise KtError(f"{settingsfile.shown(path)} cannot be read: {why}", hint=hint) from error
    return _profile(_ProfileText(path, text, hint), found, shipped=shipped)


def _profile(reading: _ProfileText, found: Mapping[str, Any], *, shipped: bool) -> ModelProfile:
    builtin = found.get("builtin", "") if shipped else ""
    known = (
        "title",
        "license",
        "released",
        "config_nulls",
        *_TABLES,
        *(["builtin"] if shipped else []),
    )
    for key in found:
        if key not in known:
            raise reading.error("", key, f"is not a profile key; known keys are {', '.join(known)}")
    sizes, formats = _sizes(reading, found), _formats(reading, found)
    released = found.get("released", "")
    if not isinstance(released, str) or (released and _MONTH.fullmatch(released) is None):
        raise reading.error("", "released", 'must be a month like "2026-04"')
    return ModelProfile(
        name=reading.path.stem,
        title=reading.text_of(found, "", "title"),
        license=reading.text_of(found, "", "license"),
        repositories=_repositories(reading, found, needed=not builtin),
        builtin=builtin,
        parameters=sizes.get("parameters"),
        expert_parameters=sizes.get("expert_parameters"),
        download_bytes=sizes.get("download_bytes"),
        experts=formats["experts"],
        dense=formats["dense"],
        table={} if builtin else _config(reading, found),
        origin=None if shipped else reading.path,
        released=released,
    )


def _sizes(reading: _ProfileText, found: Mapping[str, Any]) -> dict[str, int]:
    table: dict[str, int] = reading.table_of(found, "sizes", _SIZES)
    for key, value in table.items():
        if type(value) is not int or not 0 <= value < 1 << 60:
            raise reading.error("sizes", key, "must be a whole number, 0 or more")
    return table


def _formats(reading: _ProfileText, found: Mapping[str, Any]) -> dict[str, str]:
    table = reading.table_of(found, "formats", ("experts", "dense"))
    chosen = {
        key: reading.text_of(table, "formats", key, default)
        for key, default in (("experts", EXPERTS), ("dense", DENSE))
    }
    for key, value in chosen.items():
        if _FORMAT.fullmatch(value) is None:
            raise reading.error("formats", key, f"{value!r} is not the name of a format")
    return chosen


def _repositories(
    reading: _ProfileText, found: Mapping[str, Any], *, needed: bool
) -> dict[str, str]:
    table: dict[str, str] = reading.table_of(found, "repositories", tuple(HUBS))
    for hub, repository in table.items():
        if not isinstance(repository, str) or re.fullmatch(REPOSITORY, repository) is None:
            raise reading.error("repositories", hub, "must be org/repo")
    if needed and not table:
        raise reading.error("", "repositories", f"is missing; it has {' or '.join(HUBS)}")
    return table


def _config(reading: _ProfileText, found: Mapping[str, Any]) -> dict[str, Any]:
    """The [config] table, with the nulls that TOML cannot write."""
    table = reading.table_of(found, "config", ())
    nulls = found.get("config_nulls", [])
    if not isinstance(nulls, list) or not all(isinstance(key, str) for key in nulls):
        raise reading.error("", "config_nulls", "must be a list of keys")
    reading.text_of(table, "config", "model_type")
    return {**table, **dict.fromkeys(nulls)}


def _line_of(text: str, table: str, key: str) -> int:
    """The line of a key, else that of its table, else the first."""
    here, of_table = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        if (header := re.match(r"\s*\[\s*([\w.\"'-]+)\s*\]", line)) is not None:
            here = header[1].strip("\"'")
            of_table = number if here in (table, key) else of_table
        elif (
            here == table
            and key
            and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*[.=]""", line) is not None
        ):
            return number
    return of_table


def _says(sentence: str, key: str) -> bool:
    return re.search(rf"(?<![\w]){re.escape(key)}(?![\w])", sentence) is not None


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
    """Returns the path of a folder of a model that ships with kt, or of a file in it; `folder` is its path within
    `profiles`.

    Raises:
        NotFound: this installation lacks it.
    """
    try:
        return data_path("profiles", folder)
    except FileNotFoundError as error:
        raise NotFound(
            f"the built-in model is missing: there is no {folder}", hint="install kt again"
        ) from error
