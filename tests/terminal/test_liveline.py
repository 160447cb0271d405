"""The line below an answer while it is made, on an emulated terminal of any size."""

from __future__ import annotations

import io
import itertools

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktcli.answers.events import AnswerPiece
from ktcli.terminal.screen import Screen

LIVE = "7 tokens, 30 tok/s · context ███░░░░░░░"


def history_of(stream: io.StringIO, columns: int, rows: int) -> list[str]:
    """All lines that were ever on a terminal, with text on them."""
    screen_of = pyte.HistoryScreen(columns, rows, history=10_000)
    pyte.Stream(screen_of).feed(stream.getvalue().replace("\n", "\r\n"))
    gone = [
        "".join(line[column].data for column in range(columns)) for line in screen_of.history.top
    ]
    return [line.rstrip() for line in (*gone, *screen_of.display) if line.strip()]


@given(
    st.text(st.sampled_from("ab *_`~#-+.|1\n界"), max_size=200),
    st.lists(st.integers(0, 200), max_size=20),
    st.sampled_from([1, 20, 40, 80, 200]),
    st.sampled_from([3, 50]),
)
@settings(max_examples=60)
def test_the_line_below_an_answer_leaves_nothing_behind(
    text: str, places: list[int], columns: int, rows: int
) -> None:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
    seen = []
    for live in (lambda columns: LIVE, None):
        stream, clock = io.StringIO(), itertools.count()
        screen = Screen(
            stream, terminal=True, colour=True, columns=lambda: columns, clock=clock.__next__
        )
        screen.begin(int, live)
        for piece in pieces:
            screen.piece(AnswerPiece(piece))
        screen.end()
        seen.append(history_of(stream, columns, rows))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("rows", [3, 20])
def test_a_line_stands_below_an_answer_while_it_is_made(columns: int, rows: int) -> None:
    stream, screen_of = io.StringIO(), pyte.Screen(columns, rows)
    now = [0.0]
    screen = Screen(
        stream, terminal=True, colour=True, columns=lambda: columns, clock=lambda: now[0]
    )
    asked: list[int] = []
    screen.begin(int, lambda columns: asked.append(columns) or LIVE)  # type: ignore[func-returns-value]
    for number in range(40):
        screen.piece(AnswerPiece(f"word{number} "))
        now[0] += 0.1
    pyte.Stream(screen_of).feed(stream.getvalue().replace("\n", "\r\n"))
    line = screen_of.cursor.y + 1
    assert screen_of.display[line].rstrip() == LIVE[: columns - 1].rstrip()
    assert "word39" in screen_of.display[line - 1]
    assert len(asked) <= 40 / 2 and set(asked) == {columns}  # five times per second


@pytest.mark.parametrize(
    "how", [{"terminal": False, "colour": False}, {"terminal": True, "colour": False}]
)
def test_no_line_stands_where_a_terminal_cannot_take_it_back(how: dict[str, bool]) -> None:
    stream, clock = io.StringIO(), itertools.count()
    screen = Screen(stream, **how, clock=clock.__next__)
    screen.begin(int, lambda columns: LIVE)
    screen.piece(AnswerPiece("some words"))
    screen.piece(AnswerPiece(" more"))
    assert LIVE not in stream.getvalue() and "\x1b" not in stream.getvalue()
