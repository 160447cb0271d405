"""Rows become tasks: the last answer is the right one, choices are checked, and what is left out is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from samples.test_read import asks, mini, write

from ktcli.samples.sample import BadData, SampleSettings
from ktcli.samples.source import sources_of
from ktcli.samples.tasks import TaskSet, read_tasks


def read(path: Path, **settings: Any) -> TaskSet:
    (source,) = sources_of((), None, (path,))
    return read_tasks(source, mini(), SampleSettings(**settings))


def test_the_last_answer_is_the_right_one(tmp_path: Path) -> None:
    rows = [
        {"messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": " <think>x</think>\nd "},
        ]},
    ]  # fmt: skip
    (task,) = read(write(tmp_path / "a.jsonl", rows), default_system="s").tasks
    assert [each["content"] for each in task.messages] == ["s", "a", "b", "c"]
    assert task.reference == "d" and task.choices == () and task.where == "a.jsonl, line 1"
    whole = task.answered("e")
    assert whole.trained == (False, False, False, False, True)


def test_choices_in_json_and_csv(tmp_path: Path) -> None:
    rows = [asks("1 + 1?", " B", choices=["A", "B "])]
    (task,) = read(write(tmp_path / "a.jsonl", rows)).tasks
    assert task.choices == ("A", "B") and task.right == 1
    table = tmp_path / "a.csv"
    table.write_text('instruction,output,choices\n1 + 1?,B,"[""A"", ""B""]"\n2?,free,\n')
    first, second = read(table).tasks
    assert first.choices == ("A", "B") and second.choices == ()


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]},
        {"messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>only</think>"},
        ]},
    ]  # fmt: skip
    found = read(write(tmp_path / "a.jsonl", rows))
    assert len(found.tasks) == 1 and found.rows == 5
    assert {each.reason: (each.rows, each.first) for each in found.dropped} == {
        "an answer to nothing": (1, "a.jsonl, line 2"),
        "no right answer to compare with": (2, "a.jsonl, line 3"),
        "the right answer calls a tool, which is not compared": (1, "a.jsonl, line 4"),
    }
    assert len(read(tmp_path / "a.jsonl", max_samples=1).tasks) == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "a.jsonl, line 1: plain text, which has no question and no answer"),
        (asks("q", "C", choices=["A", "B"]), "line 1: the answer 'C' is not one of its choices"),
        (asks("q", "A", choices=["A"]), "line 1: choices must be several different texts"),
        (asks("q", "A", choices=["A", "A "]), "line 1: choices must be several different texts"),
        (asks("q", "A", choices=["A", " "]), "line 1: choices[1] is empty"),
        (asks("q", "A", choices=["A", 2]), "line 1: choices[1] is a number, not text"),
        (asks("q", "A", choices={"A": 1}), "line 1: choices is an object, not a list"),
        (asks("q", "A", choices="A, B"), "line 1: choices is not JSON: 'A, B'"),
        (asks("q", "0", choices=[str(n) for n in range(300)]), "at most 256 are read"),
        (asks("q", ""), "a.jsonl has no question with a right answer: no right answer"),
        ({"q": 1}, "a.jsonl, line 1: the keys q do not belong to a format that kt knows"),
    ],
)
def test_what_makes_no_sense_names_its_line(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(BadData, match=re.escape(said)):
        read(write(tmp_path / "a.jsonl", [row]))
