"""Why a cached prefix was lost: at which token, and for which reason, with templates as they are published."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from chat.fake_engine import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from text.family_templates import HARMONY, LLAMA3, QWEN3_TOOLS
from text.templates import CHATML, DEEPSEEK, QWEN3

from ktcli.dialogue.timeline import Loss, Timeline, common, common_letters, lost
from ktcli.text import sandbox
from ktcli.text.template import ChatTemplate
from ktcli.text.tokenizer import Tokenizer, load_tokenizer

MORE = (
    "<|im_start|>", "<|im_end|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|start|>", "<|channel|>", "<|message|>",
)  # fmt: skip
QUESTION = ("user", "Where does the road begin?")
ANSWER = ("assistant", "It begins at the old bridge.")
AGAIN = ("user", "And where does it end?")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder, more=MORE)
    return load_tokenizer(folder)


class Model:
    """A template and a tokenizer: what a chat would read."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(source, name="x", tokens={"bos_token": "<|bos|>"})

    def reads(self, *messages: tuple[str, str], **variables: Any) -> Timeline:
        plain: Sequence[Mapping[str, str]] = [{"role": r, "content": c} for r, c in messages]
        text = self.template.render(plain, **variables)
        return Timeline(tuple(self.tokenizer.encode(text)), messages, variables, ("m", "1"))

    def says(self, read: Timeline, text: str, ids: list[int] | None = None) -> Timeline:
        return read.answered(text, self.tokenizer.encode(text) if ids is None else ids)

    def lost(self, before: Timeline, now: Timeline, reused: int | None = None) -> Loss | None:
        same = common(before.ids, now.ids)
        return lost(
            before,
            now,
            min(same, len(now.ids) - 1) if reused is None else reused,
            lambda ids: self.tokenizer.decode(ids, special=True),
        )


def test_nothing_is_lost_where_the_template_repeats_what_was_said(tokenizer: Tokenizer) -> None:
    model = Model(CHATML, tokenizer)
    before = model.says(model.reads(QUESTION), ANSWER[1])
    now = model.reads(QUESTION, ANSWER, AGAIN)
    assert model.lost(before, now) is None
    assert (
        model.lost(before, now, len(before.ids) - 1) is None
    )  # the last id is computed with the next


@pytest.mark.parametrize("source", [DEEPSEEK, QWEN3], ids=["deepseek", "qwen3"])
def test_thoughts_that_the_template_leaves_out(tokenizer: Tokenizer, source: str) -> None:
    model = Model(source, tokenizer)
    thought = f"<think>\nhm, bridges\n</think>\n\n{ANSWER[1]}"
    first = model.reads(QUESTION)
    before = model.says(first, thought)
    loss = model.lost(before, model.reads(QUESTION, ("assistant", thought), AGAIN))
    assert loss is not None and loss.at >= len(first.ids)
    assert loss.tokens == len(before.ids) - loss.at
    assert "leaves out the thoughts of answer 1" in loss.why and "hm" in loss.why


def test_thoughts_in_channels_that_the_template_leaves_out(tokenizer: Tokenizer) -> None:
    model = Model(HARMONY, tokenizer)
    first = model.reads(QUESTION)
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
    ids = tokenizer.encode(said + ANSWER[1])
    loss = model.lost(first.answered(ANSWER[1], ids), model.reads(QUESTION, ANSWER, AGAIN))
    assert loss is not None and "leaves out the thoughts of answer 1" in loss.why


