"""Turns of a conversation: what is computed, what is kept, and how it ends."""

import gc
import io
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat.fake_engine import backend

from ktcli.chat.chat import Chat
from ktcli.chat.conversation import Saved
from ktcli.engine.request import Event, Finish
from ktcli.errors import ContextFull, KtError, UsageError
from ktcli.sampling import SamplingSettings
from ktcli.terminal.screen import Screen


def say(chat: Chat, question: str) -> str:
    return "".join(piece.text for piece in chat.ask(question))


def test_answers_and_stops(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path))
    assert say(chat, "hi") == "you said hi"
    assert chat.reply and chat.reply.finish is Finish.STOP
    assert (
        chat.reply.stats.tokens
        == len(chat.reply.ids)
        == len(chat.backend.texts.tokenizer.encode("you said hi"))
    )
    assert chat.conversation.messages[-1] == {"role": "assistant", "content": "you said hi"}


@pytest.mark.parametrize(
    ("written", "letters"),
    [("'hello ' * 600000", 0), ("'hello ' * 30000", 70_000), ("'<|end|>' * 20000", 70_000)],
)
def test_a_template_that_writes_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, letters: int
) -> None:
    """What cannot fit is not cut into tokens: of megabytes nothing is, of less no more than a slice."""
    chat = Chat(backend(tmp_path, template=f"{{{{ messages[0].content }}}}{{{{ {written} }}}}"))
    tokenizer = chat.backend.texts.tokenizer
    seen: list[int] = []
    encode = tokenizer._codec.encode
    monkeypatch.setattr(
        tokenizer._codec, "encode", lambda text: seen.append(len(text)) or encode(text)
    )
    for question in ("hello", "a [<|end|> b"):
        with pytest.raises(ContextFull, match="more than 4,096"):
            say(chat, question)
    assert sum(seen) <= 2 * letters


def test_the_second_turn_computes_only_what_is_new(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path))
    say(chat, "first question, which is long enough")
    first = chat.reply.stats
    assert first.reused_tokens == 0 and first.prefilled_tokens == first.prompt_tokens
    say(chat, "second")
    second = chat.reply.stats
    fresh = chat.backend.texts.tokenizer.encode("<|end|><|user|>second<|end|><|assistant|>")
    assert second.prefilled_tokens == len(fresh)
    assert chat.backend.engine.computed == len(chat.session.sequence.ids)


def test_ids_as_generated_are_reused(tmp_path: Path) -> None:
    """A model may cut its text otherwise than the tokenizer; that must not cost a prefill."""
    odd: list[int] = []
    model = backend(tmp_path, lambda question: odd if question == "one" else "fine")
    odd += [model.texts.tokenizer.id_of(letter) for letter in "hello"]
    assert odd != model.texts.tokenizer.encode("hello")
    chat = Chat(model)
    assert say(chat, "one") == "hello"
    say(chat, "two")
    fresh = model.texts.tokenizer.encode("<|end|><|user|>two<|end|><|assistant|>")
    assert chat.reply.stats.prefilled_tokens == len(fresh)


def test_a_template_that_drops_thoughts_reuses_what_is_common(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = Chat(backend(tmp_path, lambda q: f"<think>hm</think>{q}", template=template))
    assert say(chat, "one") == "hmone"
    assert say(chat, "two") == "hmtwo"
    assert 0 < chat.reply.stats.reused_tokens < chat.reply.stats.prompt_tokens


def test_thoughts_are_told_from_the_answer(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path, lambda q: "<think>let me\nsee</think>\n\n4 < 5"))
    pieces = list(chat.ask("2+2"))
    assert "".join(p.text for p in pieces if p.thought) == "let me\nsee"
    assert "".join(p.text for p in pieces if not p.thought) == "4 < 5"


def test_a_prompt_that_opens_the_thought(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|><think>"
    )
    # The script counts from the end of <|assistant|>, so what the prompt holds stands in it.
    chat = Chat(backend(tmp_path, lambda q: "<think>hm</think>ok", template=template))
    pieces = list(chat.ask("q"))
    assert "".join(p.text for p in pieces if p.thought) == "hm"
    assert "".join(p.text for p in pieces if not p.thought) == "ok"


CHANNELS = {
    "template": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|return|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "more": ("<|start|>", "<|channel|>", "<|message|>", "<|return|>"),
    "end": "<|return|>",
}


