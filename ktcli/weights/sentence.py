"""Reads the pooling of an embedding model from the files that sentence-transformers writes next to its weights.

    modules.json                        the steps: Transformer, Pooling, and Normalize or not
    PATH/config.json                    of the Pooling step, usually 1_Pooling: which hidden states count
    sentence_bert_config.json           the most tokens of a text
    config_sentence_transformers.json   the prompts that may be put before a text

They come from strangers: a step, a mode or a path that is not one of these is refused by name. What they say becomes
one field of the config, see `models.pooling`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models.config import MAX_CONTEXT, MAX_WIDTH, Fields
from ktcli.models.pooling import KEY, PoolingMode
from ktcli.weights.documents import inside, parse_object
from ktcli.weights.header import read_bounded

MODULES = "modules.json"
LENGTH = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
SENTENCE_FILES = (
    MODULES,
    "1_Pooling/config.json",
    LENGTH,
    PROMPTS,
)  # as published models have them
MAX_BYTES = 1_000_000  # the largest published one has a few kB
_MOST_MODULES = 16
_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", re.ASCII)
_MODES = {
    "pooling_mode_lasttoken": PoolingMode.LAST,
    "pooling_mode_mean_tokens": PoolingMode.MEAN,
    "pooling_mode_cls_token": PoolingMode.FIRST,
}
_OTHER_MODES = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
_STEPS = ("Transformer", "Pooling", "Normalize")


def with_pooling(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns `config` completed by how an embedding model pools its hidden rows, which other files of its folder say;
    `config` unchanged if there are no such files.

    Raises:
        BadCheckpoint: a file is damaged or hostile, or names what kt does not compute.
    """
    path = folder / MODULES
    if not path.exists() and not path.is_symlink():
        return config
    steps = _steps(folder)
    if [kind for kind, _ in steps] not in (list(_STEPS), list(_STEPS[:2])):
        found = ", ".join(kind for kind, _ in steps)[:200]
        raise BadCheckpoint(
            f"{MODULES} has the modules {found}; kt computes {', '.join(_STEPS[:2])} and {_STEPS[2]}, in this order"
        )
    (_, beside), (_, pooling) = steps[:2]
    if beside not in ("", "."):
        raise BadCheckpoint(f"{MODULES}: the path of the Transformer is {beside[:60]!r}, not empty")
    made = {**_pooling(folder, pooling), "normalize": len(steps) == len(_STEPS)}
    return {**config, KEY: {**made, **_length(folder), **_prompts(folder)}}


def _steps(folder: Path) -> list[tuple[str, str]]:
    """Returns the kind and the path of each module."""
    data = read_bounded(inside(folder, MODULES), MAX_BYTES)
    modules = parse_object(b'{"modules":' + data + b"}", MODULES)["modules"]
    if not isinstance(modules, list) or not 0 < len(modules) <= _MOST_MODULES:
        raise BadCheckpoint(f"{MODULES} must be a list of 1 to {_MOST_MODULES} modules")
    found = []
    for at, each in enumerate(modules):
        f = Fields(each, f"{MODULES}: module {at}")
        found.append((f.text("type", "").rpartition(".")[2], f.text("path", "")))
    return found


def _object(folder: Path, name: str) -> Fields:
    """Returns the fields of a file; none where there is no such file."""
    path = folder / name
    if not path.exists() and not path.is_symlink():
        return Fields({}, name)
    return Fields(parse_object(read_bounded(inside(folder, name), MAX_BYTES), name), name)


def _pooling(folder: Path, path: str) -> dict[str, Any]:
    """Returns what the config of the Pooling step says."""
    if _FOLDER.fullmatch(path) is None:
        raise BadCheckpoint(
            f"{MODULES}: the path of Pooling is {path[:60]!r}, not a folder next to it"
        )
    name = f"{path}/config.json"
    f = Fields(parse_object(read_bounded(inside(folder, name), MAX_BYTES), name), name)
    chosen = [each for each in (*_MODES, *_OTHER_MODES) if f.flag(each, False)]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        asked = " and ".join(chosen) or "no pooling mode that kt knows"
        raise BadCheckpoint(f"{name} has {asked}; kt pools with one of {', '.join(_MODES)}")
    return {
        "mode": _MODES[chosen[0]].value,
        "dimensions": f.whole("word_embedding_dimension", "embedding_dimension", high=MAX_WIDTH),
        "include_prompt": f.flag("include_prompt", True),
    }


def _length(folder: Path) -> dict[str, int]:
    f = _object(folder, LENGTH)
    f.only({"do_lower_case": False})
    if not f.has("max_seq_length"):
        return {}
    return {"max_tokens": f.whole("max_seq_length", high=MAX_CONTEXT)}


def _prompts(folder: Path) -> dict[str, Any]:
    """Returns the prompts and the name of the default one; they are checked where the config is read."""
    f = _object(folder, PROMPTS)
    return {
        "prompts": f.values.get("prompts") or {},
        "default_prompt": f.text("default_prompt_name", ""),
    }
