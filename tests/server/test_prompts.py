"""Prompts of conversations that come again and again, and thoughts without their marks."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat.fake_engine import backend
from hypothesis import given
from hypothesis import strategies as st

from ktcli.answers.events import AnswerPiece
from ktcli.answers.stream import ThoughtMarks
from ktcli.errors import ContextFull, UsageError
from ktcli.server.models import prompts
from ktcli.server.models.prompts import ChatRequest, PromptMaker

QUESTION = [{"role": "user", "content": "hello"}]


def after(answer: str) -> list[dict[str, str]]:
    more = {"role": "user", "content": "and then?"}
    return [*QUESTION, {"role": "assistant", "content": answer}, more]


def letters(maker: PromptMaker, text: str) -> list[int]:
    """The ids of a text, a letter each: not what the tokenizer would make of it."""
    cut = maker._backend.texts.tokenizer.encode
    return [id for letter in text for id in cut(letter)]


def test_an_answer_keeps_the_ids_that_were_generated(tmp_path: Path) -> None:
    maker = PromptMaker(backend(tmp_path))
    first = maker.of_messages(ChatRequest(QUESTION, caller="a"))
    ids = letters(maker, "the answer")
    maker.remember(first, "the answer", ids)
    again = maker.of_messages(ChatRequest(after("the answer"), caller="a")).ids
    assert list(again[: len(first.ids) + len(ids)]) == [*first.ids, *ids]


@pytest.mark.parametrize(
    ("caller", "question", "answer"),
    [("b", "hello", "the answer"), ("a", "hollo", "the answer"), ("a", "hello", "the Answer")],
    ids=["another caller", "another question", "another answer"],
)
def test_an_answer_is_recalled_where_it_was_given_only(
    tmp_path: Path, caller: str, question: str, answer: str
) -> None:
    maker, fresh = PromptMaker(backend(tmp_path)), PromptMaker(backend(tmp_path))
    first = maker.of_messages(ChatRequest(QUESTION, caller="a"))
    maker.remember(first, "the answer", letters(maker, "the answer"))
    said = [{"role": "user", "content": question}, *after(answer)[1:]]
    asked = ChatRequest(said, caller=caller)
    assert list(maker.of_messages(asked).ids) == list(fresh.of_messages(asked).ids)


def test_only_the_latest_answers_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_ANSWERS", 3)
    monkeypatch.setattr(prompts, "MOST_CHARS", 20)
    maker = PromptMaker(backend(tmp_path))
    first = maker.of_messages(ChatRequest(QUESTION))
    for text in ("one", "two", "three", "four", "five", "a long answer"):
        maker.remember(first, text, letters(maker, text))
        maker.remember(first, text, letters(maker, text))
    kept = [each.text for each in maker._answers.values()]
    assert kept == ["five", "a long answer"] and maker._chars == sum(map(len, kept))


def test_what_cannot_be_a_prompt_is_refused(tmp_path: Path) -> None:
    maker = PromptMaker(backend(tmp_path, context=64))
    with pytest.raises(ContextFull, match="the context holds 64"):
        maker.of_messages(ChatRequest([{"role": "user", "content": "x y " * 100}]))
    with pytest.raises(ContextFull):
        maker.of_text("x y " * 100)
    with pytest.raises(UsageError, match="empty"):
        maker.of_text("")
    with pytest.raises(UsageError, match="vocabulary"):
        maker.of_ids([5, 1024])
    assert all(id < 300 for id in maker.of_text("<|user|>").ids)  # words, no control token


ANSWER = st.text("ab \n", max_size=8)


@given(st.text("ab \n", max_size=12), ANSWER, st.booleans(), st.data())
def test_thoughts_lose_their_marks_however_they_are_cut(
    thought: str, answer: str, opened: bool, data: st.DataObject
) -> None:
    whole = [AnswerPiece("<think>", True)] if opened else []
    inner = thought
    while inner:
        n = data.draw(st.integers(1, len(inner)))
        whole.append(AnswerPiece(inner[:n], True))
        inner = inner[n:]
    whole.append(AnswerPiece("</think>", True))
    whole += [AnswerPiece(letter) for letter in answer]
    marks, said = ThoughtMarks(), {True: "", False: ""}
    while whole:
        n = data.draw(st.integers(1, len(whole)))
        for piece in marks.without(whole[:n]):
            assert piece.text
            said[piece.thought] += piece.text
        del whole[:n]
    assert said[True] == thought.strip()
    assert said[False] == answer.lstrip("\n")


CALLING = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}<|assistant|>"
)


def test_a_conversation_has_no_more_messages_than_the_context_has_tokens(tmp_path: Path) -> None:
    maker = PromptMaker(backend(tmp_path, context=256))
    with pytest.raises(
        ContextFull, match="257 messages; the limit for a context of 256 tokens is 256"
    ):
        maker.of_messages(ChatRequest([{"role": "user", "content": ""}] * 257))
    with pytest.raises(ContextFull, match="256"):  # that many are looked at
        maker.of_messages(ChatRequest([{"role": "user", "content": ""}] * 256))


def test_every_turn_says_what_other_conversations_begin_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where layers keep states: also a turn that ends with a tool's result, or is much work to render."""
    maker = PromptMaker(backend(tmp_path))
    monkeypatch.setattr(maker._prompts, "_recurrent", True)
    begun = [{"role": "system", "content": "be brief"}, *QUESTION]
    first = maker.of_messages(ChatRequest(begun))
    assert 0 < first.shared == first.marks[0] < len(first.ids)
    result = [{"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}]
    then = maker.of_messages(ChatRequest([*begun, *result]))
    assert (then.shared, then.marks) == (first.shared, ())
    monkeypatch.setattr(prompts, "MARKED_WORK_MOST", 0)
    again = maker.of_messages(ChatRequest(begun))
    assert (again.shared, again.marks) == (first.shared, ())