def test_answers_in_channels(tmp_path: Path) -> None:
    """gpt-oss: heads are no text, thoughts are shown as such and forgotten, an end of a thought is no end."""
    said = (
        "<|channel|>analysis<|message|>they ask\nfor 4<|end|><|start|>assistant"
        "<|channel|>commentary to=x<|message|>{}<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is 4, 😀.<|return|>"
    )
    chat = Chat(backend(tmp_path, lambda q: said, **CHANNELS))
    pieces = list(chat.ask("2+2"))
    assert "".join(p.text for p in pieces if p.thought) == "they ask\nfor 4\n\n{}"
    assert "".join(p.text for p in pieces if not p.thought) == "It is 4, 😀."
    assert chat.reply.finish is Finish.STOP
    assert chat.conversation.messages[-1]["content"] == "It is 4, 😀."
    assert say(chat, "again").endswith("It is 4, 😀.")


@pytest.mark.parametrize(
    ("begins", "closing", "more"),
    [
        ("<think>", "\n</think>\n\n", {}),
        (
            "<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
            CHANNELS,
        ),
    ],
    ids=["marks", "channels"],
)
@pytest.mark.parametrize("budget", [6, 100])
def test_a_thought_that_has_spent_its_budget_is_ended(
    tmp_path: Path, begins: str, closing: str, more: dict[str, Any], budget: int
) -> None:
    """The model of the script says at each place what it would have said there anyway."""
    script: list[int] = []
    chat = Chat(backend(tmp_path, lambda question: script, **more))
    cut = chat.backend.texts.tokenizer.encode
    thought = cut(begins + "a b c d e f g h i j")
    ended, answer = cut(closing), cut("It is 4.")
    head = len(cut(begins)) - 1  # the mark before the thought counts
    short = budget < len(thought) - head
    kept = thought[: head + budget] if short else thought
    script += [*kept, *ended, *answer]
    said, end = list(script), cut("<|return|>") if more else []
    script += end
    chat.settings = replace(chat.settings, think_budget=budget)
    screen = Screen(stream := io.StringIO(), terminal=True, colour=False)
    screen.begin(int, cut=lambda: chat.thought_cut)
    pieces = []
    for piece in chat.ask("think"):
        pieces.append(piece)
        screen.piece(piece)
    screen.end()
    folded = stream.getvalue().splitlines()[0]
    assert folded.startswith("▸ thought for ") and folded.endswith(", then cut") == short
    reply = chat.reply
    assert "".join(piece.text for piece in pieces if not piece.thought).strip() == "It is 4."
    assert reply is not None and reply.ids == said and reply.thought_cut == short
    assert reply.finish is Finish.STOP and reply.stats.tokens == len(said)
    assert chat.backend.engine.computed == len(chat.session.sequence.ids)  # nothing twice
    saved = Saved("fake", chat.conversation.copy(), SamplingSettings(), spoken=list(chat.spoken))
    again = Chat(chat.backend)
    again.restore(saved)
    list(again.ask("and"))
    assert more or tuple(again.reply.timeline.ids[: len(chat.timeline.ids)]) == chat.timeline.ids
    script[:] = [*cut("<|channel|>final<|message|>fine" if more else "fine"), *end]
    assert say(chat, "two") == "fine" and not chat.reply.thought_cut


def test_a_thought_that_is_ended_counts_for_the_length_of_the_answer(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path, lambda question: "<think>a b c d e f g h"))
    closing = len(chat.backend.texts.tokenizer.encode("\n</think>\n\n"))
    for most, expected in ((4, 4), (4 + closing, 4), (6 + closing, 6 + closing)):
        chat.settings = replace(chat.settings, think_budget=4, max_tokens=most)
        say(chat, "think")
        assert chat.reply.finish is Finish.LENGTH
        assert len(chat.reply.ids) == chat.reply.stats.tokens == expected


def test_stop_strings_and_cuts_in_channels(tmp_path: Path) -> None:
    said = "<|channel|>analysis<|message|>no 4<|end|><|start|>assistant<|channel|>final<|message|>4, no 5<|return|>"
    chat = Chat(backend(tmp_path, lambda q: said, **CHANNELS))
    chat.settings = replace(chat.settings, stops=("no",))
    assert say(chat, "q") == "no 44, " and chat.reply.text == "4, "
    chat = Chat(
        backend(tmp_path, lambda q: said[: said.index("<|end|>")] + "<|return|>", **CHANNELS)
    )
    assert say(chat, "q") == "no 4" and chat.reply.text == ""
    chat = Chat(backend(tmp_path, lambda q: "<|message|>plain<|return|>", **CHANNELS))
    assert say(chat, "q") == chat.reply.text == "plain"


def test_cancelled_answers_are_kept_and_the_chat_goes_on(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path))
    seen: list[str] = []
    for piece in chat.ask("hello", cancelled=lambda: len(seen) >= 2):
        seen.append(piece.text)
    assert chat.reply.finish is Finish.CANCELLED
    assert chat.conversation.messages[-1] == {"role": "assistant", "content": "".join(seen)}
    assert say(chat, "again") == "you said again"
    assert len(chat.conversation.turns) == 4


