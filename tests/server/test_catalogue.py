"""Which models of a library requests can name, and how; names are hostile input."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import pretend_pack

from ktcli.assembly.ready import Ready
from ktcli.assembly.request import Wanted
from ktcli.assembly.talking import Opening
from ktcli.server.models.catalogue import Catalogue, LibraryReader, ModelIndex
from ktcli.server.models.source import FOREVER, ModelSource
from ktcli.store import aliases

HOW = Opening(Wanted(), 0, records_heat=False)


@pytest.fixture
def packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.setenv("KT_HOME", str(tmp_path))

    def made(label: str) -> Path:
        experts, dense = label.partition("@")[2].split("-")
        return pretend_pack(tmp_path / "packs" / label, experts, dense)

    return made


def finds(catalogue: Catalogue, *names: str) -> list[str]:
    async def run() -> list[str]:
        found = [await catalogue.find(name) for name in names]
        return [Path(each.key).name if each else "" for each in found]

    return asyncio.run(run())


def test_a_model_is_found_by_its_name_its_conversions_and_its_aliases(
    packs: Callable[[str], Path],
) -> None:
    labels = ["big@int8-int8", "big@int4-int8", "mine@int4-int8", "qwen3-30b-a3b@int4-int8"]
    folders = {label: packs(label) for label in labels}
    aliases.save("Coder", "big@int8-int8")
    own = ModelSource(Ready("mine", folders["mine@int4-int8"]), "mine", HOW, FOREVER)
    reader = LibraryReader(own, HOW, 300.0)
    index = reader()
    assert [each.key for each in index.models if each.key == own.key] == [own.key]
    names = [each.name for each in index.models]
    assert len(set(names)) == 4 and {"big", "mine", "qwen3-30b-a3b"} < set(names)
    catalogue = Catalogue(own, ["gpt"], reader)
    short = finds(catalogue, "big")[0]
    assert short in labels
    found = finds(
        catalogue, "BIG:latest", "big@int8-int8", "big@int4-int8", "coder", "Coder:latest"
    )
    assert found == [short, "big@int8-int8", "big@int4-int8", "big@int8-int8", "big@int8-int8"]
    assert finds(catalogue, "gpt", "GPT:latest", "mine", "Mine@int4-int8") == ["mine@int4-int8"] * 4
    away = ["", "gpt-4o", "qwen3-235b-a22b", "Qwen/Qwen3-30B-A3B", "big@bf16-bf16", "big:Q4_K_M"]
    paths = [str(folders["big@int4-int8"]), "./big", "../packs/big@int4-int8", "~", "/", "hf:a/b"]
    assert finds(catalogue, *away, *paths) == [""] * 12


def test_a_library_that_cannot_be_read_costs_a_warning(
    packs: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ModelSource(Ready("mine", packs("mine@int4-int8")), "mine", HOW, FOREVER)
    (tmp_path / "aliases.json").write_text("{")
    assert [each.name for each in LibraryReader(own, HOW, 300.0)().models] == ["mine"]

    def broken() -> None:
        raise OSError("a disk that is gone")

    monkeypatch.setattr("ktcli.store.library.conversions", broken)
    catalogue = Catalogue(own, (), LibraryReader(own, HOW, 300.0))
    assert finds(catalogue, "mine", "other") == ["mine@int4-int8", ""]


def test_the_servers_own_conversion_has_the_short_name(packs: Callable[[str], Path]) -> None:
    folders = [packs(f"big@{formats}-int8") for formats in ("bf16", "int4", "int8")]
    for folder in folders:
        own = ModelSource(Ready("big", folder), folder.name, HOW, FOREVER)
        index = LibraryReader(own, HOW, 300.0)()
        others = [each.name for each in folders if each != folder]
        assert sorted(each.name for each in index.models) == ["big", *others]
        catalogue = Catalogue(own, (), lambda index=index: index)  # type: ignore[misc]
        assert finds(catalogue, "big", others[0]) == [folder.name, others[0]]


@settings(max_examples=10)
@given(st.lists(st.text(), max_size=20))
def test_any_name_means_a_model_or_none(names: list[str]) -> None:
    own = ModelSource(Ready("own", Path("/own")), "own", HOW, FOREVER)
    assert set(finds(Catalogue(own, (), ModelIndex), *names)) <= {"own", ""}


def test_what_is_pulled_meanwhile_is_found_soon(
    packs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktcli.server.models.catalogue.FRESH_S", 0.0)
    own = ModelSource(Ready("mine", packs("mine@int4-int8")), "mine", HOW, FOREVER)
    catalogue = Catalogue(own, (), LibraryReader(own, HOW, 300.0))
    assert finds(catalogue, "new") == [""]
    packs("new@int4-int8")
    assert finds(catalogue, "new") == ["new@int4-int8"]
