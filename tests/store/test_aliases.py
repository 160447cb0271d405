"""Aliases: they mean what they were made for, never hide a model, and a hostile file costs one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packs import pretend_pack
from store.fake_hub import Hub, serve
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli import smallfiles
from ktcli.errors import Busy, KtError, NotFound, UsageError
from ktcli.main import main
from ktcli.store import aliases, library, places
from ktcli.store.reference import parse

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "home"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
        yield running


def document(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return json.loads(said.out)


# --- what a name means ------------------------------------------------------------------------


def test_an_alias_is_the_model_that_it_stands_for(home: Path) -> None:
    pack = pretend_pack(places.pack_path("org--repo", "int4", "int8"))
    other = pretend_pack(places.pack_path("org--repo", "int8", "int8"))
    aliases.save("big", "org--repo@int4-int8")
    aliases.save("whole", "org--repo")
    assert parse("BIG").name == "org--repo" and parse("big").formats == "int4-int8"
    assert [entry.path for entry in library.matching("big")] == [pack]
    assert {entry.path for entry in library.matching("whole")} == {pack, other}
    assert library.resolve("whole@int8-int8").path == other
    assert library.called(library.entries()) == {pack: ("big", "whole"), other: ("whole",)}
    with pytest.raises(UsageError, match="already stands for org--repo@int4-int8"):
        parse("big@int8-int8")


@pytest.mark.parametrize(
    "said",
    ["org/repo", "ms:org/repo", "org/repo@v1:Q4_K_M", "qwen3-8b", "https://hf.co/org/repo/tree/x"],
)
def test_what_is_kept_means_the_same_later(said: str) -> None:
    reference = parse(said)
    aliases.save("it", reference.lasting)
    meant = parse("it")
    for field in ("name", "hub", "repository", "revision", "quant", "folder"):
        assert getattr(meant, field) == getattr(reference, field)


def test_an_alias_of_an_alias_follows_it() -> None:
    aliases.save("big", "kimi-k2")
    aliases.save("usual", "big")
    aliases.save("big", "deepseek-v3")
    assert parse("usual").name == "deepseek-v3"
    assert aliases.save("big", "glm-4.5") == "deepseek-v3"


def test_a_folder_is_kept_from_wherever_it_was_named(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint(tmp_path / "model", QWEN3)
    monkeypatch.chdir(tmp_path)
    document(["alias", "mine", "./model"], capsys)
    monkeypatch.chdir("/")
    assert library.resolve("mine").path == tmp_path / "model"
    assert document(["alias"], capsys)["aliases"] == [
        {"alias": "mine", "model": str(tmp_path / "model"), "state": "on disk", "preset": {}}
    ]


# --- what cannot be ---------------------------------------------------------------------------


def test_an_alias_never_hides_a_model() -> None:
    pretend_pack(places.pack_path("org--repo", "int4", "int8"))
    for name in ("org--repo", "ORG--repo", "Qwen3-8B", "kt-mini"):
        with pytest.raises(UsageError, match="is the name of a model"):
            aliases.save(name, "kimi-k2")
    aliases.save("late", "kimi-k2")
    late = pretend_pack(places.pack_path("late", "int4", "int8"))
    assert library.resolve("late").path == late
    assert parse("late").name == "late"


def test_an_alias_hides_nothing_of_an_administrators_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = pretend_pack(tmp_path / "shared" / "packs" / "theirs@int4-int8")
    aliases.save("theirs", "kimi-k2")
    monkeypatch.setenv("KT_LIBRARIES", str(tmp_path / "shared"))
    assert library.resolve("theirs").path == pack
    with pytest.raises(UsageError, match="is the name of a model"):
        aliases.save("theirs", "deepseek-v3")


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a b",
        "../x",
        "-x",
        ".x",
        "a/b",
        "a:b",
        "a@b",
        "é",
        "x" * 97,
        "a\n",
        "a\x1b[2J",
        "\0",
    ],
)
def test_names_that_none_can_have(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be an alias") as caught:
        aliases.save(name, "kimi-k2")
    assert "at most 96" in caught.value.hint


def test_an_alias_that_leads_back_is_refused_and_changes_nothing() -> None:
    aliases.save("a", "kimi-k2")
    aliases.save("b", "a")
    for target in ("b", "a", "B@int4-int8"):
        with pytest.raises(UsageError, match="refers back to itself: a -> "):
            aliases.save("a", target)
    assert parse("b").name == "kimi-k2"


def test_more_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "MOST", 1)
    aliases.save("a", "kimi-k2")
    with pytest.raises(UsageError, match="there are already 1 aliases"):
        aliases.save("b", "kimi-k2")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", "null", '{"kt_aliases": true, "aliases": {}}',
        '{"kt_aliases": 3, "aliases": {}}', '{"kt_aliases": 1}', '{"kt_aliases": 1, "aliases": []}', "[" * 100_000,
        json.dumps({"kt_aliases": 1, "aliases": {f"a{i}": "x" for i in range(1001)}}),
    ],
)  # fmt: skip
def test_a_hostile_file_is_one_sentence_and_models_are_found(
    text: str, home: Path, capsys: Capture
) -> None:
    pack = pretend_pack(places.pack_path("org--repo", "int4", "int8"))
    (home / "aliases.json").write_text(text)
    with pytest.raises(KtError, match=r"the file of aliases .*aliases\.json") as caught:
        parse("nothing")
    assert "repair it, or remove it" in caught.value.hint
    assert library.resolve("org--repo").path == pack
    assert parse("kimi-k2").name == "kimi-k2"
    for command in (["list"], ["names"], ["show", "kt-mini"]):
        assert main(command) == 0
    assert main(["alias", "a", "kimi-k2"]) == 1
    assert (home / "aliases.json").read_text() == text


def test_a_file_that_goes_in_circles_or_is_a_pipe(home: Path) -> None:
    home.mkdir()
    table = {"a": "b", "b": "c", "c": "a", "out": "kimi-k2", "odd": "::"}
    (home / "aliases.json").write_text(json.dumps({"kt_aliases": 1, "aliases": table}))
    for name in "abc":
        with pytest.raises(UsageError, match="refers back to itself"):
            parse(name)
    with pytest.raises(UsageError):
        parse("odd")
    assert parse("out").name == "kimi-k2"
    assert main(["list"]) == 0 and main(["alias"]) == 0
    (home / "aliases.json").unlink()
    os.mkfifo(home / "aliases.json")
    with pytest.raises(KtError, match="cannot be read"):
        parse("a")


def test_a_change_is_whole_or_not_at_all(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aliases.save("a", "kimi-k2")

    def full(path: Path, data: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(KtError, match="cannot write"):
        patch.setattr(smallfiles, "write", full)
        aliases.save("b", "kimi-k2")
    assert [each.name for each in aliases.every()] == ["a"]
    monkeypatch.setattr(aliases, "_WAIT_S", 0.0)
    with smallfiles.lock(places.lock_path("aliases"), "changing"), pytest.raises(Busy):
        aliases.save("b", "kimi-k2")


# --- commands ---------------------------------------------------------------------------------


def test_alias_as_a_command(capsys: Capture) -> None:
    pack = pretend_pack(places.pack_path("org--repo", "int4", "int8"))
    assert document(["alias", "big", "org--repo@int4-int8"], capsys)["before"] is None
    assert document(["alias", "far", "org/far"], capsys)["model"] == "org/far"
    states = {row["alias"]: row["state"] for row in document(["alias"], capsys)["aliases"]}
    assert states == {"big": "on disk", "far": "kt pull far"}
    assert document(["path", "big"], capsys)["path"] == str(pack)
    assert document(["list"], capsys)["models"][1]["aliases"] == ["big"]
    assert document(["show", "kt-mini"], capsys)["aliases"] == []
    assert set(document(["names"], capsys)["names"]) >= {"big", "far"}
    assert "far" not in document(["names", "--mine"], capsys)["names"]
    assert main(["list"]) == 0
    assert "ALIAS" in capsys.readouterr().out
    assert main(["rm", "big", "--yes"]) == 0
    assert "The alias big stays" in capsys.readouterr().err
    assert not pack.exists()
    document(["alias", "made", "kt-mini@int8-bf16"], capsys)
    states = {row["alias"]: row["state"] for row in document(["alias"], capsys)["aliases"]}
    assert states["made"] == "kt chat made converts it" and "there is no model" in states["big"]
    assert document(["alias", "--rm", "big"], capsys)["meant"] == "org--repo@int4-int8"
    assert "did you mean: far" in document(["alias", "--rm", "fat"], capsys, 3)["error"]["hint"]


def test_an_alias_of_nothing_gets_the_nearest(capsys: Capture) -> None:
    error = document(["alias", "big", "kimmi"], capsys, 3)["error"]
    assert "kimi-k2" in error["hint"]
    with pytest.raises(NotFound):
        library.resolve("big")
    document(["alias", "big", "kimi-k2"], capsys)
    assert main(["alias", "--rm"]) == 2 and main(["alias", "--rm", "a", "b"]) == 2
    capsys.readouterr()
    assert "big" in document(["verify", "bigg"], capsys, 3)["error"]["hint"]


def test_pull_as(hub: Hub, tmp_path: Path, capsys: Capture) -> None:
    folder = random_checkpoint(tmp_path / "tiny", QWEN3)
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    hub.repositories["org/tiny"] = {
        name: (folder / name).read_bytes() for name in names if (folder / name).is_file()
    }
    error = document(["pull", "org/tiny", "--as", "kt-mini"], capsys, 2)["error"]
    assert "may not hide" in error["message"] and hub.requests == []
    found = document(["pull", "org/tiny", "--as", "wee", "--yes"], capsys)
    assert found["alias"] == "wee"
    assert str(library.resolve("wee").path) == found["path"]
    assert aliases.every() == (aliases.Alias("wee", "org/tiny"),)
