"""A text between two others is asked for with the model's own marks, or refused by name where it has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
from chat.fake_engine import VOCAB, FakeEngine, write_tokenizer
from server.running import Running, running, scripted

from ktcli.dialogue.local import LocalBackend
from ktcli.text.codec import AddedToken
from ktcli.text.infill import Infill
from ktcli.text.model import read_text_model
from ktcli.text.tokenizer import load_tokenizer

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
PAD = "<|fim_pad|>"


class InfillEngine(FakeEngine):
    """Says what stands between two texts, and then a token behind which the next file would come.

    Attributes:
        asked: the ids of the prompts.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(load_tokenizer(folder), lambda asked: "", streams=8)
        self.asked: list[list[int]] = []

    def logits(self, cache: list[int]) -> np.ndarray:
        middle = self.tokenizer.id_of(MARKS[2])
        out = np.full(VOCAB, -10, dtype=np.float32)
        if middle in cache:
            at = cache.index(middle)
            self.asked.append(cache[: at + 1])
            out[self.tokenizer.encode(f"between{PAD}")[len(cache) - at - 1]] = 10
        return out


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, more=[*MARKS, PAD])
    (folder / "generation_config.json").write_text("{}")
    engine = InfillEngine(folder)
    texts = read_text_model("fake", folder)
    with running(LocalBackend("fake", engine, texts)) as found:  # type: ignore[arg-type]
        yield found


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(scripted(tmp_path_factory.mktemp("model"), lambda asked: "yes")) as found:
        yield found


WAYS = {
    "/v1/completions": {"prompt": "def f(<|fim_suffix|>", "suffix": "return", "max_tokens": 20},
    "/api/generate": {"prompt": "def f(<|fim_suffix|>", "suffix": "return", "stream": False},
}


def ids_of(server: Running, text: str, *, special: bool) -> list[int]:
    asked = {"content": text, "parse_special": special}
    found: list[int] = requests.post(f"{server.url}/tokenize", json=asked, timeout=60).json()[
        "tokens"
    ]
    return found


@pytest.mark.parametrize("path", WAYS)
def test_the_marks_stand_where_the_model_learned_them(server: Running, path: str) -> None:
    reply = requests.post(server.url + path, json=WAYS[path], timeout=60).json()
    said = reply["choices"][0]["text"] if "choices" in reply else reply["response"]
    assert said == "between"  # and ends where the next file would begin
    before, behind = (
        ids_of(server, WAYS[path][name], special=False) for name in ("prompt", "suffix")
    )  # type: ignore[arg-type]
    first, second, third = (ids_of(server, mark, special=True)[0] for mark in MARKS)
    prompt = server.engine.asked[-1]  # type: ignore[attr-defined]
    assert prompt[prompt.index(first) :] == [first, *before, second, *behind, third]


@pytest.mark.parametrize("path", WAYS)
def test_a_model_without_marks_refuses_it_by_name(without: Running, path: str) -> None:
    reply = requests.post(without.url + path, json=WAYS[path], timeout=60)
    error = reply.json()["error"]
    assert reply.status_code == 400 and "suffix" in (error if path[1] == "a" else error["message"])


@pytest.mark.parametrize(
    "more", [{"echo": True}, {"prompt": [1, 2]}, {"suffix": 3}, {"suffix": "x " * 100_000}]
)
def test_what_does_not_go_together_is_refused(server: Running, more: dict[str, object]) -> None:
    asked = {**WAYS["/v1/completions"], **more}
    reply = requests.post(f"{server.url}/v1/completions", json=asked, timeout=60)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"] == "suffix" or error["code"] == "context_length_exceeded"


def test_capabilities_say_whether_texts_can_be_put_in(server: Running, without: Running) -> None:
    for each, can in ((server, True), (without, False)):
        shown = requests.post(f"{each.url}/api/show", json={"model": "fake"}, timeout=60).json()
        assert ("insert" in shown["capabilities"]) is can


def test_only_whole_sets_of_marks_count() -> None:
    added = [AddedToken(at, text, True) for at, text in enumerate(MARKS)]
    found = Infill.of([*added, AddedToken(7, "<|endoftext|>", True)])
    assert found is not None and found.ids([50], [60]) == [0, 50, 1, 60, 2]
    assert found.ends == {0, 1, 2, 7}
    assert Infill.of(added[:2]) is None
