"""Looks at a model's files for what the engine's command line depends on: Python code of the repository, and whether an
adapter changes routed experts. Nothing of them is run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint, UsageError
from ktcli.records import dataclass
from ktcli.server.sglang.families import FAMILIES
from ktcli.weights.header import read_header

_MOST_BYTES = 16 << 20
_AUTO = "auto_map"
_SUFFIX = ".safetensors"
_PLAIN_TYPES = frozenset(name for name, row in FAMILIES.items() if not row.code)


@dataclass(frozen=True, slots=True)
class RepositoryCode:
    """The Python code that a checkpoint needs to run in the engine.

    Attributes:
        why: what needs it; empty: nothing does.
        missing: the files of it that are not in the folder.
    """

    why: str = ""
    missing: tuple[str, ...] = ()


def code_of(folder: Path, config: Mapping[str, Any]) -> RepositoryCode:
    """Returns the code that the checkpoint in a folder needs.

    A tokenizer of the repository's own has no other implementation; a configuration has one, where the engine knows the
    type of model.
    """
    named = dict[str, str]()
    tokenizer = _object(folder / "tokenizer_config.json").get(_AUTO)
    if files := _files(tokenizer):
        named |= dict.fromkeys(files, "its tokenizer is Python code of its repository")
    if str(config.get("model_type")) not in _PLAIN_TYPES:
        own = _files(_object(folder / "config.json").get(_AUTO))
        named |= dict.fromkeys(own, "its configuration is Python code of its repository")
    missing = tuple(sorted(each for each in named if not (folder / each).is_file()))
    return RepositoryCode(next(iter(named.values()), ""), missing)


def require_code(code: RepositoryCode, name: str, folder: Path) -> None:
    """Raises an error if a checkpoint's own Python code is missing, since kt pulls none.

    Raises:
        UsageError: a file is missing.
    """
    if code.missing:
        raise UsageError(
            f"{name} needs {', '.join(code.missing)[:300]} of its repository, which kt does not download",
            hint=f"read that code, and put it into {folder}",
        )


def changes_experts(folder: Path) -> bool:
    """Returns whether the adapter in a folder changes routed experts, by the names of its tensors.

    Raises:
        BadCheckpoint: a file is damaged.
    """
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    return any(".experts." in name for file in files for name in read_header(file).entries)


def _files(said: object) -> set[str]:
    """Returns the files that an auto_map names: "tokenization_kimi.TikTokenTokenizer" is of tokenization_kimi.py."""
    values = list(said.values()) if isinstance(said, Mapping) else [said]
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    names = (each.rpartition("--")[2] for each in flat if isinstance(each, str) and "." in each)
    stems = {name.partition(".")[0] for name in names}
    return {f"{stem}.py" for stem in stems if stem.isidentifier()}


def _object(path: Path) -> Mapping[str, Any]:
    """Returns the object in a JSON file; an empty one where there is no such file."""
    try:
        found = json.loads(smallfiles.read_bounded(path, _MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"cannot read {path}: {str(error)[:200]}") from error
    return found if isinstance(found, dict) else {}
