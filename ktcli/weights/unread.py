"""The tensors that a model deliberately leaves out, and the weight files that contain nothing else and are never
read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import translate
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models import Model, build

_LAYER = re.compile(r".*\.layers\.[0-9]+\.\*")


def left_over(model: Model, names: Collection[str]) -> list[str]:
    """Returns those of the unused tensor names `names` that a model does not leave out on purpose (as it does, for
    example, vision parts).

    A layer beyond the last is left out on purpose if it has the projection `eh_proj`, with which layers begin that
    predict tokens further ahead; otherwise config.json gives too few layers.
    """
    patterns = [
        translate(pattern)
        for pattern in model.ignored
        if not _LAYER.fullmatch(pattern)
        or any(name.startswith(f"{pattern[:-1]}eh_proj") for name in names)
    ]
    meant = re.compile("|".join(patterns))
    return [name for name in names if not (patterns and meant.match(name))]


def unread_files(config: Mapping[str, Any], weight_map: Mapping[str, str]) -> frozenset[str]:
    """Returns the names of the weight files that hold only tensors which the model described by `config` leaves out on
    purpose; none for a config that kt does not support.

    Args:
        weight_map: the file of each tensor by its name, as the index of the checkpoint has it.
    """
    try:
        model = build(config)
    except BadCheckpoint:
        return frozenset()
    read = {weight_map[name] for name in left_over(model, weight_map)}
    return frozenset(weight_map.values()) - read
