"""Presets: what was set is read back, nothing else is let in, and one bad entry takes nothing from the others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import pretend_pack

from ktcli.errors import KtError, NotFound, UsageError
from ktcli.main import main
from ktcli.store import aliases, library, places
from ktcli.store.preset import KINDS, MOST_STOPS, NOTHING, Preset
from ktcli.store.reference import parse

WHOLE: dict[str, Any] = {
    "system": "Be brief.\n\tAlways.",
    "temperature": 0.2,
    "top-k": 40,
    "top-p": 0.9,
    "min-p": 0.05,
    "repetition-penalty": 1.1,
    "seed": 7,
    "stop": ["###", "\n\n"],
    "max-tokens": 100,
    "think": False,
    "think-budget": 50,
    "context": 4096,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def file_of(home: Path, entries: Any, version: int = 2) -> None:
    (home / "aliases.json").write_text(json.dumps({"kt_aliases": version, "aliases": entries}))


def test_every_value_is_kept_and_means_the_same_later(home: Path) -> None:
    assert set(WHOLE) == set(KINDS)
    preset = Preset.of(WHOLE)
    assert preset.document() == WHOLE and Preset.of(preset.document()) == preset
    aliases.save("it", "kimi-k2", preset)
    assert aliases.preset_of("IT@int4-int8") == preset
    assert parse("it").name == "kimi-k2"
    assert json.loads((home / "aliases.json").read_text())["kt_aliases"] == 2
    aliases.save("it", "kimi-k2")
    assert aliases.preset_of("it") == NOTHING
    assert json.loads((home / "aliases.json").read_text())["kt_aliases"] == 1  # earlier kts read it


def test_a_file_of_an_earlier_kt_is_read(home: Path) -> None:
    file_of(home, {"big": "kimi-k2"}, version=1)
    assert aliases.every() == (aliases.Alias("big", "kimi-k2"),)
    aliases.save("hot", "big", Preset.of({"temperature": 2}))
    assert aliases.preset_of("hot").values == {"temperature": 2.0}


def test_the_nearest_name_decides() -> None:
    aliases.save("big", "kimi-k2", Preset.of({"temperature": 1, "top-k": 5}))
    aliases.save("mine", "big@int4-int8", Preset.of({"temperature": 0.5}))
    assert aliases.preset_of("mine").values == {"temperature": 0.5, "top-k": 5}
    aliases.change("mine", Preset.of({"top-k": 9}))
    assert aliases.preset_of("mine").values == {"temperature": 0.5, "top-k": 9}
    assert aliases.preset_of("big").values == {"temperature": 1.0, "top-k": 5}
    for other in ("kimi-k2", "org/repo", "./folder", "nothing"):
        assert aliases.preset_of(other) == NOTHING
    with pytest.raises(NotFound) as caught:
        aliases.change("mien", Preset.of({"top-k": 9}))
    assert "mine" in caught.value.hint


@settings(max_examples=100)
@given(st.sampled_from(sorted(KINDS)), JSON)
def test_a_value_is_its_settings_or_an_error(name: str, value: Any) -> None:
    try:
        preset = Preset.of({name: value})
    except ValueError as error:
        assert name in str(error) and len(str(error)) < 400 and str(error).isprintable()
        return
    kept = preset.get(name)
    assert (kept is None) == (value in (None, []))
    if kept is None:
        return
    expected = str if name == "stop" else KINDS[name]
    for each in kept if name == "stop" else [kept]:
        assert type(each) is expected
        assert not isinstance(each, float) or math.isfinite(each)
        assert not isinstance(each, str) or all(
            c.isprintable() or c in "\n\t\r" or ord(c) > 159 for c in each
        )
    assert Preset.of(json.loads(json.dumps(preset.document()))) == preset


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": True}, {"temperature": "0.2"}, {"temperature": 101}, {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf}, {"top-k": 1.5}, {"top-k": -1}, {"top-k": 10**30}, {"seed": 1 << 64}, {"think": 1},
        {"think": "on"}, {"system": ["x"]}, {"system": ""}, {"system": "x" * 20_001}, {"system": "a\x1b[2J"},
        {"system": "\x9b1m"}, {"system": "\ud800"}, {"system": "\0"}, {"stop": {"a": 1}}, {"stop": [1]},
        {"stop": ["\x07"]},
        {"stop": ["x"] * (MOST_STOPS + 1)}, {"max-tokens": 0}, {"context": 0}, {"heat": True}, {"": 1},
        {"model\x1b": 1},
    ],
)  # fmt: skip
def test_one_bad_entry_takes_nothing_from_the_others(
    wrong: dict[str, Any], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError):
        Preset.of(wrong)
    file_of(home, {"bad": {"model": "kimi-k2", **wrong}, "good": {"model": "kimi-k2", "top-k": 3}})
    assert parse("good").name == "kimi-k2" and aliases.preset_of("good").get("top-k") == 3
    for ask in (parse, aliases.preset_of):
        with pytest.raises(KtError, match=r"the alias bad in .* cannot be used") as caught:
            ask("bad")
        assert "kt alias --rm bad" in caught.value.hint and str(caught.value).isprintable()
    assert main(["alias"]) == 0
    said = capsys.readouterr().out
    assert "not usable" in said and "\x1b" not in said and "\x9b" not in said
    aliases.save("new", "kimi-k2")  # what is not understood is written back
    kept = json.loads((home / "aliases.json").read_text())["aliases"]
    assert set(kept) == {"bad", "good", "new"} and kept["bad"]["model"] == "kimi-k2"
    assert main(["alias", "--rm", "bad"]) == 0
    assert [each.name for each in aliases.every()] == ["good", "new"]


@pytest.mark.parametrize(
    "entry", [1, None, [], "", "x" * 5000, "x\0", {}, {"model": 1}, {"temperature": 1}]
)
def test_an_entry_that_is_no_alias_is_told_alone(
    entry: Any, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_of(home, {"bad": entry, "a/b\x1b": "kimi-k2", "good": "kimi-k2"})
    assert parse("good").name == "kimi-k2"
    assert [bool(each.fault) for each in aliases.every()] == [True, True, False]
    assert main(["list"]) == 0
    capsys.readouterr()
    assert main(["names"]) == 0
    assert {"good"} == set(capsys.readouterr().out.split()) & {"bad", "good", "a/b\\x1b", "a/b"}
    aliases.save("bad", "kimi-k2")  # made again
    assert parse("bad").name == "kimi-k2"
    assert aliases.remove("a/b\x1b").fault


def test_a_number_of_many_digits_is_a_fault_of_its_entry(home: Path) -> None:
    text = '{"kt_aliases": 2, "aliases": {"a": {"model": "kimi-k2", "seed": %s}, "b": "kimi-k2"}}'
    (home / "aliases.json").write_text(text % ("9" * 10_000))
    assert parse("b").name == "kimi-k2"
    with pytest.raises(KtError, match="seed"):
        parse("a")


def test_more_than_the_file_holds_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "_MAX_BYTES", 2000)
    aliases.save("a", "kimi-k2")
    with pytest.raises(UsageError, match="more than kt reads"):
        aliases.save("b", "kimi-k2", Preset.of({"system": "x" * 3000}))
    assert [each.name for each in aliases.every()] == ["a"]


def test_a_text_is_shown_on_one_line_and_not_whole() -> None:
    words = Preset.of({"system": "one\ntwo " * 100, "think": True, "temperature": 0.25}).words()
    assert "\n" not in words and len(words) < 200
    assert words.startswith('system "one two') and words.endswith("temperature 0.25, think on")


def test_a_name_that_is_no_alias_hides_no_model(home: Path) -> None:
    pack = pretend_pack(places.pack_path("org--repo", "int4", "int8"))
    file_of(home, {"org/repo": "kimi-k2", "./x": "kimi-k2", "mine": "org/repo"})
    assert library.called(library.entries()) == {pack: ("mine",)}
    assert parse("org/repo").name == "org--repo" and aliases.preset_of("org/repo") == NOTHING