def test_cancelled_while_reading_takes_the_question_back(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path))
    read: list[int] = []
    pieces = chat.ask(
        "long " * 50, cancelled=lambda: bool(read), progress=lambda done, total: read.append(done)
    )
    assert list(pieces) == []
    assert chat.conversation.turns == []
    assert 0 < len(chat.session.sequence.ids) < 60  # whole chunks only, and they stay useful
    assert say(chat, "ok") == "you said ok"


def test_a_stopped_reading_counts_what_was_read(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path))
    asked: list[bool] = []
    said = chat.ask("long " * 50, cancelled=lambda: bool(asked.append(True)) or len(asked) > 2)
    assert list(said) == [] and chat.reply is not None
    stats, read = chat.reply.stats, chat.backend.engine.computed
    assert 0 < read < 60 and (stats.prefilled_tokens, stats.reused_tokens) == (read, 0)
    assert stats.prompt_tokens == read and stats.prompt_s > 0
    say(chat, "ok")
    before = chat.reply
    with pytest.raises(ContextFull):
        say(chat, "x" * 9999)
    assert chat.reply is before  # a question that was refused took nothing


def test_a_reply_may_be_left_at_any_piece(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path))
    answer = chat.ask("hello")
    next(answer)
    answer.close()
    assert say(chat, "more") == "you said more"


def test_a_full_context_is_said_with_numbers(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path, context=40))
    with pytest.raises(
        ContextFull, match=r"alone has \d+ tokens, but the context holds 40"
    ) as caught:
        say(chat, "x" * 100)
    assert "a part of it" in caught.value.hint and "--context" in caught.value.hint
    assert chat.conversation.turns == []
    assert say(chat, "hi") == "you said hi"


def test_an_answer_that_meets_the_end_of_the_context(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path, lambda q: "a" * 500, context=40))
    text = say(chat, "hi")
    assert chat.reply.finish is Finish.CONTEXT and set(text) == {"a"}
    assert chat.used == 40


def test_max_tokens(tmp_path: Path) -> None:
    model = backend(tmp_path)
    chat = Chat(model, replace(model.texts.settings, max_tokens=3))
    say(chat, "hello there")
    assert chat.reply.finish is Finish.LENGTH and len(chat.reply.ids) == 3
    assert chat.session.sequence.ids[-3:] == tuple(chat.reply.ids)


def test_stop_strings_span_tokens(tmp_path: Path) -> None:
    model = backend(tmp_path, lambda q: "one two STOP three")
    chat = Chat(model, replace(model.texts.settings, stops=("STOP",)))
    assert say(chat, "x") == "one two "
    assert chat.reply.finish is Finish.STOP
    assert say(chat, "y") == "one two "


def test_a_chat_that_is_collected_is_closed_by_the_next_operation(tmp_path: Path) -> None:
    """The collector runs in the middle of another chat's operation, too."""
    model = backend(tmp_path)
    chat, pools = Chat(model), model.engine.pools
    free = pools.available
    say(chat, "hi")
    held = pools.pages.available
    assert held < free[0]
    del chat
    gc.collect()
    assert pools.pages.available == held and pools.waiting
    assert pools.available == free
    chat = Chat(model)
    say(chat, "hi")
    chat.leave()  # which closes it at once
    assert pools.pages.available == free[0] and not pools.waiting


def test_undo_and_retry(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path))
    say(chat, "one")
    say(chat, "two")
    assert chat.conversation.undo() == "two"
    assert len(chat.conversation.turns) == 2
    again = chat.retry()
    assert again is not None and "".join(p.text for p in again) == "you said one"
    assert len(chat.conversation.turns) == 2
    chat.conversation.clear()
    assert chat.retry() is None


def test_a_seed_fixes_the_whole_chat(tmp_path: Path) -> None:
    model = backend(tmp_path)

    def run(seed: int) -> list[list[int]]:
        sampling = SamplingSettings(temperature=20, seed=seed)
        chat = Chat(model, replace(model.texts.settings, sampling=sampling, max_tokens=8))
        ids = []
        for question in ("a", "b"):
            say(chat, question)
            ids.append(chat.reply.ids)
        return ids

    assert run(1) == run(1) != run(2)


def test_the_system_text_comes_first(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path))
    chat.conversation.system = "Be brief."
    say(chat, "hi")
    shown = chat.backend.texts.tokenizer.decode(chat.session.sequence.ids, special=True)
    assert shown.startswith("<|bos|><|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>")