@pytest.mark.parametrize("source", [LLAMA3, HARMONY], ids=["llama3", "gpt-oss"])
def test_a_date_in_the_beginning(
    tokenizer: Tokenizer, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(source, tokenizer)

    def on(day: int) -> None:
        clock = SimpleNamespace(now=lambda: datetime(2026, 11, day))
        monkeypatch.setattr(sandbox, "datetime", clock)

    on(22)
    before = model.says(model.reads(("system", "Be brief."), QUESTION), ANSWER[1])
    on(23)
    loss = model.lost(before, model.reads(("system", "Be brief."), QUESTION, ANSWER, AGAIN))
    assert loss is not None and "date or time" in loss.why and "became" in loss.why
    assert loss.at < 200 and "3" in loss.why
    assert loss.sentence.startswith(f"the cache was lost from token {loss.at} on")


def test_an_answer_in_other_tokens(tokenizer: Tokenizer) -> None:
    model = Model(CHATML, tokenizer)
    letters = [i for letter in "hello world" for i in tokenizer.encode(letter)]
    assert letters != tokenizer.encode("hello world")
    first = model.reads(QUESTION)
    before = model.says(first, "hello world", letters)
    loss = model.lost(before, model.reads(QUESTION, ("assistant", "hello world"), AGAIN))
    assert loss is not None and loss.why == "answer 1 is split into different tokens than before"
    assert len(first.ids) <= loss.at < len(first.ids) + 3


@pytest.mark.parametrize(
    ("system", "changed"), [("Be brief.", "Be long."), ("Be brief.", ""), ("", "Be brief.")]
)
def test_another_system_text(tokenizer: Tokenizer, system: str, changed: str) -> None:
    model = Model(QWEN3, tokenizer)
    first = [("system", system)] if system else []
    then = [("system", changed)] if changed else []
    before = model.says(model.reads(*first, QUESTION), ANSWER[1])
    loss = model.lost(before, model.reads(*then, QUESTION, ANSWER, AGAIN))
    assert loss is not None and loss.why.startswith("the system text changed: ")


def test_other_tools(tokenizer: Tokenizer) -> None:
    model = Model(QWEN3_TOOLS, tokenizer)
    tool = {"type": "function", "function": {"name": "find", "description": "x", "parameters": {}}}
    before = model.says(model.reads(QUESTION), ANSWER[1])
    loss = model.lost(before, model.reads(QUESTION, ANSWER, AGAIN, tools=[tool]))
    assert loss is not None and loss.why.startswith("the tools changed: ")


def test_another_choice_of_thinking(tokenizer: Tokenizer) -> None:
    model = Model("{{ enable_thinking }}" + CHATML, tokenizer)
    before = model.says(model.reads(QUESTION, enable_thinking=True), ANSWER[1])
    loss = model.lost(before, model.reads(QUESTION, ANSWER, AGAIN, enable_thinking=False))
    assert loss is not None and "a different enable_thinking" in loss.why


def test_another_question(tokenizer: Tokenizer) -> None:
    model = Model(CHATML, tokenizer)
    before = model.says(model.reads(QUESTION, ANSWER, AGAIN), "At the sea.")
    other = ("user", "Who built it?")
    loss = model.lost(before, model.reads(QUESTION, ANSWER, other))
    assert loss is not None and loss.why.startswith("question 2 has changed: ")
    loss = model.lost(before, model.reads(QUESTION))
    assert loss is not None and "assistant" not in loss.why


def test_another_model_or_conversion(tokenizer: Tokenizer) -> None:
    model = Model(CHATML, tokenizer)
    before = model.says(model.reads(QUESTION), ANSWER[1])
    now = model.reads(QUESTION, ANSWER, AGAIN)
    for there, words in ((("n", "1"), "another model, n"), (("m", "2"), "another conversion of m")):
        from_there = Timeline(before.ids, before.messages, before.variables, there)
        loss = model.lost(from_there, now, 0)
        assert loss is not None and words in loss.why and loss.at == 0


def test_a_cache_that_was_not_kept(tokenizer: Tokenizer) -> None:
    """Whole pages are kept: what is behind the last of them is no loss."""
    model = Model(CHATML, tokenizer)
    long = ("user", "Where? " * 99)
    before = model.says(model.reads(long), ANSWER[1])
    now = model.reads(long, ANSWER, AGAIN)
    loss = model.lost(before, now, 0)
    assert loss is not None and "none of it was cached" in loss.why
    loss = model.lost(before, now, 128)
    assert loss is not None and (loss.at, loss.tokens) == (128, len(before.ids) - 128)
    assert model.lost(before, now, len(before.ids) // 64 * 64) is None


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_part(a: list[int], b: list[int]) -> None:
    n = common(a, b)
    assert a[:n] == b[:n] and (n in (len(a), len(b)) or a[n] != b[n])
    text, other = "".join(map(str, a)), "".join(map(str, b))
    assert common_letters(text, other) == n


WORDS = st.text("ab <>|{}\x1b\n", max_size=6)
TALK = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), WORDS), max_size=4)


@settings(deadline=None)
@given(
    before=st.tuples(st.lists(st.integers(0, 300), max_size=9), TALK),
    now=st.tuples(st.lists(st.integers(0, 300), min_size=1, max_size=9), TALK),
    reused=st.integers(0, 9),
)
def test_any_two_prompts_have_a_sentence(
    tokenizer: Tokenizer, before: tuple, now: tuple, reused: int
) -> None:
    """Files may claim any ids and messages."""
    was, is_ = (Timeline(tuple(ids), tuple(talk)) for ids, talk in (before, now))
    loss = lost(was, is_, reused, lambda ids: tokenizer.decode(ids, special=True))
    assert loss is None or (loss.why and len(loss.sentence) < 300 and loss.at <= len(is_.ids))


def test_a_text_that_another_role_says_was_edited(tokenizer: Tokenizer) -> None:
    model = Model(QWEN3, tokenizer)
    before = model.says(model.reads(QUESTION, ANSWER, AGAIN), ANSWER[1])
    loss = model.lost(before, model.reads(QUESTION, ("user", ANSWER[1]), AGAIN, ANSWER, AGAIN))
    assert loss is not None and loss.why.startswith("question 2 has changed: ")


def test_what_the_template_writes_behind_a_message_is_no_part_of_it(tokenizer: Tokenizer) -> None:
    source = "{% for message in messages %}{{ message.content }}"
    source += "{{ messages | length if message.role == 'assistant' }}{% endfor %}"
    model = Model(source, tokenizer)
    before = model.says(model.reads(QUESTION, ANSWER, AGAIN), "At the sea.")
    said = ("assistant", "At the sea.")
    loss = model.lost(before, model.reads(QUESTION, ANSWER, AGAIN, said, QUESTION))
    assert loss is not None
    assert loss.why.startswith("the template writes something else before question 2: ")
