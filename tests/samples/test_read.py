"""Rows become samples: what is left out is counted and named, and the same data gives the same samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from samples import models

from ktcli.errors import KtError, UsageError
from ktcli.resources import data_path
from ktcli.samples.read import read_samples
from ktcli.samples.sample import BadData, DropCount, Sample, SampleSet, SampleSettings
from ktcli.samples.source import DataSource, sources_of
from ktcli.text.model import TextModel, read_text_model


@cache
def mini() -> TextModel:
    return read_text_model("kt-mini", data_path("profiles", "kt-mini"))


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asks(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"prompt": question, "completion": answer, **more}


def read(*paths: Path, **settings: Any) -> SampleSet:
    return read_samples(sources_of((), None, paths), mini(), SampleSettings(**settings))


def text(sample: Sample) -> str:
    return mini().tokenizer.decode(sample.ids, special=True)


def trained(sample: Sample) -> str:
    ids = [id for id, is_trained in zip(sample.ids, sample.trained, strict=True) if is_trained]
    return mini().tokenizer.decode(ids, special=True)


def test_rows_that_are_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        [
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " \n"}]},
            {"messages": [{"role": "user", "content": "a"}]},
            {"messages": []},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""},
                {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
            {"messages": [{"role": "assistant", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a " * 40}, {"role": "assistant", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 40}]},
        ],
    )  # fmt: skip
    found = read(path, cutoff_len=20)
    line = "mine.jsonl, line {}".format
    assert found.rows == 9
    assert found.dropped == (
        DropCount("empty answers only", 1, line(2)),
        DropCount("no answer to train on", 2, line(3)),
        DropCount("same as an earlier sample", 1, line(5)),
        DropCount("an empty answer is not trained", 1, line(6)),
        DropCount(
            "an answer without a prompt, or not rendered after it, is not trained", 1, line(7)
        ),
        DropCount("nothing to train in the first 20 tokens", 1, line(8)),
        DropCount("cut to 20 tokens", 1, line(9)),
    )
    assert [sample.where for sample in found.samples] == [line(1), line(6), line(9)]
    assert [trained(sample) for sample in found.samples[:2]] == ["b<|end|>", "d<|end|>"]
    assert len(found.samples[2].ids) == 20 and not trained(found.samples[2]).endswith("<|end|>")
    # What is cut is the beginning of what is not.
    whole = read(path).samples[-1]
    assert whole.ids[:20] == found.samples[2].ids and trained(whole).endswith("b<|end|>")


def test_a_row_of_several_samples_counts_once(tmp_path: Path) -> None:
    texts = models.family(tmp_path, "qwen3")
    messages = [{"role": role, "content": text} for role, text in
        (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))]  # fmt: skip
    last = [messages[0], {**messages[1], "weight": 0}, *messages[2:]]
    rows = [{"messages": messages}, {"messages": messages}, {"messages": last}]
    path = write(tmp_path / "t.jsonl", rows)
    found = read_samples(sources_of((), None, [path]), texts, SampleSettings())
    assert [sample.where for sample in found.samples] == ["t.jsonl, line 1"] * 2
    assert found.dropped == (DropCount("same as an earlier sample", 2, "t.jsonl, line 2"),)
    # In one sample the same ids with another mask are another sample.
    assert [sum(sample.trained) for sample in read(path).samples] == [4, 2]


def test_nothing_to_train(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [asks("a", ""), asks("b", " ")])
    with pytest.raises(
        KtError,
        match=r"mine\.jsonl has no row to train on: .* \(2, first mine\.jsonl, line 1\)",
    ):
        read(path)


def test_texts_and_prompts(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", [{"text": "one <|end|> two"}, {"text": "a b c " * 99}, {"text": ""}]
    )
    found = read(path, cutoff_len=16)
    assert all(all(sample.trained) for sample in found.samples)
    assert found.samples[0].ids == tuple(mini().control.encode_text("one <|end|> two"))
    assert mini().stop_ids.isdisjoint(found.samples[0].ids)
    assert [(each.reason, each.first) for each in found.dropped] == [
        ("cut to 16 tokens", "t.jsonl, line 2"),
        ("fewer than two tokens, so none is predicted", "t.jsonl, line 3"),
    ]
    chat = write(tmp_path / "c.jsonl", [asks("a", "b")])
    [plain], [whole] = read(chat).samples, read(chat, train_on_prompt=True).samples
    assert plain.ids == whole.ids and all(whole.trained) and not all(plain.trained)


def test_a_prompt_that_fills_the_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [asks("word " * 999, "b")])
    with pytest.raises(KtError, match=r"nothing to train in the first 50 tokens \(1, first c"):
        read(path, cutoff_len=50)
    found = read(path, cutoff_len=50, train_on_prompt=True)
    assert [(len(each.ids), all(each.trained)) for each in found.samples] == [(50, True)]
    assert found.dropped == (DropCount("cut to 50 tokens", 1, "c.jsonl, line 1"),)


def test_a_text_begins_as_the_tokenizer_says(tmp_path: Path) -> None:
    texts = models.write_text_model(
        tmp_path / "m", models.TEMPLATES["llama3"], ["<|eot_id|>"], add_bos_token=True
    )
    path = write(tmp_path / "t.jsonl", [{"text": "hello"}])
    [found] = read_samples(sources_of((), None, [path]), texts, SampleSettings()).samples
    assert texts.tokenizer.decode(found.ids, special=True) == "<s>hello"


def test_a_base_model_is_trained_on_texts_alone(tmp_path: Path) -> None:
    models.family(tmp_path, "llama3")
    (tmp_path / "m").mkdir()
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / "llama3" / name).rename(tmp_path / "m" / name)
    texts = read_text_model("base", tmp_path / "m", chats=False)
    rows = write(tmp_path / "t.jsonl", [{"text": "hello world"}])
    [found] = read_samples(sources_of((), None, [rows]), texts, SampleSettings()).samples
    assert texts.tokenizer.decode(found.ids) == "hello world"
    rows = write(tmp_path / "c.jsonl", [asks("a", "b")])
    with pytest.raises(BadData, match=r"c.jsonl, line 1: .* base has no chat template"):
        read_samples(sources_of((), None, [rows]), texts, SampleSettings())


def test_a_refused_conversation_is_left_out(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('never') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    texts = models.write_text_model(tmp_path / "m", template, ["<|end|>"])
    path = write(tmp_path / "t.jsonl", [asks("no", "b"), asks("a", "b")])
    found = read_samples(sources_of((), None, [path]), texts, SampleSettings())
    assert found.dropped == (DropCount("refused by the chat template", 1, "t.jsonl, line 1"),)
    assert len(found.samples) == 1


def test_an_error_names_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [asks("a", "b")] * 3 + [{"text": "x"}])
    with pytest.raises(
        KtError, match=r"mine\.jsonl, line 4: the file's first row is in the completion format"
    ):
        read(path)
    assert len(read(path, max_samples=2).samples) == 1  # what is not read is not wrong


def test_the_hash_knows_what_changes_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [asks("a", "b"), asks("c", "d")])
    copy = write(tmp_path / "copy.jsonl", [asks("a", "b"), asks("c", "d")])
    first = read(path)
    assert read(path) == first and len(first.sha256) == 64
    hashes = {read(path, **how).sha256 for how in ({}, {"cutoff_len": 99}, {"mask_history": True},
        {"seed": 1}, {"default_system": "x"}, {"enable_thinking": False}, {"max_samples": 2})}  # fmt: skip
    assert len(hashes) == 7 and first.sha256 in hashes
    assert read(copy).sha256 == first.sha256 != read(path, copy).sha256
    path.write_text(path.read_text().replace('"d"', '"e"'))
    assert read(path).sha256 != first.sha256


# --- several sources --------------------------------------------------------------------------------


def numbered(path: Path, count: int) -> Path:
    return write(path, [asks(f"{path.stem} {number}", "x") for number in range(count)])


def sources_in_order(found: SampleSet) -> str:
    return "".join(sample.where[0] for sample in found.samples)


def test_one_after_the_other_and_in_turns(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.jsonl", 4), numbered(tmp_path / "b.jsonl", 2)
    assert sources_in_order(read(a, b)) == "aaaabb"
    assert sources_in_order(read(a, b, mix_strategy="interleave_under")) == "abab"
    over = read(a, b, mix_strategy="interleave_over")
    assert sources_in_order(over) == "abababab"
    assert [sample.where[-1] for sample in over.samples[1::2]] == list("1212")
    assert sources_in_order(read(a, b, max_samples=1)) == "ab"


def test_shares(tmp_path: Path) -> None:
    a, b = numbered(tmp_path / "a.jsonl", 40), numbered(tmp_path / "b.jsonl", 40)
    how = {"mix_strategy": "interleave_under", "interleave_probs": (0.75, 0.25)}
    found = read(a, b, **how)
    counts = Counter(sources_in_order(found))
    assert counts["a"] == 40 and 4 <= counts["b"] <= 25
    assert read(a, b, **how) == found and read(a, b, **how, seed=7).samples != found.samples
    over = Counter(sources_in_order(read(a, b, **{**how, "mix_strategy": "interleave_over"})))
    assert over["b"] == 40 and over["a"] > 80


def test_in_turns_as_datasets_documents_it(tmp_path: Path) -> None:
    """The example of `datasets.interleave_datasets` with sources of 3, 4 and 5 rows."""
    paths = [
        numbered(tmp_path / f"{name}.jsonl", count)
        for name, count in (("0", 3), ("1", 4), ("2", 5))
    ]
    want = {
        "interleave_under": [0, 10, 20, 1, 11, 21, 2, 12, 22],
        "interleave_over": [0, 10, 20, 1, 11, 21, 2, 12, 22, 0, 13, 23, 1, 10, 24],
    }
    for strategy, numbers in want.items():
        found = read(*paths, mix_strategy=strategy).samples
        assert [10 * int(each.where[0]) + int(each.where[-1]) - 1 for each in found] == numbers


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cutoff_len": 1}, "cutoff_len is 1, but must be at least 2"),
        ({"max_samples": 0}, "max_samples is 0"),
        ({"mask_history": True, "train_on_prompt": True}, "mask_history trains the last answer only"),
        ({"mix_strategy": "stack"}, "mix_strategy is 'stack'"),
        ({"interleave_probs": (0.5, 0.5)}, "no effect with mix_strategy concat"),
        ({"mix_strategy": "interleave_over", "interleave_probs": (1.0,)}, "1 shares for 2 sources"),
        ({"mix_strategy": "interleave_over", "interleave_probs": (1.5, -0.5)}, "greater than 0"),
        ({"mix_strategy": "interleave_over", "interleave_probs": (float("nan"), 0.5)}, "greater than 0"),
        ({"mix_strategy": "interleave_over", "interleave_probs": (0.5, 0.4)}, "sum to 0.9, but must"),
        ({"mix_strategy": "interleave_over", "interleave_probs": (1 - 1e-9, 1e-9)}, "repeated more than 1000"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    paths = [numbered(tmp_path / f"{name}.jsonl", 2) for name in "ab"]
    with pytest.raises(UsageError, match=said):
        read(*paths, **settings)


def test_a_part_of_a_source(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 50)
    source = DataSource("a", path, num_samples=10)

    def drawn(**settings: Any) -> list[int]:
        found = read_samples([source], mini(), SampleSettings(**settings)).samples
        return [int(sample.where.rpartition(" ")[2]) for sample in found]

    first = drawn()
    assert len(set(first)) == 10 and first == sorted(first) and first != list(range(1, 11))
    assert drawn() == first != drawn(seed=1)
    assert drawn(max_samples=3) == first[:3]
    assert max(line for seed in range(20) for line in drawn(seed=seed)) == 50


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 50)
    told: list[tuple[str, int | None, int]] = []

    class Listener:
        @contextmanager
        def progress(self, title: str, total: int | None = None, **_: Any) -> Iterator[Any]:
            class Bar:
                def update(self, *, done: int, total: int | None = None) -> None:
                    told.append((title, size, done))

            size = total
            yield Bar()

    read_samples(sources_of((), None, [path]), mini(), SampleSettings(), Listener())
    assert told[-1] == ("Reading a.jsonl", path.stat().st_size, path.stat().st_size)
