"""Answers for scripts: lines of JSON that together are what --json says, and a file that is always a new one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ktcli.answers.events import AnswerPiece
from ktcli.commands.chat.answering import AnswerEvents


def kt(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ktcli", "chat", "kt-mini", "hi", "-n", "6", "--greedy"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def test_the_lines_of_an_answer_are_its_pieces_and_then_the_document() -> None:
    done = kt("--jsonl")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    *before, last = events
    assert {event["event"] for event in before} <= {"reading", "text"}
    text = "".join(e["text"] for e in before if e["event"] == "text" and not e["thought"])
    assert last["event"] == "answer"
    assert text.strip() and last["text"] == text
    whole = json.loads(kt("--json").stdout)
    assert last.keys() - {"event"} == whole.keys()
    assert (last["text"], last["ids"]) == (whole["text"], whole["ids"])
    assert "cut at 6 tokens" in done.stderr


def test_json_and_lines_of_json_contradict_each_other() -> None:
    assert kt("--json", "--jsonl").returncode == 2


def test_no_text_breaks_a_line_or_reaches_the_terminal_as_a_control() -> None:
    stream = io.StringIO()
    text = "a\nb\u2028c\x1b[2J\x7f\x9b\ud800é"
    AnswerEvents(stream).piece(AnswerPiece(text, thought=True))
    line = stream.getvalue()
    assert line.endswith("\n") and line[:-1].isascii() and line[:-1].isprintable()
    assert json.loads(line) == {"event": "text", "text": text, "thought": True}


@pytest.mark.thorough
def test_an_answer_goes_into_a_new_file_and_never_over_one(tmp_path: Path) -> None:
    path = tmp_path / "answer.txt"
    done = kt("--output", str(path))
    assert done.returncode == 0, done.stderr
    written = path.read_text()
    assert written.strip() == done.stdout.strip() != ""
    again = kt("--output", str(path))
    assert (again.returncode, again.stdout) == (2, "")
    assert "already exists" in again.stderr
    assert path.read_text() == written
    assert "no folder" in kt("--output", str(tmp_path / "none" / "a")).stderr
