"""Finds the requested data files: as the user named them, or as entries of a `dataset_info.json`.

That file comes from strangers, often: it reaches nothing outside its own folder, and what is in it that kt would have
to leave out is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import NotFound, UsageError
from ktcli.records import dataclass
from ktcli.samples.columns import USUAL_COLUMNS, USUAL_TAGS, Columns, Tags, read_columns, read_tags
from ktcli.samples.rows import check_kind
from ktcli.samples.sample import BadData

INFO = "dataset_info.json"
USUAL_FOLDER = Path("data")  # as in LLaMA-Factory
FORMATTINGS = ("alpaca", "sharegpt", "openai")
_MOST_BYTES = 16 << 20
_MOST_SOURCES = 1000

_ELSEWHERE = "download the file into the folder of dataset_info.json, and set file_name to it"
# Keys of an entry that kt does not honour, and what to do about each; those that are false or null do no harm.
_REFUSED = {
    "hf_hub_url": _ELSEWHERE,
    "ms_hub_url": _ELSEWHERE,
    "om_hub_url": _ELSEWHERE,
    "cloud_file_name": _ELSEWHERE,
    "script_url": "kt does not run a dataset's code: write its rows to a .jsonl file",
    "subset": _ELSEWHERE,
    "folder": _ELSEWHERE,
    "ranking": "kt trains on answers, not on preferences between two",
}
_HONOURED = ("file_name", "formatting", "columns", "tags", "num_samples", "split", "file_sha1")


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data file, and the options for reading its rows.

    Attributes:
        name: of the dataset, or of the file.
        formatting: one of FORMATTINGS; None: it is seen from the first row.
        columns: the names of the file's columns, where they are not the usual ones.
        tags: the names in messages, where they are not the usual ones.
        num_samples: how many rows are drawn by chance; None: all are taken.
    """

    name: str
    path: Path
    formatting: str | None = None
    columns: Columns = USUAL_COLUMNS
    tags: Tags = USUAL_TAGS
    num_samples: int | None = None


def sources_of(
    names: Sequence[str], dataset_dir: Path | None, data: Sequence[Path]
) -> tuple[DataSource, ...]:
    """Returns the data files to read, with the options for reading their rows: first those in `data`, then the named
    datasets.

    Args:
        names: entries of `dataset_info.json`.
        dataset_dir: the folder that has it; None: the folder `data`.
        data: files as the user named them.
    Raises:
        NotFound: there is no such file or entry; the hint names the most similar one.
        BadData: an entry asks for something unsupported. UsageError: no file is named, one twice, or too many.
    """
    found = [DataSource(path.name, path) for path in data]
    if names:
        folder = dataset_dir or USUAL_FOLDER
        info = _read_info(folder)
        found += [_source(name, info, folder) for name in names]
    if not found:
        raise UsageError("no data is named", hint="for example: --data mine.jsonl")
    if len(found) > _MOST_SOURCES:
        raise UsageError(f"{len(found):,} data files are too many; the limit is {_MOST_SOURCES:,}")
    for at, each in enumerate(found):
        check_kind(each.path)
        if not os.path.exists(each.path):  # which a name too long does not either
            raise NotFound(f"the data file {each.path} does not exist", hint=_near(each.path))
        if any(each == other for other in found[:at]):
            raise UsageError(f"the data file {each.name} is named twice")
    return tuple(found)


def _near(path: Path) -> str:
    """Returns a hint with the names of files beside a missing one that look like its own."""
    try:
        beside = [each.name for each in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    return _meant(get_close_matches(path.name, beside, 3, 0.6))


def _meant(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(near)}?" if near else ""


def _read_info(folder: Path) -> dict[str, Any]:
    path = folder / INFO
    try:
        return smallfiles.json_object(smallfiles.read_bounded(path, _MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"there is no {path}, which maps names of datasets to files",
            hint="set dataset_dir to its folder, or name a file: --data mine.jsonl",
        ) from None
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadData(f"{path} {error}") from None


def _source(name: str, info: Mapping[str, Any], folder: Path) -> DataSource:
    where = f"{folder / INFO}, dataset {name!r}"
    if name not in info:
        near = get_close_matches(name, list(info), 3, 0.5)
        known = _meant(near) or (f"it lists {', '.join(list(info)[:5])}" if info else "")
        raise NotFound(f"{folder / INFO} has no dataset {name!r}", hint=known)
    entry = info[name]
    if not isinstance(entry, dict):
        raise BadData(f"{where}: it is not an object")
    _check_keys(entry, where)
    formatting = entry.get("formatting")
    if formatting is not None and formatting not in FORMATTINGS:
        raise BadData(
            f"{where}: formatting is {formatting!r}, but must be {', '.join(FORMATTINGS)}"
        )
    columns, tags = read_columns(entry.get("columns"), where), read_tags(entry.get("tags"), where)
    if formatting is None and columns != USUAL_COLUMNS and columns.messages is None:
        formatting = "alpaca"  # as in LLaMA-Factory
    count = entry.get("num_samples")
    if count is not None and (type(count) is not int or count < 1):
        raise BadData(
            f"{where}: num_samples is {count!r}, but must be a whole number of at least 1"
        )
    path = _file_below(folder, entry.get("file_name"), where)
    return DataSource(name, path, formatting, columns, tags, count)


def _check_keys(entry: Mapping[str, Any], where: str) -> None:
    for key, value in entry.items():
        if key in _REFUSED and value not in (None, False):
            raise BadData(f"{where}: {key} is not supported", hint=_REFUSED[key])
        if key not in _REFUSED and key not in _HONOURED:
            near = get_close_matches(key, _HONOURED, 1, 0.6)
            hint = (
                f"did you mean {near[0]}?" if near else f"known keys are {', '.join(_HONOURED[:5])}"
            )
            raise BadData(f"{where}: {key[:60]!r} is not a known key", hint=hint)
    if entry.get("split") not in (None, "train"):
        raise BadData(
            f"{where}: split is {entry['split']!r}, but a file has only one split, train",
            hint="put the rows of that split into a separate file",
        )


def _file_below(folder: Path, name: Any, where: str) -> Path:
    """Returns the file that an entry names, which has to lie below the folder of `dataset_info.json`."""
    if not isinstance(name, str) or not name:
        raise BadData(
            f"{where}: file_name is missing", hint='for example: "file_name": "mine.jsonl"'
        )
    outside = BadData(
        f"{where}: file_name {name[:200]!r} points outside the folder of {INFO}",
        hint="copy the file into that folder, or name it directly: --data FILE",
    )
    path = folder / name
    if Path(name).is_absolute() or "\0" in name:
        raise outside
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise outside
    except (OSError, RuntimeError, ValueError):  # a name too long, links in a circle
        raise outside from None
    return path
