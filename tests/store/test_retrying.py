"""Hubs that say "later" or break the connection: they are asked again, as late as they say, and it is said."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from store.fake_hub import Hub, serve
from weights.fake_checkpoint import QWEN3, sources, write_checkpoint, write_file

from ktcli import manifest
from ktcli.errors import HubError
from ktcli.main import main
from ktcli.store import library
from ktcli.store.choice import look
from ktcli.store.hubsearch import read_configs, search_hub
from ktcli.store.reference import parse
from ktcli.store.retrying import RETRIES, with_retries

NAMES = {"hf": "org/tiny", "ms": "ms:org/tiny"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", running.url)
        running.repositories["org/tiny"] = {"config.json": b"{}", "model.safetensors": b"x" * 100}
        yield running


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were slept, none of which pass."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("status", [429, 502, 503, 504, 0])
def test_a_hub_that_has_trouble_once_is_asked_again(
    hub: Hub, waits: list[float], name: str, status: int
) -> None:
    hub.troubles = [(status, {"Retry-After": "7"})]
    told: list[str] = []
    _, found = look(parse(NAMES[name]), tell=told.append)
    assert {file.name for file in found.files} == set(hub.repositories["org/tiny"])
    if told:  # ModelScope's client tries a listing again itself
        assert "retrying in" in told[0] and "1 of 3" in told[0]
    assert name == "ms" or waits == [7 if status else 1]


def test_a_search_is_asked_for_again(hub: Hub, waits: list[float]) -> None:
    for name in NAMES:
        hub.troubles = [(503, {})] * 2
        told: list[str] = []
        (hit,) = search_hub(name, "tiny", 3, told.append)
        assert hit.repository == "org/tiny"
        assert len(told) in (1, 2)
        hub.troubles = [(429, {"Retry-After": "0"})]
        (found,) = read_configs([hit], 1000, told.append)
        assert found.data == b"{}"
        assert "retrying" in told[-1]


@pytest.mark.parametrize("name", NAMES)
def test_the_third_retry_is_the_last(hub: Hub, waits: list[float], name: str) -> None:
    hub.status = 503
    told: list[str] = []
    with pytest.raises(HubError, match="error 503") as caught:
        look(parse(f"{name}:org/tiny"), tell=told.append)
    assert "later" in caught.value.hint
    assert len(told) == RETRIES
    if name == "hf":
        assert waits == [1, 2, 4]
        assert sum("api/models/org/tiny" in line for line in hub.requests) == RETRIES + 1


@pytest.mark.parametrize("when", ["3600", "a date"])
def test_a_hub_that_wants_more_than_a_minute_is_not_waited_for(
    hub: Hub, waits: list[float], when: str
) -> None:
    said = formatdate(time.time() + 3600, usegmt=True) if when == "a date" else when
    hub.troubles = [(429, {"Retry-After": said})]
    with pytest.raises(HubError, match="error 429") as caught:
        look(parse("hf:org/tiny"))
    assert "60 minutes" in caught.value.hint
    assert not waits


@pytest.mark.parametrize("status", [400, 404, 500, 501])
def test_other_answers_are_final(hub: Hub, waits: list[float], status: int) -> None:
    hub.status = status
    with pytest.raises(Exception, match="org/tiny"):
        look(parse("hf:org/tiny"))
    assert not waits


def test_a_server_that_is_not_there_is_not_waited_for(
    hub: Hub, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="refused"):
        look(parse("hf:org/tiny"))
    assert not waits


def test_an_interrupt_ends_the_wait(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    hub.status = 503
    monkeypatch.setattr(time, "sleep", interrupt)
    assert main(["pull", "org/tiny", "--yes"]) == 130
    assert sum("api/models" in line for line in hub.requests) == 1
    assert "retrying in 1 s (1 of 3)" in " ".join(capsys.readouterr().err.split())


def test_whoever_waits_may_give_up() -> None:
    asked = []

    def ask() -> None:
        asked.append(1)
        raise HubError("busy", again_s=5)

    with pytest.raises(HubError):
        with_retries(ask, wait=lambda seconds: seconds == 5)
    assert len(asked) == 1


# --- weights that nobody reads --------------------------------------------------------------------


def shards_of(folder: Path) -> dict[str, bytes]:
    """Two shards, a third with a layer that predicts a further token, and a single file of the same weights."""
    stored = sources(QWEN3)
    write_checkpoint(folder, QWEN3, stored, shards=2)
    write_file(folder / "model.safetensors", stored)
    ahead = {f"model.layers.{QWEN3['num_hidden_layers']}.{name}": ("BF16", (2,), bytes(4))
             for name in ("eh_proj.weight", "enorm.weight")}  # fmt: skip
    write_file(folder / "model-extra.safetensors", ahead)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(ahead, "model-extra.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


TOKENIZER = Path(__file__).parents[2] / "profiles" / "kt-mini" / "tokenizer.json"
SHARDS = {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}


@pytest.mark.parametrize("how", [["pull"], ["pull", "--stream"], ["plan"]])
def test_shards_that_nobody_reads_are_not_asked_for(
    hub: Hub, tmp_path: Path, how: list[str]
) -> None:
    hub.repositories["org/tiny"] = shards_of(tmp_path / "repository")
    words = [how[0], "org/tiny", *how[1:], *(["--yes"] if how[0] == "pull" else [])]
    assert main(words) == 0
    assert {name for name in hub.sent if name.endswith(".safetensors")} == SHARDS
    if how == ["pull"]:
        found = manifest.read(library.resolve("org--tiny").path / manifest.CHECKPOINT)
        assert found is not None
        assert {f.name for f in found.files if f.name.endswith(".safetensors")} == SHARDS
        assert main(["convert", "org/tiny", "--quiet"]) == 0
        assert main(["verify", "org/tiny", "--quiet"]) == 0


def test_a_shard_that_somebody_reads_is_missed_by_its_name(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["org/tiny"] = shards_of(tmp_path / "repository")
    lost = min(SHARDS)
    del hub.repositories["org/tiny"][lost]
    assert main(["pull", "org/tiny", "--yes"]) == 5
    assert lost in capsys.readouterr().err
