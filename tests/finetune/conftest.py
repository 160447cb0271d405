"""The packs that runs are made of, converted once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from convert import convert_checkpoint
from reference import Case, case_named

from ktcli.resources import data_path
from ktcli.weights.pack import Pack


@pytest.fixture(scope="session")
def pack_of(
    checkpoint_of: Callable[[Case], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Pack]:
    """The conversion of a case, or of kt-mini, made once: experts in int4, the rest in int8."""
    made: dict[str, Pack] = {}

    def pack(name: str, experts: str = "int4", dense: str = "int8") -> Pack:
        key = f"{name}-{experts}-{dense}"
        if key not in made:
            mini = data_path("profiles", "kt-mini")
            checkpoint = mini if name == "kt-mini" else checkpoint_of(case_named(name))
            out = tmp_path_factory.mktemp(key) / "pack"
            made[key] = Pack.open(convert_checkpoint(checkpoint, out, experts=experts, dense=dense))
        return made[key]

    return pack
