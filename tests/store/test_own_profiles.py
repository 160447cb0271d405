"""The user's own profiles: they are models as ours are, and what is wrong with one is told by file, line and key."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ktcli.main import main
from ktcli.resources import data_path
from ktcli.store import catalog
from ktcli.store.reference import parse

Capture = pytest.CaptureFixture[str]
TEXT = data_path("profiles", "models", "olmoe-1b-7b.toml").read_text().replace("allenai/", "me/")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KT_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "catalog.d").mkdir()
    return tmp_path / "catalog.d"


def document(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return json.loads(said.out)


def test_a_profile_of_the_user_is_a_model(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "my-olmoe.toml").write_text(TEXT)
    profile, ours = catalog.get("My-OLMoE"), catalog.get("olmoe-1b-7b")
    assert profile.config == ours.config and profile.origin == folder / "my-olmoe.toml"
    repository = profile.repositories["hf"]
    assert parse(repository).name == "my-olmoe" and parse("my-olmoe").repository == repository
    [row] = document(["search", "my-olmoe"], capsys)["models"]
    assert row["origin"] == str(folder / "my-olmoe.toml") and row["need_bytes"]
    assert (
        document(["plan", "my-olmoe"], capsys, 0 if row["fits"] else 4)["origin"] == row["origin"]
    )
    rows = {each["name"]: each["origin"] for each in document(["list", "--all"], capsys)["known"]}
    assert rows["my-olmoe"] == row["origin"] and rows["olmoe-1b-7b"] == "kt"
    monkeypatch.setattr(catalog, "names", lambda: ("my-olmoe", "qwen3-0.6b"))
    (folder / "bad.toml").write_text("")
    assert main(["plan"]) == 0
    said = capsys.readouterr()
    assert "my-olmoe: from " in said.out and "bad.toml, line 1: title: is missing" in said.err
    assert main(["search", "my-olmoe"]) == 0
    assert "my-olmoe: from " in capsys.readouterr().out


def test_a_change_is_seen_and_ours_come_first(folder: Path) -> None:
    path = folder / "my-olmoe.toml"
    path.write_text(TEXT.replace("me/", "allenai/"))
    assert catalog.get("my-olmoe").title == catalog.get("olmoe-1b-7b").title
    for hub, repository in catalog.get("olmoe-1b-7b").repositories.items():
        assert parse(f"{hub}:{repository}").name == "olmoe-1b-7b"
    path.unlink()
    assert catalog.find("my-olmoe") is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "', "title = 7 #", "line 1: title: must be one line of text"),
        ("license =", "licence =", "line 2: licence: is not a profile key; known keys are title"),
        ("[sizes]", "[sizes]\nsize = 1", ": sizes.size: is not a profile key"),
        ("parameters = ", "parameters = -", ": sizes.parameters: must be a whole number"),
        ('hf = "', 'hf = "../', ": repositories.hf: must be org/repo"),
        ("[repositories]", "[repositories]\ngithub = 'a/b'", ": repositories.github: is not a profile key"),
        ('experts = "int4"', 'experts = "int3"', ": formats.experts: "),
        ('dense = "int8"', 'dense = "../x"', ": formats.dense: '../x' is not the name of a format"),
        ("model_type =", "model_types =", ": config.model_type: is missing"),
        ('model_type = "olmoe"', 'model_type = "olmo"', ": config.model_type: unknown architecture"),
        ("hidden_size = 2048", "hidden_size = -1", ": config.hidden_size: "),
        ("[config]", "[config]\n= 1", "at line"),
        ("[config]", "[config]\n[config]", "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_file_line_and_key(
    old: str, new: str, said: str, folder: Path, capsys: Capture
) -> None:
    assert old in TEXT
    text = TEXT.replace(old, new, 1)
    (folder / "mine.toml").write_text(text)
    error = document(["plan", "mine"], capsys, 1)["error"]
    assert "mine.toml" in error["message"] and said in error["message"]
    if "line " in error["message"] and "must be" in said:
        line = int(error["message"].partition("line ")[2].partition(":")[0])
        assert text.splitlines()[line - 1].startswith(new.splitlines()[-1].split()[0])
    assert main(["list", "--all"]) == 0
    capsys.readouterr()


def test_files_that_are_no_models_are_told_and_hide_nothing(folder: Path, capsys: Capture) -> None:
    (folder / "kimi-k2.toml").write_text(TEXT)
    (folder / "Upper.toml").write_text(TEXT)
    (folder / "a b.toml").write_text(TEXT)
    (folder / "long.toml").write_bytes(b"#" * (1 << 20) + b"\n")
    (folder / "deep.toml").write_text("a = " + "[" * 5000)
    (folder / "dir.toml").mkdir()
    assert catalog.get("kimi-k2").origin is None
    assert len(catalog.faults()) == 6
    assert main(["list", "--all"]) == 0
    said = capsys.readouterr()
    for words in ("is a built-in profile", "is not a valid model name", "cannot be read"):
        assert words in said.err
    assert "deepseek-v3" in said.out and "Traceback" not in said.err
    assert "deep.toml" in document(["pull", "deep"], capsys, 1)["error"]["message"]


def test_whatever_stands_in_a_file_costs_one_sentence(folder: Path) -> None:
    rng = random.Random(5)
    odd = [
        "[",
        "]",
        "=",
        '"',
        "\n",
        "\0",
        "\ud800",
        "9" * 30,
        "[[config]]",
        "config.x = 1\n",
        "'''",
    ]
    for turn in range(150):
        text = TEXT
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(odd) + text[at + rng.randrange(20) :]
        path = folder / f"m{turn}.toml"
        path.write_text(text, errors="replace")
        assert catalog.find(path.stem) is not None or [
            each for each in catalog.faults() if path.name in str(each) and each.hint
        ]
        path.unlink()
