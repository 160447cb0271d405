"""What a question names in kt's own tables, and what the built-in model is told of it."""

from __future__ import annotations

import json

import pytest

from ktcli.commands.cli.table import COMMANDS
from ktcli.dialogue.rendering import rendered
from ktcli.errors import BadCheckpoint
from ktcli.resources import data_path
from ktcli.store.entry import BUILTIN
from ktcli.text.model import read_text_model
from ktcli.text.rows import (
    FILE,
    LEAD,
    MAX_CHARACTERS,
    TOLD,
    KnownAnswer,
    KnownRow,
    KnownRows,
    read_rows,
)

MINI = data_path("profiles", BUILTIN)


@pytest.fixture(scope="module")
def shipped() -> KnownRows:
    return read_rows(MINI)


def named(*names: str) -> KnownRows:
    """Rows with one name each, which say it."""
    return KnownRows(KnownRow((tuple(name.split(" & ")),), name) for name in names)


@pytest.mark.parametrize(
    ("question", "found"),
    [
        ("what does kt bench do?", "kt bench"),
        ("What does KT Bench Decode do", "kt bench decode"),
        ("kt bench decode --json?", "kt bench decode & --json"),
        ("kt bench --json?", "--json"),
        ("what is --json-lines?", None),
        ("what does ---json mean", None),
        ("is docs/model a page", None),
        ("what does /model do?", "/model"),
        ("`/model`", "/model"),
        ("what are /models", None),
        ("is qwen3 a name", "qwen3"),
        ("is qwen3-30b-a3b a name", "qwen3-30b-a3b"),
        ("is qwen3-30b a name", None),
        ("is qwen3.5 a name", None),
        ("I mean qwen3.", "qwen3"),
        ("hello", None),
        ("", None),
        ("what is --json " + "x" * MAX_CHARACTERS, None),
    ],
)
def test_what_is_named_most_exactly_is_found(question: str, found: str | None) -> None:
    both = "kt bench decode & --json"
    rows = named("kt bench", "kt bench decode", "--json", both, "/model", "qwen3", "qwen3-30b-a3b")
    assert rows.find(question) == found


def test_each_row_is_found_by_its_names(shipped: KnownRows) -> None:
    """A name of several rows, as an option of several commands, finds one of them."""
    rows = json.loads((MINI / FILE).read_text())["rows"]
    texts = {text for _, text in rows}
    first = [(names[0], text) for names, text in rows]
    found = [shipped.find(f"what is {' '.join(name)}?") for name, _ in first]
    assert set(found) <= texts
    assert sum(a == text for a, (_, text) in zip(found, first, strict=True)) >= 0.9 * len(rows)


def test_each_command_of_the_help_is_found(shipped: KnownRows) -> None:
    for name, row in COMMANDS.items():
        text = shipped.find(f"what does kt {name} do?")
        assert not row.summary or (text is not None and "kt " in text), name


def test_only_questions_are_told_and_a_growing_conversation_keeps_its_beginning() -> None:
    rows = named("--seed")
    turns = [
        {"role": "system", "content": "what is --seed?"},
        {"role": "user", "content": "what is --seed?"},
        {"role": "assistant", "content": "it is --seed"},
        {"role": "user", "content": "and what else"},
    ]
    told = rows.told(turns, 512)
    assert told == [turns[0], {"role": "system", "content": TOLD + "--seed"}, *turns[1:]]
    assert rows.told(turns[:2], 512) == told[:3]
    assert rows.told(turns, 2) == turns  # more than fits is not looked at


@pytest.mark.parametrize(
    ("question", "lead"),
    [
        ("what is --seed?", 0),
        ("--seed", 0),
        ("What does `KT Pull` do?!", 0),
        ("and what's the --seed option for, please", 0),
        ("can you explain kt pull to me in one sentence", 0),
        ("what is --seed of kt pull?", LEAD),
        ("I used kt pull, what is the capital of France?", LEAD),
        ("kt pull --seed", LEAD),
        ("what does kt pull not do", LEAD),
        ("what is a seed", None),
        ("", None),
    ],
)
def test_a_question_that_only_asks_for_a_row_is_answered_with_it(
    question: str, lead: int | None
) -> None:
    turns = [{"role": "user", "content": question}]
    found = named("--seed", "kt pull").answer(turns, 512)
    assert (None if found is None else found.lead) == lead


def test_only_a_question_at_the_end_is_answered() -> None:
    rows, asked = named("--seed"), {"role": "user", "content": "what is --seed?"}
    assert rows.answer([asked], 512) == KnownAnswer("--seed")
    assert rows.answer([asked], 1) is None  # as it is not told
    for role in ("assistant", "system", "tool"):
        assert rows.answer([asked, {**asked, "role": role}], 512) is None
    assert rows.answer([asked, {"role": "user", "content": "what is that?"}], 512) is None
    assert rows.answer([{"role": "user", "content": None}], 512) is None
    assert rows.answer([], 512) is None


def test_only_the_built_in_model_is_told() -> None:
    question = [{"role": "user", "content": "what does kt serve do?"}]
    texts = {name: read_text_model(name, MINI) for name in (BUILTIN, "another")}
    said = {name: rendered(each, question, {}, 512).text for name, each in texts.items()}
    assert TOLD in said[BUILTIN] and TOLD not in said["another"]


def test_damaged_rows_are_one_sentence(tmp_path) -> None:
    with pytest.raises(BadCheckpoint, match=FILE):
        read_rows(tmp_path)
