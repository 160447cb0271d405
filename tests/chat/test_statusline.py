"""The line under an answer, and the words about time and room."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat.fake_engine import speaker

from ktcli.chat.chat import Chat
from ktcli.chat.statusline import nearly_full, status_line, time_left
from ktcli.chat.worktimes import GROUPS, Lap, time_lines
from ktcli.engine.request import Stats
from ktcli.ops.backend import FORWARD, MADE_BY_PASSES

STATS = Stats(prompt_tokens=1100, reused_tokens=1000, prompt_s=2.04, tokens=214, eval_s=17.4)


def test_everything_is_on_a_wide_line() -> None:
    assert status_line(STATS, 1314, 8192, 100) == (
        "214 tokens, 12.3 tok/s · read 100 in 2.0 s, 1,000 cached · context ██░░░░░░░░ 16 %"
    )


@pytest.mark.parametrize("columns", [10, 30, 40, 60, 80, 200])
def test_a_line_is_never_broken_and_the_first_part_always_there(columns: int) -> None:
    line = status_line(STATS, 1314, 8192, columns)
    assert line.startswith("214 tokens, 12.3 tok/s") and len(line) < max(columns, 23)


def test_one_token_without_a_speed() -> None:
    assert status_line(Stats(tokens=1), 9, 8192, 80) == "1 token · context █░░░░░░░░░ 0 %"


def test_the_word_about_the_context_comes_once() -> None:
    assert nearly_full(100, 799, 1000) == ""
    assert nearly_full(799, 800, 1000).startswith("(the context is 80 % full, 200 tokens are left")
    assert nearly_full(800, 900, 1000) == ""


def test_time_left_is_that_of_the_speed_so_far() -> None:
    assert time_left(0.5, 100, 1000) == ""
    assert time_left(10, 100, 1000) == "1 min 30 s left"
    assert time_left(10, 900, 1000) == "1 s left"


def test_each_operation_of_the_table_belongs_to_a_group() -> None:
    known = sorted(name for names in GROUPS.values() for name in names)
    assert known == sorted({row.name for row in (*FORWARD, *MADE_BY_PASSES)})


def test_where_the_time_went_adds_up_and_fits_forty_columns(tmp_path: Path) -> None:
    chat = Chat(speaker(tmp_path))
    list(chat.ask("hello"))
    reply = chat.reply
    assert reply is not None and reply.laps is not None
    reading, answering = reply.laps
    assert reading.parts["experts"] == pytest.approx(1e-6 * reply.stats.prefilled_tokens)
    assert answering.parts.get("dense products") == pytest.approx(0.5e-6 * reply.stats.tokens)
    assert sum(spent for _, spent in answering.rows) == pytest.approx(reply.stats.eval_s)
    lines = time_lines(reading, answering).splitlines()
    assert all(len(line) <= 40 for line in lines) and lines[0].startswith("reading")
    assert time_lines(Lap(0.0, {}), Lap(0.0, {}))
