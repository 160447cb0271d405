"""The tokenizer in a GGUF file: the same tokens as llama.cpp, or a sentence about what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gguf_models import GgufCase, write_gguf
from gguf_vocabularies import OTHERWISE, TEXTS, VOCABULARIES, byte_level, sentencepiece
from llama_judge import recorded_tokens

from ktcli.errors import BadCheckpoint
from ktcli.text.tokenizer import load_tokenizer
from ktcli.weights.gguf.header import read_gguf_header
from ktcli.weights.gguf.tokenizer import small_file_names, small_files

PRE = "qwen2"


def values_of(case: GgufCase) -> dict[str, Any]:
    """The metadata that the file of a case has, but for numbers' types."""
    return case.metadata


def unpacked(values: dict[str, Any], folder: Path) -> Path:
    files = small_files(values, "a.gguf")
    assert tuple(sorted(files)) == tuple(sorted(small_file_names(values)))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.in_turn("case")
@pytest.mark.parametrize("case", VOCABULARIES, ids=lambda case: case.name)
def test_tokens_are_those_of_llama_cpp(case: GgufCase, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(unpacked(values_of(case), tmp_path))
    otherwise = re.compile(OTHERWISE.get(case.name, "$^"))
    for text, wanted in zip(TEXTS, recorded_tokens(case.name), strict=True):
        ids = tokenizer.encode(text)
        assert ids == wanted or otherwise.search(text), text
        assert tokenizer.decode(ids, special=True) == text


def test_values_come_through_a_file(tmp_path: Path) -> None:
    case = sentencepiece("pieces")
    read = read_gguf_header(write_gguf(case, tmp_path / "a.gguf")).values
    assert small_files(read, "a.gguf") == small_files(values_of(case), "a.gguf")


def test_what_ends_an_answer_and_how_it_is_sampled() -> None:
    values = {
        **values_of(byte_level(PRE)),
        "tokenizer.ggml.eot_token_id": 2,
        "general.sampling.temp": 0.6000000238418579,
        "general.sampling.top_k": 20,
    }
    files = small_files(values, "a.gguf")
    config = json.loads(files["generation_config.json"])
    assert config == {
        "bos_token_id": 0,
        "eos_token_id": [2, 4],
        "temperature": 0.6,
        "top_k": 20,
        "do_sample": True,
    }
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["bos_token"] == "<|bos|>" and settings["eos_token"] == "<|end|>"
    assert files["chat_template.jinja"].decode() == values["tokenizer.chat_template"]


def test_without_a_tokenizer_there_is_none() -> None:
    assert set(small_files({"tokenizer.ggml.model": "no_vocab"}, "a.gguf")) == {
        "generation_config.json"
    }


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"tokenizer.ggml.model": "rwkv"}, "kind 'rwkv'"),
    "an unknown way to cut": ({"tokenizer.ggml.pre": "mystery"}, "'mystery'"),
    "a way of an unknown tokenizer": ({"tokenizer.ggml.pre": "default"}, "'default'"),
    "no way to cut": ({"tokenizer.ggml.pre": None}, "'none'"),
    "a way that is a number": ({"tokenizer.ggml.pre": 3}, "not a string"),
    "tokens that are numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "not a list of str"),
    "no tokens": ({"tokenizer.ggml.tokens": []}, "lists 0 tokens"),
    "a token twice": (
        {"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": None},
        "twice",
    ),
    "kinds of others": ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
    "kinds that are texts": ({"tokenizer.ggml.token_type": ["a"]}, "not a list of int"),
    "a merge of three": ({"tokenizer.ggml.merges": ["a b c"]}, "invalid merge"),
    "no merges": ({"tokenizer.ggml.merges": None}, "not a list of str"),
    "an end that is a text": ({"tokenizer.ggml.eos_token_id": "x"}, "not a whole number"),
    "a template that is a list": ({"tokenizer.chat_template": []}, "not a string"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name: str) -> None:
    changes, said = BAD[name]
    with pytest.raises(BadCheckpoint, match=said):
        small_files({**values_of(byte_level(PRE)), **changes}, "a.gguf")


@pytest.mark.parametrize("scores", [None, [1, 2], ["a"]])
def test_pieces_without_scores(scores: Any) -> None:
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.ggml\.scores is not a list of float"):
        small_files({**values_of(sentencepiece("p")), "tokenizer.ggml.scores": scores}, "a.gguf")


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (lambda own: [0.0] * len(own), "gives one score to all tokens"),
        (lambda own: [-1000.0] * len(own), "gives one score to all tokens"),
        (lambda own: [*own[:-1], float("nan")], "gives scores that are not numbers"),
    ],
)
def test_scores_that_rank_nothing(scores: Any, words: str) -> None:
    """As converters write them that know no scores."""
    values = values_of(sentencepiece("p"))
    own = values["tokenizer.ggml.scores"]
    with pytest.raises(
        BadCheckpoint, match=rf"a\.gguf: tokenizer\.ggml\.scores {words}, so the order"
    ):
        small_files({**values, "tokenizer.ggml.scores": scores(own)}, "a.gguf")


def test_scores_of_others() -> None:
    with pytest.raises(BadCheckpoint, match="1 scores"):
        small_files({**values_of(sentencepiece("p")), "tokenizer.ggml.scores": [1.0]}, "a.gguf")


def test_too_many_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktcli.weights.gguf.tokenizer.MAX_MERGES", 10)
    with pytest.raises(BadCheckpoint, match="merges, more than 10"):
        small_files(values_of(byte_level("gpt-2")), "a.gguf")


def test_pieces_that_make_too_many_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktcli.weights.vocabulary.MAX_MERGES", 10)
    with pytest.raises(BadCheckpoint, match="more than 10 merges"):
        small_files(values_of(sentencepiece("p")), "a.gguf")
