"""Writing to the terminal: streams, modes, tables, foreign text."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import sys
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ktcli.errors import (
    LONGEST_SENTENCE,
    LONGEST_WORD,
    KtError,
    UsageError,
    predicted,
    shortened,
)
from ktcli.output import Mode, Output, safe, table, visible

Capture = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


class Colour(Enum):
    RED = "red"


def test_people_get_text_and_scripts_a_document(capsys: Capture) -> None:
    out = Output()
    out.result({"a": 1}, "one")
    out.note("going on")
    assert capsys.readouterr() == ("one\n", "going on\n")
    out.mode = Mode.JSON
    out.result(
        {"path": Path("/x"), "n": np.int64(3), "c": Colour.RED, "s": {2, 1}, "ü": "…"}, "never"
    )
    out.note("never")
    said = capsys.readouterr()
    assert json.loads(said.out) == {"path": "/x", "n": 3, "c": "red", "s": [1, 2], "ü": "…"}
    assert said.err == ""


def test_quiet_keeps_results_and_warnings(capsys: Capture) -> None:
    out = Output()
    out.mode = Mode.QUIET
    out.note("never")
    out.warn("careful", hint="do this")
    out.result({}, lambda: "one")
    assert capsys.readouterr() == ("one\n", "warning: careful\n  do this\n")


# Everything that a terminal obeys: C0 but newline and tab, DEL, C1, and what turns the direction of text.
OBEYED = {chr(code) for code in (*range(32), *range(0x7F, 0xA0))} - {"\n", "\t"}
OBEYED |= set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
FOREIGN = "[b]no[/b] " + "".join(sorted(OBEYED)) + "\x1b]52;c;ZXZpbA==\x07 \x1b[31mred"


def test_results_are_escaped_unless_a_program_is_to_have_them(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Output()
    out.result({}, FOREIGN)
    out.result({}, lambda: FOREIGN)
    assert not OBEYED & set(capsys.readouterr().out)
    out.result({}, FOREIGN, exact=True)
    assert capsys.readouterr().out == FOREIGN + "\n"
    out.mode = Mode.JSON
    out.result({"text": FOREIGN}, "never")
    said = capsys.readouterr().out
    assert not OBEYED & set(said) and json.loads(said) == {"text": FOREIGN}


@pytest.mark.parametrize("exact", [False, True])
def test_a_terminal_obeys_styles_of_results_and_nothing_else(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    out = Output()
    out.result({}, f"{FOREIGN} {out.style('good ' + FOREIGN, 'green')} {FOREIGN}", exact=exact)
    said = terminal.getvalue()
    assert said.count("\x1b") == 2
    before, _, rest = said.partition("\x1b[32mgood ")
    styled, _, after = rest.partition("\x1b[0m")
    assert before and styled and after and not OBEYED & set(before + styled + after)
    monkeypatch.setenv("NO_COLOR", "1")
    out.result({}, "\x1b[32mgreen\x1b[0m", exact=exact)
    assert terminal.getvalue().endswith("\\x1b[32mgreen\\x1b[0m\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü", "plain ü"),
        ("a\x1b[31m", r"a\x1b[31m"),
        ("a\nb", r"a\nb"),
        ("\udcff", r"\udcff"),
        ("\u202e", r"\u202e"),
    ],
)
def test_foreign_names_are_one_visible_line(text: str, shown: str) -> None:
    assert safe(text) == shown


@pytest.mark.parametrize("mode", [Mode.HUMAN, Mode.JSON])
def test_a_terminal_obeys_nothing_foreign(mode: Mode, capsys: Capture) -> None:
    evil = "a\x1b[31m\x9b2J\u202e\udcff"
    out = Output()
    out.mode = mode
    out.warn(evil, hint=evil)
    out.note(evil)
    out.error(UsageError(evil, hint=evil))
    said = capsys.readouterr()
    assert not set("\x1b\x9b\udcff") & set(said.out + said.err)
    if mode is Mode.JSON:
        assert json.loads(said.out)["error"]["message"] == evil


def test_long_values_are_shortened_wherever_they_are_said(capsys: Capture) -> None:
    word = "/".join(["folder"] * 1000)
    assert str(KtError(f"cannot read {word}: it is not there")).endswith("older: it is not there")
    for long in (word, "a word and " * 1000):
        out = Output()
        error = KtError(f"cannot read {long}")
        error.hint = f"look at {long}"
        said = f"look at {long}"
        for tell in (
            partial(out.note, said),
            partial(out.warn, said),
            partial(out.warn, "x", hint=said),
        ):
            tell()
            assert 300 < len(capsys.readouterr().err) < LONGEST_SENTENCE + 20
        out.error(error)
        assert len(capsys.readouterr().err) < 2 * LONGEST_SENTENCE + 20
    assert shortened("x" * LONGEST_WORD) == "x" * LONGEST_WORD


def test_notes_keep_their_lines_and_letters() -> None:
    assert visible("a\n\tb 👩\u200d👩") == "a\n\tb 👩\u200d👩"


def test_tables_align() -> None:
    assert table([("a", "1"), ("bbb", "22")], ("N", "S"), right=(1,)) == "N     S\na     1\nbbb  22"
    assert table([]) == ""
    assert table([("a",), ("b", "c")]) == "a\nb  c"


def test_progress_is_silent_without_a_terminal(capsys: Capture) -> None:
    with Output().progress("[red]x", 10) as bar:
        bar.advance(3)
        bar.update(done=5, total=20)
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = pty.openpty()
    with os.fdopen(inner, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        with Output().progress("[/nonsense]\x1b[0m", 10, unit="layers", done=2) as bar:
            bar.advance(3)
    said = ""
    with contextlib.suppress(OSError):  # the end of what was written to a terminal that is closed
        while part := os.read(outer, 65536):
            said += part.decode()
    os.close(outer)
    assert "[/nonsense]" in said
    assert "5/10" in said


def test_a_bar_on_which_nothing_happened_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for happened in (False, True):
        monkeypatch.setattr(sys, "stderr", Terminal())
        with Output().progress("Converting x") as bar:
            if happened:
                bar.update(done=1, total=1)
        assert sys.stderr.getvalue().rstrip().endswith("\x1b[2K") is not happened


def test_a_bar_leaves_room_for_what_the_terminal_shows_of_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else ^C goes on in the next line, and the last drawing of the bar stands below the one before."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "60"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    with Output().progress("Converting x", 10) as bar:
        bar.advance(3)
    lines = (
        re.sub(r"\x1b\[[?0-9]*[a-zA-Z]", "", terminal.getvalue()).replace("\r", "\n").split("\n")
    )
    assert max(map(len, lines)) == 60 - len("^C")


def test_a_terminal_that_cannot_draw_gets_one_line_of_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    with Output().progress("Converting x", 10) as bar:
        bar.advance(3)
        bar.update(done=10)
    with Output().progress("Nothing", 10):
        pass
    assert terminal.getvalue() == "Converting x …\n"


def test_colour_needs_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    out, terminal = Output(), Terminal()
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert out.style("x", "red", terminal) == "\x1b[31mx\x1b[0m"
    assert out.style("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert out.style("x", "red", terminal) == "x"
    monkeypatch.delenv("NO_COLOR")
    out.mode = Mode.JSON
    assert out.style("x", "red", terminal) == "x"


def test_what_is_told_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    words = "one chat of many words and a/path/that/goes/on"
    out = Output()
    out.note(words)
    out.warn(words, hint=words)
    out.error(KtError(words, hint=words))
    lines = re.sub("\x1b[^m]*m", "", screen.getvalue()).splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines).split()) == " ".join(
        [words, "warning:", words, words, "error:", words, words]
    )


def test_a_question_needs_a_terminal() -> None:
    with pytest.raises(UsageError) as caught:
        Output().confirm("Remove it?")
    assert "--yes" in caught.value.hint


def test_the_last_column_is_broken_between_words() -> None:
    words = "one two three four five six seven"
    rows = [("a", words), ("bb", "six"), ("c", "x" * 40)]
    first, second = "one two three four five", "six seven"
    assert table(rows, width=28).splitlines() == [
        f"a   {first}", f"    {second}", "bb  six", "c   " + "x" * 40,
    ]  # fmt: skip
    assert table(rows, width=27) == table(rows) == table(rows, width=80)
    wide = [("a" * 20, words), ("b", "six")]
    own_lines = ["a" * 20, f"    {first}", f"    {second}", "b" + " " * 21 + "six"]
    assert table(wide, width=28).splitlines() == own_lines


def test_predicted_speeds_have_two_digits() -> None:
    said = {
        0.14: "0.1",
        1.58: "1.6",
        15.94: "16",
        155.4: "160",
        9.96: "10",
        2609.2: "2,600",
        5324.4: "5,300",
    }
    assert {value: predicted(value) for value in said} == said


def test_warnings_wait_for_the_end_of_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    told = Output()
    told.hold()
    told.warn("the disk is slow", hint="wait")
    assert capsys.readouterr().err == ""
    told.release()
    told.warn("again")
    assert capsys.readouterr().err == "warning: the disk is slow\n  wait\nwarning: again\n"
