"""The line under an answer, and the words about time and room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from chat.fake_engine import backend
from optable import FORWARD, MADE_BY_PASSES

from ktcli.chat.chat import Chat
from ktcli.chat.worktimes import GROUPS, Lap, time_lines
from ktcli.engine.request import Stats
from ktcli.errors import ContextFull
from ktcli.terminal.statusline import nearly_full, status_line, time_left

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
    assert nearly_full(799, 800, 1000).startswith("(the context is 80 % full, 200 tokens left")
    assert nearly_full(800, 900, 1000) == ""


def test_time_left_is_that_of_the_speed_so_far() -> None:
    assert time_left(0.5, 100, 1000) == ""
    assert time_left(10, 100, 1000) == "1 min 30 s left"
    assert time_left(10, 900, 1000) == "1 s left"


def test_each_operation_of_the_table_belongs_to_a_group() -> None:
    known = sorted(name for names in GROUPS.values() for name in names)
    assert known == sorted({row.name for row in (*FORWARD, *MADE_BY_PASSES)})


def test_where_the_time_went_adds_up_and_fits_forty_columns(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path))
    list(chat.ask("hello"))
    reply = chat.reply
    assert reply is not None and reply.laps is not None
    reading, answering = reply.laps
    assert reading.parts["experts"] == pytest.approx(1e-6 * reply.stats.prefilled_tokens)
    assert answering.parts.get("dense products") == pytest.approx(0.5e-6 * reply.stats.tokens)
    assert sum(spent for _, spent in answering.rows) == pytest.approx(reply.stats.eval_s)
    lines = time_lines(reading, answering).splitlines()
    assert all(len(line) <= 40 for line in lines) and lines[0].startswith("reading")
    assert time_lines(Lap(), Lap())
    assert 0 < answering.parts["choosing tokens"] < reply.stats.eval_s
    assert [name for name, _ in answering.rows] == [name for name, _ in reading.rows]


def test_the_totals_of_a_chat_are_the_sum_of_its_answers(tmp_path: Path) -> None:
    chat = Chat(replace(backend(tmp_path), loading_s=3.0))
    assert chat.totals.answers == 0
    replies = []
    for question in ("hello", "hello again", "and again"):
        list(chat.ask(question))
        assert chat.reply is not None
        replies.append(chat.reply)
    totals, stats = chat.totals, [reply.stats for reply in replies]
    assert totals.answers == 3 and totals.loading_s == 3.0
    assert totals.tokens == sum(each.tokens for each in stats)
    assert totals.reused_tokens == sum(each.reused_tokens for each in stats) > 0
    assert totals.prompt_tokens == sum(each.prompt_tokens for each in stats)
    for lap, seconds in (
        (totals.reading, sum(each.prompt_s for each in stats)),
        (totals.answering, sum(each.eval_s for each in stats)),
    ):
        assert lap.seconds == pytest.approx(seconds)
        assert sum(spent for _, spent in lap.rows) == pytest.approx(seconds)
    lines = totals.lines.splitlines()
    assert all(len(line) <= 40 for line in lines) and "3, " in lines[0]
    assert lines[2].startswith("loading") and "████" in lines[2]


def test_a_refused_question_is_no_part_of_the_totals_and_a_stopped_one_is(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path))
    with pytest.raises(ContextFull):
        list(chat.ask("x" * 100_000))
    assert chat.totals.answers == 0
    list(chat.ask("hello", cancelled=lambda: True))
    assert chat.totals.answers == 1 and chat.totals.tokens == 0
    assert chat.totals.lines
