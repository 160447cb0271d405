"""What of a conversation goes unread when its context is full: the same as one by one, in few tries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat.fake_engine import backend
from hypothesis import given, settings
from hypothesis import strategies as st

from ktcli.chat.chat import Chat
from ktcli.chat.compaction import fewest_omitted
from ktcli.chat.conversation import Conversation
from ktcli.dialogue.splice import Splicer, Spoken
from ktcli.text.control import ControlTokens, Marked

QUESTIONS = 300
MOST_TRIES = 16  # for 300 questions, of which about a dozen fit


def one_by_one(turns: int, omitted: int, least: int) -> int:
    """The slow and obvious way: a question and its answer go until the rest fits, or one question is left."""
    omitted += 2
    while omitted < least and omitted + 2 < turns:
        omitted += 2
    return omitted


@settings(max_examples=60)
@given(st.integers(0, 200), st.integers(0, 99), st.integers(0, 210))
def test_as_much_is_omitted_as_one_by_one(questions: int, pairs: int, least: int) -> None:
    turns, omitted = 2 * questions + 1, 2 * min(pairs, questions)
    tries: list[int] = []

    def fits(tried: int) -> bool:
        tries.append(turns - tried)
        return tried >= least

    found = fewest_omitted(turns, omitted, fits)
    assert found == (one_by_one(turns, omitted, least) if omitted + 2 < turns else omitted)
    kept = turns - found
    assert len(tries) <= 2 * max(2, kept).bit_length() and max(tries, default=0) <= 2 * kept + 4


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    """A chat that goes on with a conversation far longer than its context."""
    made = Chat(backend(tmp_path, lambda question: "yes", context=600))
    made.conversation = Conversation(turns=[
        {"role": role, "content": f"{role} {number}"} for number in range(QUESTIONS) for role in ("user", "assistant")
    ])  # fmt: skip
    return made


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The messages of each conversation that is rendered."""
    counts: list[int] = []
    render = ControlTokens.render

    def counted(
        self: ControlTokens, write: Any, said: Sequence[Mapping[str, Any]], *more: Any
    ) -> Marked:
        counts.append(len(said))
        return render(self, write, said, *more)

    monkeypatch.setattr(ControlTokens, "render", counted)
    return counts


def test_a_long_conversation_is_cut_in_few_renderings(chat: Chat, renderings: list[int]) -> None:
    assert "".join(piece.text for piece in chat.ask("and now?")) == "yes"
    assert len(renderings) <= MOST_TRIES and renderings[0] == 2 * QUESTIONS + 1
    assert max(renderings[1:]) < 100  # of the rest, what is tried is not much longer than what fits
    assert chat.reply is not None and 200 < chat.reply.stats.prompt_tokens <= 300
    texts, omitted = chat.backend.texts, chat.conversation.omitted.turns
    longer = texts.template.render(chat.conversation.turns[omitted - 2 : -1])
    assert len(texts.tokenizer.encode(longer)) > 300  # one question more would not have fitted


def test_a_summary_of_a_long_conversation_takes_few_renderings(
    chat: Chat, renderings: list[int]
) -> None:
    assert chat.compact() == 2 * QUESTIONS - 2
    assert len(renderings) <= MOST_TRIES


def test_answers_behind_which_no_token_begins_are_left_out_together(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, text, spoken = chat.backend.texts.control, "", []
    for _ in range(QUESTIONS):
        text += "question "
        spoken.append(Spoken(len(text), "answer", (1,)))
        text += "answer "
    lengths: list[int] = []
    encode = control.encode
    monkeypatch.setattr(
        control, "encode", lambda part: lengths.append(len(part.text)) or encode(part)
    )
    splicer = Splicer(chat.backend.texts.tokenizer, control)
    assert splicer.ids(Marked(text), spoken, 1 << 20) == encode(Marked(text))
    assert sum(lengths) <= 2 * len(text)