def test_broken_text_is_no_crash(tmp_path: Path) -> None:
    chat = Chat(backend(tmp_path, lambda q: "ok"))
    assert say(chat, "\ud800 \x00 \x1b[31m") == "ok"


# --- a context that fills -------------------------------------------------------------------------


def filled(folder: Path, **more: bool) -> Chat:
    """A chat whose next long question does not fit."""
    chat = Chat(backend(folder, lambda q: "a summary" if "Sum up" in q else "yes", context=300))
    chat.settings = replace(chat.settings, **more)
    chat.conversation.system = "Be brief."
    for number in range(3):
        assert say(chat, f"{number}" * 60) == "yes"
    return chat


def test_the_oldest_turns_go_unread_when_a_question_does_not_fit(tmp_path: Path) -> None:
    chat = filled(tmp_path)
    assert say(chat, "z" * 100) == "yes"
    assert chat.reply.dropped == chat.conversation.omitted.turns > 0
    assert chat.reply.stats.prompt_tokens <= 150
    assert len(chat.conversation.turns) == 8  # all are still there
    messages = chat.conversation.messages
    assert messages[0]["content"] == "Be brief." and messages[-2]["content"] == "z" * 100
    assert say(chat, "and") == "yes" and chat.reply.dropped == 0  # one drop makes room for a while


def test_a_question_may_be_refused_instead(tmp_path: Path) -> None:
    chat = filled(tmp_path, drops=False)
    with pytest.raises(ContextFull, match=r"conversation has .* context holds 300") as caught:
        say(chat, "z" * 200)
    assert "/compact" in caught.value.hint and len(chat.conversation.turns) == 6


def test_a_question_that_never_fits_changes_nothing(tmp_path: Path) -> None:
    chat = filled(tmp_path)
    before = chat.conversation.copy()
    with pytest.raises(ContextFull, match=r"question alone has .* context holds 300"):
        say(chat, "z" * 900)
    assert chat.conversation == before


def test_a_summary_stands_for_the_oldest_turns(tmp_path: Path) -> None:
    chat = filled(tmp_path)
    assert chat.compact() == 4
    messages = chat.conversation.messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert "a summary" in messages[1]["content"] and messages[1]["content"].endswith("2" * 60)
    assert say(chat, "next") == "yes" and len(chat.conversation.turns) == 8
    assert chat.compact() == 2  # of the summary and what came since, another
    with pytest.raises(UsageError, match="nothing to summarize"):
        chat.compact()


def test_a_summary_that_is_stopped_or_empty_changes_nothing(tmp_path: Path) -> None:
    chat = filled(tmp_path)
    before = chat.conversation.copy()
    assert chat.compact(cancelled=lambda: True) == 0 and chat.conversation == before
    chat.backend.engine.script = lambda question: "<think>what now?</think>"
    with pytest.raises(KtError, match="no summary"):
        chat.compact()
    assert chat.conversation == before


def test_taking_back_what_was_summed_up_ends_the_summary(tmp_path: Path) -> None:
    chat = filled(tmp_path)
    chat.compact()
    chat.conversation.undo()
    assert chat.conversation.omitted.turns == 4
    chat.conversation.undo()
    assert chat.conversation.omitted.turns == 0 and len(chat.conversation.messages) == 3


def test_an_answer_that_was_interrupted_twice_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a step, and again in the step that would have told the engine to end."""
    chat = Chat(backend(tmp_path))
    step, steps = chat.session.step, itertools.count(1)

    def interrupted() -> list[Event]:
        if next(steps) in (6, 7):
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(chat.session, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        say(chat, "first")
    for question in ("second", "third", "fourth"):
        assert say(chat, question) == f"you said {question}"


def test_parts_of_an_answer_with_several_thoughts_stay_apart(tmp_path: Path) -> None:
    said = (
        "<|channel|>analysis<|message|>First.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        "<|channel|>analysis<|message|>Second.<|end|><|start|>assistant"
        "<|channel|>final<|message|>yes<|return|>"
    )
    (tmp_path / "channels").mkdir()
    chat = Chat(backend(tmp_path / "channels", lambda q: said, **CHANNELS))
    pieces = list(chat.ask("q"))
    assert "".join(p.text for p in pieces if p.thought) == "First.\n\nSecond."
    assert "".join(p.text for p in pieces if not p.thought) == "I look.\n\nyes"
    chat = Chat(backend(tmp_path, lambda q: "<think>a</think>\n\nOne.<think>b</think>\n\nTwo."))
    pieces = list(chat.ask("q"))
    assert "".join(p.text for p in pieces if p.thought) == "a\n\nb"
    assert "".join(p.text for p in pieces if not p.thought) == "One.\n\nTwo."
