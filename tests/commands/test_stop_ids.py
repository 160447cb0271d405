"""From a hub to an answer: what ends it is what the repository's generation_config.json says, as gpt-oss needs it.

Its config.json names one id, the end of an answer; generation_config.json has two more, of which one ends the call
of a tool. A model that goes on after that one invents what the tool would have said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat.fake_engine import write_tokenizer
from reference import CASES, write_checkpoint
from safetensors.torch import load_file, save_file
from store.fake_hub import Hub, serve

from ktcli.main import main
from ktcli.text.tokenizer import load_tokenizer

RETURN, CALL, TEXT = "<|return|>", "<|call|>", "<|endoftext|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss with gpt-oss's names for what ends an answer."""
    small = next(case for case in CASES if case.name == "gpt-oss")
    case = replace(small, values={**small.values, "vocab_size": 320}, seed=1)
    folder = write_checkpoint(case, tmp_path_factory.mktemp("oss") / "oss")
    write_tokenizer(folder, more=(RETURN, CALL, TEXT), end=RETURN)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    ends = {"eos_token_id": load_tokenizer(folder).id_of(RETURN)}
    (folder / "config.json").write_text(json.dumps({**config, **ends}))
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def answer(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    line = ["chat", name, "hello", "--json", "--greedy", "--max-tokens", "8", "--yes"]
    assert main(line) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_an_answer_ends_where_the_repository_says(
    folder: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights are published twice, with and without the file. Before, two rows of their head change places:
    what the random model says first after other tokens, and the call."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repositories["org/first"] = files
    first = answer("org/first", capsys)["ids"]
    call, ends = (load_tokenizer(folder).id_of(text) for text in (CALL, RETURN))
    assert len(first) == 8 and not {call, ends} & set(first)
    before = next(i for i in range(1, 8) if first[i] not in first[:i])
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = tensors["lm_head.weight"]
    head[[call, first[before]]] = head[[first[before], call]]
    save_file(tensors, path, metadata={"format": "pt"})
    files = {**files, path.name: path.read_bytes()}
    said = {"eos_token_id": [ends, load_tokenizer(folder).id_of(TEXT), call]}
    hub.repositories["org/without"] = files
    hub.repositories["org/with"] = {**files, "generation_config.json": json.dumps(said).encode()}
    without, found = answer("org/without", capsys), answer("org/with", capsys)
    assert without["finish"] == "length" and without["ids"][: before + 1] == [*first[:before], call]
    assert found["finish"] == "stop" and found["text"] in without["text"]
    assert [id for id in found["ids"] if id != call] == first[:before]
