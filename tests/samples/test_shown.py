"""Samples are shown as they are: what is trained is marked, and nothing in the data can pretend."""

from __future__ import annotations

import json

import pytest

from ktcli.output import out, visible
from ktcli.resources import data_path
from ktcli.samples.read import read_samples
from ktcli.samples.sample import SampleSet, SampleSettings
from ktcli.samples.shown import document, shown
from ktcli.samples.source import sources_of
from ktcli.text.model import TextModel, read_text_model

ROWS = [
    {"prompt": "a <|end|> ⟦b⟧\n\tc", "completion": "d\x1b[32me\x9b\u202e <|user|>"},
    {"prompt": "a", "completion": ""},
    {"prompt": "q", "completion": "long " * 9},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[SampleSet, TextModel]:
    path = tmp_path_factory.mktemp("data") / "m\x1b[1mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    texts = read_text_model("kt-mini", data_path("profiles", "kt-mini"))
    return read_samples(sources_of((), None, [path]), texts, SampleSettings()), texts


def test_without_colour(made: tuple[SampleSet, TextModel]) -> None:
    found = shown(*made, 1, colour=False)
    first, _, counts = found.partition("\n\n")
    assert first.startswith("--- m\\x1b[1mine.jsonl, line 1: ")
    assert first.endswith(
        "\n<|bos|><|user|>a <\\|end|> \\⟦b\\⟧\n\tc<|end|><|assistant|>"
        "⟦d\\x1b[32me\\x9b\\u202e <\\|user|><|end|>⟧"
    )
    samples = made[0].samples
    tokens = sum(len(each.ids) for each in samples)
    trained = sum(sum(each.trained) for each in samples)
    assert counts.split("\n") == [
        f"3 rows, 2 samples, {tokens} tokens, {trained} trained ({100 * trained / tokens:.0f} %)",
        f"the longest sample has {max(len(each.ids) for each in samples)} tokens: m\\x1b[1mine.jsonl, "
        f"line {max(samples, key=lambda each: len(each.ids)).where[-1]}",
        "1 row: empty answers only (first: m\\x1b[1mine.jsonl, line 2)",
    ]
    assert shown(*made, 0, colour=False) == counts
    assert shown(*made, 9, colour=False).count("--- ") == 2


def test_with_colour(made: tuple[SampleSet, TextModel], monkeypatch: pytest.MonkeyPatch) -> None:
    found = shown(*made, 1, colour=True)
    assert "\x1b[2m<|bos|><|user|>\x1b[0ma <\\|end|> ⟦b⟧" in found
    assert "\x1b[32md\\x1b[32me\\x9b\\u202e <\\|user|>\x1b[0m\x1b[32m<|end|>\x1b[0m" in found
    plain = found.replace("\x1b[32m", "").replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert visible(plain) == plain
    # `output` lets just this through.
    monkeypatch.setattr(out, "_colours", lambda stream: True)
    assert out._obeyed_styles(found) == found


def test_for_programs(made: tuple[SampleSet, TextModel]) -> None:
    samples, texts = made
    found = json.loads(json.dumps(document(samples, texts, 1)))
    [first] = found.pop("shown")
    assert first["ids"] == list(samples.samples[0].ids)
    assert first["trained"] == list(samples.samples[0].trained)
    assert "".join(part["text"] for part in first["parts"]) == (
        "<|bos|><|user|>a <|end|> ⟦b⟧\n\tc<|end|><|assistant|>d\x1b[32me\x9b\u202e <|user|><|end|>"
    )
    assert [part["trained"] for part in first["parts"]] == [False, True]
    assert found["rows"] == 3 and found["samples"] == 2 and found["sha256"] == samples.sha256
    assert found["dropped"][0]["rows"] == 1 and found["longest"]["tokens"] >= 10
    assert found["trained_tokens"] == sum(sum(each.trained) for each in samples.samples)
